"""The network of a run over a mailbox: hosts of workers that reach the host of the store, and nothing else."""

from __future__ import annotations

import itertools
from types import TracebackType
from typing import TYPE_CHECKING

from benchmarks.cluster.network import namespaces
from benchmarks.cluster.network.reaper import Reaper

if TYPE_CHECKING:
    from typing_extensions import Self

STORE_ADDRESS = "10.79.255.1"
MAX_WORKERS = 250
_serials = itertools.count(1_000_000)  # networks of other benchmarks count from 0


class StoreNetwork:
    """A host for the store and one for each worker; each worker has a cable to the store, and no other route.

    Use it as a context manager, or `close()` it.

    Args:
        num_workers: 1 to 250.

    Raises:
        ClusterUnavailableError: no root, no iproute2, or a kernel without what is needed.
    """

    def __init__(self, num_workers: int) -> None:
        assert 1 <= num_workers <= MAX_WORKERS, "there are that many addresses"
        namespaces.require()
        namespaces.remove(namespaces.abandoned(namespaces.names()))
        prefix = namespaces.owner_prefix(next(_serials))
        self.store_host = f"{prefix}store"
        self.hosts = tuple(f"{prefix}{rank}" for rank in range(num_workers))
        self._reaper = Reaper(prefix)
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        for namespace in (self.store_host, *self.hosts):
            namespaces.run("ip", "netns", "add", namespace)
        lines = ["link set lo up", f"address add {STORE_ADDRESS}/32 dev lo"]
        for rank, host in enumerate(self.hosts):
            lines += [
                f"link add w{rank} type veth peer name eth0 netns {host}",
                f"address add 10.79.{rank}.1/30 dev w{rank}",
                f"link set w{rank} up",
            ]
        namespaces.run_batch(self.store_host, lines)
        for rank, host in enumerate(self.hosts):
            namespaces.run_batch(
                host,
                [
                    "link set lo up",
                    f"address add {self.address(rank)}/30 dev eth0",
                    "link set eth0 up",
                    f"route add {STORE_ADDRESS}/32 via 10.79.{rank}.1",
                ],
            )

    def address(self, rank: int) -> str:
        """The address of the host of a worker."""
        return f"10.79.{rank}.2"

    def cut(self) -> None:
        """The answers of the store are dropped: its packets have no way to any worker."""
        self._each_worker("add")

    def mend(self) -> None:
        """Undo `cut()`."""
        self._each_worker("delete")

    def _each_worker(self, action: str) -> None:
        lines = [f"route {action} blackhole {self.address(rank)}/32" for rank in range(len(self.hosts))]
        namespaces.run_batch(self.store_host, lines)

    def listening(self, host: str) -> str:
        """The sockets of a host that listen, by `ss`; empty: there is none."""
        return namespaces.run("ip", "netns", "exec", host, "ss", "-H", "-l", "-t", "-u", "-n").strip()

    def close(self) -> None:
        """Remove everything, with the processes in it. Idempotent."""
        self._reaper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
