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

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from train.rank_files import RankFiles
from train.survey import Survey, name_of, step_of, survey
from train.world import Agreement


class Checkpoints:
    """The checkpoints in one folder, as seen by one rank. Every method is collective.

    Args:
        folder: where they are; made when needed.
        world: rank and agreement.
        identity: what a run must have in common with a checkpoint to go on from it: world size, recipe, model
            fingerprint and the like, plain JSON values.
        settings: what may change between them, but no longer gives the run that never stopped: a warning says so.
        keep_last: newest checkpoints kept; the one with the best score is kept as well.
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

    def save(self, step: int, state: Mapping[str, Any], *, score: float | None = None) -> Path:
        """Write `state` as the checkpoint of `step`, durable on all ranks on return, and remove what is not kept.

        Args:
            step: optimizer steps taken.
            state: tensors, numbers, strings and containers of them.
            score: of the averaged model at this step, higher is better, the same on every rank; None: not known.

        Returns:
            The folder of the checkpoint.

        Raises:
            ValueError: a rank could not write; it is named.
        """
        files = self._files(step)
        manifest = {"step": step, "score": score, "settings": self._settings}
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
        found = self._survey()
        newest = found.complete[-1] if found.complete else -1
        if newest < 0 and found.present:
            raise ValueError(
                f"got no checkpoint in {self.folder} that is complete on all ranks of this run (the newest: "
                f"{found.lacking[max(found.present)]}), expected one; resume with as many ranks as it was saved by, "
                "bring the missing files back, or start afresh in another --out-dir"
            )
        for step, what in found.lacking.items():
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
        found = self._survey()
        named = Path(resume)
        is_step = step_of(named) is not None
        folder = named.parent if is_step else named / self.folder.name
        is_here = bool(resume) and folder.resolve() == self.folder.resolve()
        present = found.present
        if present and not is_here:
            raise ValueError(
                f"got an --out-dir with checkpoints of an earlier run ({self.folder / name_of(max(present))}) and "
                f"{f'--resume {resume}' if resume else 'no --resume'}, expected a new folder; pass --resume auto to go "
                "on from there, or another --out-dir"
            )
        if not resume:
            return None
        if is_step:
            return named
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
        before = [name for name in map(name_of, source._survey().complete) if name < path.name]
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
        found = self._survey()
        newer = [later for later in (*found.complete, *found.lacking) if later > step]

        def set_aside() -> None:
            for later in newer:
                files = self._files(later)
                if files.manifest_path.is_file() and files.state_path.is_file():
                    files.move_to(self.folder / "superseded" / files.folder.name)
                else:
                    files.remove()

        self._world.on_every_rank(set_aside)
        if newer:
            names = ", ".join(map(name_of, sorted(newer)))
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
        found = self._survey()
        kept = {newest, *found.complete[-self._keep_last :]}
        scores = {step: self._files(step).read_manifest().get("score") for step in found.complete}
        measured = [step for step in found.complete if scores[step] is not None]
        if measured:
            kept.add(max(measured, key=lambda step: (scores[step], step)))
        for step in (*found.complete, *found.lacking):
            if step not in kept:
                self._files(step).remove()
            else:
                self._files(step).remove_temporaries()

    def _survey(self) -> Survey:
        return survey(self.folder, self._world)

    def _files(self, step: int) -> RankFiles:
        return RankFiles(self.folder / name_of(step), self._world.rank)

    def _print(self, text: str) -> None:
        if self._world.rank == 0:
            print(text, flush=True)
