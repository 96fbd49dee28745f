"""A store that ends and begins again at the same address."""

from __future__ import annotations

import contextlib
import random

import torch.distributed as dist

# Below those that Linux gives to sockets that ask for any port, which might have it before the store is back.
_PORTS = range(10_000, 17_000)


def serve(port: int | None = None) -> dist.TCPStore:
    """A store on this machine; with the port of one that has ended, in its place."""
    for candidate in random.sample(_PORTS, 100) if port is None else [port]:
        with contextlib.suppress(dist.DistNetworkError):  # somebody listens there
            return dist.TCPStore("127.0.0.1", candidate, is_master=True, wait_for_workers=False)
    raise RuntimeError(f"got no store at {'100 ports' if port is None else f'port {port}'}, expected one")
