"""Stores of objects by address."""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch.distributed as dist

from ..transport.job_key import key_of
from ..warn import levels_to_user
from .base import Medium
from .bucket import BucketMedium
from .clock import Clock
from .folder import FolderMedium
from .key_values import StoreMedium, connected
from .memory import MemoryMedium
from .sealed import Seal

__all__ = ["REAL_TIME", "Medium", "key_of", "open_medium"]

REAL_TIME = Clock()
_warned: set[str] = set()


def open_medium(
    address: str | dist.Store,
    *,
    timeout: float,
    clock: Clock = REAL_TIME,
    key: bytes | None = None,
    seed: int | None = None,
) -> Medium:
    """Open a store of objects.

    Args:
        address: s3://bucket/run, gs://bucket/run, az://container/run, file:///folder/run, store://host:port/run (a
            TCPStore), or memory://run for threads of one process; or a store of torch.distributed itself. The three
            object stores take their options from the environment, as `obstore` does: AWS_ACCESS_KEY_ID, AWS_REGION,
            AWS_ENDPOINT_URL, GOOGLE_SERVICE_ACCOUNT, AZURE_STORAGE_ACCOUNT_NAME and so on.
        timeout: see `Medium`.
        clock: see `Medium`.
        key: see `Seal`.
        seed: see `Medium`.

    Raises:
        ValueError: the address is of no such kind.
        ImportError: an object store, and `obstore` is not installed.
        MailboxError: the store refuses to be opened.
    """
    text = address if isinstance(address, str) else type(address).__name__
    scheme, _, rest = text.partition("://")
    if key is None and scheme != "memory" and not _warned:
        warnings.warn(
            f"got no key for {text}, so anyone with write access can change the model; set GOSSIP_JOB_KEY to the "
            "same secret text for all workers",
            stacklevel=levels_to_user(),
        )
        _warned.add("key")
    options: dict[str, Any] = {"timeout": timeout, "clock": clock, "seal": Seal(key), "seed": seed}
    if not isinstance(address, str):
        return StoreMedium(lambda: address, "store://", **options)
    if scheme == "memory" and rest:
        return MemoryMedium(rest, **options)
    if scheme == "file" and rest.startswith("/") and rest.strip("/"):
        return FolderMedium(rest, **options)
    if scheme == "store" and (place := re.fullmatch(r"(?:\[([^]]+)]|([^/:]+)):(\d{1,5})(?:/(.*))?", rest)):
        host = place[1] or place[2]
        return StoreMedium(lambda: connected(host, int(place[3]), timeout), address, prefix=place[4] or "", **options)
    if scheme in BucketMedium.SCHEMES and rest.strip("/"):
        return BucketMedium(address, **options)
    raise ValueError(
        f"got the address {address!r}, expected s3://bucket/run, gs://bucket/run, az://container/run, "
        "file:///folder/run, store://host:port/run or memory://run"
    )
