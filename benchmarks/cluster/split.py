"""Where the time of a step goes, taken from outside: by timing the methods of the objects that do it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed.optim import PostLocalSGDOptimizer

from benchmarks.by_hand import BlockingSGP, OverlappedSGP, PlainLoop, RingLoop
from benchmarks.contenders import PeriodicallyAveraged
from gossip_modules import GossipDataParallel
from gossip_modules.extend import GossipWrapper, Mixer
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
    """

    def __init__(self, contender: PlainLoop) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._running: set[str] = set()
        self._round_start: float | None = None  # of the round that has sent nothing yet
        self._num_pending, self._wire_start = 0, 0.0  # exchanges under way, and when the first of them was posted
        self._contender = contender
        optimizer: Any = getattr(contender, "optimizer", None)  # Decent-DP keeps it to itself
        averages = isinstance(optimizer, PostLocalSGDOptimizer)
        if optimizer is not None and not averages and not optimizer._optimizer_step_post_hooks:
            optimizer.step = self._timed(OPTIMIZER, optimizer.step)
        model = contender.model
        gossips = isinstance(model, GossipDataParallel) and not isinstance(contender, PeriodicallyAveraged)
        self.has_rounds = gossips or isinstance(contender, BlockingSGP)
        if isinstance(contender, RingLoop):
            loop: Any = contender
            loop.wait = self._timed(ROUND, self._timed(WIRE, loop.wait))
        elif gossips:
            assert isinstance(model, GossipDataParallel)
            engine: Any = model._local.engine
            self._watch(engine.mixer)

    @property
    def is_hidden(self) -> bool:
        """Whether rounds run beside training; overlap="auto" chooses it on the way."""
        model: Any = self._contender.model
        is_ours = isinstance(model, GossipDataParallel) and self.has_rounds
        return (is_ours and model._local.engine.overlap is not None) or isinstance(self._contender, OverlappedSGP)

    def seconds(self) -> dict[str, float]:
        """So far, by part: optimizer, wait, and, where rounds are told apart, encode, wire and mix, their rest."""
        parts = {"optimizer": self._seconds[OPTIMIZER], "wait": 0.0}
        model = self._contender.model
        if isinstance(self._contender, OverlappedSGP):
            parts["wait"] = self._seconds[WIRE]  # what is left of it; how long it took nobody sees
        elif isinstance(model, GossipWrapper) and (self.is_hidden or not self.has_rounds):
            parts["wait"] = model.comm_stats()["wait_seconds"]
        if self.has_rounds:
            encode, wire = self._seconds[ENCODE], self._seconds[WIRE]
            parts.update(encode=encode, wire=wire, mix=max(self._seconds[ROUND] - encode - wire, 0.0))
        return parts

    def _watch(self, mixer: Mixer) -> None:
        instance: Any = mixer
        for name in ("start", "finish", "difference"):
            setattr(instance, name, self._timed(ROUND, self._marked(getattr(instance, name))))
        transport: Any = mixer.transport
        exchange = transport.exchange

        def timed_exchange(*args: Any, **options: Any) -> Pending:
            now = time.perf_counter()
            if self._round_start is not None:
                self._seconds[ENCODE] += now - self._round_start
                self._round_start = None
            if not self._num_pending:
                self._wire_start = now
            self._num_pending += 1
            return _TimedPending(exchange(*args, **options), self._arrived)

        transport.exchange = timed_exchange

    def _marked(self, function: Callable[..., T]) -> Callable[..., T]:
        """The function, a part of a round, whose time before it sends anything is that of encoding."""

        def marked(*args: Any, **options: Any) -> T:
            self._round_start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self._round_start = None

        return marked

    def _arrived(self) -> None:
        """An exchange has ended; several at a time, as of headers and messages, count once."""
        self._num_pending -= 1
        if not self._num_pending:
            self._seconds[WIRE] += time.perf_counter() - self._wire_start

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
    """A posted exchange that says when the wait for it has ended.

    Args:
        pending: the exchange.
        arrived: called then.
    """

    lost: frozenset[int] = frozenset()

    def __init__(self, pending: Pending, arrived: Callable[[], None]) -> None:
        self._pending: Any = pending
        self._arrived = arrived

    def wait(self, timeout: timedelta | None = None) -> None:
        """See `Pending`."""
        self._pending.wait(timeout)
        self._arrived()

    def arrivals(self, *args: Any, **options: Any) -> Iterator[Any]:
        """See `Pending`."""
        yield from self._pending.arrivals(*args, **options)
        self._arrived()
