"""CHOCO-SGD: gossip of compressed differences between each model and a public copy of it; also where peers may fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compression.compressor import Compressor
from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingWeights
from .broadcast import BroadcastGossiper, checked_compressor
from .compressed import CompressedGossiper, State
from .message import MessageBuffer


class Choco(BroadcastGossiper):
    """CHOCO-SGD: each rank sends the compressed difference between its model x_i and a public copy x̂_i of it.

    A round on rank i with the neighbours j, after the local SGD step; x̂_i and drift_i are zero at first:

        q_i = C(x_i - x̂_i)                                      compress
        x̂_i = x̂_i + q_i
        send q_i to all neighbours, receive their q_j           (broadcast.py)
        drift_i = drift_i + sum_j W_ij (q_j - q_i)              apply
        x_i = x_i + step_size drift_i

    All neighbours of a rank follow its public copy, since the q alone determine it. As the x̂ approach the x, the
    differences that are compressed shrink, and so does the error of compression: for any contraction C the ranks agree
    exactly in the limit. A rank does not store the copies of its neighbours, only drift_i = sum_j W_ij (x̂_j - x̂_i), so
    the state takes twice the memory of the model, whatever the degree, and a scratch tensor takes as much again. The
    graph must not change, because drift_i is a sum over the same neighbours in all rounds.

    The step size has to fit the compressor and the graph; training diverges if it is too large. On a ring of 8 about
    0.4 works for signs and 0.04 for the largest 1 % of the entries.

    Koloskova, Stich, Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
    Communication", ICML 2019, arXiv 1902.00340, Algorithm 2 in the memory-efficient form of its appendix.

    Args:
        compressor: the compressor C; a contraction.
        step_size: the consensus step size, gamma in the paper.

    Example:
        >>> ring = RingGraph(8, peers_per_itr=2)
        >>> model = GossipDataParallel(model, graph=ring, push_sum=False, gossiper=Choco(SignNorm(), step_size=0.4))
    """

    needs_static_graph = True

    def __init__(self, compressor: Compressor, *, step_size: float) -> None:
        super().__init__(step_size=step_size)
        self.compressor = checked_compressor(compressor)
        self._scratch: dict[tuple[torch.dtype, int], Tensor] = {}  # holds x - x̂, one for each dtype and length

    def init_state(self, x: Tensor) -> State:
        """See `BroadcastGossiper`. `public` is x̂; both are zero at first, as in the paper."""
        return {"public": torch.zeros_like(x), "drift": torch.zeros_like(x)}

    def compress(self, x: Tensor, state: State, message: Tensor) -> None:
        """message <- q = C(x - x̂);  x̂ <- x̂ + q."""
        difference = torch.sub(x, state["public"], out=self._scratch[x.dtype, x.numel()])
        self.compressor.compress(difference, message, t=self.num_messages)
        self.compressor.add_decompressed(message, state["public"])

    def apply(self, target: Tensor, state: State, messages: Sequence[tuple[Tensor, float]]) -> None:
        """drift <- drift + sum_j (W - I)_ij q_j;  target <- target + step_size drift."""
        for message, weight in messages:
            self.compressor.add_decompressed(message, state["drift"], alpha=weight)
        target.add_(state["drift"], alpha=self.step_size)

    def message_like(self, x: Tensor) -> Tensor:
        """See `BroadcastGossiper`."""
        return self.compressor.message_like(x)

    def allocate_state(self, values: Sequence[Tensor]) -> None:
        """See `CompressedGossiper`."""
        self._scratch = {(x.dtype, x.numel()): torch.empty_like(x) for x in values}
        super().allocate_state(values)

    def state(self) -> dict[str, Any]:
        """See `CompressedGossiper`; includes the mixing, since drift is a sum over its neighbours and weights."""
        return {"mixing": repr(self.mixing), **super().state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `CompressedGossiper`."""
        if state["mixing"] != repr(self.mixing):
            raise ValueError(
                f"{self}: got state of {state['mixing']}, expected {self.mixing}, since it holds a sum over the "
                "neighbours; resume on the same graph"
            )
        super().load_state(state)

    def for_membership(self) -> ElasticChoco:
        """See `Gossiper`.

        Raises:
            ValueError: of a subclass with an arithmetic of its own.
        """
        if any(getattr(type(self), name) is not getattr(Choco, name) for name in ("init_state", "compress", "apply")):
            raise ValueError(
                f"got a {type(self).__name__} with a membership, expected a Choco, whose rounds by link are known: "
                "derive from ElasticChoco in gossip_modules.gossiper.choco what is to run where peers may fail"
            )
        return ElasticChoco(self.compressor, step_size=self.step_size)

    def __repr__(self) -> str:
        return f"Choco({self.compressor}, step_size={self.step_size})"


class ElasticChoco(CompressedGossiper):
    """CHOCO-SGD where neighbours come and go: both ends of a link keep the two public copies that belong to it.

    A round on rank i, for each neighbour j; x̂_ij is the public copy of x_i that j knows, zero when the link begins:

        q_ij = C(x_i - x̂_ij)                                    compress
        x̂_ij = x̂_ij + q_ij
        send q_ij, receive q_ji
        x̂_ji = x̂_ji + q_ji
        x_i = x_i + step_size W_ij (x̂_ji - x̂_ij)                apply

    So a neighbour that dies takes its public copy with it, a new one begins with what both know, and what one end adds
    the other subtracts: the mean is kept. Links that began in one round have equal x̂_ij, which is then kept,
    compressed and packed once. While nobody comes or goes these are the rounds of `Choco`, to rounding.

    The state takes the memory of the model once for each neighbour, and once for each round in which links that there
    are began, mostly one; a scratch tensor takes as much again.

    Args:
        compressor, step_size: as for `Choco`, which gives this one to a wrapper with a membership.
    """

    is_elastic = True
    has_links = True
    needs_static_graph = True

    def __init__(self, compressor: Compressor, *, step_size: float) -> None:
        super().__init__(step_size=step_size)
        self.compressor = checked_compressor(compressor)
        self._born: dict[int, int] = {}  # the round in which each link began, by peer
        self._own: dict[int, list[Tensor]] = {}  # x̂_ij of each run, by the round in which the link began
        self._theirs: dict[int, list[Tensor]] = {}  # x̂_ji of each run, by peer
        self._outbox: dict[int, MessageBuffer] = {}  # by the round in which the link began
        self._inbox: dict[int, MessageBuffer] = {}

    def write_messages(self, s: FlatVector) -> None:
        """x̂_ij <- x̂_ij + q_ij, for all links that began in one round at once."""
        values = self.values_to_compress(s)
        for born in sorted({self._born[peer] for peer in self._buffers}):
            message = self._outbox[born]
            self.copy_exact(s, message)
            fields = message.fields[len(self._exact_runs) :]
            for x, public, field in zip(values, self._own[born], fields, strict=True):
                difference = torch.sub(x, public, out=self._scratch[x.dtype, x.numel()])
                self.compressor.compress(difference, field, t=self._t)
                self.compressor.add_decompressed(field, public)

    def apply_messages(self, s: FlatVector, weights: MixingWeights) -> None:
        """x̂_ji <- x̂_ji + q_ji;  x_i <- x_i + step_size sum_j W_ij (x̂_ji - x̂_ij)."""
        self.add_exact(s, weights)
        targets = self.targets(s)
        for peer in self._buffers:
            fields, own = self._inbox[peer].fields[len(self._exact_runs) :], self._own[self._born[peer]]
            for target, field, mine, theirs in zip(targets, fields, own, self._theirs[peer], strict=True):
                self.compressor.add_decompressed(field, theirs)
                difference = torch.sub(theirs, mine, out=self._scratch[mine.dtype, mine.numel()])
                target.add_(difference, alpha=self.step_size * weights.inp[peer])
        self.add_targets(s, targets)

    # Links.

    def buffers_for(self, peer: int) -> tuple[MessageBuffer, MessageBuffer]:
        """See `CompressedGossiper`; begins the link if there is none."""
        if peer not in self._born:
            self._born[peer] = self._t
            self._theirs[peer] = self._zeros()
        born = self._born[peer]
        if born not in self._own:
            self._own[born] = self._zeros()
        for box, key in ((self._outbox, born), (self._inbox, peer)):
            if key not in box:
                box[key] = MessageBuffer(self._sizes, self._device)
        return self._outbox[born], self._inbox[peer]

    def message_number(self, peer: int) -> int:
        """See `LinkedGossiper`: the round, since workers that came later have sent fewer."""
        return self._t

    def link_age(self, peer: int) -> int:
        """See `LinkedGossiper`: when it began."""
        return self._born[peer] + 1 if peer in self._born else 0

    def forget_link(self, peer: int) -> None:
        """See `LinkedGossiper`."""
        for kept in (self._born, self._theirs, self._inbox):
            kept.pop(peer, None)
        self._drop_unused()

    def renumber_links(self, ranks: Mapping[int, int]) -> None:
        """See `LinkedGossiper`."""
        self._born = {ranks[peer]: born for peer, born in self._born.items() if peer in ranks}
        self._theirs = {ranks[peer]: public for peer, public in self._theirs.items() if peer in ranks}
        self._inbox = {ranks[peer]: message for peer, message in self._inbox.items() if peer in ranks}
        self._drop_unused()

    def _drop_unused(self) -> None:
        used = set(self._born.values())
        self._own = {born: public for born, public in self._own.items() if born in used}
        self._outbox = {born: message for born, message in self._outbox.items() if born in used}

    # State.

    def allocate_state(self, values: Sequence[Tensor]) -> None:
        """See `CompressedGossiper`; links have theirs when they begin."""
        self._runs = [(x.dtype, x.numel()) for x in values]
        self._scratch = {(x.dtype, x.numel()): torch.empty_like(x) for x in values}
        self._sizes = [*self.exact_sizes, *((torch.uint8, self.compressor.message_like(x).numel()) for x in values)]
        self._born, self._own, self._theirs, self._outbox, self._inbox = {}, {}, {}, {}, {}

    def _zeros(self) -> list[Tensor]:
        return [torch.zeros(numel, dtype=dtype, device=self._device) for dtype, numel in self._runs]

    def num_compressed_bytes(self) -> int:
        """See `CompressedGossiper`."""
        return sum(numel for _, numel in self._sizes[len(self.exact_sizes) :])

    def state(self) -> dict[str, Any]:
        """See `CompressedGossiper`."""
        return {"born": self._born, "own": self._own, "theirs": self._theirs}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `CompressedGossiper`."""
        self._born = dict(state["born"])
        for kept, loaded in ((self._own, state["own"]), (self._theirs, state["theirs"])):
            kept.update({key: [x.to(self._device) for x in public] for key, public in loaded.items()})

    def __repr__(self) -> str:
        return f"Choco({self.compressor}, step_size={self.step_size})"
