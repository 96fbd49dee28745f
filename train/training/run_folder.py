"""RunFolder: whose the folder of a run is. What an earlier run left there is not overwritten without a word."""

from __future__ import annotations

import os
from pathlib import Path

from train.job.outputs import SUMMARY, outputs_in, tables_in
from train.job.world import Agreement
from train.training.rank_files import name_of, step_of
from train.training.survey import survey

CHECKPOINTS = "checkpoints"


def require_own_folder(folder: Path, world: Agreement, *, resume: str, overwrite: bool) -> None:
    """Collective: nothing is deleted here, and all is refused that would lose what an earlier run left in `folder`.

    Args:
        folder: the folder of the run; may be local to each machine.
        world: rank and agreement.
        resume: see RunConfig.
        overwrite: see RunConfig.

    Raises:
        ValueError: there is an earlier run, and neither is this one to go on from it, nor was it told to delete it.
    """
    is_here = resume == "auto" or (bool(resume) and run_of(Path(resume)).resolve() == folder.resolve())
    num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    found = world.on_every_rank(
        lambda: ([path.name for path in (*outputs_in(folder), *tables_in(folder))], num_restarts)
    )
    steps = survey(folder / CHECKPOINTS, world).present
    left = [f"{CHECKPOINTS}/{name_of(max(steps))}"] if steps else []
    left += dict.fromkeys(name for names, _ in found for name in names)
    if overwrite and is_here:
        raise ValueError(f"got --overwrite and --resume {resume} of the same folder {folder}, expected one of them")
    if overwrite and any(count for _, count in found):
        raise ValueError(
            f"got --overwrite when torchrun --max-restarts has started all workers again, expected --resume auto: "
            f"{folder} holds what they have trained before"
        )
    if not left or overwrite or (is_here and steps):
        return
    if is_here and SUMMARY not in left:
        return  # killed before its first checkpoint: starts anew
    told = f"--resume {resume}" if resume else "no --resume"
    go_on = "--resume auto to go on from there, " if steps else ""
    names = f"{', '.join(left[:3])}{' and more' if left[3:] else ''}"
    raise ValueError(
        f"got an --out-dir with an earlier run ({names} in {folder}) and {told}, expected a new folder; pass "
        f"{go_on}another --out-dir, or --overwrite to delete that run"
    )


def run_of(path: Path) -> Path:
    """The folder of the run that `path`, itself or one of its checkpoints, is of."""
    return path.parent.parent if step_of(path) is not None else path
