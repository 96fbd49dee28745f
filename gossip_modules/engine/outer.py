"""OuterEngine: steps of an outer optimizer, every H steps of training."""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import record_function

from ..flat.buffer import FlatBuffer
from ..flat.layout import FlatLayout
from ..flat.nonfinite import are_finite
from ..flat.slots import TensorPlace
from ..flat.vector import FlatVector
from ..gossiper.mixer import Mixer
from ..outer.anchor import Anchor, load_anchors
from ..outer.carrying_over import carry_over, new_tensors
from ..outer.fragment import cut
from ..outer.method import OuterMethod
from ..schedule import Schedule
from .compressed_average import CompressedAverage
from .engine import SyncEngine
from .gossip_thread import GossipThread
from .inner_rate import InnerRate
from .outer_checks import check_fragments, check_weights
from .outer_flight import OuterFlight


class OuterEngine(SyncEngine):
    """Every H steps the models of the ranks move an anchor phi by a step of an outer optimizer, and x <- phi.

    [Note: Outer steps] The anchor is x as it is at the first training forward. An outer step runs at the forward after
    H optimizer steps, and blocks, as the rounds of `SyncEngine` do. What it computes is the method's: see
    `OuterMethod`. Between outer steps ranks train alone, or gossip where the method says so. Beside the model it keeps
    the anchor, one vector that is mixed, and what the outer optimizer remembers: with momentum, three copies of the
    model; and where drifts are compressed another one, of what was not sent.

    [Note: Fragments and delays] Fragment p of P takes its outer steps at the steps p H / P, p H / P + H, ... With a
    delay what it sends is mixed on the gossip thread, and applied at the forward `delay` steps later, which waits for
    it. The thread takes one after the other, in the order of the steps, which is the same on all ranks. In between the
    vector that is mixed belongs to the thread, and phi and the optimizer to the training thread, so that nothing is
    locked. `flush()` applies what travels at once.

    Where other tensors are trained than before (layers frozen or added), those that were trained before keep anchor and
    outer momentum. The anchor of new ones is their exact average over all models at the next outer step, where the
    outer optimizer starts anew.

    A rank whose model is not finite raises before it sends anything and before it applies what has come, so that who
    mends the model takes the same step again; with on_nonfinite="skip" it goes back to its anchor and brings a drift of
    zero, so that its steps since then are lost and nothing else is.

    Args:
        gossiper: bound to its peers. Outer steps use it where the method mixes on a graph, and rounds of gossip between
            outer steps.
        outer: what an outer step computes.
        buffer: the tensors of the model, whose optimizer's rate a method may need; None: nobody knows it.
        on_nonfinite: see `LockstepEngine`.
        places: says where the tensors of the model are in the vector; None: nobody knows, and fragments are equal runs
            of the vector.

    Raises:
        ValueError: weights that do not keep the mean, with a method that needs it; or fragments, where they cannot be.
    """

    def __init__(
        self,
        gossiper: Mixer,
        outer: OuterMethod,
        buffer: FlatBuffer | None = None,
        *,
        on_nonfinite: str = "raise",
        places: Callable[[], Sequence[TensorPlace]] | None = None,
    ) -> None:
        super().__init__(gossiper, Schedule(gossip_every=max(outer.gossip_every, 1)), on_nonfinite=on_nonfinite)
        check_weights(gossiper, outer, on_nonfinite)
        check_fragments(gossiper, outer, has_places=places is not None)
        self.outer = outer
        self._places = places
        self._inner = InnerRate(outer, buffer)
        self._mixer = self.averager if outer.averages_exactly else gossiper
        self._gathering: CompressedAverage | None = None
        if outer.wire_compressor is not None:
            self._gathering = CompressedAverage(gossiper.transport, outer.wire_compressor)
        self._anchors: list[Anchor] = []  # one for each fragment
        self._loaded: list[dict[str, Any]] = []  # the states of anchors, until the next outer step
        self._flights: list[OuterFlight] = []  # in the order in which they were started
        self._thread: GossipThread | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def state_name(self) -> str:
        """See `Engine`: each method has a state of its own."""
        return f"{type(self.outer).__name__} engine"

    @property
    def is_in_flight(self) -> bool:
        """See `Engine`."""
        return bool(self._flights)

    def round(self, x: FlatVector) -> bool:
        """See `Engine`."""
        self._anchor_at_start(x)
        step = self.step
        starting = self.outer.starting_at(step)
        self._check_finite(starting, x)
        has_changed = False
        while self._flights and self._flights[0].due <= step:
            self._arrive(x)
            has_changed = True
        if not starting and self.outer.gossip_every:
            return super().round(x)
        self.step += 1
        for p in starting:
            has_changed |= self._outer_step(p, x, step)
        return has_changed

    def _check_finite(self, starting: Sequence[int], x: FlatVector) -> None:
        """Raise FloatingPointError where these fragments of x, or all of x if it has other tensors, are not finite."""
        if not starting or self.on_nonfinite != "raise":
            return
        own = [self._anchors[p] for p in starting if self._anchors]
        fits = bool(own) and all(anchor.has_tensors_of(x) for anchor in own)  # else whole models are averaged
        tensors = [segment for anchor in own for segment in anchor.fragment.segments_of(x)] if fits else x.segments
        if not self.agree_finite(are_finite(tensors)):
            self._refuse_nonfinite(self._mixer, self.t // self.outer.num_fragments, is_own=True)

    def _outer_step(self, p: int, x: FlatVector, step: int) -> bool:
        """[Note: Outer steps] of fragment p; returns whether x was written."""
        start = time.perf_counter()
        with record_function("gossip.outer_step", f"t={self.t}"):
            anchor = self._anchor_for(p, x)
            anchor.inner_rate = self._inner.rate
            has_changed = self._bring(anchor, x)
            t = self.t // self.outer.num_fragments  # so that each fragment meets every matrix of a graph that changes
            self.t += 1
            if self.outer.delay:
                self._depart(p, anchor, t, step)
            elif self._mix(anchor, t):
                self._apply(p, x, step)
                has_changed = True
        self.stats.wait_seconds += time.perf_counter() - start
        return has_changed

    def _bring(self, anchor: Anchor, x: FlatVector) -> bool:
        """What is sent <- that of x; returns whether x was written."""
        has_changed = False
        parameters, buffers = anchor.read(x)
        if self.on_nonfinite == "skip" and not self.agree_finite(are_finite((*parameters, *buffers))):
            for own in self._anchors:  # one that is not finite makes the gradients of all so
                own.write_to(x)
            parameters, buffers = anchor.read(x)
            self.stats.num_skipped += 1
            has_changed = True
        self.outer.start(anchor, parameters)
        anchor.take_buffers(buffers)
        if self.outer.is_eager:
            anchor.write_to(x)
        return has_changed or self.outer.is_eager

    def _mix(self, anchor: Anchor, t: int) -> bool:
        """What is sent <- W(t) of it, or the mean of the compressed messages of all ranks; returns whether it is."""
        if self._gathering is None:
            self._mixer.mix(anchor.sent, t)
            return True
        self._gathering.average(anchor.messages, anchor.gradients, what=f"the compressed average of round {t}")
        for buffer in anchor.sent.buffers:
            self.averager.mix(buffer, t)
        return True

    def _apply(self, p: int, x: FlatVector, began: int) -> None:
        """phi of fragment p <- a step with what was mixed, and x <- phi. began: the step at which it was sent."""
        anchor = self._anchors[p]
        anchor.keep_buffers()
        self.outer.finish(anchor)
        if not self.outer.is_eager:
            anchor.write_to(x, own_weight=self.outer.kept)
        x.push_sum_weight.fill_(1.0)
        self.stats.record(0)

    # With a delay: [Note: Fragments and delays].

    def _depart(self, p: int, anchor: Anchor, t: int, step: int) -> None:
        """Hand what is sent to the gossip thread."""
        # An anchor in host memory travels by way of the GPU where messages do: not in the stream of training.
        device = anchor.sent.raw.device if anchor.sent.raw.is_cuda else self.gossiper.transport.device
        if device.type == "cuda":
            if self._stream is None or self._stream.device != device:
                self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))  # `sent` is written before it is sent
        stream = self._stream if device.type == "cuda" else None

        def run() -> float:
            on_stream = torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()
            with torch.no_grad(), on_stream, record_function("gossip.round", f"t={t}"):
                return float(self._mix(anchor, t))

        if self._thread is None:
            self._thread = GossipThread(f"gossip-{self.gossiper.transport.rank}")
        self._flights.append(OuterFlight(p, step, step + self.outer.delay, self._thread.submit(run)))

    def _arrive(self, x: FlatVector) -> None:
        """Wait for the first outer step that travels, and apply it."""
        start = time.perf_counter()
        flight = self._flights[0]
        try:
            with record_function("gossip.wait"):
                assert self._thread is not None
                is_mixed = self._thread.result(flight.future, **self._limit_of(self._mixer, self.t))
        except Exception:  # of the round; an interrupt instead leaves it in flight, done or not
            self._flights.clear()
            raise
        self._flights.pop(0)
        if self._stream is not None:  # `sent` is mixed before it is read
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        if is_mixed:
            self._apply(flight.fragment, x, flight.began)
        self.stats.wait_seconds += time.perf_counter() - start

    def flush(self, x: FlatVector) -> bool:
        """See `Engine`."""
        has_changed = bool(self._flights)
        while self._flights:
            self._arrive(x)
        return has_changed

    # Anchors.

    def set_out(self, x: FlatVector) -> None:
        """See `Engine`."""
        super().set_out(x)
        self._anchor_at_start(x)

    def _anchor_at_start(self, x: FlatVector) -> None:
        """Anchors at x, where training begins."""
        if not self._anchors and not self._loaded:
            self._anchors = self._anchors_at(x)

    def _anchors_at(self, x: FlatVector) -> list[Anchor]:
        """New anchors, at x."""
        places = None if self._places is None else self._places()
        of_all: dict[str, Any] = {"num_ranks": self.gossiper.transport.world_size, "device": self.outer.anchor_device}
        return [
            Anchor(x, self.outer.make_optimizer, fragment=fragment, **of_all)
            for fragment in cut(x.layout, self.outer.fragments, places)
        ]

    def _anchor_for(self, p: int, x: FlatVector) -> Anchor:
        """The anchor of fragment p, on the device of x and with its tensors."""
        anchors = self._anchors
        if anchors and anchors[p].fits(x):
            return anchors[p]
        loaded, before = self._loaded, anchors
        has_others = bool(before) and not before[p].has_tensors_of(x)
        if before and not has_others:
            loaded = [anchor.state_dict() for anchor in before]  # moved to another device
        elif before:
            self._average_new(x, before[0].cut_from)
        anchors = self._anchors_at(x)
        if has_others:
            carry_over(before, anchors)
        elif loaded:
            load_anchors(anchors, loaded)
        self._anchors, self._loaded = anchors, []
        return anchors[p]

    def _average_new(self, x: FlatVector, before: FlatLayout) -> None:
        """The tensors of x that anchors of that layout do not have <- their average over all ranks."""
        new = new_tensors(x, before)
        if not new:
            return
        warnings.warn(
            f"{self.outer}: other tensors are trained than before, so the anchor becomes the average of all models in "
            f"those that are new ({sum(map(torch.numel, new))} elements), where the outer optimizer starts anew",
            stacklevel=2,
        )
        vector = FlatVector.pack(new)
        vector.push_sum_weight.copy_(x.push_sum_weight)
        self.averager.mix(vector, self.t)
        vector.multiply_by_weight_(x.push_sum_weight)
        vector.unpack_to(new)

    def state_dict(self) -> dict[str, Any]:
        """See `Engine`; shares memory with the engine, like that of a module."""
        states = self._loaded or [anchor.state_dict() for anchor in self._anchors]
        anchor = {"fragments": states} if len(states) > 1 else dict(*states)
        return {**super().state_dict(), **self._inner.state_dict(), "anchor": anchor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Engine`; the next outer step uses it, and checks its shapes."""
        super().load_state_dict(state)
        self._inner.load_state_dict(state)
        anchor = copy.deepcopy(state["anchor"])
        self._anchors, self._loaded = [], anchor.get("fragments", [anchor] if anchor else [])

    def reset(self) -> None:
        """See `Engine`: the next forward starts a new anchor."""
        self.load_state_dict({"engine": self.state_name, "t": 0, "step": 0, "gossiper": {}, "anchor": {}})

    def forget_models(self) -> None:
        """See `Engine`: where each rank has an anchor of its own, the next forward starts new ones."""
        super().forget_models()
        if not self.outer.averages_exactly:
            self._anchors, self._loaded = [], []

    def close(self) -> None:
        """See `Engine`; keeps what `state_dict()` gives. What travels is left to end: other ranks wait for it."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        self._flights.clear()
        self._inner.close()
        if self._anchors:
            self._loaded = [anchor.state_dict() for anchor in self._anchors]
            self._anchors = []

    def __getstate__(self) -> dict[str, Any]:
        assert not self._flights, "flush() before copying: an outer step travels"
        return {**self.__dict__, "_thread": None, "_stream": None}
