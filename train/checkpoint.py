"""Checkpoints: one folder per step, one state per rank; all ranks resume from the same step or none does.

    <folder>/step_00000040/     rank_0000.pt, rank_0000.json, rank_0001.pt, ...: see RankFiles
    <folder>/superseded/        checkpoints that a run gave up when it was resumed from an earlier one

[Note: a checkpoint is complete when every rank has its manifest]
A rank writes its state to a temporary file, fsyncs and renames it; when all ranks have done so, each writes its
manifest in the same way. A job killed at any point leaves temporary files or states without manifest, which no one
reads and the next save removes. Every rank touches only its own files, so the folder may be shared between machines or
local to each.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from train.rank_files import RankFiles

STEP_FOLDER = re.compile(r"step_(\d{8,})")


class Agreement(Protocol):
    """The part of a World that checkpoints need."""

    @property
    def rank(self) -> int: ...

    def gather(self, value: Any) -> list[Any]: ...

    def on_every_rank(self, function: Callable[[], Any]) -> list[Any]: ...


class Survey(NamedTuple):
    """What all ranks together find in a folder."""

    complete: list[int]
    """Steps of which every rank has its files, ascending."""
    lacking: dict[int, str]
    """The other steps, with what they lack, ascending."""
    unfinished: set[int]
    """Those of them that no rank has a manifest of: the job was killed while it wrote them."""


class Checkpoints:
    """The checkpoints in one folder, as seen by one rank. Every method is collective.

    Args:
        folder: where they are; made when needed.
        world: rank and agreement.
        identity: what a run must have in common with a checkpoint to go on from it: world size, recipe, model
            fingerprint and the like, plain JSON values.
        settings: what may change between them, but no longer gives the run that never stopped: a warning says so.
        keep_last: newest checkpoints kept; the one with the best test accuracy is kept as well.
    """

    def __init__(
        self,
        folder: Path,
        world: Agreement,
        identity: Mapping[str, Any],
        *,
        settings: Mapping[str, Any] | None = None,
        keep_last: int = 2,
    ) -> None:
        self.folder = folder
        self._world = world
        self._identity = dict(identity)
        self._settings = dict(settings or {})
        self._keep_last = keep_last

    def save(self, step: int, state: Mapping[str, Any], *, test_accuracy_percent: float | None = None) -> Path:
        """Write `state` as the checkpoint of `step`, durable on all ranks on return, and remove what is not kept.

        Args:
            step: optimizer steps taken.
            state: tensors, numbers, strings and containers of them.
            test_accuracy_percent: of the averaged model at this step, the same on every rank; None: not known.

        Returns:
            The folder of the checkpoint.

        Raises:
            ValueError: a rank could not write; it is named.
        """
        files = self._files(step)
        manifest = {"step": step, "test_accuracy_percent": test_accuracy_percent, "settings": self._settings}
        # Two rounds: see [Note: a checkpoint is complete when every rank has its manifest].
        self._world.on_every_rank(lambda: files.write_state(state))
        self._world.on_every_rank(lambda: files.write_manifest({**manifest, **self._identity}))
        self._remove_old(step)
        return files.folder

    def newest(self) -> Path | None:
        """The newest complete checkpoint; None when no run has finished one here.

        Raises:
            ValueError: there are some, none of them complete on the ranks of this run.
        """
        survey = self._survey()
        newest = survey.complete[-1] if survey.complete else -1
        if newest < 0 and survey.lacking.keys() - survey.unfinished:
            raise ValueError(
                f"got no checkpoint in {self.folder} that is complete on all ranks of this run "
                f"({'; '.join(survey.lacking.values())}), expected one; resume with as many ranks as it was saved by, "
                "bring the missing files back, or start afresh in another --out-dir"
            )
        for step, what in survey.lacking.items():
            if step > newest:
                self._print(f"skipped {what}")
        return self._files(newest).folder if newest >= 0 else None

    def choose(self, resume: str) -> Path | None:
        """What a run that was told `resume` goes on from; None: it starts anew.

        Args:
            resume: 'auto', the newest complete checkpoint here, if any; a folder, of a run or of one checkpoint; or
                '', which allows none here, lest two runs mix.

        Raises:
            ValueError: the folder has no complete checkpoint, or there are those of another run here.
        """
        if resume == "auto":
            return self.newest()
        survey = self._survey()
        named = Path(resume)
        is_step = STEP_FOLDER.fullmatch(named.name) is not None
        folder = named.parent if is_step else named / self.folder.name
        is_here = bool(resume) and folder.resolve() == self.folder.resolve()
        present = {*survey.complete, *survey.lacking} - survey.unfinished
        if present and not is_here:
            raise ValueError(
                f"got an --out-dir with checkpoints of an earlier run ({self._files(max(present)).folder}) and "
                f"{f'--resume {resume}' if resume else 'no --resume'}, expected a new folder; pass --resume auto to go "
                "on from there, or another --out-dir"
            )
        if not resume or is_step:
            return (self.folder / named.name if is_here else named) if is_step else None
        path = Checkpoints(folder, self._world, self._identity).newest()
        if path is None:
            raise ValueError(
                f"got no checkpoint in {folder}, expected step_00000040/ or the like; name the folder of a run or of "
                "one of its checkpoints"
            )
        return path

    def load(self, path: Path, *, keys: Collection[str] = ()) -> dict[str, Any]:
        """The state that this rank saved in the checkpoint `path`.

        Args:
            path: folder of the checkpoint, of this run or of another one.
            keys: what the state must have.

        Raises:
            ValueError: on some rank it is missing, damaged, or from a run that cannot go on here.
        """
        source = Checkpoints(path.parent, self._world, self._identity)
        before = [self._files(step).folder.name for step in source._survey().complete]
        before = [name for name in before if name < path.name]
        remedy = (
            f"resume from the one before: --resume {path.parent / before[-1]}"
            if before
            else "there is no earlier one: start afresh in another --out-dir"
        )
        states: list[dict[str, Any]] = []
        self._world.on_every_rank(lambda: states.append(self._load_own(path, keys, remedy)))
        return states[0]

    def set_aside_after(self, step: int) -> None:
        """Move the checkpoints after `step` to superseded/: a run that goes on from `step` writes its own."""
        survey = self._survey()
        newer = [later for later in (*survey.complete, *survey.lacking) if later > step]

        def set_aside() -> None:
            for later in newer:
                files = self._files(later)
                if files.manifest_path.is_file() and files.state_path.is_file():
                    files.move_to(self.folder / "superseded" / files.folder.name)
                else:
                    files.remove()

        self._world.on_every_rank(set_aside)
        if newer:
            names = ", ".join(self._files(later).folder.name for later in sorted(newer))
            self._print(f"moved {names} to {self.folder / 'superseded'}: the run goes on from step {step}")

    def _load_own(self, path: Path, keys: Collection[str], remedy: str) -> dict[str, Any]:
        files = RankFiles(path, self._world.rank)
        try:
            manifest = files.read_manifest()
            for name, expected in self._identity.items():
                if manifest.get(name) != expected:
                    remedy = "resume with the options of that run, or start afresh in another --out-dir"
                    raise ValueError(
                        f"got {files.state_path} of a run with {name}={manifest.get(name)!r}, expected {expected!r} as "
                        "in this run"
                    )
            state = files.read_state(manifest, keys)
        except (ValueError, OSError) as error:
            raise ValueError(f"{error}; {remedy}") from error
        before = manifest.get("settings", {})
        changed = [
            f"{name}={before[name]!r} before, {value!r} now"
            for name, value in self._settings.items()
            if name in before and before[name] != value
        ]
        if changed and self._world.rank == 0:
            warnings.warn(
                f"resumed with other settings ({'; '.join(changed)}): the run goes on with those of now, and differs "
                "from one that never stopped",
                stacklevel=2,
            )
        return state

    def _remove_old(self, newest: int) -> None:
        survey = self._survey()
        kept = {newest, *survey.complete[-self._keep_last :]}
        accuracy = {
            step: self._files(step).read_manifest()["test_accuracy_percent"] or float("-inf")
            for step in survey.complete
        }
        best = max(survey.complete, key=lambda step: (accuracy[step], step))
        kept.add(best)
        for step in (*survey.complete, *survey.lacking):
            if step not in kept:
                self._files(step).remove()
            else:
                self._files(step).remove_temporaries()

    def _survey(self) -> Survey:
        mine: dict[int, tuple[str, int | None]] = {}
        for path in self.folder.glob("step_*"):
            match = STEP_FOLDER.fullmatch(path.name)
            if match is None or not path.is_dir():
                continue
            try:
                mine[int(match[1])] = ("", RankFiles(path, self._world.rank).read_manifest().get("world_size"))
            except (ValueError, OSError) as error:
                mine[int(match[1])] = (str(error), None)
        survey = Survey([], {}, set())
        ranks = self._world.gather(mine)
        for step in sorted(set().union(*ranks)):
            found = [rank.get(step, (f"no {self._files(step).folder}", None)) for rank in ranks]
            missing = [rank for rank, (problem, _) in enumerate(found) if problem]
            if not missing:
                survey.complete.append(step)
                continue
            sizes = {size for _, size in found if size is not None}
            saved_by = f", saved by {sizes.pop()} ranks," if sizes else ""
            survey.lacking[step] = (
                f"{self._files(step).folder.name}{saved_by} not complete on rank {', '.join(map(str, missing))}: "
                f"{found[missing[0]][0]}"
            )
            if len(missing) == len(ranks):
                survey.unfinished.add(step)
        return survey

    def _files(self, step: int) -> RankFiles:
        return RankFiles(self.folder / f"step_{step:08d}", self._world.rank)

    def _print(self, text: str) -> None:
        if self._world.rank == 0:
            print(text, flush=True)
