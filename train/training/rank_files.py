"""RankFiles: the two files of one rank in the folder of one checkpoint, and everything that can be wrong with them.

rank_0000.pt      tensors and plain numbers, loaded with weights_only=True
rank_0000.json    the manifest: written last, so what has one is whole
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from train.job.files import paths_in, remove_file, sha256, write_atomically

FORMAT = "gossip-checkpoint-1"
OWN_KEYS = {"format", "num_bytes", "sha256"}


class DamagedError(ValueError):
    """A checkpoint is not what was written; an earlier one may be."""


@dataclass(frozen=True)
class RankFiles:
    """What `rank` keeps in the checkpoint `folder`; nothing here waits for another rank."""

    folder: Path
    rank: int

    @property
    def state_path(self) -> Path:
        """The file of tensors."""
        return self.folder / f"rank_{self.rank:04d}.pt"

    @property
    def manifest_path(self) -> Path:
        """The file that says whose they are."""
        return self.folder / f"rank_{self.rank:04d}.json"

    def write_state(self, state: Mapping[str, Any]) -> None:
        """Write `state`: tensors, numbers, strings and containers of them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.state_path, lambda temporary: torch.save(dict(state), temporary))

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Write `manifest`, plain JSON values, with the step, the rank, and the size and hash of the state."""
        own = {"format": FORMAT, "step": step_of(self.folder), "rank": self.rank}
        own |= {"num_bytes": self.state_path.stat().st_size, "sha256": sha256(self.state_path)}
        text = json.dumps({**manifest, **own}, indent=1) + "\n"
        write_atomically(self.manifest_path, lambda temporary: temporary.write_text(text))

    def read_manifest(self) -> dict[str, Any]:
        """What `write_manifest` was given.

        Raises:
            DamagedError: there is none, it is damaged, or it was written for another step or rank.
        """
        path = self.manifest_path
        try:
            manifest = json.loads(path.read_text())
        except FileNotFoundError:
            raise DamagedError(f"got {self.folder} without {path.name}, expected a finished checkpoint") from None
        except ValueError as error:
            raise DamagedError(f"got {path} damaged ({error}), expected a manifest") from error
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or not manifest.keys() >= OWN_KEYS:
            raise DamagedError(f"got {path} of another format, expected a manifest of {FORMAT}")
        # Files that were copied to a place of others have the size and the hash of what they hold. A manifest of an
        # older version has no rank.
        for name, expected in (("step", step_of(self.folder)), ("rank", self.rank)):
            if manifest.get(name, expected) != expected:
                raise DamagedError(
                    f"got {path} of {name} {manifest[name]}, expected that of {name} {expected}: copied?"
                )
        return manifest

    def read_state(self, manifest: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
        """What `write_state` was given.

        Args:
            manifest: the manifest of the same checkpoint.
            keys: what the state must have.

        Raises:
            DamagedError: the file is missing, not the one that was written, or holds something else.
        """
        path = self.state_path
        if not path.is_file():
            raise DamagedError(f"got {self.folder} without {path.name}, expected a whole checkpoint")
        # torch.load checks neither: it reads a flipped bit as another weight.
        num_bytes = path.stat().st_size
        if num_bytes != manifest["num_bytes"]:
            raise DamagedError(f"got {path} of {num_bytes} bytes, expected {manifest['num_bytes']}: truncated")
        if sha256(path) != manifest["sha256"]:
            raise DamagedError(f"got {path} with other bytes than were written, expected those of its manifest")
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # noqa: BLE001 - unpickling what anyone wrote may raise anything
            # Not torch's own words: they propose weights_only=False, which would run whatever code the file holds.
            raise DamagedError(
                f"got {path} with more than tensors and plain values ({type(error).__name__}), expected a checkpoint "
                "of this script; do not load it"
            ) from None
        missing = sorted(set(keys) - state.keys()) if isinstance(state, dict) else sorted(keys)
        if missing:
            raise DamagedError(f"got {path} without {', '.join(missing)}, expected a checkpoint of this script")
        return dict(state)

    def remove(self) -> None:
        """Delete both files and what a killed process left of them; the last rank to leave takes the folder away."""
        # The manifest goes first: half a removal must not look like a checkpoint.
        remove_file(self.manifest_path)
        remove_file(self.state_path)
        self.remove_temporaries()
        with contextlib.suppress(OSError):  # not empty yet, or gone
            self.folder.rmdir()

    def remove_temporaries(self) -> None:
        """Delete what a process that was killed while it wrote has left."""
        for path in paths_in(self.folder, f".rank_{self.rank:04d}.*.tmp"):
            remove_file(path)

    def move_to(self, folder: Path) -> None:
        """Move both files to `folder`, in place of those there."""
        folder.mkdir(parents=True, exist_ok=True)
        # In the order of `remove`, for its reason.
        for path in (self.manifest_path, self.state_path):
            path.replace(folder / path.name)
        self.remove()


def name_of(step: int) -> str:
    """The name of the folder of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """The step of a checkpoint's folder; None for other names, such as step_latest."""
    match = re.fullmatch(r"step_(\d{8,})", path.name)
    return int(match[1]) if match else None
