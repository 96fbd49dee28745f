"""AverageOnDemand: the exact average over all workers of dpwa, which use no process group otherwise."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ..flat.vector import FlatVector
from ..rounds.mixer import GlobalAverage
from ..transport.connect import connect
from ..transport.process_group import ProcessGroupTransport
from ..transport.stores import job_store

_calls = itertools.count()  # of averages by this process; all ranks make them in the same order


class AverageOnDemand(GlobalAverage):
    """The exact average over all workers. Its process group is made by all of them at the first average.

    [Note: Roll call] Before each average every rank sets a key in the store of the job and waits for the keys of all
    others. So the error names a rank that has died or does not average, before anything is sent.

    Args:
        device: the device of the parameters.
        timeout: the timeout of the wait for the other ranks, and of the average.
    """

    def __init__(self, device: torch.device, timeout: timedelta) -> None:
        self._device, self._timeout = device, timeout
        self._connection: ProcessGroupTransport | None = None

    @property
    def num_bytes_sent(self) -> int:
        """The bytes that averages have sent so far."""
        return 0 if self._connection is None else self._connection.num_bytes_sent

    def close(self) -> None:
        """Release the process group, if there is one; idempotent. No averages after it."""
        if self._connection is not None:
            self._connection.close()

    def start(self, s: FlatVector, t: int) -> None:
        """See `Mixer`.

        Raises:
            RuntimeError: torch.distributed is not initialised.
            TimeoutError: a rank has not come to this average in time; names it.
        """
        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised, expected it for an average over all ranks; start with torchrun "
                "and call torch.distributed.init_process_group() before"
            )
        call_the_roll(job_store(), dist.get_rank(), dist.get_world_size(), call=next(_calls), timeout=self._timeout)
        if self._connection is None:
            self._connection = connect(module_device=self._device, timeout=self._timeout)
            super().__init__(self._connection)
        super().start(s, t)


def call_the_roll(store: dist.Store, rank: int, world_size: int, *, call: int, timeout: timedelta) -> None:
    """Wait until all ranks have come to this average, the `call`-th of each.

    Raises:
        TimeoutError: some ranks have not come; names them.
    """
    store = dist.PrefixStore(f"gossip_average/{call}", store)
    start = time.monotonic()
    store.set(str(rank), "here")
    try:
        store.wait([str(other) for other in range(world_size)], timeout)
    except RuntimeError as error:  # a DistStoreError, but of a FileStore
        missing = [other for other in range(world_size) if not store.check([str(other)])]
        raise TimeoutError(
            f"rank {rank}: ranks {missing} have not come to average {call} over all ranks after "
            f"{time.monotonic() - start:.1f} s (timeout {timeout.total_seconds():g} s), expected all: have they "
            "died? all ranks must call averaged(), averaged_state_dict(), average_() or consensus_distance(), as often "
            "as the others; where they only come later, pass a longer average_timeout="
        ) from error
