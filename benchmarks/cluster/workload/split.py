"""Where the time of a step goes, taken from outside: by timing the methods of the objects that do it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch

from benchmarks.contenders import (
    Contender,
    HandWritten,
    HandWrittenBlocking,
    HandWrittenOverlapped,
    PeriodicallyAveraged,
)
from gossip_modules import GossipDataParallel
from gossip_modules.extend import Gossiper, GossipWrapper, OverlapEngine
from gossip_modules.transport.base import Pending

T = TypeVar("T")
ROUND, ENCODE, WIRE, OPTIMIZER = "round", "encode", "wire", "optimizer"


class Split:
    """Seconds spent in named parts of the work of a contender; those of the optimizer, and of our rounds.

    Args:
        contender: whose objects' methods are replaced by timed ones.

    Attributes:
        has_rounds: whether rounds are told apart into encode, wire and mix; none of a peer's are, and no averages over
            all ranks.
        is_hidden: whether rounds run beside training, which only waits for what is left of them.
    """

    def __init__(self, contender: Contender) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._running: set[str] = set()
        self._contender = contender
        optimizer: Any = getattr(contender, "optimizer", None)  # Decent-DP keeps it to itself
        is_plain = type(optimizer) is torch.optim.SGD and not optimizer._optimizer_step_post_hooks
        if is_plain:  # and does not average models too
            optimizer.step = self._timed(OPTIMIZER, optimizer.step)
        model = contender.model
        gossips = isinstance(model, GossipDataParallel) and not isinstance(contender, PeriodicallyAveraged)
        self.has_rounds = gossips or isinstance(contender, HandWrittenBlocking)
        self.is_hidden = isinstance(contender, HandWrittenOverlapped)
        if isinstance(contender, HandWritten):
            loop: Any = contender
            loop.wait = self._timed(ROUND, self._timed(WIRE, loop.wait))
        elif gossips:
            assert isinstance(model, GossipDataParallel)
            self.is_hidden = isinstance(model._engine, OverlapEngine)
            gossiper = model._engine.gossiper
            assert isinstance(gossiper, Gossiper), "rounds of a graph are a gossiper's"
            self._watch(gossiper)

    def seconds(self) -> dict[str, float]:
        """So far, by part: optimizer, wait, and, where rounds are told apart, encode, wire and mix, their rest."""
        parts = {"optimizer": self._seconds[OPTIMIZER], "wait": 0.0}
        model = self._contender.model
        if isinstance(self._contender, HandWrittenOverlapped):
            parts["wait"] = self._seconds[WIRE]  # what is left of it; how long it took nobody sees
        elif isinstance(model, GossipWrapper) and (self.is_hidden or not self.has_rounds):
            parts["wait"] = model.comm_stats()["wait_seconds"]
        if self.has_rounds:
            encode, wire = self._seconds[ENCODE], self._seconds[WIRE]
            parts.update(encode=encode, wire=wire, mix=max(self._seconds[ROUND] - encode - wire, 0.0))
        return parts

    def _watch(self, gossiper: Gossiper) -> None:
        instance: Any = gossiper
        for name in ("start", "finish", "difference"):
            setattr(instance, name, self._timed(ROUND, getattr(instance, name)))
        instance.encode = self._timed(ENCODE, instance.encode)
        transport: Any = gossiper.transport
        exchange = transport.exchange

        def timed_exchange(*args: Any, **options: Any) -> Pending:
            start = time.perf_counter()
            pending: Pending = exchange(*args, **options)
            # Headers go while the message is still encoded, and are waited for with it.
            return pending if ENCODE in self._running else _TimedPending(pending, self._seconds, start)

        transport.exchange = timed_exchange

    def _timed(self, part: str, function: Callable[..., T]) -> Callable[..., T]:
        """The function, timed; a call within a call of the same part counts once."""

        def timed(*args: Any, **options: Any) -> T:
            if part in self._running:
                return function(*args, **options)
            self._running.add(part)
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self._seconds[part] += time.perf_counter() - start
                self._running.remove(part)

        return timed


class _TimedPending:
    """A posted exchange that counts as time on the wire from its posting to the end of the wait for it.

    Args:
        pending: the exchange.
        seconds: by part, to add to.
        start: of the posting, of time.perf_counter().
    """

    def __init__(self, pending: Pending, seconds: dict[str, float], start: float) -> None:
        self._pending: Any = pending
        self._seconds = seconds
        self._start = start

    def wait(self, timeout: timedelta | None = None) -> None:
        """See `Pending`."""
        self._pending.wait(timeout)
        self._seconds[WIRE] += time.perf_counter() - self._start

    def arrivals(self, *args: Any, **options: Any) -> Iterator[Any]:
        """See `Pending`."""
        yield from self._pending.arrivals(*args, **options)
        self._seconds[WIRE] += time.perf_counter() - self._start
