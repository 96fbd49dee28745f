"""PairwiseEngine: dpwa; publish, fetch the model of a live peer during the batch, merge it before the next forward."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from ..engine.background import Background
from ..engine.engine import Engine, IdleEngine
from ..engine.snapshots import SnapshotPool
from ..flat.buffer import FlatBuffer
from ..flat.vector import FlatVector
from ..profiling import span
from ..state import branch, leaf
from ..transport.bounded_listener import MIN_CONNECTIONS
from ..transport.uncaught_errors import leave_at_error, stay
from .config import PairwiseConfig, check_address
from .fetcher import Fetched, ModelFetcher
from .interpolation import Standing
from .peer_scores import PeerScores
from .protocol import Counts, ModelShape
from .server import ModelServer

_CONNECTIONS_PER_PEER = 2  # above MIN_CONNECTIONS, for each peer that is known: one to fetch and one to probe
_REMEDY = "lower the learning rate, clip gradients, or go back to a checkpoint"


class PairwiseEngine(Engine):
    """dpwa: each worker pulls the model of a random live peer; neither of the two waits for the other. A round is:

        at the safe point before a batch:
            if the fetch that is under way is complete:
                f <- interpolation(own clock and loss, the peer's clock and loss)      # 1/2 by default
                x <- (1 - f) x + f x_peer                                              # merge
                clock <- (1 - f) clock + f clock_peer
            clock <- clock + 1
            publish (x, clock, loss)                          # a thread sends it to peers that ask
            start to fetch from the peer with the highest score + random number        # a thread, during the batch

    as pull-gossip (Jin, Yuan, Iandola, Keutzer 2016, arXiv 1611.04581; compare GoSGD, Blot et al. 2016, arXiv
    1611.09726, which pushes). `flush` is the merge, `_advance` the rest, `interpolation.py` has f, and `peer_scores.py`
    the choice of the peer.

    [Note: Pairwise round] The fetch runs during the batch, so x_peer is older than x by a batch or so. The difference
    is taken from x as it is at the merge, so no gradient step is lost; like the rest of x it is scaled by 1 - f.
    Merging is one-sided: the mean over workers is not kept, while their spread shrinks.

    [Note: Clocks] A clock counts publications and is interpolated like the model on a merge, so it says how much
    training is in a model, whichever worker did it.

    [Note: threads of dpwa] One thread accepts connections, and each connection is answered in a thread of its own; a
    reply sends a snapshot; see [Note: Serving never blocks training] of `SnapshotPool` for the one lock that it shares
    with training. One thread fetches; the memory of the model belongs to it from the start of a fetch until the future
    of that fetch is done. Each probe has a thread too, at most one for each peer. `add_peer` and `remove_peer` may come
    from any thread: the scores have a lock, and the addresses change one at a time. No thread waits for a peer while it
    holds a lock.

    All other methods belong to the training thread. The constructor waits for one round at most; from its end on the
    model is served.

    Args:
        buffer: the parameters; mutated where `init_from_peers` finds a peer. Their layout, dtypes and device must stay.
        config: the name of this worker, the peers and the options.
        init_from_peers: whether to start from the model of a live peer, if there is one.

    Attributes:
        snapshots: the models that were published.
        server: serves the newest of them.
        fetcher: fetches one model at a time from a peer.
        scores: the scores by which the next peer is chosen.
        counts: the messages and models that were sent, received and refused.
        clock, loss: see [Note: Clocks], and the loss that was reported last.
        step: rounds seen, with or without a fetch.
        last_peer: the peer whose model was merged last.
        thread: the thread that trains.

    Raises:
        ValueError, ConnectionError: a malformed address, or one that is taken.
        FloatingPointError: (round, flush) the own model holds infinities or NaN, with on_nonfinite="raise".
    """

    is_asynchronous = True

    step: int = leaf(0, is_needed=True)
    clock: float = leaf(0.0, is_needed=True)
    loss: float | None = leaf(None)
    scores: PeerScores = branch(name="peers", is_needed=True)

    def __init__(self, buffer: FlatBuffer, config: PairwiseConfig, *, init_from_peers: bool) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        x = buffer.vector
        self.config, self.rule = config, config.rule
        self.num_refused_losses = 0
        self.last_peer: str | None = None
        self._fetch_step = 0  # the step in which the fetch under way began
        self._warned: set[str] = set()
        self._peers = config.others
        self.background, self.counts = Background(), Counts()
        self.scores = PeerScores(self._peers, seed=f"{config.seed}/{config.name}")
        self.snapshots = SnapshotPool(x)
        shared: dict[str, Any] = {
            "shape": ModelShape.of(buffer.signature(), x.layout),
            "snapshots": self.snapshots,
            "counts": self.counts,
            "background": self.background,
        }
        self.server = ModelServer(config, max_connections=self._max_connections, **shared)
        self.fetcher = ModelFetcher(x, config, self._peers, self.scores, **shared)
        self.background.start(f"gossip-serve-{config.name}", self.server.serve)
        try:
            if init_from_peers:
                self._take(x)
            self._publish(x)
        except BaseException:
            self.close()
            raise
        leave_at_error(self)

    def end_by(self, error: BaseException) -> None:
        """See `Leaver`: peers get no more of this model, and ask others."""
        self.server.stop()

    def _max_connections(self) -> int:
        return MIN_CONNECTIONS + _CONNECTIONS_PER_PEER * len(self._peers)

    @property
    def is_in_flight(self) -> bool:
        """See `Engine`."""
        return self.fetcher.is_under_way

    def snapshot(self) -> PairwiseRecord:
        """See `Engine`."""
        return PairwiseRecord(self)

    def statistics(self) -> dict[str, float]:
        """The part of `PairwiseDataParallel.comm_stats` that only dpwa has."""
        return {
            **self.counts.read(),
            **self.scores.statistics(),
            **self.fetcher.traffic.summary(),
            "deadline": self.config.timeout.total_seconds(),
            "num_refused_losses": self.num_refused_losses,
            "clock": self.clock,
        }

    def add_peer(self, name: str, address: str) -> None:
        """Ask this worker too from the next round on. Replaces a peer of the same name; from any thread.

        Raises:
            ValueError: no address, or the own name.
        """
        check_address(address, peer=name)
        if name == self.config.name:
            raise ValueError(f"got the own name {name!r}, expected another worker's")
        self._peers[name] = address
        self.scores.add(name)

    def remove_peer(self, name: str) -> None:
        """Do not ask this worker any more. An unknown name is no error; from any thread."""
        self.scores.remove(name)
        self.fetcher.traffic.forget(name)
        self._peers.pop(name, None)

    def report_loss(self, loss: float) -> None:
        """The loss of the last batch; one that is not finite is counted and never published."""
        self.loss = float(loss)
        if not math.isfinite(self.loss):
            self.num_refused_losses += 1

    def round(self, x: FlatVector) -> bool:
        """See `Engine` and [Note: Pairwise round]; never waits.

        Raises:
            RuntimeError: the interpolation needs losses and none was reported.
        """
        self._check(x)
        if self.rule.needs_loss and self.loss is None and self.step > 0:
            raise RuntimeError(
                f"worker {self.config.name!r}: got no loss before the second training step, expected one for "
                f"{self.rule}; call report_loss(loss.item()) after every batch"
            )
        is_written = self.fetcher.is_under_way and self.fetcher.is_done and self.flush(x)
        self._advance(x)
        return is_written

    def publish(self, x: FlatVector) -> None:
        """Serve x from now on, and start the next fetch; the first half of a round. Never waits."""
        self._check(x)
        self._advance(x)

    def republish(self, x: FlatVector) -> None:
        """Serve x, which no round follows now, if an older x is served; the clock stays. Never waits."""
        if not self.is_closed and self.snapshots.is_open and self.snapshots.fits(x):
            self._publish(x)

    def flush(self, x: FlatVector) -> bool:
        """Wait for the fetch that is under way, as long as a round may take, and merge it; the second half.

        Returns:
            Whether x was written: not where no peer had a model to send.
        """
        if not self.fetcher.is_under_way:
            return False
        fetched = self._await()
        if self.config.on_nonfinite == "raise" and not self.fetcher.is_own_finite:
            raise FloatingPointError(f"{self._divergence(fetched)}; {_REMEDY}")
        if fetched is None:
            return False
        own, peer = Standing(self.clock, self.loss), fetched.standing
        if (self.rule.needs_loss and own.loss is None) or (self.rule.needs_peer_loss and peer.loss is None):
            return False  # one of the two workers has only just begun
        factor = self.rule.factor(own, peer)
        with span("gossip.merge"):
            if factor == 1.0:  # a copy: 0 * x would keep infinities and NaN of x
                x.raw.copy_(self.fetcher.arrived.raw)
            else:
                x.combine_(1.0 - factor, [self.fetcher.arrived], [factor])  # x <- (1 - f) x + f x_peer
        self.clock = factor * peer.clock + (1.0 - factor) * self.clock
        self.last_peer = fetched.peer
        staleness = max(self.step - self._fetch_step - 1, 0)
        self.stats.record(staleness)
        self.fetcher.traffic.mixed(staleness)
        return factor != 0.0

    def close(self) -> None:
        """See `Engine`. A fetch that is under way is given up."""
        self.is_closed = True
        stay(self)
        self.server.stop()
        self.fetcher.stop()
        self.background.close()

    def interrupt(self) -> None:
        """See `State`. Peers get no model of before it: none at all until the next one is published."""
        self._await()
        self.fetcher.is_own_finite = True
        self.snapshots.withdraw()

    @torch.no_grad()
    def _take(self, x: FlatVector) -> None:
        """x <- the model of a live peer, if there is one."""
        self.fetcher.start()
        fetched = self._await()
        if fetched is not None:
            x.raw.copy_(self.fetcher.arrived.raw)
            self.clock = fetched.standing.clock

    def _check(self, x: FlatVector) -> None:
        self.background.raise_if_failed()
        if self.is_closed:
            raise RuntimeError(f"worker {self.config.name!r} is closed, expected no more rounds; make a new one")
        self.snapshots.check(x, who=f"worker {self.config.name!r}: ")
        while self.counts.refusals:
            peer, why = self.counts.refusals.popitem()
            if peer not in self._warned:
                self._warned.add(peer)
                warnings.warn(f"worker {self.config.name!r} refused the model of {peer!r}: {why}", stacklevel=3)

    def _divergence(self, fetched: Fetched | None) -> str:
        met = "" if fetched is None else f" when it met that of {fetched.peer!r}"
        return (
            f"worker {self.config.name!r}: the own model held infinities or NaN in round {self._fetch_step}{met}, "
            "expected finite numbers: training has diverged"
        )

    def _advance(self, x: FlatVector) -> None:
        self.thread = threading.get_ident()
        self.step += 1
        self.clock += 1
        self._publish(x)
        if not self.fetcher.is_under_way and self.scores.is_due(self.config.fetch_probability):
            self.t += 1
            self._fetch_step = self.step
            self.fetcher.start()

    def _publish(self, x: FlatVector) -> None:
        is_refused = self.loss is not None and not math.isfinite(self.loss)
        if not (is_refused or self.snapshots.is_copying):  # training would wait for the GPU
            with span("gossip.publish"):
                self.snapshots.publish(x, Standing(self.clock, self.loss))

    def _await(self) -> Fetched | None:
        start = time.perf_counter()
        try:
            return self.fetcher.wait()
        finally:
            self.stats.wait_seconds += time.perf_counter() - start


class PairwiseRecord(IdleEngine):
    """The engine of a copy: no rounds any more, with the state of the worker, which can be loaded into it again.

    Args:
        other: the engine of the worker, or of a copy of it. Nothing may be in flight.
    """

    def __init__(self, other: PairwiseEngine) -> None:
        super().__init__(other)
        self.last_peer: str | None = other.last_peer
        self._statistics = other.statistics()
        self._state = other.state_dict()

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("server", "add_peer", "remove_peer"):
            raise RuntimeError(
                "got a request for the address or the peers of a copy, expected it of the worker itself: a copy stays "
                "local; make a new worker to connect"
            )
        raise AttributeError(name)

    def statistics(self) -> dict[str, float]:
        """See `PairwiseEngine`; of the worker at the time of the copy."""
        return dict(self._statistics)

    def report_loss(self, loss: float) -> None:
        """No peer asks for the loss."""

    def republish(self, x: FlatVector) -> None:
        """No peer asks for the model."""

    def state_dict(self, *, joins: bool = False, has_links: bool = True) -> dict[str, Any]:
        """See `State`."""
        return dict(self._state)

    def fill(self, state: Mapping[str, Any]) -> None:
        """See `State`."""
        super().fill(state)
        self._state = dict(state)
