"""A store that ends and begins again at the same address; and addresses that are exchanged over one."""

from __future__ import annotations

import contextlib
import random

import torch.distributed as dist

from gossip_modules.membership.addresses import Exchange

# Below those that Linux gives to sockets that ask for any port, which might have it before the store is back.
_PORTS = range(10_000, 17_000)


def serve(port: int | None = None) -> dist.TCPStore:
    """A store on this machine; with the port of one that has ended, in its place."""
    for candidate in random.sample(_PORTS, 100) if port is None else [port]:
        with contextlib.suppress(dist.DistNetworkError):  # somebody listens there
            return dist.TCPStore("127.0.0.1", candidate, is_master=True, wait_for_workers=False)
    raise RuntimeError(f"got no store at {'100 ports' if port is None else f'port {port}'}, expected one")


def exchange_over(store: dist.Store, rank: int, size: int) -> Exchange:
    """The exchange of addresses of one rank with all, over a store of these ranks."""

    def exchange(name: str, text: str) -> list[str]:
        store.set(f"{name}/{rank}", text)
        return [store.get(f"{name}/{i}").decode() for i in range(size)]

    return exchange
