"""Backend: where the workers of `Chaos` run, and how they are hit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .worker import Worker

Body = Callable[[Worker], Any]


class Backend(ABC):
    """Starts workers and a store, and carries out what `Chaos` asks for.

    A worker that comes to a step with events asks, and waits until `go_on`; so events happen at exactly their step.

    Args:
        body: of each worker.

    Attributes:
        results: by rank, what the body of a worker that has ended returned.
        errors: by rank, what ended the others; workers that were killed are in neither.
        running: ranks of the workers that have not ended.
        store: "host:port" of the store.
        has_network: whether workers are hosts of their own, whose packets are delayed, lost and cut off.
    """

    has_network = False

    def __init__(self, body: Body) -> None:
        self.body = body
        self.results: dict[int, Any] = {}
        self.errors: dict[int, BaseException] = {}
        self.running: set[int] = set()
        self.store = ""

    @abstractmethod
    def start(self, rank: int, steps: Sequence[int]) -> None:
        """Start a worker, which asks at these steps."""

    @abstractmethod
    def wait(self, seconds: float) -> list[tuple[int, int]]:
        """Wait until somebody asks or ends; the ranks that ask, each with the step that it has come to."""

    @abstractmethod
    def go_on(self, rank: int) -> None:
        """Answer a worker that has asked."""

    @abstractmethod
    def kill(self, rank: int) -> None:
        """End a worker."""

    @abstractmethod
    def stop(self, rank: int) -> None:
        """Have a worker stand still."""

    @abstractmethod
    def resume(self, rank: int) -> None:
        """A worker that stands still goes on."""

    @abstractmethod
    def kill_store(self) -> None:
        """End the store."""

    @abstractmethod
    def start_store(self) -> None:
        """Start the store again, empty, at its address."""

    def set_delay(self, rank: int, seconds: float) -> None:
        """Packets to and from a worker take so much longer; where `has_network`."""
        raise NotImplementedError(type(self).__name__)

    def set_loss(self, rank: int, fraction: float) -> None:
        """So many of the packets to and from a worker are lost; where `has_network`."""
        raise NotImplementedError(type(self).__name__)

    def cut(self, ranks: Iterable[int]) -> None:
        """No packets pass between these workers and all others, nor the store; where `has_network`."""
        raise NotImplementedError(type(self).__name__)

    def mend(self, ranks: Iterable[int]) -> None:
        """Undo `cut(ranks)`; where `has_network`."""
        raise NotImplementedError(type(self).__name__)

    @abstractmethod
    def close(self) -> None:
        """End everything. Idempotent."""
