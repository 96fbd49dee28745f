"""RankFiles: the two files of one rank in the folder of one checkpoint, and everything that can be wrong with them.

rank_0000.pt      tensors and plain numbers, loaded with weights_only=True
rank_0000.json    the manifest: written last, so what has one is whole
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from train.files import sha256, write_atomically

FORMAT = "gossip-checkpoint-1"
OWN_KEYS = {"format", "num_bytes", "sha256"}


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
        """Write `manifest`, plain JSON values, together with the size and the hash of the state."""
        own = {"format": FORMAT, "num_bytes": self.state_path.stat().st_size, "sha256": sha256(self.state_path)}
        text = json.dumps({**manifest, **own}, indent=1) + "\n"
        write_atomically(self.manifest_path, lambda temporary: temporary.write_text(text))

    def read_manifest(self) -> dict[str, Any]:
        """What `write_manifest` was given.

        Raises:
            ValueError: there is none, or it is damaged.
        """
        if not self.manifest_path.is_file():
            raise ValueError(f"got {self.folder} without {self.manifest_path.name}, expected a finished checkpoint")
        try:
            manifest = json.loads(self.manifest_path.read_text())
        except ValueError as error:
            raise ValueError(f"got {self.manifest_path} damaged ({error}), expected a manifest") from error
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or not manifest.keys() >= OWN_KEYS:
            raise ValueError(f"got {self.manifest_path} of another format, expected a manifest of {FORMAT}")
        return manifest

    def read_state(self, manifest: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
        """What `write_state` was given.

        Args:
            manifest: of the same checkpoint.
            keys: what the state must have.

        Raises:
            ValueError: the file is missing, not the one that was written, or holds something else.
        """
        path = self.state_path
        if not path.is_file():
            raise ValueError(f"got {self.folder} without {path.name}, expected a whole checkpoint")
        # torch.load checks neither: it reads a flipped bit as another weight.
        num_bytes = path.stat().st_size
        if num_bytes != manifest["num_bytes"]:
            raise ValueError(f"got {path} of {num_bytes} bytes, expected {manifest['num_bytes']}: truncated")
        if sha256(path) != manifest["sha256"]:
            raise ValueError(f"got {path} with other bytes than were written, expected those of its manifest")
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # noqa: BLE001 - unpickling what anyone wrote may raise anything
            # Not torch's own words: they propose weights_only=False, which would run whatever code the file holds.
            raise ValueError(
                f"got {path} with more than tensors and plain values ({type(error).__name__}), expected a checkpoint "
                "of this script; do not load it"
            ) from None
        missing = sorted(set(keys) - state.keys()) if isinstance(state, dict) else sorted(keys)
        if missing:
            raise ValueError(f"got {path} without {', '.join(missing)}, expected a checkpoint of this script")
        return dict(state)

    def remove(self) -> None:
        """Delete both files and what a killed process left of them; the last rank to leave takes the folder away."""
        # The manifest goes first: half a removal must not look like a checkpoint.
        self.manifest_path.unlink(missing_ok=True)
        self.state_path.unlink(missing_ok=True)
        self.remove_temporaries()
        with contextlib.suppress(OSError):  # not empty yet, or gone
            self.folder.rmdir()

    def remove_temporaries(self) -> None:
        """Delete what a process that was killed while it wrote has left."""
        for path in self.folder.glob(f".rank_{self.rank:04d}.*.tmp"):
            path.unlink()

    def move_to(self, folder: Path) -> None:
        """Move both files to `folder`, in place of those there."""
        folder.mkdir(parents=True, exist_ok=True)
        # In the order of `remove`, for its reason.
        for path in (self.manifest_path, self.state_path):
            path.replace(folder / path.name)
        self.remove()
