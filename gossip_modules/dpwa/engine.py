"""PairwiseEngine: dpwa; publish, fetch the model of a live peer during the batch, merge it before the next forward."""

from __future__ import annotations

import math
import random
import time
import warnings
from typing import Any

import torch
from torch.profiler import record_function

from ..engine.engine import Engine
from ..flat.buffer import FlatBuffer
from ..flat.vector import FlatVector
from .config import PairwiseConfig
from .interpolation import Standing
from .network import PairwiseNetwork
from .wire.fetcher import Fetched

_REMEDY = (
    "lower the learning rate, clip gradients, or go back to a checkpoint; on_nonfinite='skip' trains on without merging"
)


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
    1611.09726, which pushes). `flush` is the merge, `_advance` the rest, `interpolation.py` has f, and
    `wire/peer_scores.py` the choice of the peer.

    [Note: Pairwise round] The fetch runs during the batch, so x_peer is older than x by a batch or so. The difference
    is taken from x as it is at the merge, so no gradient step is lost; like the rest of x it is scaled by 1 - f.
    Merging is one-sided: the mean over workers is not kept, while their spread shrinks.

    [Note: Clocks] A clock counts publications and is interpolated like the model on a merge, so it says how much
    training is in a model, whichever worker did it.

    All methods belong to the training thread. Everything that other threads share is in `network`; see
    [Note: threads of dpwa]. The constructor waits for one round at most; from its end on the model is served.

    Args:
        buffer: the parameters; mutated where `init_from_peers` finds a peer. Their layout, dtypes and device must stay.
        config: the name of this worker, the peers and the options.
        init_from_peers: whether to start from the model of a live peer, if there is one.

    Raises:
        ValueError, ConnectionError: an address that is none, or that is taken.
        FloatingPointError: (round, flush) the own model holds infinities or NaN, with on_nonfinite="raise".
    """

    is_asynchronous = True

    def __init__(self, buffer: FlatBuffer, config: PairwiseConfig, *, init_from_peers: bool) -> None:
        super().__init__()
        x = buffer.vector
        self.config = config
        self.rule = config.rule
        self.clock = 0.0
        self.loss: float | None = None
        self.step = 0  # rounds seen, with or without a fetch
        self.num_refused_losses = 0
        self.last_peer: str | None = None  # the peer whose model was merged last
        self._layout, self._device = x.layout, x.raw.device
        self._coin = random.Random(config.seed_of("coin"))
        self._fetch_step = 0  # the step in which the fetch under way began
        self.network = PairwiseNetwork(x, buffer.signature(), config)
        try:
            if init_from_peers:
                self._take(x)
            self._publish(x)
        except BaseException:
            self.close()
            raise

    @property
    def is_in_flight(self) -> bool:
        """See `Engine`."""
        return self.network.fetcher.is_under_way

    def statistics(self) -> dict[str, float]:
        """What went wrong and what arrived; see `PairwiseDataParallel.comm_stats`."""
        return {**self.network.statistics(), "num_refused_losses": self.num_refused_losses, "clock": self.clock}

    def report_loss(self, loss: float) -> None:
        """The loss of the last batch; what is no finite number is counted and never published."""
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
        is_written = self.network.fetcher.is_under_way and self.network.fetcher.is_done and self.flush(x)
        self._advance(x)
        return is_written

    def publish(self, x: FlatVector) -> None:
        """Serve x from now on, and start the next fetch; the first half of a round. Never waits."""
        self._check(x)
        self._advance(x)

    def republish(self, x: FlatVector) -> None:
        """Serve x, which no round follows now, if an older x is served; the clock stays. Never waits."""
        if not self.is_closed and self.network.snapshots.is_serving and self._fits(x):
            self._publish(x)

    def flush(self, x: FlatVector) -> bool:
        """Wait for the fetch that is under way, as long as a round may take, and merge it; the second half.

        Returns:
            Whether x was written: not where no peer had a model to send.
        """
        if not self.network.fetcher.is_under_way:
            return False
        fetched = self._await()
        is_diverged = not self.network.bound.is_own_finite
        if is_diverged and self.config.on_nonfinite == "raise":
            raise FloatingPointError(f"{self._divergence(fetched)}; {_REMEDY}")
        if fetched is None:
            return False
        own, peer = Standing(self.clock, self.loss), fetched.standing
        if (self.rule.needs_loss and own.loss is None) or (self.rule.needs_peer_loss and peer.loss is None):
            return False  # one of the two workers has only just begun
        factor = self.rule.factor(own, peer)
        if is_diverged and self.config.on_nonfinite == "skip" and factor != 1.0:
            self.stats.num_skipped += 1
            if self.stats.num_skipped == 1:
                warnings.warn(f"{self._divergence(fetched)}; merges are left out from now on; {_REMEDY}", stacklevel=2)
            return False
        with record_function("gossip.merge"):
            if factor == 1.0:  # a copy: 0 * x would keep infinities and NaN of x
                x.raw.copy_(self.network.fetcher.arrived.raw)
            else:
                x.combine_(1.0 - factor, [self.network.fetcher.arrived], [factor])  # x <- (1 - f) x + f x_peer
        self.clock = factor * peer.clock + (1.0 - factor) * self.clock
        self.last_peer = fetched.peer
        self.stats.record(max(self.step - self._fetch_step - 1, 0))
        return factor != 0.0

    def close(self) -> None:
        """See `Engine`. A fetch that is under way is given up."""
        self.is_closed = True
        self.network.close()

    def state_dict(self) -> dict[str, Any]:
        """See `Engine`."""
        version, words, gauss = self._coin.getstate()
        own = {"step": self.step, "clock": self.clock, "loss": self.loss, "coin": [version, list(words), gauss]}
        return {**super().state_dict(), **own, "peers": self.network.scores.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Engine`. Peers get no model of before it: none at all until the next one is published."""
        super().load_state_dict(state)
        self._withdraw()
        self.step, self.clock, self.loss = state["step"], state["clock"], state["loss"]
        version, words, gauss = state["coin"]
        self._coin.setstate((version, tuple(words), gauss))
        self.network.scores.load_state_dict(state["peers"])

    def reset(self) -> None:
        """See `Engine` and `load_state_dict`."""
        self._withdraw()
        super().reset()
        self.step, self.clock, self.loss = 0, 0.0, None
        self._coin = random.Random(self.config.seed_of("coin"))
        self.network.scores.reset(seed=self.config.seed_of("peers"))

    @torch.no_grad()
    def _take(self, x: FlatVector) -> None:
        """x <- the model of a live peer, if there is one."""
        self.network.fetcher.start()
        fetched = self._await()
        if fetched is not None:
            x.raw.copy_(self.network.fetcher.arrived.raw)
            self.clock = fetched.standing.clock

    def _withdraw(self) -> None:
        """Forget the model that is served, and the one that is under way: they are not of the state to come."""
        self._await()
        self.network.bound.is_own_finite = True
        self.network.snapshots.withdraw()

    def _check(self, x: FlatVector) -> None:
        self.network.raise_if_failed()
        if self.is_closed:
            raise RuntimeError(f"worker {self.config.name!r} is closed, expected no more rounds; make a new one")
        if not self._fits(x):
            raise ValueError(
                f"worker {self.config.name!r}: got a model of {x.layout.num_bytes} bytes on {x.raw.device} whose "
                "dtypes, trained tensors or device changed since it was wrapped, expected the same; peers may ask for "
                "it at any time: call .to(), .half() and requires_grad_() before wrapping"
            )
        self.network.warn_of_refusals()

    def _divergence(self, fetched: Fetched | None) -> str:
        met = "" if fetched is None else f" when it met that of {fetched.peer!r}"
        return (
            f"worker {self.config.name!r}: the own model held infinities or NaN in round {self._fetch_step}{met}, "
            "expected finite numbers: training has diverged"
        )

    def _fits(self, x: FlatVector) -> bool:
        return x.raw.device == self._device and x.layout == self._layout

    def _advance(self, x: FlatVector) -> None:
        self.step += 1
        self.clock += 1
        self._publish(x)
        if not self.network.fetcher.is_under_way and self._coin.random() < self.config.fetch_probability:
            self.t += 1
            self._fetch_step = self.step
            self.network.fetcher.start()

    def _publish(self, x: FlatVector) -> None:
        if self.loss is None or math.isfinite(self.loss):
            with record_function("gossip.publish"):
                self.network.snapshots.publish(x, Standing(self.clock, self.loss))

    def _await(self) -> Fetched | None:
        start = time.perf_counter()
        try:
            return self.network.fetcher.wait()
        finally:
            self.stats.wait_seconds += time.perf_counter() - start
