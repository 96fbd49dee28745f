"""Checkpoints: one file per rank, written atomically; all ranks resume from the same step or none does.

    <folder>/step_00000040/rank_0000.pt      tensors and plain numbers, loaded with weights_only=True
    <folder>/step_00000040/rank_0000.json    the manifest: written last, so what has one is whole

[Note: a checkpoint is complete when every rank has its manifest]
A rank writes its .pt to a temporary file, fsyncs and renames it; when all ranks have done so, each writes its manifest
in the same way. A job killed at any point leaves temporary files or files without manifest, which no one reads. Every
rank reads and deletes only its own two files, so the folder may be shared between machines or local to each.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

FORMAT = "gossip-checkpoint-1"


class Agreement(Protocol):
    """The part of a World that checkpoints need."""

    @property
    def rank(self) -> int: ...

    def gather(self, value: Any) -> list[Any]: ...

    def on_every_rank(self, function: Callable[[], Any]) -> list[Any]: ...


class Checkpoints:
    """The checkpoints in one folder, as seen by one rank. Every method is collective.

    Args:
        folder: where they are; made when needed.
        world: rank and agreement.
        identity: what a run must have in common with a checkpoint to go on from it: world size, recipe, model
            fingerprint and the like, plain JSON values.
        keep_last: newest checkpoints kept; the one with the best test accuracy is kept as well.
    """

    def __init__(self, folder: Path, world: Agreement, identity: Mapping[str, Any], *, keep_last: int = 2) -> None:
        self.folder = folder
        self._world = world
        self._identity = dict(identity)
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
        path = self._path(step)
        manifest = {"format": FORMAT, "step": step, "test_accuracy_percent": test_accuracy_percent, **self._identity}

        def write_state() -> None:
            path.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file(path, ".pt"), lambda temporary: torch.save(dict(state), temporary))

        def write_manifest() -> None:
            manifest["num_bytes"] = self._file(path, ".pt").stat().st_size
            manifest["sha256"] = sha256(self._file(path, ".pt"))
            text = json.dumps(manifest, indent=1) + "\n"
            write_atomically(self._file(path, ".json"), lambda temporary: temporary.write_text(text))

        # Two rounds: see [Note: a checkpoint is complete when every rank has its manifest].
        self._world.on_every_rank(write_state)
        self._world.on_every_rank(write_manifest)
        self._remove_old()
        return path

    def newest(self) -> Path | None:
        """The newest complete checkpoint; None when there is none."""
        steps = self._complete_steps()
        return self._path(steps[-1]) if steps else None

    def choose(self, resume: str) -> Path | None:
        """What a run that was told `resume` goes on from; None: it starts anew.

        Args:
            resume: 'auto', the newest complete checkpoint here, if any; a folder, of a run or of one checkpoint; or
                '', which allows none here, lest two runs mix.

        Raises:
            ValueError: the folder has no complete checkpoint, or there is one and nothing was said.
        """
        newest = self.newest()
        if not resume and newest is not None:
            raise ValueError(
                f"got an --out-dir with checkpoints of an earlier run ({newest}) and no --resume, expected a new "
                "folder; pass --resume auto to go on from there, or another --out-dir"
            )
        if resume in ("", "auto"):
            return newest
        if Path(resume).name.startswith("step_"):
            return Path(resume)
        folder = Path(resume) / self.folder.name
        path = Checkpoints(folder, self._world, self._identity).newest()
        if path is None:
            raise ValueError(
                f"got no checkpoint complete on all ranks in {folder}, expected step_*/; name the folder of a run or "
                "of one of its checkpoints"
            )
        return path

    def load(self, path: Path) -> dict[str, Any]:
        """The state that this rank saved in the checkpoint `path`.

        Args:
            path: folder of the checkpoint, of this run or of another one.

        Raises:
            ValueError: on some rank it is missing, truncated, or from a run that cannot go on here.
        """
        source = self if path.parent == self.folder else Checkpoints(path.parent, self._world, self._identity)
        before = [step for step in source._complete_steps() if source._path(step).name < path.name]
        remedy = (
            f"resume from the one before: --resume {source._path(before[-1])}"
            if before
            else ("there is no earlier one: start afresh in another --out-dir")
        )
        states: list[dict[str, Any]] = []
        self._world.on_every_rank(lambda: states.append(source._load_own(path, remedy)))
        return states[0]

    def _load_own(self, path: Path, remedy: str) -> dict[str, Any]:
        file = self._file(path, ".pt")
        manifest = self._read_manifest(path)
        if manifest is None or not file.is_file():
            raise ValueError(f"got {path} without {file.name} and its .json, expected a whole checkpoint; {remedy}")
        for name, expected in self._identity.items():
            if manifest.get(name) != expected:
                raise ValueError(
                    f"got {file} of a run with {name}={manifest.get(name)!r}, expected {expected!r} as in this run; "
                    "resume with the options of that run, or start afresh in another --out-dir"
                )
        # torch.load checks neither: it reads a flipped bit as another weight.
        num_bytes = file.stat().st_size
        if num_bytes != manifest["num_bytes"]:
            raise ValueError(f"got {file} of {num_bytes} bytes, expected {manifest['num_bytes']}: truncated; {remedy}")
        if sha256(file) != manifest["sha256"]:
            raise ValueError(f"got {file} with other bytes than were written, expected those of its manifest; {remedy}")
        state = torch.load(file, map_location="cpu", weights_only=True)
        assert isinstance(state, dict), "save writes a dict"
        return state

    def _remove_old(self) -> None:
        steps = self._complete_steps()
        kept = set(steps[-self._keep_last :])
        accuracy = {step: (self._read_manifest(self._path(step)) or {}).get("test_accuracy_percent") for step in steps}
        measured = [step for step in steps if accuracy[step] is not None]
        if measured:
            kept.add(max(measured, key=lambda step: (accuracy[step], step)))
        for step in set(steps) - kept:
            path = self._path(step)
            # The manifest goes first: half a removal must not look like a checkpoint.
            self._file(path, ".json").unlink()
            self._file(path, ".pt").unlink()
            with contextlib.suppress(OSError):  # not empty yet: the last rank to leave takes the folder away
                path.rmdir()

    def _complete_steps(self) -> list[int]:
        mine = {
            int(path.name.removeprefix("step_")) for path in self.folder.glob("step_*") if self._read_manifest(path)
        }
        return sorted(set.intersection(*self._world.gather(mine)))

    def _read_manifest(self, path: Path) -> dict[str, Any] | None:
        """The manifest of this rank in `path`; None when there is none. Written atomically, so it is whole."""
        file = self._file(path, ".json")
        try:
            manifest = json.loads(file.read_text()) if file.is_file() else None
        except ValueError:
            return None
        return manifest if isinstance(manifest, dict) and manifest.get("format") == FORMAT else None

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def _file(self, path: Path, suffix: str) -> Path:
        return path / f"rank_{self._world.rank:04d}{suffix}"


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary file and put it at `path`: a reader sees the old file or the whole new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    # A rename is durable once its folder is.
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal, read a few megabytes at a time."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def fingerprint(module: nn.Module) -> str:
    """A short hash of the names, shapes and dtypes of a model's state."""
    layout = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in module.state_dict().items()]
    return hashlib.sha256("\n".join(layout).encode()).hexdigest()[:16]
