"""RelaySGD: ranks relay sums of models through a tree, so that every rank averages all models, some of them late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..devices import wide_dtype
from ..graph_manager import DoubleBinaryTreeGraph
from ..graph_manager.base import GraphManager
from ..mixing_manager.base import MixingManager
from ..registry import Paper
from ..rounds import Algorithm, Exchange, Memory, MessageBuffer, Round, Vectors, wide


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
        received = {j: relay.fields(j, link["received"]) for j, link in links.items()}
        messages = {j: v.message(relay.sizes(j), key=j) for j in v.peers}
        for tree, neighbours in enumerate(relay.neighbours):
            for j in messages.keys() & neighbours:  # without peers that are lost
                others = [relay.of(received[k], k, tree) for k in neighbours if k != j and k in received]
                for m_ij, x, *m_ki in zip(
                    relay.of(messages[j].fields, j, tree), relay.shares(v, tree), *others, strict=True
                ):
                    m_ij.copy_(x)  # the last one is the count, c_ij <- 1
                    for message in m_ki:
                        m_ij.add_(message)
        replies = yield Exchange(messages)
        for tree, neighbours in enumerate(relay.neighbours):
            m_ji = [relay.of(replies[j].fields, j, tree) for j in neighbours if j in replies]
            own = n - sum(fields[-1][0] for fields in m_ji)
            for index, x in enumerate(relay.shares(v, tree)[:-1]):
                total = x.to(wide(x.dtype)).mul_(own)  # x itself if it is wide
                for fields in m_ji:
                    total.add_(fields[index])
                x.copy_(total.div_(n))
        for j, reply in replies.items():
            links[j]["received"] = reply.raw


class Relay:
    """The shares of the model that each tree relays, with their counts.

    Args:
        v: the round, with the rank, the graph and the model.

    Attributes:
        neighbours: the neighbours of this rank in each tree.
    """

    def __init__(self, v: Vectors) -> None:
        trees = trees_of(v.mixing.graph)
        self.neighbours = [
            sorted({j for link in tree for j in link if v.rank in link and j != v.rank}) for tree in trees
        ]
        assert v.x.flat is not None, "only the model is relayed"
        self._numels = [segment.numel for segment in v.x.flat.layout.segments]
        self._one = torch.ones(1, dtype=wide_dtype(v.x.device), device=v.x.device)
        self._sizes = [[(wide(x.dtype), x.numel()) for x in self.shares(v, tree)] for tree in range(len(trees))]

    def shares(self, v: Vectors, tree: int) -> list[Tensor]:
        """Return the elements of each part that this tree relays, as views, and the count of one model."""
        return [*(x[first:last] for x, (first, last) in zip(v.x.parts, self._places(tree), strict=True)), self._one]

    def sizes(self, peer: int) -> list[tuple[torch.dtype, int]]:
        """Return the sizes of the fields of a message to this peer, for each tree in which it is a neighbour."""
        return [size for tree in self._trees(peer) for size in self._sizes[tree]]

    def zeros(self, peer: int) -> dict[str, Any]:
        """Return the state of a link before its first message, as bytes, since its fields have several dtypes."""
        return {"received": MessageBuffer(self.sizes(peer), self._one.device).raw}

    def fields(self, peer: int, message: Tensor) -> Sequence[Tensor]:
        """Return the fields of a message from this peer; they share memory with its bytes."""
        return MessageBuffer(self.sizes(peer), message).fields

    def of(self, fields: Sequence[Tensor], peer: int, tree: int) -> Sequence[Tensor]:
        """Return the fields of a message that belong to this tree; the last field is the count, float64 [1]."""
        size = len(self._sizes[tree])
        first = self._trees(peer).index(tree) * size
        return fields[first : first + size]

    def _places(self, tree: int) -> list[tuple[int, int]]:
        """Return the first element and the end of this tree's share of each segment, with buffers at the end."""
        num_trees = len(self.neighbours)
        return [(n * tree // num_trees, n * (tree + 1) // num_trees) for n in self._numels]

    def _trees(self, peer: int) -> list[int]:
        return [tree for tree, neighbours in enumerate(self.neighbours) if peer in neighbours]


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
