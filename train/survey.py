"""Survey: what all ranks together find in a folder of checkpoints."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from train.rank_files import RankFiles
from train.world import Agreement


@dataclass(frozen=True)
class Survey:
    """The checkpoints in a folder; the same on every rank."""

    complete: list[int]
    """Steps of which every rank has its manifest, ascending."""
    lacking: dict[int, str]
    """The other steps, ascending, with what they lack."""
    unfinished: set[int]
    """Those of them that no rank has a manifest of: a job was killed while it wrote its states."""

    @property
    def present(self) -> set[int]:
        """Steps that a job has, or nearly has, finished: there is something to lose."""
        return {*self.complete, *self.lacking} - self.unfinished


def survey(folder: Path, world: Agreement) -> Survey:
    """Collective: look into `folder` on every rank, which may be one folder or another on each machine."""
    mine: dict[int, tuple[str, bool, int | None]] = {}  # step: what is wrong, is there a manifest, number of ranks
    for path in folder.glob("step_*"):
        step = step_of(path)
        if step is None or not path.is_dir():
            continue
        files = RankFiles(path, world.rank)
        try:
            mine[step] = ("", True, files.read_manifest().get("world_size"))
        except (ValueError, OSError) as error:  # kept for the one who asks for this step
            mine[step] = (str(error), files.manifest_path.is_file(), None)
    ranks = [dict(items) for items in world.gather(list(mine.items()))]
    found = Survey([], {}, set())
    for step in sorted(set().union(*ranks)):
        on_ranks = [rank.get(step, (f"no {folder / name_of(step)}", False, None)) for rank in ranks]
        missing = [rank for rank, (problem, _, _) in enumerate(on_ranks) if problem]
        if not missing:
            found.complete.append(step)
            continue
        sizes = {size for _, _, size in on_ranks if size is not None}
        saved_by = f", saved by {sizes.pop()} ranks," if sizes else ""
        found.lacking[step] = (
            f"{name_of(step)}{saved_by} not complete on rank {', '.join(map(str, missing))}: {on_ranks[missing[0]][0]}"
        )
        if not any(has_manifest for _, has_manifest, _ in on_ranks):
            found.unfinished.add(step)
    return found


def name_of(step: int) -> str:
    """The name of the folder of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """The step of a checkpoint's folder; None for other names, such as step_latest."""
    match = re.fullmatch(r"step_(\d{8,})", path.name)
    return int(match[1]) if match else None
