"""What all compressed gossip shares: which numbers are in code, numbered messages, memory that is checkpointed."""

from __future__ import annotations

import copy
import math
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .envelope import Envelope, Header, sections
from .flat_vector import FlatLayout, FlatVector, Part, add_
from .gossiper import Gossiper, Messages
from .mixing_manager import MixingManager, MixingWeights
from .transport import Pending

Memory = dict[str, Tensor]


class CompressedGossiper(Gossiper):
    """x <- x + step_size (W - I) s', where s' is what the peers know of s from messages that are smaller than s.

    Floating-point buffers (BatchNorm statistics) always travel exactly and are mixed by W itself: a lossy code may
    make a variance negative. Segments narrower than float32 are coded in float32.

    [Note: out of step] Ahead of every message goes a header with its number, so that a peer whose memory belongs to
    another round (resumed from another checkpoint, say) is an error and never silent corruption.

    Args:
        step_size: of consensus, gamma in the papers; positive.
    """

    needs_symmetric_weights = True
    needs_static_graph = False

    def __init__(self, *, step_size: float) -> None:
        if not (isinstance(step_size, int | float) and 0 < step_size < math.inf):
            raise ValueError(
                f"{type(self).__name__}: got step_size={step_size!r}, expected a positive number; 1 mixes as the "
                "weights say, strong compression wants less"
            )
        self.step_size = float(step_size)
        self._layout: FlatLayout | None = None
        self._device: torch.device | None = None
        self._loaded: Mapping[str, Any] = {}
        self._pending_headers: Pending | None = None

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

    @property
    def exact_step_size(self) -> float:
        """The step size of parameters that travel exactly: there is nothing to be careful about."""
        return 1.0

    # The memory of the algorithm.

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

    def state_dict(self) -> dict[str, Any]:
        """See `Mixer`; shares memory, like a module's."""
        return dict(self._loaded) if self._layout is None else {"algorithm": type(self).__name__, **self.memory()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Mixer`; an empty state starts afresh. Takes effect in the next round, where shapes are checked."""
        if state and state.get("algorithm") != type(self).__name__:
            raise ValueError(
                f"got state {sorted(state)} of {state.get('algorithm', 'another algorithm')}, expected that of "
                f"{type(self).__name__}; load a checkpoint of the same gossiper"
            )
        self._layout, self._loaded = None, copy.deepcopy(dict(state))

    def prepare(self, s: FlatVector) -> None:
        """Know the layout of s, and have memory for it."""
        if self._layout == s.layout and self._device == s.raw.device:
            return
        if self._layout is not None:
            if self._layout == s.layout:
                self._loaded = self.state_dict()  # moved to another device
            else:
                warnings.warn(
                    f"{self}: other tensors are trained than before, so its memory starts afresh", stacklevel=2
                )
                self._loaded = {}
        self._coded = sections(s.layout, self.is_coded)
        # Buffers apart from parameters, which may have another step size.
        self._exact = sections(s.layout, lambda part: not part.is_buffer and not self.is_coded(part))
        self._exact += sections(s.layout, lambda part: part.is_buffer)
        self._layout, self._device = s.layout, s.raw.device
        self.make_memory([_wide(section.of(s)) for section in self._coded])
        loaded, self._loaded = self._loaded, {}
        if loaded:
            self.set_memory(loaded)

    # Sections of s.

    @property
    def exact_sizes(self) -> list[tuple[torch.dtype, int]]:
        """Pieces of a message that hold what travels exactly."""
        assert self._layout is not None
        return [(self._layout.segments[section.segment].dtype, section.last - section.first) for section in self._exact]

    def coded(self, s: FlatVector) -> list[Tensor]:
        """The values that go in code, one tensor per section, float32 or float64; views of s where it is as wide."""
        return [_wide(section.of(s)) for section in self._coded]

    def copy_exact(self, s: FlatVector, envelope: Envelope) -> None:
        """The first pieces of the envelope <- what travels exactly."""
        for section, piece in zip(self._exact, envelope.pieces, strict=False):
            piece.copy_(section.of(s))

    def add_exact(self, s: FlatVector, letters: Sequence[tuple[Envelope, float]]) -> None:
        """s <- s + sum of weight * (first pieces of the envelope)."""
        for envelope, weight in letters:
            for section, piece in zip(self._exact, envelope.pieces, strict=False):
                step_size = 1.0 if section.parts[0].is_buffer else self.exact_step_size
                add_(section.of(s), piece, alpha=step_size * weight)

    def targets(self, s: FlatVector) -> list[Tensor]:
        """Where corrections are added: the sections in code themselves, or zeros in float32 where s is narrower."""
        return [
            torch.zeros_like(x) if _is_narrow(section.of(s)) else x for section, x in zip(self._coded, self.coded(s))
        ]

    def apply_targets(self, s: FlatVector, targets: Sequence[Tensor]) -> None:
        """s <- s + what was added to the targets."""
        for section, target in zip(self._coded, targets, strict=True):
            if _is_narrow(section.of(s)):
                add_(section.of(s), target, alpha=1.0)

    # Headers.

    def post_headers(self, peers: Sequence[int]) -> None:
        """Exchange headers with all peers of this round, ahead of the messages."""
        device = self.transport.device
        self._headers = {peer: Header(*self.header_of(peer), device=device) for peer in peers}
        self._inbox_headers = {peer: Header(device=device) for peer in peers}
        sends, recvs = ({p: (h.raw,) for p, h in headers.items()} for headers in (self._headers, self._inbox_headers))
        self._pending_headers = self.transport.exchange(sends, recvs, tag=self._t)

    @abstractmethod
    def header_of(self, peer: int) -> tuple[int, int]:
        """The number of the next message to and from this peer, and a checksum on which both must agree."""

    def _wait(self) -> None:
        """[Note: out of step] Before the message, whose size may be another where its number is."""
        assert self._pending is not None, "no round is in flight: start() comes first"
        assert self._pending_headers is not None, "headers are posted with every message"
        pending, self._pending_headers = self._pending_headers, None
        pending.wait()
        for peer, header in self._inbox_headers.items():
            got, expected = header.read(), self._headers[peer].read()
            if got == expected:
                continue
            who = f"rank {self.transport.names[self.transport.rank]}: round {self._t}"
            if got[0] != expected[0]:
                raise RuntimeError(
                    f"{who}: rank {self.transport.names[peer]} sent its message number {got[0]}, expected number "
                    f"{expected[0]}: the two remember different rounds; resume all ranks from the same checkpoint, or "
                    "all without one"
                )
            raise RuntimeError(
                f"{who}: what rank {self.transport.names[peer]} remembers has the checksum {got[1]}, expected "
                f"{expected[1]}, which this rank has; resume all ranks from the same checkpoint, and check the "
                "machines if this comes back"
            )
        super()._wait()


class BroadcastGossiper(CompressedGossiper):
    """Compressed gossip where a rank says the same to all its peers; an algorithm writes `say` and `hear`.

    Both are called for each section in code, with what `remember` allocated for it.
    """

    def __init__(self, *, step_size: float) -> None:
        super().__init__(step_size=step_size)
        self.num_messages = 0
        self._memory: list[Memory] = []
        self._own: Envelope | None = None
        self._inbox: dict[int, Envelope] = {}

    @abstractmethod
    def remember(self, x: Tensor) -> Memory:
        """New memory for a section of values like x, by name."""

    @abstractmethod
    def message_like(self, x: Tensor) -> Tensor:
        """A message for a section of values like x: uint8 [num_bytes]."""

    @abstractmethod
    def say(self, x: Tensor, memory: Memory, message: Tensor) -> None:
        """message <- the code of x, which is not changed; `memory` is updated."""

    @abstractmethod
    def hear(self, target: Tensor, memory: Memory, messages: Sequence[tuple[Tensor, float]]) -> None:
        """target <- target + step_size (W - I) s'.

        Args:
            target: where the correction is added, like x.
            memory: updated.
            messages: every message with its weight in the row of W - I, this rank's own first.
        """

    def encode(self, s: FlatVector, out_peers: Sequence[int], in_peers: Sequence[int]) -> tuple[Messages, Messages]:
        """See `Gossiper`."""
        self.prepare(s)
        assert self._own is not None
        own = self._own
        self.post_headers(in_peers)
        self.copy_exact(s, own)
        for x, memory, message in zip(self.coded(s), self._memory, own.pieces[len(self._exact) :], strict=True):
            self.say(x, memory, message)
        for j in in_peers:
            if j not in self._inbox:
                self._inbox[j] = Envelope(own.sizes, own.raw.device)
        return dict.fromkeys(out_peers, (own.raw,)), {j: (self._inbox[j].raw,) for j in in_peers}

    def decode(self, s: FlatVector, weights: MixingWeights) -> None:
        """See `Gossiper`. Reads the messages, never s."""
        assert self._own is not None
        self.num_messages += 1
        letters = [(self._own, weights.own - 1), *((self._inbox[j], weight) for j, weight in weights.inp.items())]
        self.add_exact(s, letters)
        targets = self.targets(s)
        for index, (target, memory) in enumerate(zip(targets, self._memory, strict=True), start=len(self._exact)):
            self.hear(target, memory, [(letter.pieces[index], weight) for letter, weight in letters])
        self.apply_targets(s, targets)

    def header_of(self, peer: int) -> tuple[int, int]:
        """See `CompressedGossiper`."""
        return self.num_messages, 0

    def make_memory(self, coded: Sequence[Tensor]) -> None:
        """See `CompressedGossiper`."""
        self.num_messages = 0
        self._memory = [self.remember(x) for x in coded]
        sizes = [*self.exact_sizes, *((torch.uint8, self.message_like(x).numel()) for x in coded)]
        assert self._device is not None
        self._own, self._inbox = Envelope(sizes, self._device), {}

    def memory(self) -> dict[str, Any]:
        """See `CompressedGossiper`."""
        return {"num_messages": self.num_messages, "sections": self._memory}

    def set_memory(self, memory: Mapping[str, Any]) -> None:
        """See `CompressedGossiper`."""
        self.num_messages = memory["num_messages"]
        copy_memory(self, self._memory, memory["sections"])


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
