"""Flights: the rounds of a model that run on the gossip thread while training computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

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

    def is_due(self, k: int) -> bool:
        """Whether the round ends after k optimizer steps: at the latest at `last`, or earlier if it is complete."""
        return k >= self.last or (k >= self.first and self.future.done())


class Flights:
    """The rounds in flight of one model, in the order in which they began, and the thread that runs them.

    The gossip thread runs one job after the other, in the order of the steps, which is equal on all ranks. It owns the
    vectors of a job until the result is there, and the training thread owns the rest, so no lock is needed. On a GPU
    the jobs run in a stream of their own.
    """

    def __init__(self) -> None:
        self._flights: list[Flight] = []
        self._thread: CallThread | None = None
        self._stream: torch.Stream | None = None

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(tuple(self._flights))

    @property
    def oldest(self) -> Flight | None:
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

    def begin(self, flight: Flight, transport: Transport) -> Flight:
        """Note a flight, and pass its job to the gossip thread. An interrupt in between loses no round."""
        self._flights.append(flight)
        self._submit(flight, transport)
        return flight

    def _submit(self, flight: Flight, transport: Transport) -> None:
        stream, job, t = self._stream, flight.job, flight.t

        def run() -> float:
            with torch.no_grad(), stream or contextlib.nullcontext(), span("gossip.round", f"t={t}"):
                return job()

        if self._thread is None:
            self._thread = CallThread(f"gossip-{transport.rank}")
        self._thread.submit(run, flight.future)
        flight.is_submitted = True

    def wait(self, flight: Flight, transport: Transport) -> float:
        """Wait for the job of a flight, which stays in flight until `end`. Returns the result.

        An error of the job ends all flights; an interrupt ends none.
        """
        if not flight.is_submitted:  # an interrupt came before
            self._submit(flight, transport)
        with span("gossip.wait"):
            try:
                if self._thread is None:
                    result = flight.future.result(0)
                else:
                    result = self._thread.result(flight.future, what=flight.describe, timeout=transport.timeout)
            except Exception:
                self._flights.clear()
                raise
        if self._stream is not None:  # the vectors of the job are written before training reads them
            torch.accelerator.current_stream(self._stream.device).wait_stream(self._stream)
        return result

    def note(self, flight: Flight, result: float = 0.0) -> None:
        """Note a flight whose communication has ended with this result, such as a flight of a checkpoint."""
        flight.future.set_result(result)
        flight.is_submitted = True
        self._flights.append(flight)

    def end(self, flight: Flight) -> None:
        """Note the end of a flight, whose result training has applied."""
        self._flights.remove(flight)

    def cancel(self) -> None:
        """Drop all flights."""
        self._flights.clear()

    def close(self) -> None:
        """Drop all flights and end the thread. A job ends by itself, since peers wait for it."""
        self._flights.clear()
        if self._thread is not None:
            self._thread.close()
        self._thread = None

    def __deepcopy__(self, memo: dict[int, object]) -> Flights:
        assert not self._flights, "flush() before copying: a round is in flight"
        return Flights()
