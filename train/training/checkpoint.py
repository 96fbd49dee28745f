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
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from train.job.files import paths_in, remove_file
from train.job.world import Agreement
from train.old_options.settings import texts_of_old_options
from train.training.rank_files import DamagedError, RankFiles, name_of, step_of
from train.training.survey import Survey, survey

SUPERSEDED = "superseded"
START_AFRESH = "start afresh in another --out-dir, or here with --overwrite"


def check_identity(
    path: Path, manifest: Mapping[str, Any], identity: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Raise ValueError where a checkpoint is of a run that cannot go on here.

    Args:
        path: the path of the checkpoint, for the error.
        manifest: what the run wrote down.
        identity, defaults: see `Checkpoints`.
    """
    found_texts = {} if "algorithm" in manifest else texts_of_old_options(manifest)
    for name, expected in identity.items():
        found = manifest.get(name, found_texts.get(name, defaults.get(name, "")))
        if found != expected:
            raise ValueError(
                f"got {path} of a run with {name}={found!r}, expected {expected!r} as in this run; resume with the "
                f"options of that run, or {START_AFRESH}"
            )


class Checkpoints:
    """The checkpoints in one folder, as seen by one rank. Every method is collective.

    Args:
        folder: where they are; made when needed.
        world: rank and agreement.
        identity: what a run must have in common with a checkpoint to go on from it: world size, recipe, model
            fingerprint and the like, plain JSON values.
        defaults: of the options among them: an option that is newer than a checkpoint had its default there.
        settings: what may change between them, but no longer gives the run that never stopped: a warning says so.
        keep_last: newest checkpoints kept; the one with the best score is kept as well.
    """

    def __init__(
        self,
        folder: Path,
        world: Agreement,
        identity: Mapping[str, Any],
        *,
        defaults: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        keep_last: int = 2,
    ) -> None:
        self.folder = folder
        self._world = world
        self.identity, self.defaults = dict(identity), dict(defaults or {})
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
            ValueError: a rank could not write; it is named. That an old one cannot be removed is a warning.
        """
        files = self._files(step)
        manifest = {"step": step, "score": score, "settings": self._settings}
        # Two rounds: see [Note: a checkpoint is complete when every rank has its manifest].
        self._world.on_every_rank(lambda: files.write_state(state))
        self._world.on_every_rank(lambda: files.write_manifest({**manifest, **self.identity}))
        self._remove_old(step)
        return files.folder

    def candidates(self) -> list[Path]:
        """What a run may go on from, newest first, down to the oldest that is complete; none: no run has saved here.

        Raises:
            ValueError: there are some, none of them complete on the ranks of this run.
        """
        found = self._survey()
        if not found.complete and found.present:
            raise ValueError(
                f"got no checkpoint in {self.folder} that is complete on all ranks of this run (the newest: "
                f"{found.lacking[max(found.present)]}), expected one; resume with as many ranks as it was saved by, "
                f"bring the missing files back, or {START_AFRESH}"
            )
        steps = [step for step in found.present if step >= found.complete[0]]
        return [self._files(step).folder for step in sorted(steps, reverse=True)]

    def choose(self, resume: str, *, overwrite: bool = False) -> list[Path]:
        """What a run that was told `resume` may go on from, the best first; none: it starts anew.

        Args:
            resume: 'auto', the complete checkpoints here, if any; a folder, of a run or of one checkpoint; or '', which
                allows none here, lest two runs mix.
            overwrite: those here are to be deleted.

        Raises:
            ValueError: the folder has no complete checkpoint, or there are those of another run here.
        """
        if resume == "auto":
            return self.candidates()
        found = self._survey()
        named = Path(resume)
        is_step = step_of(named) is not None
        folder = named.parent if is_step else named / self.folder.name
        is_here = bool(resume) and folder.resolve() == self.folder.resolve()
        present = found.present
        if present and not is_here and not overwrite:
            raise ValueError(
                f"got an --out-dir with checkpoints of an earlier run ({self.folder / name_of(max(present))}) and "
                f"{f'--resume {resume}' if resume else 'no --resume'}, expected a new folder; pass --resume auto to go "
                "on from there, another --out-dir, or --overwrite to delete that run"
            )
        if not resume:
            return []
        if is_step:
            return [named]
        paths = Checkpoints(folder, self._world, self.identity).candidates()
        if not paths:
            raise ValueError(
                f"got no checkpoint in {folder}, expected step_00000040/ or the like; name the folder of a run or of "
                "one of its checkpoints"
            )
        return paths

    def load(self, paths: Sequence[Path], *, keys: Collection[str] = ()) -> tuple[Path, dict[str, Any]]:
        """The first of the checkpoints `paths` that is whole on every rank, and the state that this rank saved in it.

        Args:
            paths: folders of checkpoints, of this run or of another one, the best first; those that are passed over
                are named, with the reason.
            keys: what the state must have.

        Raises:
            ValueError: all are missing or damaged on some rank, or one is from a run that cannot go on here.
        """
        damaged: dict[Path, str] = {}
        for path in paths:
            states: list[dict[str, Any]] = []
            # One pass over the file says whether it is whole, and reads it.
            problems = self._world.on_every_rank(partial(self._load_own, path, keys, states))
            damaged[path] = "; ".join(f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem)
            if not damaged[path]:
                return path, states[0]
            if path != paths[-1]:
                self._print(f"passed over {path.name}: {damaged[path]}")
        if len(paths) > 1:
            reasons = "".join(f"\n  {path.name}: {damaged[path]}" for path in paths)
            raise ValueError(
                f"got no checkpoint in {paths[0].parent} that is whole on all ranks of this run, expected one; bring "
                f"the files back, or {START_AFRESH}:{reasons}"
            )
        complete = Checkpoints(paths[0].parent, self._world, self.identity)._survey().complete
        before = [name for name in map(name_of, complete) if name < paths[0].name]
        remedy = (
            f"resume from the one before: --resume {paths[0].parent / before[-1]}"
            if before
            else f"there is no earlier one: {START_AFRESH}"
        )
        raise ValueError(f"{damaged[paths[0]]}; {remedy}")

    def clear(self) -> None:
        """Delete the checkpoints in the folder, superseded ones too, of however many ranks; no other files."""

        def clear() -> list[str]:
            folders = [*paths_in(self.folder, "step_*"), *paths_in(self.folder / SUPERSEDED, "step_*")]
            # Every rank deletes what it finds: the folder may be local to its machine.
            for folder in folders:
                for pattern in ("rank_*.json", "rank_*.pt", ".rank_*.tmp"):
                    for path in paths_in(folder, pattern):
                        remove_file(path)
            for folder in (*folders, self.folder / SUPERSEDED, self.folder):
                with suppress(OSError):  # not empty, or gone
                    folder.rmdir()
            return [folder.name for folder in folders]

        names = set().union(*self._world.on_every_rank(clear))
        if names:
            self._print(f"cleared {self.folder} of an earlier run: {', '.join(sorted(names))}")

    def set_aside_after(self, step: int) -> None:
        """Move the checkpoints after `step` to superseded/: a run that goes on from `step` writes its own."""
        found = self._survey()
        newer = [later for later in (*found.complete, *found.lacking) if later > step]

        def set_aside() -> None:
            for later in newer:
                files = self._files(later)
                if files.manifest_path.is_file() and files.state_path.is_file():
                    files.move_to(self.folder / SUPERSEDED / files.folder.name)
                else:
                    files.remove()

        self._world.on_every_rank(set_aside)
        if newer:
            names = ", ".join(map(name_of, sorted(newer)))
            self._print(f"moved {names} to {self.folder / SUPERSEDED}: the run goes on from step {step}")

    def _load_own(self, path: Path, keys: Collection[str], states: list[dict[str, Any]]) -> str:
        """Append this rank's state in `path` to `states`; what is damaged, if anything.

        Raises:
            ValueError: it is whole, and of a run that cannot go on here: then so are the others in its folder.
        """
        files = RankFiles(path, self._world.rank)
        try:
            manifest = files.read_manifest()
        except (DamagedError, OSError) as error:
            return str(error)
        check_identity(files.state_path, manifest, self.identity, self.defaults)
        try:
            states.append(files.read_state(manifest, keys))
        except (DamagedError, OSError) as error:
            return str(error)
        self._warn_of_changes(manifest.get("settings", {}))
        return ""

    def _warn_of_changes(self, before: Mapping[str, Any]) -> None:
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

    def _remove_old(self, newest: int) -> None:
        found = self._survey()
        kept = {newest, *found.complete[-self._keep_last :]}
        if found.scores:
            kept.add(max(found.scores, key=lambda step: (found.scores[step], step)))
        for step in (*found.complete, *found.lacking):
            files = self._files(step)
            try:
                if step in kept:
                    files.remove_temporaries()
                else:
                    files.remove()
            except OSError as error:
                # What was saved is whole on every rank: training goes on.
                warnings.warn(
                    f"got {files.folder} that cannot be removed ({error}), expected to make room; remove it by hand",
                    stacklevel=2,
                )

    def _survey(self) -> Survey:
        return survey(self.folder, self._world)

    def _files(self, step: int) -> RankFiles:
        return RankFiles(self.folder / name_of(step), self._world.rank)

    def _print(self, text: str) -> None:
        if self._world.rank == 0:
            print(text, flush=True)
