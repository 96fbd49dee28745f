"""Progress: how far a job is that no rank leads, counted in its key-value store."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from .bounded_store import BoundedStore


class Progress:
    """A counter that all ranks of a job add to: how many steps they have taken together.

    Where ranks train at their own pace no rank's step count tells how far the job is. Epochs, the learning rate and
    the end of training then follow the sum, so that fast ranks do more of the work. AD-PSGD: Lian et al., ICML 2018,
    arXiv 1710.06952, counts its iterations k over all workers.

    Adding is atomic and never waits for another rank, only for the store, and no longer than `timeout`: one request and
    its answer, some 60 µs on one machine. To take exactly n steps together, let each rank claim a step before it takes
    it: see the example.

    Args:
        store: reached by all ranks; None: the store of the default process group, under a prefix of its own.
        name: of this counter; ranks that give the same name and store share it.
        timeout: of each request; None: the store's own, as given to `init_process_group`.

    Raises:
        RuntimeError: no store, and torch.distributed is not initialised.

    Example:
        >>> progress = Progress(dist.HashStore())
        >>> while progress.add(1) <= 3:
        ...     print("a step")
        a step
        a step
        a step
    """

    def __init__(
        self, store: dist.Store | None = None, *, name: str = "steps", timeout: timedelta | None = None
    ) -> None:
        prefixed = dist.PrefixStore("gossip_progress", job_store() if store is None else store)
        self._store = BoundedStore(prefixed, timeout=timeout)
        self._name = name

    @property
    def total(self) -> int:
        """The sum of what all ranks have added so far.

        Raises:
            ConnectionError: the store does not answer, or not in time.
        """
        return self.add(0)

    def add(self, n: int) -> int:
        """Count `n` more steps; the total with them, which no other call returns as long as everyone adds 1 or more.

        Raises:
            ConnectionError: the store does not answer, or not in time.
        """
        return self._store.add(self._name, n, what=f"adding {n} to the progress {self._name!r} of the job")

    def restore(self, total: int) -> None:
        """Make `total` the count, as after a resumption.

        Not collective, and not to be mixed with `add`: one rank calls it while no other counts, between two barriers.

        Args:
            total: 0 or more.

        Raises:
            ConnectionError: the store does not answer, or not in time.
        """
        if total < 0:
            raise ValueError(f"got total={total}, expected a count of 0 or more; 0 starts anew")
        what = f"restoring {total} as the progress {self._name!r} of the job"
        self._store.set(self._name, str(total), what=what)


def job_store() -> dist.Store:
    """The key-value store of the default process group: the one through which the ranks of the job have met.

    Raises:
        RuntimeError: torch.distributed is not initialised.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised, expected the store of its default process group; call "
            "torch.distributed.init_process_group() before, or pass a store"
        )
    return dist.distributed_c10d._get_default_store()
