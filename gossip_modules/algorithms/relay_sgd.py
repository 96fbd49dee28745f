"""RelaySGD: ranks relay sums of models through a tree, so that every rank averages all models, some of them late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..devices import wide_dtype
from ..graph_manager import DoubleBinaryTreeGraph
from ..graph_manager.base import GraphManager
from ..mixing_manager.base import MixingManager
from ..registry import Paper
from ..rounds import Algorithm, Exchange, Memory, MessageBuffer, Round, Vector, Vectors, wide


@dataclass(frozen=True)
class RelaySGD(Algorithm):
    """RelaySGD: a message is the sum of all models on the sender's side of the link, one round late for each hop.

    A round on rank i of n with the neighbours j in a tree; messages m and counts c are zero at first:

        m_ij = x_i + sum of the m_ki of the round before over the neighbours k but j
        c_ij = 1   + sum of the c_ki of the round before over the neighbours k but j
        send m_ij and c_ij to each j, receive m_ji and c_ji
        x_i  = ((n - sum_j c_ji) x_i + sum_j m_ji) / n

    After as many rounds as the tree is deep, every rank has the mean of one model of each rank, with equal weights at
    all distances: x_i = 1/n sum_j x_j, where x_j is late by the number of hops from j, less one. At a fixed point the
    models are equal and the mean of all steps is zero. With a constant learning rate and exact gradients that is the
    optimum of the mean of all losses, however the data of the ranks differ, for any optimizer whose steps are linear in
    the gradients.

    The weights W of the mixing apply to buffers only, such as BatchNorm statistics; for parameters only the graph
    matters. On a `DoubleBinaryTreeGraph`, the default, the first half of the tensors of each dtype is relayed through
    one tree and the second half through the other, so all ranks send about twice the model per round. `ChainGraph` and
    trees of networkx carry whole models. Sums are float32 at least. A rank keeps a message from each neighbour. During
    a round it also has the next message from and the own message to each neighbour.

    In a membership a worker that is lost takes the sums of its side of the tree with it. Their counts are missing too,
    so the own model of a rank stands in for them. A new generation has another tree, whose messages start from zero.

    Vogels, He, Koloskova, Lin, Karimireddy, Stich, Jaggi, "RelaySum for Decentralized Deep Learning on Heterogeneous
    Data", NeurIPS 2021, arXiv 2110.04175, Algorithm 1.

    Raises:
        ValueError: (when the model is wrapped) the graph is not a tree, or there is overlap or an exact average.

    Example:
        >>> model = GossipDataParallel(model, algorithm=RelaySGD())
    """

    summary: ClassVar[str] = "relays sums of models through trees, so that every rank averages the models of all"
    paper: ClassVar[Paper | None] = Paper(
        "Vogels, He, Koloskova, Lin, Karimireddy, Stich, Jaggi",
        "RelaySum for Decentralized Deep Learning on Heterogeneous Data",
        "NeurIPS 2021",
        "2110.04175",
    )
    takes_wire_dtype: ClassVar[bool] = False
    needs_current: ClassVar[bool] = True
    keeps_models: ClassVar[bool] = True
    is_skippable: ClassVar[bool] = False
    keeps_links: ClassVar[bool] = True
    takes_rows: ClassVar[bool] = False
    checks_messages: ClassVar[bool] = False
    needs_symmetric_weights: ClassVar[bool] = True

    def default_graph(self, world_size: int) -> GraphManager:
        """See `Algorithm`."""
        return DoubleBinaryTreeGraph(world_size)

    def check(self, mixing: MixingManager) -> None:
        """See `Algorithm`."""
        trees_of(mixing.graph)

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        n, relay = v.num_ranks, m.cached("relay", lambda: Relay(v))
        links = {j: m.link(j, partial(relay.zeros, j), generation="reset") for j in v.peers}
        before = {j: relay.fields(j, link["received"]) for j, link in links.items()}
        messages = {j: v.message(relay.sizes(j), key=j) for j in links}
        for tree in relay.trees:
            for j in links.keys() & tree.neighbours:  # without peers that are lost
                m_ij = tree.sums_in(messages[j].fields, j).copy_(tree.own(v.x))
                for other in tree.neighbours:
                    if other != j and other in before:
                        m_ij.add_(tree.sums_in(before[other], other))
        replies = yield Exchange(messages)
        for tree in relay.trees:
            received = [tree.sums_in(replies[j].fields, j) for j in tree.neighbours if j in replies]
            own = n - sum(m_ji.num_models[0] for m_ji in received)
            for index, x in enumerate(tree.own(v.x).shares):
                total = x.to(wide(x.dtype)).mul_(own)  # x itself if it is wide
                for m_ji in received:
                    total.add_(m_ji.shares[index])
                x.copy_(total.div_(n))
        for j, reply in replies.items():
            links[j]["received"] = reply.raw


class Sums(NamedTuple):
    """A sum of models, of the share that one tree relays.

    Attributes:
        shares: the sum, for each part of a vector; float32 or wider in messages.
        num_models: their number, of a wide dtype [1].
    """

    shares: Sequence[Tensor]
    num_models: Tensor

    def copy_(self, other: Sums) -> Sums:
        """self <- other."""
        for own, x in zip((*self.shares, self.num_models), (*other.shares, other.num_models), strict=True):
            own.copy_(x)
        return self

    def add_(self, other: Sums) -> Sums:
        """self <- self + other."""
        for own, x in zip((*self.shares, self.num_models), (*other.shares, other.num_models), strict=True):
            own.add_(x)
        return self


class Tree(NamedTuple):
    """One of the trees, with the share of the model that it relays.

    Attributes:
        neighbours: the neighbours of this rank in the tree, in ascending order.
        places: the first element and the end of its share of each part of a vector.
        one: the count of one model, [1].
        sizes: the dtype and the number of elements of its fields in a message: the shares of a sum, and the count.
        first_fields: the index of its first field in a message, by neighbour.
    """

    neighbours: list[int]
    places: list[tuple[int, int]]
    one: Tensor
    sizes: list[tuple[torch.dtype, int]]
    first_fields: dict[int, int]

    def own(self, x: Vector) -> Sums:
        """Return one model as a sum; shares memory with x."""
        return Sums([part[first:last] for part, (first, last) in zip(x.parts, self.places, strict=True)], self.one)

    def sums_in(self, fields: Sequence[Tensor], peer: int) -> Sums:
        """Return the sum of this tree in the fields of a message to or from a neighbour; shares memory."""
        first = self.first_fields[peer]
        *shares, num_models = fields[first : first + len(self.sizes)]
        return Sums(shares, num_models)


class Relay:
    """The trees through which a rank relays sums, and the layout of its messages.

    Args:
        v: the round, with the rank, the graph and the model.

    Attributes:
        trees: the trees, each with its share of the model. Buffers, which are at the end of the parts, have none.
    """

    def __init__(self, v: Vectors) -> None:
        assert v.x.flat is not None, "only the model is relayed"
        trees, segments, device = trees_of(v.mixing.graph), v.x.flat.layout.segments, v.x.device
        self.trees: list[Tree] = []
        self._device = device
        for index, links in enumerate(trees):
            neighbours = sorted({j for link in links for j in link if v.rank in link and j != v.rank})
            places = [(s.numel * index // len(trees), s.numel * (index + 1) // len(trees)) for s in segments]
            shares = [part[first:last] for part, (first, last) in zip(v.x.parts, places, strict=True)]
            sizes = [(wide(share.dtype), share.numel()) for share in shares]
            one = torch.ones(1, dtype=wide_dtype(device), device=device)
            first_fields = {j: len(self.sizes(j)) for j in neighbours}
            self.trees.append(Tree(neighbours, places, one, [*sizes, (one.dtype, 1)], first_fields))

    def sizes(self, peer: int) -> list[tuple[torch.dtype, int]]:
        """Return the sizes of the fields of a message to this peer, for each tree in which it is a neighbour."""
        return [size for tree in self.trees if peer in tree.neighbours for size in tree.sizes]

    def zeros(self, peer: int) -> dict[str, Any]:
        """Return the state of a link before its first message, as bytes, since its fields have several dtypes."""
        return {"received": MessageBuffer(self.sizes(peer), self._device).raw}

    def fields(self, peer: int, message: Tensor) -> Sequence[Tensor]:
        """Return the fields of a message from this peer; they share memory with its bytes."""
        return MessageBuffer(self.sizes(peer), message).fields


def trees_of(graph: GraphManager) -> Sequence[Sequence[tuple[int, int]]]:
    """Return the links of each tree: of the trees of a `DoubleBinaryTreeGraph`, or of the graph itself.

    Raises:
        ValueError: the graph is not a tree, is directed, or changes.
    """
    if isinstance(graph, DoubleBinaryTreeGraph):
        return graph.trees
    n = graph.world_size
    links = {(min(i, j), max(i, j)) for i in range(n) for j in graph.phone_book(i)}
    if graph.is_dynamic or not graph.is_symmetric or len(links) != n - 1:
        raise ValueError(
            f"RelaySGD: got {graph}, expected a tree that never changes, with all neighbours in every round: in a "
            "graph with cycles a model would be added twice; take DoubleBinaryTreeGraph, ChainGraph or "
            "NetworkXGraph(networkx.minimum_spanning_tree(links))"
        )
    return (sorted(links),)
