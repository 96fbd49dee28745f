"""The base of all compressed gossip: which tensors are compressed, numbered messages, state in checkpoints."""

from __future__ import annotations

import copy
import math
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..flat.layout import TensorSpec
from ..flat.vector import FlatVector, add_
from ..mixing_manager.base import MixingManager, MixingWeights
from .gossiper import Messages
from .linked import LinkedGossiper
from .message import MessageBuffer, num_bytes, tensor_runs, warn_of_little

State = dict[str, Tensor]


class CompressedGossiper(LinkedGossiper):
    """x <- x + step_size (W - I) s', where s' is what the peers know of s from compressed messages.

    A round of every compressed algorithm; the arithmetic of lines 2 and 4 is in the file of the algorithm:

        1  s = the vector to be mixed
        2  write_messages(s): fill the buffer for each peer
        3  exchange headers [Note: out of step], then messages, with the peers
        4  apply_messages(s, weights): s = s + step_size (W - I) s'

    Floating-point buffers (BatchNorm statistics) are always sent exactly and are mixed with weights that are not
    negative, since a lossy code could make a variance negative. Segments narrower than float32 are compressed in
    float32.

    After a round that failed the state is no longer usable: resume all ranks from a checkpoint, or start without one.

    In the first round rank 0 warns where little is saved: more than half of the parameters' bytes are sent exactly, or
    compressed messages are no smaller than the parameters. Models below 4 KiB get no warning.

    Subclasses write the abstract methods below; most derive from `BroadcastGossiper` instead.

    Args:
        step_size: the consensus step size, called gamma in most papers; positive.
    """

    needs_symmetric_weights = True
    needs_static_graph = False
    is_skippable = False

    def __init__(self, *, step_size: float) -> None:
        if not (isinstance(step_size, int | float | np.number) and 0 < float(step_size) < math.inf):
            raise ValueError(
                f"{type(self).__name__}: got step_size={step_size!r}, expected a positive number; 1 mixes with the "
                "weights as they are, strong compression needs less"
            )
        super().__init__()
        self.step_size = float(step_size)
        self._device = torch.device("cpu")
        self._loaded: Mapping[str, Any] = {}
        self._has_failed = False  # True inside a round, and after one that raised

    def check(self, mixing: MixingManager) -> None:
        """See `Mixer`: weights must be symmetric, and for some algorithms the graph must be static."""
        name = type(self).__name__
        if not (mixing.graph.is_symmetric and mixing.is_symmetric):
            raise ValueError(
                f"{name}: got {mixing}, expected symmetric weights on an undirected graph; take "
                "MetropolisHastingsMixing over a graph whose peers answer each other, e.g. "
                "RingGraph(n, peers_per_itr=2)"
            )
        if self.needs_static_graph and (mixing.graph.is_dynamic or mixing.period != 1):
            raise ValueError(
                f"{name}: got {mixing} of period {mixing.period}, expected a graph that never changes, since each rank "
                "keeps a sum over its neighbours' messages; take a ring with peers_per_itr=2, a torus with 4, or "
                "DeepSqueeze, Moniqua or PowerGossip on this graph"
            )

    def is_compressed(self, spec: TensorSpec) -> bool:
        """Whether a tensor is compressed; the others are sent exactly."""
        return not spec.is_buffer

    remedy_for_exact = "leave the gossiper out, or choose another one"
    """The advice for a model most of whose parameters are sent exactly."""

    @property
    def exact_step_size(self) -> float:
        """The step size of parameters that are sent exactly: 1, since no compression error has to be damped."""
        return 1.0

    # What a subclass writes.

    @abstractmethod
    def allocate_state(self, values: Sequence[Tensor]) -> None:
        """Allocate what is kept from round to round, with the values that it has before the first round.

        Args:
            values: the values of each run of compressed tensors, float32 or float64 [d]; only shapes and dtypes matter.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What is kept from round to round, for a checkpoint: tensors, plain values and containers of them."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Copy in what `state()` returned."""

    @abstractmethod
    def buffers_for(self, peer: int) -> tuple[MessageBuffer, MessageBuffer]:
        """The outgoing and the incoming message of this peer in this phase, of equal sizes."""

    def num_compressed_bytes(self) -> int:
        """The bytes of compressed parameters in a message, for the warning that nothing is saved; 0: no warning."""
        return 0

    @abstractmethod
    def write_messages(self, s: FlatVector) -> None:
        """Fill the outgoing messages of this round, `self._buffers`."""

    @abstractmethod
    def apply_messages(self, s: FlatVector, weights: MixingWeights) -> None:
        """s <- s + the correction that the messages give. Must not read s, which may be zero."""

    # A round.

    def encode(self, s: FlatVector, out_peers: Sequence[int], in_peers: Sequence[int]) -> tuple[Messages, Messages]:
        """See `Gossiper`."""
        self.prepare(s)
        if self._has_failed and self.phase == 0:
            raise RuntimeError(
                f"{self}: got a round after one that failed, expected none: the states of the ranks may no longer "
                "agree; start again from a checkpoint on all ranks"
            )
        self._has_failed = True
        self._buffers = {peer: self.buffers_for(peer) for peer in self.live(in_peers)}
        self.post_headers()
        self.write_messages(s)
        sends = {peer: (outgoing.raw,) for peer, (outgoing, _) in self._buffers.items()}
        return sends, {peer: (incoming.raw,) for peer, (_, incoming) in self._buffers.items()}

    def decode(self, s: FlatVector, weights: MixingWeights) -> None:
        """See `Gossiper`."""
        self.apply_messages(s, weights)
        self._has_failed = self.phase + 1 < self.num_phases

    # State.

    def state_dict(self) -> dict[str, Any]:
        """See `Mixer`; shares memory with the gossiper, like that of a module. Empty after a round that failed."""
        if self._layout is None:
            return dict(self._loaded)
        if self._has_failed or self._is_elastic:
            return {}
        return self._state_dict()

    def _state_dict(self) -> dict[str, Any]:
        return {"algorithm": type(self).__name__, **self._message_check.state_dict(), **self.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Mixer`; an empty state, or any on an elastic transport, starts from zero.

        The next round uses it, and checks its shapes.
        """
        if state and not self._is_elastic and state.get("algorithm") != type(self).__name__:
            raise ValueError(
                f"got state {sorted(state)} of {state.get('algorithm', 'another algorithm')}, expected that of "
                f"{type(self).__name__}; load a checkpoint of the same gossiper"
            )
        loaded = {} if self._is_elastic else copy.deepcopy(dict(state))
        self._layout, self._loaded, self._has_failed = None, loaded, False

    def prepare(self, s: FlatVector) -> None:
        """Find out which tensors of s are compressed, and allocate or load the state for them."""
        if self._layout == s.layout and self._device == s.raw.device:
            return
        loaded = self._loaded
        if self._layout is not None and self._layout == s.layout:
            loaded = {} if self._has_failed else self._state_dict()  # moved to another device
        elif self._layout is not None:
            what = "other tensors, or tensors of other dtypes, are trained than before"
            warnings.warn(f"{self}: {what}, so its state starts from zero", stacklevel=2)
        self._layout, self._device = None, s.raw.device
        self._compressed_runs = tensor_runs(s.layout, self.is_compressed)
        # Buffers apart from parameters, which may have another step size and other weights.
        self._exact_runs = tensor_runs(s.layout, lambda spec: not spec.is_buffer and not self.is_compressed(spec))
        self._exact_runs += tensor_runs(s.layout, lambda spec: spec.is_buffer)
        self.exact_sizes = [(s.layout.segments[run.segment].dtype, run.last - run.first) for run in self._exact_runs]
        self.allocate_state(self.values_to_compress(s))
        if loaded:
            self.load_state(loaded)
        self._message_check.load_state_dict(loaded)
        self._layout, self._loaded = s.layout, {}
        if self.transport.rank == 0:  # all have the same layout
            exact = [run for run in self._exact_runs if not run.specs[0].is_buffer]
            warn_of_little(
                str(self),
                exact=num_bytes(s.layout, exact),
                compressed=num_bytes(s.layout, self._compressed_runs),
                num_compressed_bytes=self.num_compressed_bytes(),
                remedy=self.remedy_for_exact,
            )

    # The compressed and the exact tensors of s.

    def values_to_compress(self, s: FlatVector) -> list[Tensor]:
        """One tensor per run of compressed tensors, float32 or float64: views of s, or copies where s is narrower."""
        return [_wide(run.of(s)) for run in self._compressed_runs]

    def copy_exact(self, s: FlatVector, message: MessageBuffer) -> None:
        """Copy the tensors that are sent exactly into the first fields of the message."""
        for run, field in zip(self._exact_runs, message.fields, strict=False):
            field.copy_(run.of(s))

    def add_exact(self, s: FlatVector, weights: MixingWeights) -> None:
        """s <- s + (W - I) s for the tensors that are sent exactly, from the first fields of the messages."""
        for peer, buffers in self._buffers.items():
            for run, mine, theirs in zip(self._exact_runs, *(buffer.fields for buffer in buffers), strict=False):
                if run.specs[0].is_buffer:
                    alpha = self._buffer_weights.inp[peer]
                else:
                    alpha = self.exact_step_size * weights.inp[peer]
                add_(run.of(s), theirs, alpha=alpha)
                add_(run.of(s), mine, alpha=-alpha)

    def targets(self, s: FlatVector) -> list[Tensor]:
        """The tensors that corrections are added to: the runs of s, or float32 zeros where s is narrower."""
        pairs = zip(self._compressed_runs, self.values_to_compress(s), strict=True)
        return [torch.zeros_like(x) if _is_narrow(run.of(s)) else x for run, x in pairs]

    def add_targets(self, s: FlatVector, targets: Sequence[Tensor]) -> None:
        """s <- s + the targets, where they are not s itself."""
        for run, target in zip(self._compressed_runs, targets, strict=True):
            if _is_narrow(run.of(s)):
                add_(run.of(s), target, alpha=1.0)


def copy_state(gossiper: CompressedGossiper, into: Sequence[State], from_: Sequence[Mapping[str, Tensor]]) -> None:
    """Copy tensors of the same names and shapes.

    Raises:
        ValueError: the names or the shapes differ; the message has both.
    """
    shapes = [[{name: tuple(x.shape) for name, x in state.items()} for state in side] for side in (from_, into)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"{gossiper}: got state of tensors {shapes[0]}, expected {shapes[1]}; load a checkpoint of the same model "
            "and the same trained tensors"
        )
    for target, source in zip(into, from_, strict=True):
        for name, x in target.items():
            x.copy_(source[name])


def _is_narrow(x: Tensor) -> bool:
    return x.element_size() < 4


def _wide(x: Tensor) -> Tensor:
    return x.float() if _is_narrow(x) else x
