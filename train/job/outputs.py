"""The files that a run leaves in its folder, checkpoints apart."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from train.job.files import paths_in, remove_file
from train.job.world import Agreement

TENSORBOARD, SUMMARY, CURVES, EXPORT = "tensorboard", "summary.json", "curves.png", "averaged_model.safetensors"
TOKENIZER, TRANSLATIONS, REPORT = "tokenizer.json", "translations", "report.html"
_OF_RANK_0 = (SUMMARY, CURVES, EXPORT, TOKENIZER, f"{TRANSLATIONS}.*", REPORT)
_OF_EACH_RANK = ("rank_*.csv", "membership_*.jsonl", "metrics_*.jsonl")
"""As patterns; the report is that of visualization/report.py."""


def csv_path(folder: Path, rank: int) -> Path:
    """The table of a rank."""
    return folder / f"rank_{rank:04d}.csv"


def membership_path(folder: Path, number: int) -> Path:
    """What a worker of an elastic run notes of those beside it, see `MembershipLog`."""
    return folder / f"membership_{number:04d}.jsonl"


def tables_in(folder: Path) -> list[Path]:
    """What each rank has written into `folder`, which may be local to a machine."""
    return [path for pattern in _OF_EACH_RANK for path in paths_in(folder, pattern)]


def tables_of(folder: Path, number: int) -> list[Path]:
    """The paths of the tables of one worker of an elastic run, whether they are there or not."""
    return [csv_path(folder, number), membership_path(folder, number), folder / f"metrics_{number}.jsonl"]


def outputs_in(folder: Path) -> list[Path]:
    """What rank 0 has left in `folder`."""
    events = paths_in(folder / TENSORBOARD, "events.out.tfevents.*")
    return [path for pattern in _OF_RANK_0 for path in paths_in(folder, pattern)] + events


def clear_outputs(folder: Path, world: Agreement) -> None:
    """Collective: delete what an earlier run left in `folder`, lest two runs mix, and say so.

    Every rank deletes the tables that it finds, as the folder may be local to its machine; rank 0 the rest.
    """

    def clear() -> list[str]:
        paths = tables_in(folder) + (outputs_in(folder) if world.rank == 0 else [])
        for path in paths:
            remove_file(path)  # another rank may be faster
        if world.rank == 0:
            with suppress(OSError):  # none, or with files of somebody else
                (folder / TENSORBOARD).rmdir()
        return [str(path.relative_to(folder)) for path in paths]

    names = set().union(*world.on_every_rank(clear))
    if names and world.rank == 0:
        print(f"cleared {folder} of an earlier run: {', '.join(sorted(names))}", flush=True)
