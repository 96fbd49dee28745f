"""The engine of pairwise averaging: publish, fetch from a live peer under the batch, merge at the safe point."""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import record_function

from ..engine.background import Background
from ..engine.engine import Engine
from ..flat.buffer import FlatBuffer
from ..flat.vector import FlatVector
from .config import PairwiseConfig, check_address
from .interpolation import Standing
from .wire.curve_keys import check_key
from .wire.distance_bound import DistanceBound
from .wire.message import ModelShape
from .wire.peer_scores import PeerScores

if TYPE_CHECKING:
    from .wire.client import Fetched


_REMEDY = (
    "lower the learning rate, clip gradients, or go back to a checkpoint; on_nonfinite='skip' trains on without merging"
)


class PairwiseEngine(Engine):
    """x <- x + f (x_peer - x) with the model of a random live peer, which does not wait for us nor we for it.

    [Note: Pairwise round] At the safe point before a batch: a fetch that is complete is merged, x is published, the
    next fetch starts. The fetch runs under the batch, so x_peer is older than x by a batch or so; the difference is
    taken from x as it is at the merge, so no gradient step is lost, but scaled by 1 - f with the rest of x. Merging is
    one-sided: the mean over workers is not kept, the spread shrinks.

    [Note: Clocks] A clock counts publications and is interpolated like the model on a merge, so it says how much
    training is in a model, whoever did it.

    Args:
        x: the parameters; their layout, dtypes and device stay what they are.
        signature: names, shapes and dtypes of the tensors: `FlatBuffer.signature()`.
        config: who we are, whom we ask, how we merge.

    Raises:
        ImportError: pyzmq is missing.
        ValueError, ConnectionError: an address that is none, or that is taken.
        FloatingPointError: (round, flush) the own model holds infinities or NaN, with on_nonfinite="raise".
    """

    is_asynchronous = True

    def __init__(self, x: FlatVector, signature: Sequence[str], config: PairwiseConfig) -> None:
        super().__init__()
        try:
            import zmq

            from .wire.client import ModelClient
            from .wire.curve_server import CurveServer
            from .wire.fetcher import ModelFetcher
            from .wire.plain_server import PlainServer
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] != "zmq":
                raise
            raise ImportError("pairwise averaging needs pyzmq; pip install 'gossip-modules[pairwise]'") from error
        if config.curve is not None:
            config.curve.check_pair(zmq.curve_public(config.curve.secret.encode()).decode())
        self.config = config
        self.rule = config.rule
        self.clock = 0.0
        self.loss: float | None = None
        self.step = 0  # rounds seen, with or without a fetch
        self.num_refused_losses = 0
        self.num_skipped = 0  # merges, as the own model was not finite
        self.last_peer: str | None = None  # whose model was merged last
        self._layout, self._device = x.layout, x.raw.device
        self._coin = self._new_coin()
        self._fetch_step = 0  # the round that the fetch under way belongs to
        self._keys = {} if config.curve is None else dict(config.curve.peers)
        self._keys_lock = threading.Lock()
        self._warned: set[str] = set()
        self._is_closed = False
        name, own_address, curve = config.name, config.peers[config.name], config.curve
        shape, is_pinned = ModelShape.of(signature, x.layout), x.raw.is_cuda
        self.scores = PeerScores(config.others, seed=f"{config.seed}/{name}/peers")
        with contextlib.ExitStack() as undo:
            # The server, which needs one with keys only, has its own: no trouble with a peer that we ask holds it up.
            contexts = [undo.enter_context(zmq.Context()) for _ in range(1 if curve is None else 2)]
            self._contexts: list[zmq.Context[zmq.Socket[bytes]]] = contexts
            self._server: PlainServer | CurveServer
            if curve is None:
                self._server = PlainServer(
                    own_address,
                    name=name,
                    shape=shape,
                    layout=x.layout,
                    is_pinned=is_pinned,
                    round_seconds=config.timeout.total_seconds(),
                )
            else:
                self._server = CurveServer(
                    contexts[1], own_address, name=name, shape=shape, layout=x.layout, is_pinned=is_pinned, curve=curve
                )
            undo.callback(self._server.close)
            self._server.num_peers = len(config.others)
            self._bound = DistanceBound(config.max_distance, self._server.latest)
            self._client = ModelClient(
                contexts[0], config.others, self.scores, shape=shape, curve=curve, bound=self._bound
            )
            undo.callback(self._client.close)
            self._fetcher = ModelFetcher(self._client, x, name=name, timeout=config.timeout.total_seconds())
            undo.pop_all()
        self._background = Background()
        self._background.start(f"gossip-serve-{name}", self._serve)
        self._background.start(f"gossip-fetch-{name}", self._fetcher.work)

    @classmethod
    def started(cls, buffer: FlatBuffer, config: PairwiseConfig, *, init_from_peers: bool) -> PairwiseEngine:
        """An engine that serves the model in `buffer`: a live peer's, if `init_from_peers` and there is one.

        Waits for one round at most.
        """
        engine = cls(buffer.vector, buffer.signature(), config)
        try:
            if init_from_peers:
                engine._take(buffer.vector)
            engine._publish(buffer.vector)
        except BaseException:
            engine.close()
            raise
        return engine

    @property
    def address(self) -> str:
        """Where this worker is reached: as configured, with the port that `*` has become."""
        return self._server.address

    @property
    def num_bytes_sent(self) -> int:
        """Models and headers."""
        return self._server.stats.bytes_sent + self._client.stats.bytes_sent

    @property
    def is_in_flight(self) -> bool:
        """See `Engine`."""
        return self._fetcher.is_under_way

    def statistics(self) -> dict[str, float]:
        """What went wrong and what arrived; see `PairwiseDataParallel.comm_stats`."""
        client, server = self._client.stats, self._server.stats
        return {
            "bytes_received": client.bytes_received,
            "num_fetches": client.num_fetches,
            "num_failed_fetches": client.num_failed_fetches,
            "num_refused_models": client.num_refused_models,
            "num_skipped": self.num_skipped,
            "num_refused_losses": self.num_refused_losses,
            "num_refused_connections": server.num_refused_connections,
            "num_garbage_messages": server.num_garbage_messages,
            "num_unread_replies": server.num_unread_replies,
            "num_models_sent": server.num_models_sent,
            "clock": self.clock,
        }

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
        is_written = self._fetcher.is_under_way and self._fetcher.is_done and self.flush(x)
        self._advance(x)
        return is_written

    def publish(self, x: FlatVector) -> None:
        """Serve x from now on, and start the next fetch; the first half of a round. Never waits."""
        self._check(x)
        self._advance(x)

    def republish(self, x: FlatVector) -> None:
        """Serve x, which no round follows now, if an older x is served; the clock stays. Never waits."""
        if not self._is_closed and self._server.is_serving and self._fits(x):
            self._publish(x)

    def flush(self, x: FlatVector) -> bool:
        """Wait for the fetch that is under way, as long as a round may take, and merge it; the second half.

        Returns:
            Whether x was written: not where no peer had a model for us.
        """
        if not self._fetcher.is_under_way:
            return False
        fetched = self._await()
        is_sick = not self._bound.is_own_finite
        if is_sick and self.config.on_nonfinite == "raise":
            raise FloatingPointError(f"{self._sickness(fetched)}; {_REMEDY}")
        if fetched is None:
            return False
        own, peer = Standing(self.clock, self.loss), fetched.standing
        if (self.rule.needs_loss and own.loss is None) or (self.rule.needs_peer_loss and peer.loss is None):
            return False  # one of us has only just begun
        factor = self.rule.factor(own, peer)
        if is_sick and self.config.on_nonfinite == "skip" and factor != 1.0:
            self.num_skipped += 1
            if self.num_skipped == 1:
                warnings.warn(f"{self._sickness(fetched)}; merges are left out from now on; {_REMEDY}", stacklevel=2)
            return False
        with record_function("gossip.merge"):
            if factor == 1.0:  # also out of a model that holds infinities or NaN
                x.raw.copy_(self._fetcher.arrived.raw)
            else:
                x.combine_(1.0 - factor, [self._fetcher.arrived], [factor])
        self.clock = factor * peer.clock + (1.0 - factor) * self.clock
        self.last_peer = fetched.peer
        self.stats.record(max(self.step - self._fetch_step - 1, 0))
        return factor != 0.0

    def add_peer(self, name: str, address: str, *, public_key: str | None = None) -> None:
        """Ask this worker too from the next round on, and with keys answer it; one that is known is replaced.

        Raises:
            ValueError: no address, the own name, or a key that is missing or too many.
        """
        check_address(address, peer=name)
        if name == self.config.name:
            raise ValueError(f"got the own name {name!r}, expected another worker's")
        if (public_key is None) != (self.config.curve is None):
            raise ValueError(f"got public_key={public_key!r} of {name!r}, expected one exactly where `curve` is given")
        if public_key is not None:
            check_key(public_key, owner=name)
            with self._keys_lock:
                keys = {**self._keys, name: public_key}
                self._server.authorize(keys.values())
                self._keys = keys
        self._client.add(name, address, public_key)
        self._server.num_peers = self._client.num_peers

    def remove_peer(self, name: str) -> None:
        """Do not ask this worker any more; with keys, do not answer it any more either. Not known: no error."""
        self._client.remove(name)
        self._server.num_peers = self._client.num_peers
        with self._keys_lock:
            if self._keys.pop(name, None) is not None:
                self._server.authorize(self._keys.values())

    def close(self) -> None:
        """See `Engine`. A fetch that is under way is given up."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fetcher.stop()
        self._server.stop()
        if self._background.close():
            for context in self._contexts:
                context.term()

    def state_dict(self) -> dict[str, Any]:
        """See `Engine`."""
        version, words, gauss = self._coin.getstate()
        own = {"step": self.step, "clock": self.clock, "loss": self.loss, "coin": [version, list(words), gauss]}
        return {**super().state_dict(), **own, "peers": self.scores.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Engine`. Peers get no model of before it: none at all until the next one is published."""
        super().load_state_dict(state)
        self._withdraw()
        self.step, self.clock, self.loss = state["step"], state["clock"], state["loss"]
        version, words, gauss = state["coin"]
        self._coin.setstate((version, tuple(words), gauss))
        self.scores.load_state_dict(state["peers"])

    def reset(self) -> None:
        """See `Engine` and `load_state_dict`."""
        self._withdraw()
        super().reset()
        self.step, self.clock, self.loss = 0, 0.0, None
        self._coin = self._new_coin()
        self.scores.reset(seed=f"{self.config.seed}/{self.config.name}/peers")

    @torch.no_grad()
    def _take(self, x: FlatVector) -> None:
        """x <- the model of a live peer, if there is one."""
        self._fetcher.start()
        fetched = self._await()
        if fetched is not None:
            x.raw.copy_(self._fetcher.arrived.raw)
            self.clock = fetched.standing.clock

    def _withdraw(self) -> None:
        """Forget the model that is served, and the one that is under way: they are not of the state to come."""
        self._await()
        self._bound.is_own_finite = True
        self._server.withdraw()

    def _new_coin(self) -> random.Random:
        return random.Random(f"{self.config.seed}/{self.config.name}/coin")

    def _check(self, x: FlatVector) -> None:
        self._background.raise_if_failed()
        if self._is_closed:
            raise RuntimeError(f"worker {self.config.name!r} is closed, expected no more rounds; make a new one")
        if not self._fits(x):
            raise ValueError(
                f"worker {self.config.name!r}: got a model of {x.layout.num_bytes} bytes on {x.raw.device} whose "
                "dtypes, trained tensors or device changed since it was wrapped, expected the same; peers may ask for "
                "it at any time: call .to(), .half() and requires_grad_() before wrapping"
            )
        while self._client.stats.refusals:
            peer, why = self._client.stats.refusals.popitem()
            if peer not in self._warned:
                self._warned.add(peer)
                warnings.warn(f"worker {self.config.name!r} refused the model of {peer!r}: {why}", stacklevel=2)

    def _sickness(self, fetched: Fetched | None) -> str:
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
        if not self._fetcher.is_under_way and self._coin.random() < self.config.fetch_probability:
            self.t += 1
            self._fetch_step = self.step
            self._fetcher.start()

    def _publish(self, x: FlatVector) -> None:
        if self.loss is None or math.isfinite(self.loss):
            with record_function("gossip.publish"):
                self._server.publish(x, Standing(self.clock, self.loss))

    def _await(self) -> Fetched | None:
        start = time.perf_counter()
        try:
            return self._fetcher.wait()
        finally:
            self.stats.wait_seconds += time.perf_counter() - start

    def _serve(self) -> None:
        try:
            self._server.serve()
        except Exception as error:
            raise RuntimeError(f"worker {self.config.name!r}: serving peers failed: {error!r}") from error
