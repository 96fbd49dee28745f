"""OuterEngine: steps of an outer optimizer, every H steps of training."""

from __future__ import annotations

import copy
import time
import warnings
from typing import Any

from torch.profiler import record_function

from ..flat.nonfinite import is_finite
from ..flat.vector import FlatVector
from ..gossiper.mixer import Mixer
from ..outer.anchor import Anchor, parameters_of
from ..outer.method import OuterMethod
from ..schedule import Schedule
from .engine import SyncEngine


class OuterEngine(SyncEngine):
    """Every H steps the models of the ranks move an anchor phi by a step of an outer optimizer, and x <- phi.

    [Note: Outer steps] The anchor is x as it is at the first training forward. An outer step runs at the forward after
    H optimizer steps, and blocks, as the rounds of `SyncEngine` do. What it computes is the method's: see
    `OuterMethod`. Between outer steps ranks train alone, or gossip where the method says so. Beside the model it keeps
    the anchor, one vector that is mixed, and what the outer optimizer remembers: with momentum, three copies of the
    model.

    Where other tensors are trained than before (layers frozen or added), the anchor is the exact average of all models
    at the next outer step, and the outer optimizer starts anew.

    A rank whose model is not finite raises before it sends anything; with on_nonfinite="skip" it goes back to its
    anchor and brings a drift of zero, so that its steps since then are lost and nothing else is.

    Args:
        gossiper: bound to its peers. Outer steps use it where the method mixes on a graph, and rounds of gossip between
            outer steps.
        outer: what an outer step computes.
        on_nonfinite: see `LockstepEngine`.

    Raises:
        ValueError: weights that do not keep the mean, with a method that needs it.
    """

    def __init__(self, gossiper: Mixer, outer: OuterMethod, *, on_nonfinite: str = "raise") -> None:
        super().__init__(gossiper, Schedule(gossip_every=max(outer.gossip_every, 1)), on_nonfinite=on_nonfinite)
        _check_weights(gossiper, outer, on_nonfinite)
        self.outer = outer
        self._mixer = self.averager if outer.averages_exactly else gossiper
        self._anchor: Anchor | None = None
        self._loaded: dict[str, Any] = {}  # the state of an anchor, until the next outer step

    @property
    def state_name(self) -> str:
        """See `Engine`: each method has a state of its own."""
        return f"{type(self.outer).__name__} engine"

    def round(self, x: FlatVector) -> bool:
        """See `Engine`."""
        if self._anchor is None and not self._loaded:
            self._anchor = Anchor(x, self.outer.make_optimizer)
        if self.step and self.step % self.outer.sync_every == 0:
            self.step += 1
            self._outer_step(x)
            return True
        if self.outer.gossip_every:
            return super().round(x)
        self.step += 1
        return False

    def _outer_step(self, x: FlatVector) -> None:
        """[Note: Outer steps]"""
        start = time.perf_counter()
        with record_function("gossip.outer_step", f"t={self.t}"):
            anchor = self._anchor_for(x)
            if self.on_nonfinite != "spread" and not is_finite(x):
                if self.on_nonfinite == "raise":
                    self._refuse_nonfinite(self._mixer, self.t, is_own=True)
                anchor.write_to(x)
                self.stats.num_skipped += 1
            self.outer.start(anchor, parameters_of(x))
            anchor.take_buffers(x)
            self._mixer.start(anchor.sent, self.t)
            self.t += 1
            self._mixer.finish(anchor.sent)
            anchor.keep_buffers()
            self.outer.finish(anchor)
            anchor.write_to(x)
            x.push_sum_weight.fill_(1.0)
        self.stats.wait_seconds += time.perf_counter() - start
        self.stats.record(0)

    def _anchor_for(self, x: FlatVector) -> Anchor:
        """The anchor, on the device of x and with its tensors."""
        anchor = self._anchor
        if anchor is not None and anchor.fits(x):
            return anchor
        loaded = self._loaded
        if anchor is not None and anchor.has_tensors_of(x):
            loaded = anchor.state_dict()  # moved to another device
        elif anchor is not None:
            warnings.warn(
                f"{self.outer}: other tensors are trained than before, so the anchor becomes the average of all "
                "models, and the outer optimizer starts anew",
                stacklevel=2,
            )
            self.averager.mix(x, self.t)
        anchor = Anchor(x, self.outer.make_optimizer)
        if loaded:
            anchor.load_state_dict(loaded)
        self._anchor, self._loaded = anchor, {}
        return anchor

    def state_dict(self) -> dict[str, Any]:
        """See `Engine`; shares memory with the engine, like that of a module."""
        anchor = self._loaded if self._anchor is None else self._anchor.state_dict()
        return {**super().state_dict(), "anchor": anchor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Engine`; the next outer step uses it, and checks its shapes."""
        super().load_state_dict(state)
        self._anchor, self._loaded = None, copy.deepcopy(state["anchor"])

    def reset(self) -> None:
        """See `Engine`: the next forward starts a new anchor."""
        self.load_state_dict({"engine": self.state_name, "t": 0, "step": 0, "gossiper": {}, "anchor": {}})

    def close(self) -> None:
        """See `Engine`; keeps what `state_dict()` gives."""
        if self._anchor is not None:
            self._loaded = self._anchor.state_dict()
            self._anchor = None


def _check_weights(gossiper: Mixer, outer: OuterMethod, on_nonfinite: str) -> None:
    """Raise ValueError where the weights are not for this method."""
    if not outer.averages_exactly and not gossiper.mixing.is_doubly_stochastic:
        raise ValueError(
            f"got {gossiper.mixing} with {outer}, expected doubly stochastic weights, which keep the mean of the "
            "anchors; use an undirected graph, such as RingGraph, without mixing="
        )
    if not outer.averages_exactly:
        outer.check(gossiper.mixing.graph, gossiper.mixing.matrix)
    if outer.gossip_every and gossiper.is_weighted and on_nonfinite == "skip":
        raise ValueError(
            f"got on_nonfinite='skip' with {outer} and {gossiper.mixing}, expected 'raise' or 'spread', or doubly "
            "stochastic weights: where rounds are left out, push-sum weights have no known sum"
        )
