"""Stores of objects by address."""

from __future__ import annotations

import warnings

from ..warn import levels_to_user
from .base import Medium, MediumCounts
from .clock import Clock
from .folder import FolderMedium
from .memory import MemoryMedium
from .sealed import Seal

__all__ = ["Medium", "MediumCounts", "open_medium"]

_REAL_TIME = Clock()
_warned: set[str] = set()


def open_medium(
    address: str, *, timeout: float, clock: Clock = _REAL_TIME, key: bytes | None = None, seed: int | None = None
) -> Medium:
    """Open a store of objects.

    Args:
        address: file:///folder, or memory://name for threads of one process.
        timeout: see `Medium`.
        clock: see `Medium`.
        key: see `Seal`.
        seed: see `Medium`.

    Raises:
        ValueError: the address is of no such kind.
        MailboxError: the store refuses to be opened.
    """
    scheme, _, rest = address.partition("://")
    if key is None and scheme != "memory" and not _warned:
        warnings.warn(
            f"got no key for {address}, so anyone with write access can change the model; set GOSSIP_JOB_KEY to the "
            "same secret text for all workers",
            stacklevel=levels_to_user(),
        )
        _warned.add("key")
    seal = Seal(key)
    if scheme == "memory" and rest:
        return MemoryMedium(rest, timeout=timeout, clock=clock, seal=seal, seed=seed)
    if scheme == "file" and rest.startswith("/"):
        return FolderMedium(rest, timeout=timeout, clock=clock, seal=seal, seed=seed)
    raise ValueError(f"got the address {address!r}, expected file:///folder or memory://name")
