"""RelaySGD: sums of models are relayed through a tree, so that every rank averages those of all, some of them late."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..flat.layout import FlatLayout
from ..flat.vector import FlatVector
from ..gossiper.gossiper import Gossiper, Messages
from ..gossiper.message import MessageBuffer
from ..graph_manager.base import GraphManager
from ..graph_manager.static_graphs import DoubleBinaryTreeGraph
from ..mixing_manager.base import MixingManager, MixingWeights
from ..transport.base import Transport


class RelaySGD(Gossiper):
    """RelaySGD: each message is the sum of all models on its sender's side of the link, a step late for each hop.

    A round on rank i of n with the neighbours j in a tree; messages m and counts c are zero at first:

        m_ij = x_i + sum of the m_ki of the round before over the neighbours k but j
        c_ij = 1   + sum of the c_ki of the round before over the neighbours k but j
        send m_ij and c_ij to each j, receive m_ji and c_ji
        x_i  = ((n - sum_j c_ji) x_i + sum_j m_ji) / n

    After as many rounds as the tree is deep every rank has the mean of one model of each rank, not weights that fade
    with the distance: x_i = 1/n sum_j x_j, where x_j is as many rounds old as there are hops from j, less one. Where
    the models stand still they are equal and the mean of all steps is zero: with a constant learning rate and exact
    gradients that is the optimum of the mean of all losses, however the data of the ranks differ, with any optimizer
    whose steps are linear in the gradients.

    The weights W of the mixing are not used, only its graph. On a `DoubleBinaryTreeGraph`, the default, the first half
    of every segment of the vector is relayed through one tree and the second half through the other, so that all ranks
    send about twice the model per round. `ChainGraph` and any tree of networkx carry whole models. Sums are of float32
    at least. A rank keeps a message to and from each neighbour. After a round that failed the state is no longer
    usable: resume all ranks from a checkpoint, or start without one.

    Vogels, He, Koloskova, Lin, Karimireddy, Stich, Jaggi, "RelaySum for Decentralized Deep Learning on Heterogeneous
    Data", NeurIPS 2021, arXiv 2110.04175, Algorithm 1.

    Raises:
        ValueError: (when the model is wrapped) the graph is no tree, or is to be used with overlap, exact averages or a
            membership.

    Example:
        >>> model = GossipDataParallel(model, gossiper=RelaySGD())
    """

    needs_symmetric_weights = True
    is_skippable = False
    keeps_models = True

    def __init__(self) -> None:
        self._layout: FlatLayout | None = None
        self._device = torch.device("cpu")
        self._loaded: Mapping[str, Any] = {}
        self._out: dict[int, MessageBuffer] = {}  # by peer
        self._in: dict[int, MessageBuffer] = {}

    def default_graph(self, world_size: int) -> GraphManager:
        """See `Gossiper`."""
        return DoubleBinaryTreeGraph(world_size)

    def check(self, mixing: MixingManager) -> None:
        """See `Mixer`."""
        trees_of(mixing.graph)

    def bind(self, mixing: MixingManager, transport: Transport) -> None:
        """See `Mixer`."""
        super().bind(mixing, transport)
        rank = transport.rank
        self._neighbours = [  # in each tree
            sorted({j for link in tree for j in link if rank in link and j != rank}) for tree in trees_of(mixing.graph)
        ]

    def encode(self, s: FlatVector, out_peers: Sequence[int], in_peers: Sequence[int]) -> tuple[Messages, Messages]:
        """See `Gossiper`: m_ij and c_ij."""
        self._prepare(s)
        for tree, neighbours in enumerate(self._neighbours):
            parts = self._parts(s, tree)
            for j in neighbours:
                *sums, count = self._fields(self._out[j], j, tree)
                others = [self._fields(self._in[k], k, tree) for k in neighbours if k != j]
                for index, (message, x) in enumerate(zip(sums, parts, strict=True)):
                    message.copy_(x)
                    for other in others:
                        message.add_(other[index])
                count.fill_(1.0)
                for other in others:
                    count.add_(other[-1])
        return {j: (self._out[j].raw,) for j in out_peers}, {j: (self._in[j].raw,) for j in in_peers}

    def decode(self, s: FlatVector, weights: MixingWeights) -> None:
        """See `Gossiper`: x_i = ((n - sum_j c_ji) x_i + sum_j m_ji) / n."""
        n = self.transport.world_size
        for tree, neighbours in enumerate(self._neighbours):
            received = [self._fields(self._in[j], j, tree) for j in neighbours]
            own = n - sum(message[-1][0] for message in received)
            for index, x in enumerate(self._parts(s, tree)):
                total = x.to(_wide(x.dtype)).mul_(own)  # x itself where it is wide
                for message in received:
                    total.add_(message[index])
                x.copy_(total.div_(n))

    def decode_difference(self, s: FlatVector, weights: MixingWeights) -> float:
        """See `Gossiper`."""
        before = s.clone()
        self.decode(s, weights)
        s.add_(before, alpha=-1.0)
        return 1.0

    # The parts of the vector that go through each tree, and the messages.

    def _parts(self, s: FlatVector, tree: int) -> list[Tensor]:
        """What of each segment goes through this tree; shares memory."""
        num_trees = len(self._neighbours)
        return [x[x.numel() * tree // num_trees : x.numel() * (tree + 1) // num_trees] for x in s.segments]

    def _fields(self, message: MessageBuffer, peer: int, tree: int) -> Sequence[Tensor]:
        """The sums of a message that belong to this tree, one for each segment, and their count, float64 [1]."""
        num_before = sum(peer in neighbours for neighbours in self._neighbours[:tree])
        size = len(message.fields) // sum(peer in neighbours for neighbours in self._neighbours)
        return message.fields[num_before * size : (num_before + 1) * size]

    def _prepare(self, s: FlatVector) -> None:
        """Make messages for s, with what is known of the neighbours: nothing, or what a checkpoint has."""
        if self._layout == s.layout and self._device == s.raw.device:
            return
        loaded = self._loaded
        if self._layout is not None and self._layout == s.layout:
            loaded = self.state_dict()  # moved to another device
        elif self._layout is not None:
            warnings.warn(
                f"{self}: other tensors, or tensors of other dtypes, are trained than before, so that what it relays "
                "starts anew",
                stacklevel=2,
            )
        self._layout, self._device = s.layout, s.raw.device
        for j in sorted({j for neighbours in self._neighbours for j in neighbours}):
            sizes: list[tuple[torch.dtype, int]] = []
            for tree, neighbours in enumerate(self._neighbours):
                if j in neighbours:
                    sizes += [(_wide(x.dtype), x.numel()) for x in self._parts(s, tree)]
                    sizes.append((torch.float64, 1))
            self._out[j], self._in[j] = (MessageBuffer(sizes, self._device) for _ in range(2))
        if loaded:
            self._take(loaded)
        self._loaded = {}

    # State.

    def state_dict(self) -> dict[str, Any]:
        """See `Mixer`: the messages that were received last; shares memory with the gossiper."""
        if self._layout is None:
            return dict(self._loaded)
        received = {j: message.raw for j, message in self._in.items()}
        return {"algorithm": type(self).__name__, "graph": repr(self.mixing.graph), "received": received}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Mixer`; an empty state starts anew. The next round uses it, and checks its shapes."""
        if state and (state.get("algorithm"), state.get("graph")) != (type(self).__name__, repr(self.mixing.graph)):
            raise ValueError(
                f"{self}: got the state of {state.get('algorithm', 'another algorithm')} on {state.get('graph')}, "
                f"expected that of {type(self).__name__} on {self.mixing.graph}; resume with the same graph"
            )
        self._layout, self._loaded = None, copy.deepcopy(dict(state))

    def _take(self, state: Mapping[str, Any]) -> None:
        found, own = ({j: x.numel() for j, x in side} for side in (state["received"].items(), self._raw().items()))
        if found != own:
            self._layout = None
            raise ValueError(
                f"{self}: got messages of {sorted(found.values())} bytes, expected {sorted(own.values())}; load a "
                "checkpoint of the same model and the same trained tensors"
            )
        for j, message in self._raw().items():
            message.copy_(state["received"][j])

    def _raw(self) -> dict[int, Tensor]:
        return {j: message.raw for j, message in self._in.items()}


def trees_of(graph: GraphManager) -> Sequence[Sequence[tuple[int, int]]]:
    """The links of the trees that models are relayed through: those of a `DoubleBinaryTreeGraph`, or the graph itself.

    Raises:
        ValueError: the graph is no tree, is directed or changes.
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


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= 4 else torch.float32
