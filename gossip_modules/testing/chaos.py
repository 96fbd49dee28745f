"""Chaos: a training loop under faults, each at a given step."""

from __future__ import annotations

import heapq
import itertools
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

from .backend import Backend, Body, ThreadBackend
from .events import Event, Join, Partition
from .network import NetworkBackend
from .process_backend import ProcessBackend

BACKENDS: dict[str, type[Backend]] = {
    "threads": ThreadBackend,
    "processes": ProcessBackend,
    "network": NetworkBackend,
}


class Chaos:
    """Runs a training loop on several workers, and kills, stops and starts them at given training steps.

    For tests of loops with a `Membership`: `run` raises the error of any other worker than a killed one.

    Args:
        events: `Kill`, `Stop`, `Continue`, `Join`, `StoreKill`, ... in any order.
        backend: "threads": all workers are threads of this process, and a killed worker leaves its loop by an exception
            after its connections were closed, and no `except Exception` catches it; for tests of the logic, in seconds.
            "processes": each is a process and gets SIGKILL, SIGSTOP and SIGCONT. "network": processes, each on a host
            of its own: a network namespace, behind a router with delays, losses and dropped packets, for `Delay`,
            `Loss` and `Partition`; on Linux with /dev/net/tun, as root.
        seconds: after this time the run ends with an error.

    Raises:
        ValueError: the backend cannot do one of the events; the error names a backend for it.

    Example:
        >>> def train(worker):
        ...     membership = worker.membership(min_workers=3)
        ...     model = GossipDataParallel(nn.Linear(4, 1), membership=membership)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     membership.track(optimizer=optimizer)
        ...     for step in membership.steps(100):
        ...         loss = model(torch.ones(2, 4)).pow(2).mean()
        ...         optimizer.zero_grad()
        ...         loss.backward()
        ...         optimizer.step()
        ...     model.close()
        ...     return membership.num_deaths
        >>> Chaos([Kill(step=20, rank=0), Join(step=40)]).run(train, 3)
        {1: 1, 2: 1, 3: 0}
    """

    def __init__(
        self,
        events: Iterable[Event] = (),
        *,
        backend: Literal["threads", "processes", "network"] = "threads",
        seconds: float = 120.0,
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"got backend={backend!r}, expected one of {', '.join(map(repr, BACKENDS))}")
        if (backend == "network" and sys.platform != "linux") or (backend == "processes" and sys.platform == "win32"):
            raise ValueError(
                f"got backend={backend!r} on {sys.platform}, which has no "
                f"{'network namespaces' if backend == 'network' else 'SIGSTOP'}, expected backend='threads'"
            )
        if not isinstance(events, Iterable):
            raise ValueError(f"got events={events!r}, expected a list: [{events!r}]")
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not seconds > 0:
            raise ValueError(f"got seconds={seconds!r}, expected a number above 0, after which a run is ended")
        events = list(events)
        for event in events:
            if not isinstance(event, Event):
                kinds = ", ".join(kind.__name__ for kind in Event.__subclasses__())
                raise ValueError(f"got {event!r}, expected an event of gossip_modules.testing: {kinds}")
            if event.needs_network and not BACKENDS[backend].has_network:
                raise ValueError(
                    f"got {event!r} with backend={backend!r}, whose workers share one network, expected "
                    "backend='network'"
                )
        self.events = tuple(sorted(events, key=lambda event: event.step))
        self.seconds = seconds
        self._backend = BACKENDS[backend]

    def run(self, body: Body, num_workers: int) -> dict[int, Any]:
        """Run `body(worker)` on so many workers, and on joining ones, until all have ended.

        Workers stopped for ever are ended with the last of the others.

        Args:
            body: the training loop; it gets a `Worker` and trains with its `membership()`. In processes it is a
                function of a module, and returns a JSON value.
            num_workers: that begin.

        Returns:
            By rank, the results of the body; without killed or stopped workers.

        Raises:
            ValueError: an event for a worker that never exists, or no workers.
            Exception: the error of another worker than a killed one; for a process a RuntimeError with its traceback.
            TimeoutError: workers still run after `seconds`; names them.
            RuntimeError: the run has ended before one of the events.
        """
        if not isinstance(num_workers, int) or isinstance(num_workers, bool) or num_workers < 1:
            raise ValueError(f"got num_workers={num_workers!r}, expected a whole number of at least 1")
        ranks = num_workers + sum(isinstance(event, Join) for event in self.events)
        for event in self.events:
            hit = event.ranks if isinstance(event, Partition) else (getattr(event, "rank", 0),)
            if max(hit) >= ranks:
                raise ValueError(
                    f"got {event} in a run of {num_workers} workers and {ranks - num_workers} that join, expected a "
                    f"rank below {ranks}"
                )
        backend = self._backend(body)
        try:
            return ChaosRun(backend, self.events, num_workers, self.seconds).run()
        finally:
            backend.close()


class ChaosRun:
    """One call of `Chaos.run`, for events to act on."""

    def __init__(self, backend: Any, events: Iterable[Event], num_workers: int, seconds: float) -> None:
        self.backend, self.num_workers, self.seconds = backend, num_workers, seconds
        self.coming = list(events)
        self.stopped: set[int] = set()
        self.next_rank = 0
        self._order = itertools.count()  # of actions at the same time
        self.later: list[tuple[float, int, Callable[[], None]]] = []  # a heap

    def run(self) -> dict[int, Any]:
        """See `Chaos.run`."""
        deadline = time.monotonic() + self.seconds
        for _ in range(self.num_workers):
            self.start()
        while self.backend.running - self.stopped or self.later:
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError(
                    f"got workers {sorted(self.backend.running)} still at work after {self.seconds:g} s, expected "
                    f"their end; events that did not happen: {self.coming}"
                )
            until = min(deadline, self.later[0][0] if self.later else deadline)
            for rank, step in self.backend.wait(until - now):
                for event in [event for event in self.coming if event.step <= step and self.is_for(event, rank)]:
                    self.coming.remove(event)
                    event.happen(self)
                self.backend.go_on(rank)
            for error in self.backend.errors.values():
                raise error
            while self.later and self.later[0][0] <= time.monotonic():
                heapq.heappop(self.later)[2]()
        if self.coming:
            raise RuntimeError(f"got an end of the run before {self.coming}, expected all events; train more steps")
        return dict(sorted(self.backend.results.items()))

    def start(self) -> None:
        """Start the next worker."""
        rank, self.next_rank = self.next_rank, self.next_rank + 1
        self.backend.start(rank, [event.step for event in self.coming if self.is_for(event, rank)])

    def is_for(self, event: Event, rank: int) -> bool:
        """Whether the event happens when this worker comes to its step."""
        return not event.is_of_own_step or event.rank == rank  # type: ignore[attr-defined]

    def stop(self, rank: int) -> None:
        """Have a worker stand still."""
        self.stopped.add(rank)
        self.backend.stop(rank)

    def resume(self, rank: int) -> None:
        """Let a stopped worker go on."""
        if rank in self.stopped:
            self.stopped.discard(rank)
            self.backend.resume(rank)

    def after(self, seconds: float | None, action: Callable[[], None]) -> None:
        """Do this so many seconds later; None: never."""
        if seconds is not None:
            heapq.heappush(self.later, (time.monotonic() + seconds, next(self._order), action))
