"""NetworkBackend: each worker a process on a host of its own: a network namespace behind a router."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from multiprocessing import reduction
from multiprocessing.connection import Connection

from ..backend import Body
from ..process_backend import Host, ProcessBackend, receive, say
from .interface import enter_namespace
from .router import Condition, Router

_NETMASK = "255.255.0.0"
_STORE = "10.77.0.1"


class NetworkBackend(ProcessBackend):
    """See `Backend`. The store and each worker are hosts, whose only network is a router in this process.

    Needs Linux with /dev/net/tun, and root or the capabilities CAP_SYS_ADMIN and CAP_NET_ADMIN.
    """

    has_network = True

    def __init__(self, body: Body) -> None:
        self._router = Router()
        self._conditions: dict[int, Condition] = {}
        try:
            super().__init__(body)
        except BaseException:
            self._router.close()
            raise

    def set_delay(self, rank: int, seconds: float) -> None:
        """See `Backend`."""
        self._set_condition(rank, delay=seconds)

    def set_loss(self, rank: int, fraction: float) -> None:
        """See `Backend`."""
        self._set_condition(rank, loss=fraction)

    def cut(self, ranks: Iterable[int]) -> None:
        """See `Backend`."""
        ranks = frozenset(ranks)
        self._router.cut(ranks, [_address(rank) for rank in ranks])

    def mend(self, ranks: Iterable[int]) -> None:
        """See `Backend`."""
        self._router.mend(frozenset(ranks))

    def close(self) -> None:
        """See `Backend`."""
        super().close()
        self._router.close()

    def _set_condition(self, rank: int, **changed: float) -> None:
        self._conditions[rank] = replace(self._conditions.get(rank, Condition()), **changed)
        self._router.set_condition(_address(rank), self._conditions[rank])

    def _host(self, rank: int | None) -> Host:
        return _NamespaceHost(_STORE if rank is None else _address(rank))

    def _admit(self, host: Host, connection: Connection) -> None:
        answer = receive(connection)
        if "error" in answer:
            raise PermissionError(
                f"got no host for a worker ({answer['error']}), expected Linux with /dev/net/tun and root; "
                "backend='processes' needs neither, and has no Delay, Loss and Partition"
            )
        self._router.attach(host.address, reduction.recv_handle(connection))


class _NamespaceHost(Host):
    """A namespace, whose device is sent to the router."""

    def enter(self, connection: Connection) -> None:
        """See `Host`."""
        try:
            device = enter_namespace(self.address, _NETMASK)
        except OSError as error:
            say(connection, error=str(error))
            raise SystemExit(1) from None
        say(connection, has_device=True)
        reduction.send_handle(connection, device, os.getppid())
        os.close(device)


def _address(rank: int) -> str:
    """Of the host of a worker."""
    return f"10.77.{1 + rank // 250}.{1 + rank % 250}"
