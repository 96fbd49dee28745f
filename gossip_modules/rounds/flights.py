"""Flights: the rounds of a model that run on the gossip thread while training computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from ..profiling import span
from ..transport.base import Transport
from ..transport.threads import CallThread


@dataclass(eq=False)
class Flight:
    """A round that has begun and not ended: it is due in a step from `first` to `last`.

    A blocking round has no flight. With overlap, `first` is the step after the round began, and `last` is up to
    `max_staleness` steps later: a round that is complete ends at the next step. With a delay of d steps `first` and
    `last` are equal, d steps after the round began, so that it ends in the same step on all ranks.

    Args:
        begun: the number of optimizer steps before the round.
        first: the first step at which the round may end.
        last: the step at which training waits for the end.
        t: the number of the round.
        job: the communication, called once on the gossip thread; its result is a number.
        describe: describes the round and its peers, for an error.
        fragment: the fragment of the model.

    Attributes:
        future: the result of the job.
    """

    begun: int
    first: int
    last: int
    t: int = 0
    job: Callable[[], float] = float
    describe: Callable[[], str] = str
    fragment: int = 0
    future: Future[float] = field(default_factory=Future)
    is_submitted: bool = False

    @property
    def result(self) -> float:
        """The result of the job, which has ended."""
        return self.future.result(0)

    def staleness_at(self, k: int) -> int:
        """The lateness of a round that ends after k optimizer steps: the steps since the first possible one."""
        return max(k - self.begun - 1, 0)

    def is_due(self, k: int) -> bool:
        """Whether the round ends after k optimizer steps: at the latest at `last`, or earlier if it is complete."""
        return k >= self.last or (k >= self.first and self.future.done())


F = TypeVar("F", bound=Flight)


class Flights(Generic[F]):
    """The rounds in flight of one model, in the order in which they began, and the thread that runs them.

    The gossip thread runs one job after the other, in the order of the steps, which is equal on all ranks. It owns the
    vectors of a job until the result is there, and the training thread owns the rest, so no lock is needed. On a GPU
    the jobs run in a stream of their own.

    Attributes:
        thread: the gossip thread; None: no job was passed to it yet.
    """

    def __init__(self) -> None:
        self._flights: list[F] = []
        self.thread: CallThread | None = None
        self._stream: torch.Stream | None = None

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[F]:
        return iter(self._flights)

    @property
    def oldest(self) -> F | None:
        """The flight that began first; None: no round is in flight."""
        return self._flights[0] if self._flights else None

    def follow_training(self, device: torch.device) -> None:
        """Let later jobs read the values that training has written on this device so far."""
        if device.type == "cpu":
            self._stream = None
            return
        if self._stream is None or self._stream.device != device:
            self._stream = torch.Stream(device)
        self._stream.wait_stream(torch.accelerator.current_stream(device))

    def begin(self, flight: F, transport: Transport, *, in_place_of: F | None = None) -> None:
        """Note a flight, and pass its job to the gossip thread. An interrupt in between loses no round.

        Args:
            flight: the new flight.
            transport: the transport of its job.
            in_place_of: a flight whose result the job applies; its end and the new flight are one assignment.
        """
        self._flights = [*(other for other in self._flights if other is not in_place_of), flight]
        self._submit(flight, transport)

    def _submit(self, flight: F, transport: Transport) -> None:
        stream, job, t = self._stream, flight.job, flight.t

        def run() -> float:
            with torch.no_grad(), stream or contextlib.nullcontext(), span("gossip.round", f"t={t}"):
                return job()

        if self.thread is None:
            self.thread = CallThread(f"gossip-{transport.rank}")
        self.thread.submit(run, flight.future)
        flight.is_submitted = True

    def wait(self, flight: F, transport: Transport) -> float:
        """Wait for the job of a flight, which stays in flight until `end`. Returns the result.

        An error of the job ends all flights; an interrupt ends none.
        """
        if not flight.is_submitted:  # an interrupt came before
            self._submit(flight, transport)
        with span("gossip.wait"):
            try:
                if self.thread is None:
                    result = flight.future.result(0)
                else:
                    result = self.thread.result(flight.future, what=flight.describe, timeout=transport.timeout)
            except Exception:
                self._flights = []
                raise
        if self._stream is not None:  # the vectors of the job are written before training reads them
            torch.accelerator.current_stream(self._stream.device).wait_stream(self._stream)
        return result

    def note(self, flight: F, result: float = 0.0) -> None:
        """Note a flight whose communication has ended with this result, such as a flight of a checkpoint."""
        flight.future.set_result(result)
        flight.is_submitted = True
        self._flights = [*self._flights, flight]

    def end(self, flight: F) -> None:
        """Note the end of a flight, whose result training has applied."""
        self._flights = [other for other in self._flights if other is not flight]

    def cancel(self) -> None:
        """Drop all flights."""
        self._flights = []

    def close(self) -> None:
        """Drop all flights and end the thread. A job ends by itself, since peers wait for it."""
        self._flights = []
        if self.thread is not None:
            self.thread.close()
        self.thread = None

    def __deepcopy__(self, memo: dict[int, object]) -> Flights[F]:
        assert not self._flights, "flush() before copying: a round is in flight"
        return Flights()
