"""Survey: what all ranks together find in a folder of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from train.job.files import paths_in
from train.job.world import Agreement
from train.training.rank_files import RankFiles, name_of, step_of


@dataclass(frozen=True)
class Survey:
    """The checkpoints in a folder; the same on every rank."""

    complete: list[int] = field(default_factory=list)
    """Steps of which every rank has its manifest, ascending."""
    lacking: dict[int, str] = field(default_factory=dict)
    """The other steps, ascending, with what they lack."""
    unfinished: set[int] = field(default_factory=set)
    """Those of them that no rank has a manifest of: a job was killed while it wrote its states."""
    scores: dict[int, float] = field(default_factory=dict)
    """Of the complete ones that have a score."""

    @property
    def present(self) -> set[int]:
        """Steps that a job has, or nearly has, finished: there is something to lose."""
        return {*self.complete, *self.lacking} - self.unfinished


class _OnRank(NamedTuple):
    """What a rank finds of its own files of one step."""

    problem: str
    """Empty: there is a manifest of this rank."""
    has_manifest: bool = False
    world_size: int | None = None
    score: float | None = None


def survey(folder: Path, world: Agreement) -> Survey:
    """Collective: look into `folder` on every rank, which may be one folder or another on each machine.

    Raises:
        ValueError: a rank cannot read the folder; it is named.
    """
    ranks = [
        {step: _OnRank(*values) for step, values in found}
        for found in world.on_every_rank(lambda: _look_into(folder, world.rank))
    ]
    found = Survey()
    for step in sorted(set().union(*ranks)):
        on_ranks = [rank.get(step, _OnRank(f"no {folder / name_of(step)}")) for rank in ranks]
        missing = [rank for rank, own in enumerate(on_ranks) if own.problem]
        if not missing:
            found.complete.append(step)
            if on_ranks[0].score is not None:
                found.scores[step] = on_ranks[0].score
            continue
        sizes = {own.world_size for own in on_ranks if own.world_size is not None}
        saved_by = f", saved by {sizes.pop()} ranks," if sizes else ""
        names = ", ".join(map(str, missing))
        found.lacking[step] = f"{name_of(step)}{saved_by} not complete on rank {names}: {on_ranks[missing[0]].problem}"
        if not any(own.has_manifest for own in on_ranks):
            found.unfinished.add(step)
    return found


def _look_into(folder: Path, rank: int) -> list[tuple[int, _OnRank]]:
    """What is wrong with the files of `rank`, and what its manifest says, by step."""
    found = []
    for path in paths_in(folder, "step_*"):
        step = step_of(path)
        if step is None or not path.is_dir():
            continue
        files = RankFiles(path, rank)
        try:
            manifest = files.read_manifest()
            found.append((step, _OnRank("", True, manifest.get("world_size"), manifest.get("score"))))
        except (ValueError, OSError) as error:  # kept for the caller that asks for this step
            found.append((step, _OnRank(str(error), files.manifest_path.is_file())))
    return found
