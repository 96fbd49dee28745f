"""What all compressed gossip shares: which numbers are in code, numbered messages, memory that is checkpointed."""

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

from ..flat.layout import FlatLayout, Part
from ..flat.vector import FlatVector, add_
from ..mixing_manager.base import MixingManager, MixingWeights
from ..transport.process_group import Pending
from .gossiper import Gossiper, Messages
from .message import Envelope, Header, sections

Memory = dict[str, Tensor]

_HEADER_TAG = -1  # no round has it: headers must meet when rounds do not
_WORD = 1 << 32
_LEAST_BYTES = 4096  # of parameters; what is smaller costs latency, whatever its messages hold
_MOST_EXACT = 0.5  # of the parameters' bytes; beyond it a plain wire of 16 bits saves more than any code of the rest


class CompressedGossiper(Gossiper):
    """x <- x + step_size (W - I) s', where s' is what the peers know of s from messages that are smaller than s.

    Floating-point buffers (BatchNorm statistics) always travel exactly and are mixed by weights that are not negative:
    a lossy code may make a variance negative. Segments narrower than float32 are coded in float32.

    [Note: out of step] Ahead of every message goes a header of 8 bytes: its number, and a digest of all that the two
    ranks have told each other before. So a peer that remembers another round or another run (resumed from another
    checkpoint, say) is an error and never silent corruption. After a round that failed, memory is of no use: only a
    checkpoint, or none, on all ranks goes on.

    Where there is little to win, rank 0 warns in the first round: more than half of the parameters' bytes travel
    exactly, or what is in code takes no fewer bytes than it would as it is. Models below 4 KiB are left alone.

    Subclasses write `make_memory`, `memory`, `set_memory`, `number_of`, `letters_of`, `write` and `read`; most are a
    `BroadcastGossiper`.

    Args:
        step_size: of consensus, gamma in the papers; positive.
    """

    needs_symmetric_weights = True
    needs_static_graph = False
    is_skippable = False

    def __init__(self, *, step_size: float) -> None:
        if not (isinstance(step_size, int | float | np.number) and 0 < float(step_size) < math.inf):
            raise ValueError(
                f"{type(self).__name__}: got step_size={step_size!r}, expected a positive number; 1 mixes as the "
                "weights say, strong compression wants less"
            )
        self.step_size = float(step_size)
        self._layout: FlatLayout | None = None
        self._device = torch.device("cpu")
        self._loaded: Mapping[str, Any] = {}
        self._digests: dict[int, int] = {}
        self._letters: dict[int, tuple[Envelope, Envelope]] = {}
        self._pending_headers: Pending | None = None
        self._is_torn = False  # inside a round, or after one that failed

    def check(self, mixing: MixingManager) -> None:
        """See `Mixer`: weights must be symmetric, and for some algorithms the graph static."""
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

    def is_coded(self, part: Part) -> bool:
        """Whether a tensor goes in code; the others travel exactly."""
        return not part.is_buffer

    remedy_for_exact = "leave the gossiper out, or choose another one"
    """What helps where most parameters are not in code."""

    @property
    def exact_step_size(self) -> float:
        """The step size of parameters that travel exactly: there is nothing to be careful about."""
        return 1.0

    # What a subclass writes.

    @abstractmethod
    def make_memory(self, coded: Sequence[Tensor]) -> None:
        """Allocate what is remembered from round to round, as before the first round.

        Args:
            coded: for each section that is in code, its values, float32 or float64 [d]; only shapes matter.
        """

    @abstractmethod
    def memory(self) -> dict[str, Any]:
        """What is remembered, for a checkpoint: tensors, plain values and containers of them."""

    @abstractmethod
    def set_memory(self, memory: Mapping[str, Any]) -> None:
        """Copy in what `memory()` gave."""

    @abstractmethod
    def number_of(self, peer: int) -> int:
        """The number of the next message to and from this peer."""

    def checksum_of(self, peer: int) -> int:
        """Of what both ends must remember alike, for the header; where there is no such thing, 0."""
        return 0

    @abstractmethod
    def letters_of(self, peer: int) -> tuple[Envelope, Envelope]:
        """The outgoing and the incoming message of this peer in this phase, of equal sizes."""

    def num_coded_bytes(self) -> int:
        """What a round sends in code to one peer, for the warning where that saves nothing; 0: it is not compared."""
        return 0

    @abstractmethod
    def write(self, s: FlatVector) -> None:
        """Fill the outgoing messages of this round, `self._letters`."""

    @abstractmethod
    def read(self, s: FlatVector, weights: MixingWeights) -> None:
        """s <- s + the correction that the messages tell; it never reads s, which may be zeros."""

    # A round.

    def encode(self, s: FlatVector, out_peers: Sequence[int], in_peers: Sequence[int]) -> tuple[Messages, Messages]:
        """See `Gossiper`."""
        self.prepare(s)
        if self._is_torn and self.phase == 0:
            raise RuntimeError(
                f"{self}: got a round after one that failed, expected none: what ranks remember of each other may "
                "differ; start again from a checkpoint on all ranks"
            )
        self._is_torn = True
        self._letters = {peer: self.letters_of(peer) for peer in in_peers}
        self._post_headers()
        self.write(s)
        sends = {peer: (outgoing.raw,) for peer, (outgoing, _) in self._letters.items()}
        return sends, {peer: (incoming.raw,) for peer, (_, incoming) in self._letters.items()}

    def decode(self, s: FlatVector, weights: MixingWeights) -> None:
        """See `Gossiper`."""
        self.read(s, weights)
        self._is_torn = self.phase + 1 < self.num_phases

    def _post_headers(self) -> None:
        device = self.transport.device
        self._headers = {
            peer: (
                Header(self.number_of(peer), self._digests.get(peer, 0) + self.checksum_of(peer), device=device),
                Header(device=device),
            )
            for peer in self._letters
        }
        sends = {peer: (mine.raw,) for peer, (mine, _) in self._headers.items()}
        recvs = {peer: (theirs.raw,) for peer, (_, theirs) in self._headers.items()}
        what = f"round {self._t}, header"
        self._pending_headers = self.transport.exchange(sends, recvs, tag=_HEADER_TAG, what=what)

    def _wait(self) -> None:
        """[Note: out of step] Headers before messages, whose size may be another where the number is."""
        headers, messages = self._pending_headers, self._pending
        self._pending_headers = self._pending = None
        assert messages is not None, "no round is in flight: start() comes first"
        assert headers is not None, "headers are posted with every message"
        headers.wait()
        for peer, (mine, theirs) in self._headers.items():
            self._require_equal(peer, mine.read(), theirs.read())
        messages.wait()
        for peer, letters in self._letters.items():
            total = sum(int(envelope.raw.view(torch.int64).sum()) for envelope in letters)
            self._digests[peer] = (31 * self._digests.get(peer, 0) + total) % _WORD

    def _require_equal(self, peer: int, mine: tuple[int, int], theirs: tuple[int, int]) -> None:
        names = self.transport.names
        who = f"rank {names[self.transport.rank]}: round {self._t}"
        remedy = "resume all ranks from the same checkpoint, or all without one"
        if mine[0] != theirs[0]:
            raise RuntimeError(
                f"{who}: rank {names[peer]} sent its message number {theirs[0]}, expected number {mine[0]}: the two "
                f"remember different rounds; {remedy}"
            )
        if mine[1] != theirs[1]:
            raise RuntimeError(
                f"{who}: rank {names[peer]} remembers another past of message number {mine[0]} (digest {theirs[1]}), "
                f"expected that of this rank (digest {mine[1]}); {remedy}, and check the machines if this comes back"
            )

    # State.

    def state_dict(self) -> dict[str, Any]:
        """See `Mixer`; shares memory, like a module's. Empty after a round that failed."""
        if self._layout is None:
            return dict(self._loaded)
        if self._is_torn:
            return {}
        digests = {"peers": list(self._digests), "digests": list(self._digests.values())}
        return {"algorithm": type(self).__name__, **digests, **self.memory()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Mixer`; an empty state starts afresh. Takes effect in the next round, where shapes are checked."""
        if state and state.get("algorithm") != type(self).__name__:
            raise ValueError(
                f"got state {sorted(state)} of {state.get('algorithm', 'another algorithm')}, expected that of "
                f"{type(self).__name__}; load a checkpoint of the same gossiper"
            )
        self._layout, self._loaded, self._is_torn = None, copy.deepcopy(dict(state)), False

    def prepare(self, s: FlatVector) -> None:
        """Know the layout of s, and have memory for it."""
        if self._layout == s.layout and self._device == s.raw.device:
            return
        loaded = self._loaded
        if self._layout is not None and self._layout == s.layout:
            loaded = self.state_dict()  # moved to another device
        elif self._layout is not None:
            what = "other tensors, or tensors of other dtypes, are trained than before"
            warnings.warn(f"{self}: {what}, so its memory starts afresh", stacklevel=2)
        self._layout, self._device = None, s.raw.device
        self._coded = sections(s.layout, self.is_coded)
        # Buffers apart from parameters, which may have another step size and other weights.
        self._exact = sections(s.layout, lambda part: not part.is_buffer and not self.is_coded(part))
        self._exact += sections(s.layout, lambda part: part.is_buffer)
        self.exact_sizes = [(s.layout.segments[part.segment].dtype, part.last - part.first) for part in self._exact]
        self.make_memory([_wide(section.of(s)) for section in self._coded])
        if loaded:
            self.set_memory(loaded)
        self._digests = dict(zip(loaded.get("peers", ()), loaded.get("digests", ()), strict=True))
        self._layout, self._loaded = s.layout, {}
        if self.transport.rank == 0:  # all have the same layout
            self._warn_of_little(s.layout)

    def _warn_of_little(self, layout: FlatLayout) -> None:
        """Say where compression saves little or nothing; silent for models that are mostly matrices."""
        exact, coded = (
            sum((part.last - part.first) * layout.segments[part.segment].dtype.itemsize for part in parts)
            for parts in ([part for part in self._exact if not part.parts[0].is_buffer], self._coded)
        )
        if exact + coded < _LEAST_BYTES:
            return
        if exact > _MOST_EXACT * (exact + coded):
            warnings.warn(
                f"{self}: {exact / (exact + coded):.0%} of the parameters' bytes ({exact:,}) are of parameters of one "
                f"dimension, which are sent as they are, so a round sends at least that; {self.remedy_for_exact}",
                stacklevel=3,
            )
        elif coded and self.num_coded_bytes() >= coded:
            warnings.warn(
                f"{self}: in code {self.num_coded_bytes():,} bytes are sent for {coded:,} of parameters, so nothing "
                "is saved: the code is too fine; leave the gossiper out, or "
                "choose a coarser code",
                stacklevel=3,
            )

    # Sections of s.

    def coded(self, s: FlatVector) -> list[Tensor]:
        """The values that go in code, one tensor per section, float32 or float64; views of s where it is as wide."""
        return [_wide(section.of(s)) for section in self._coded]

    def copy_exact(self, s: FlatVector, envelope: Envelope) -> None:
        """The first pieces of the envelope <- what travels exactly."""
        for section, piece in zip(self._exact, envelope.pieces, strict=False):
            piece.copy_(section.of(s))

    def add_exact(self, s: FlatVector, weights: MixingWeights) -> None:
        """s <- s + (W - I) s for what travels exactly: the first pieces of the envelopes."""
        for peer, letters in self._letters.items():
            for section, mine, theirs in zip(self._exact, *(letter.pieces for letter in letters), strict=False):
                if section.parts[0].is_buffer:
                    alpha = self._buffer_weights.inp[peer]
                else:
                    alpha = self.exact_step_size * weights.inp[peer]
                add_(section.of(s), theirs, alpha=alpha)
                add_(section.of(s), mine, alpha=-alpha)

    def targets(self, s: FlatVector) -> list[Tensor]:
        """Where corrections are added: the sections in code themselves, or zeros in float32 where s is narrower."""
        pairs = zip(self._coded, self.coded(s), strict=True)
        return [torch.zeros_like(x) if _is_narrow(section.of(s)) else x for section, x in pairs]

    def apply_targets(self, s: FlatVector, targets: Sequence[Tensor]) -> None:
        """s <- s + what was added to the targets."""
        for section, target in zip(self._coded, targets, strict=True):
            if _is_narrow(section.of(s)):
                add_(section.of(s), target, alpha=1.0)


def copy_memory(gossiper: CompressedGossiper, into: Sequence[Memory], from_: Sequence[Mapping[str, Tensor]]) -> None:
    """Copy tensors of the same names and shapes.

    Raises:
        ValueError: they are others, naming them.
    """
    shapes = [[{name: tuple(x.shape) for name, x in memory.items()} for memory in side] for side in (from_, into)]
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
