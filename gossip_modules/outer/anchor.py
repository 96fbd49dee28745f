"""Anchor: where the ranks last began together, with the optimizer that moves it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compression.compressor import Compressor
from ..flat.vector import FlatVector
from .fragment import Fragment, cut
from .optimizer import MakeOptimizer, are_same, made_optimizer, settings_of


class Anchor:
    """The anchor phi of one rank, the vector that is mixed in an outer step, and the outer optimizer.

    phi and `sent` have at least float32 where the model is narrower, so that small steps are not lost. Floating-point
    buffers of the model travel along and are averaged; no optimizer touches them.

    [Note: Anchors in host memory] With device="cpu" and x on a GPU all of this is in the host's memory, where the outer
    optimizer steps too; nothing of it is on the GPU between outer steps. `read` copies x to the host and `write_to`
    copies phi back, both in the current stream and through pageable memory, so that the host waits for the first and
    may change phi after the second. An outer step takes one more vector of host memory, for the copy of x.

    Args:
        x: what the anchor starts as; copied.
        make_optimizer: see `OuterMethod.make_optimizer`.
        fragment: the part of x that it is the anchor of; None: all of x.
        num_ranks: how many mix.
        device: where it is; None: beside x.

    Attributes:
        phi: the anchor.
        sent: what is mixed; the same layout.
        parameters: phi without buffers, one flat tensor for each of its segments; share memory with phi.
        gradients: `sent` without buffers, likewise.
        cut_from: the layout of x.
        messages: what travels in place of `gradients`, where a method has called `compress` or `compress_drift`: uint8,
            one for each of them, with up to seven bytes after it, so that messages side by side begin at a multiple of
            8 bytes.
        inner_rate: what `OuterMethod.inner_rate` gave at the last step of the model's optimizer; None: nothing.
    """

    def __init__(
        self,
        x: FlatVector,
        make_optimizer: MakeOptimizer,
        *,
        fragment: Fragment | None = None,
        num_ranks: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        self.cut_from = x.layout
        self.fragment = cut(x.layout, 1, None)[0] if fragment is None else fragment
        self.num_ranks = num_ranks
        self._device = None if device is None else torch.device(device)
        self.phi = FlatVector.zeros(self.fragment.layout.with_dtypes(_widened), self._device or x.raw.device)
        self.sent = self.phi.like()
        for own, theirs in zip(self.phi.segments, self.fragment.segments_of(x), strict=True):
            own.copy_(theirs)
        self.parameters = parameters_of(self.phi)
        self.gradients = parameters_of(self.sent)
        self.messages: list[Tensor] = []
        self.inner_rate: float | None = None
        self._memory: dict[str, list[Tensor]] = {}
        self._num_compressed = 0
        # A shard of a model that has fewer elements than processes may be empty.
        self.optimizer = made_optimizer(make_optimizer, self.parameters) if self.parameters else None
        self._made_with = settings_of(self.optimizer)

    def memory(self, name: str) -> Sequence[Tensor]:
        """What a method keeps from one outer step to the next under that name: like `gradients`, at first zeros."""
        if name not in self._memory:
            self._memory[name] = [torch.zeros_like(gradient) for gradient in self.gradients]
        return self._memory[name]

    def read(self, x: FlatVector) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters and the buffers of its part of x, one flat tensor for each segment; views or copies.

        On the device of phi.
        """
        segments = [own.to(self.phi.raw.device) for own in self.fragment.segments_of(x)]
        sizes = [phi.numel() for phi in self.parameters]
        halves = [(own[:size], own[size:]) for own, size in zip(segments, sizes, strict=True)]
        return [parameters for parameters, _ in halves], [buffers for _, buffers in halves if buffers.numel()]

    def take_drift(self, x: Sequence[Tensor]) -> None:
        """sent <- phi - x, without buffers."""
        for drift, phi, own in zip(self.gradients, self.parameters, x, strict=True):
            torch.sub(phi, own, out=drift)

    def compress_drift(self, compressor: Compressor, *, decay: float) -> None:
        """Error feedback: e <- decay e + sent; messages <- C(e); e <- e - C(e).

        e is the memory "error", at first zeros: what the messages of this rank have left out so far. Buffers stay as
        they are.

        Args:
            compressor: C, a contraction.
            decay: what is kept of e, 0 to 1.
        """
        errors = self.memory("error")
        for error, drift in zip(errors, self.gradients, strict=True):
            error.mul_(decay).add_(drift)
        self.compress(errors, compressor)

    def add_left_out(self) -> None:
        """sent <- sent + e: what messages of before have left out, of a run that goes on without a compressor."""
        for drift, error in zip(self.gradients, self._memory.pop("error", ()), strict=False):
            drift.add_(error)
        self._num_compressed = 0

    def compress(self, x: Sequence[Tensor], compressor: Compressor) -> None:
        """messages <- C(x), and x <- x - C(x), which is what they leave out.

        Args:
            x: like `gradients`, but other tensors; mutated.
            compressor: C. Its round is the number of calls so far, which is the same on all ranks.
        """
        self.messages = [_with_padding(compressor.message_like(own)) for own in x]
        for own, padded in zip(x, self.messages, strict=True):
            message = padded[: compressor.num_bytes(own.numel(), own.dtype)]
            compressor.compress(own, message, t=self._num_compressed)
            compressor.add_decompressed(message, own, alpha=-1.0)
        self._num_compressed += 1

    def read_messages(self, compressor: Compressor) -> None:
        """sent <- what the messages of this rank mean, C(e) of `compress_drift`, where nobody has averaged it yet."""
        for meant, padded in zip(self.gradients, self.messages, strict=True):
            message = padded[: compressor.num_bytes(meant.numel(), meant.dtype)]
            compressor.add_decompressed(message, meant.zero_())

    def step(self, gradients: Sequence[Tensor] | None = None) -> None:
        """phi <- a step of the outer optimizer with these gradients; None: `sent`."""
        if self.optimizer is None:
            return
        gradients = self.gradients if gradients is None else gradients
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        try:
            self.optimizer.step()
        finally:
            for parameter in self.parameters:
                parameter.grad = None

    def take_buffers(self, buffers: Sequence[Tensor]) -> None:
        """The buffers of `sent` <- those of x, as `read` gives them."""
        for sent, own in zip(self.sent.buffers, buffers, strict=True):
            sent.copy_(own)

    def keep_buffers(self) -> None:
        """The buffers of phi <- those of `sent`, which were mixed."""
        for phi, sent in zip(self.phi.buffers, self.sent.buffers, strict=True):
            phi.copy_(sent)

    def write_to(self, x: FlatVector, *, own_weight: float = 0.0) -> None:
        """x <- lerp(phi, x, own_weight) in its part of x, buffers included."""
        for own, phi in self.fragment.pairs(x, self.phi):
            own.copy_(torch.lerp(phi, own.to(phi), own_weight) if own_weight else phi)

    def has_tensors_of(self, x: FlatVector) -> bool:
        """Whether x has the tensors that phi was made of, in any dtype, on any device."""
        own = self.cut_from
        return x.layout is own or x.layout.with_dtypes(_widened) == own.with_dtypes(_widened)

    @property
    def names(self) -> list[str]:
        """Of the tensors of the whole vector, of which phi has some."""
        return self.cut_from.names

    def fits(self, x: FlatVector) -> bool:
        """Whether x has these tensors, and phi is on the device that goes with x."""
        return self.has_tensors_of(x) and self.phi.raw.device == (self._device or x.raw.device)

    def state_dict(self) -> dict[str, Any]:
        """phi, the state of the optimizer, and what the method keeps; shares memory with this object."""
        optimizer: dict[str, Any] = {}
        if self.optimizer is not None:
            optimizer = {
                "kind": type(self.optimizer).__name__,
                "made_with": self._made_with,
                **self.optimizer.state_dict(),
            }
        memory: dict[str, Any] = {"memory": dict(self._memory)} if self._memory else {}
        if self._num_compressed:
            memory["num_compressed"] = self._num_compressed
        return {"phi": list(self.phi.segments), "optimizer": optimizer, **memory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict()` gave; copies it.

        What the optimizer was made with, such as its rates, stays as it is now. What has changed in its groups since it
        was made goes on: a rate under a scheduler, or the count of steps that some optimizers keep there.

        Raises:
            ValueError: it is the state of a model with other tensors, or of another optimizer; nothing is changed then.
        """
        found, own = ([x.numel() for x in phi] for phi in (state["phi"], self.phi.segments))
        if found != own:
            raise ValueError(
                f"got an anchor with {found} elements, expected {own}: other tensors were trained when it was saved; "
                "freeze the same parameters, or load the model alone: module.load_state_dict"
            )
        optimizer, kind = state["optimizer"], type(self.optimizer).__name__
        if self.optimizer is not None and optimizer.get("kind", kind) != kind:  # older checkpoints do not say it
            raise ValueError(
                f"got the state of the outer optimizer {optimizer['kind']}, expected that of {kind}; wrap with the "
                "optimizer= of when it was saved, or load the model alone: module.load_state_dict"
            )
        for mine, theirs in zip(self.phi.segments, state["phi"], strict=True):
            mine.copy_(theirs)
        self._num_compressed = state.get("num_compressed", 0)
        self._memory = {}
        for name, tensors in state.get("memory", {}).items():
            for mine, theirs in zip(self.memory(name), tensors, strict=True):
                mine.copy_(theirs)
        if self.optimizer is not None:
            groups = self.optimizer.state_dict()["param_groups"]
            saved = zip(groups, optimizer["param_groups"], optimizer.get("made_with", []), strict=False)
            for group, theirs, made_with in saved:  # older checkpoints do not say what theirs was made with
                group |= {
                    name: copy.deepcopy(value)
                    for name, value in theirs.items()
                    if name != "params" and not are_same(value, made_with.get(name))
                }
            self.optimizer.load_state_dict({"state": copy.deepcopy(optimizer["state"]), "param_groups": groups})


def load_anchors(anchors: Sequence[Anchor], states: Sequence[dict[str, Any]]) -> None:
    """Each anchor <- its state; raises ValueError where they are of other fragments."""
    if len(states) != len(anchors):
        raise ValueError(
            f"got the state of {len(states)} fragments, expected {len(anchors)}; wrap with the fragments= of when it "
            "was saved, or load the model alone: module.load_state_dict"
        )
    for anchor, state in zip(anchors, states, strict=True):
        anchor.load_state_dict(state)


def parameters_of(x: FlatVector) -> Sequence[Tensor]:
    """The parameters of each segment of x, without buffers; share memory."""
    return x.where(is_buffer=False).segments


def anchor_dtypes(x: FlatVector) -> list[torch.dtype]:
    """Of the parameters of an anchor of x, one for each of its segments."""
    return [_widened(segment.dtype) for segment in parameters_of(x) if segment.numel()]


def _with_padding(message: Tensor) -> Tensor:
    return message.new_zeros(-(-message.numel() // 8) * 8)


def _widened(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= 4 else torch.float32
