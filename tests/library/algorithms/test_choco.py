"""CHOCO against its definition, where every rank holds a copy of every neighbour's public copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import Choco, GossipDataParallel, RingGraph, SignNorm, TopK
from gossip_modules.compression import Compressor
from gossip_modules.flat.layout import FlatLayout, TensorSpec
from gossip_modules.graph_manager import DynamicBipartiteExponentialGraph, HypercubeGraph
from gossip_modules.mixing_manager import MatrixMixing, MetropolisHastingsMixing, MixingManager
from gossip_modules.rounds.algorithm import Algorithm
from tests.harness.problems import loss_of, net, train_step
from tests.harness.ranks import run_ranks, solo_group
from tests.harness.reference import flatten
from tests.library.algorithms.contract import STATIC, bound, vector_of
from tests.library.algorithms.test_compressed import rounds_of

LAYOUT = FlatLayout.of([(torch.float64, [TensorSpec((3, 4)), TensorSpec((5,))])])
GRAPHS = ["ring", "star", "path"]
Code = Callable[[Tensor], Tensor]


def top(x: Tensor) -> Tensor:
    """The largest 30 % of a vector, in magnitude."""
    k = int(0.3 * x.numel())
    return torch.where(x.abs() >= x.abs().sort(descending=True).values[k - 1], x, torch.zeros_like(x))


def signs(x: Tensor) -> Tensor:
    """In blocks of 8, the mean magnitude as a float32 times the sign; zero is positive."""
    return torch.cat([b.abs().mean().float().double() * torch.where(b < 0, -1.0, 1.0).double() for b in x.split(8)])


CODES: list[tuple[Compressor, Code]] = [(TopK(0.3), top), (SignNorm(8), signs)]
CODE_NAMES = [str(compressor) for compressor, _ in CODES]  # the same in every process: a function has an address


class Dense:
    """Algorithm 2 of the paper: x̂[i][j] is rank i's copy of rank j's public copy."""

    def __init__(self, x: Tensor, W: Tensor, code: Code, step_size: float) -> None:
        self.x, self.W, self.code, self.step_size = x.clone(), W, code, step_size
        n = len(x)
        self.peers = [[j for j in range(n) if W[i, j] and j != i] for i in range(n)]
        self.public = [{j: torch.zeros_like(x[0]) for j in (i, *self.peers[i])} for i in range(n)]

    def step(self) -> Tensor:
        """One round; the new x [n, d]."""
        ranks = range(len(self.x))
        q = [self.code(self.x[i] - self.public[i][i]) for i in ranks]
        for i in ranks:
            for j, copy in self.public[i].items():
                copy += q[j]
        for i in ranks:
            mine = self.public[i][i]
            for j in self.peers[i]:
                self.x[i] += self.step_size * self.W[i, j] * (self.public[i][j] - mine)
        return self.x.clone()


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize(("compressor", "code"), CODES, ids=CODE_NAMES)
def test_rounds_are_those_of_the_paper(compressor: Compressor, code: Code, graph: str) -> None:
    first, *rest = rounds_of(lambda: Choco(compressor, step_size=0.35), STATIC[graph], 10, LAYOUT)
    dense = Dense(first, STATIC[graph].matrix(0), code, 0.35)
    for x in rest:
        torch.testing.assert_close(x, dense.step(), rtol=0, atol=1e-6 if code is signs else 1e-13)


@pytest.mark.parametrize("graph", GRAPHS)
def test_drift_is_the_sum_over_public_copies(graph: str) -> None:
    """drift_i = sum_j W_ij (x̂_j - x̂_i) at all times, though no rank keeps its neighbours' x̂."""

    def body(group: dist.ProcessGroup) -> list[dict[str, Tensor]]:
        gossiper, s = bound(Choco(TopK(0.2), step_size=0.3), STATIC[graph], group), vector_of(group.rank(), LAYOUT)
        states = []
        for t in range(8):
            gossiper.mix(s, t)
            vectors = gossiper.state_dict()["memory"]["vectors"]
            states.append({name: x.clone() for name, (x,) in vectors.items()})
        return states

    W = STATIC[graph].matrix(0)
    for ranks in zip(*run_ranks(4, body), strict=True):
        public, drift = (torch.stack([rank[name] for rank in ranks]) for name in ("public", "drift"))
        assert bool(public.any())
        torch.testing.assert_close(drift, W @ public - public, rtol=0, atol=1e-13)


@pytest.mark.parametrize("graph", GRAPHS)
def test_an_exact_code_is_plain_gossip(graph: str) -> None:
    first, *rest = rounds_of(lambda: Choco(TopK(1.0), step_size=0.8), STATIC[graph], 6, LAYOUT)
    W = STATIC[graph].matrix(0)
    for x in rest:
        first = first + 0.8 * (W @ first - first)
        torch.testing.assert_close(x, first, rtol=0, atol=1e-13)


def test_consensus_is_exact_in_the_limit() -> None:
    """Unlike a code of the model itself: the differences that are coded vanish."""
    layout = FlatLayout.of([(torch.float64, 8)])
    _, *rest = rounds_of(lambda: Choco(SignNorm(8), step_size=0.5), STATIC["ring"], 120, layout)
    assert float((rest[-1] - rest[-1].mean(0)).norm()) < 1e-4


@pytest.mark.parametrize(
    "mixing",
    [
        MetropolisHastingsMixing(DynamicBipartiteExponentialGraph(4)),
        MetropolisHastingsMixing(HypercubeGraph(4)),
        MatrixMixing(RingGraph(2), [[[0.5, 0.5], [0.5, 0.5]], [[0.75, 0.25], [0.25, 0.75]]]),
    ],
    ids=str,
)
def test_a_graph_that_changes_is_refused(mixing: MixingManager) -> None:
    message = r"Choco: got .* of period 2, expected a graph that never changes, .*; take a ring with peers_per_itr=2"
    with pytest.raises(ValueError, match=message):
        bound(Choco(SignNorm(), step_size=0.1), mixing, solo_group())


def test_bytes_are_the_compressors_and_a_header() -> None:
    compressor = TopK(0.1)
    layout = FlatLayout.of([(torch.float32, [TensorSpec((40, 10)), TensorSpec((30,)), TensorSpec((3,), True)])])
    size = compressor.num_bytes(430, torch.float32)

    def body(group: dist.ProcessGroup) -> None:
        gossiper = bound(Choco(compressor, step_size=0.1), STATIC["star"], group)
        for t in range(3):
            gossiper.mix(vector_of(group.rank(), layout), t)
        num_peers = 3 if group.rank() == 0 else 1
        assert gossiper.transport.num_bytes_sent == 3 * num_peers * (8 + 16 + -(-size // 8) * 8)

    run_ranks(4, body)


# In training: helpers that the tests of other algorithms share.


def coded(module: nn.Module) -> list[Tensor]:
    """The parameters in the order of the vector: matrices by shape, vectors."""
    parameters = list(module.parameters())
    matrices = sorted((p for p in parameters if p.dim() > 1), key=lambda p: tuple(p.shape))
    return [*matrices, *(p for p in parameters if p.dim() < 2)]


def train_ranks(make: Callable[[], Algorithm], mixing: MixingManager, num_steps: int) -> list[Tensor]:
    """The library: models of all ranks after each step of SGD, float64 [n, d]."""

    def body(group: dist.ProcessGroup) -> list[Tensor]:
        model = net(group.rank()).double()
        wrapper = GossipDataParallel(model, mixing=mixing, algorithm=make(), init_sync=False, process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        states = []
        for step in range(num_steps):
            train_step(wrapper, optimizer, group.rank(), step)
            states.append(flatten(model))
        return states

    return [torch.stack(ranks) for ranks in zip(*run_ranks(mixing.graph.world_size, body), strict=True)]


def train_dense(mix: Callable[[list[Tensor]], None], W: Tensor, num_steps: int) -> Iterator[Tensor]:
    """The same in one process: `mix` changes the parameters [n, ...] in place, W mixes the buffers."""
    models = [net(rank).double() for rank in range(len(W))]
    for step in range(num_steps):
        stacks = [torch.stack([p.detach() for p in row]) for row in zip(*map(coded, models), strict=True)]
        mix(stacks)
        buffers = list(zip(*([b for b in m.buffers() if b.is_floating_point()] for m in models), strict=True))
        means = [torch.tensordot(W, torch.stack(row), 1) for row in buffers]
        for rank, model in enumerate(models):
            tensors = [*coded(model), *(row[rank] for row in buffers)]
            for tensor, stack in zip(tensors, [*stacks, *means], strict=True):
                tensor.detach().copy_(stack[rank])
            model.zero_grad()
            loss_of(model, rank, step).backward()
            for p in model.parameters():
                assert p.grad is not None
                p.detach().sub_(0.05 * p.grad)
        yield torch.stack(list(map(flatten, models)))


def test_training_equals_the_dense_one() -> None:
    """Parameters by CHOCO, batch norm statistics by W itself, then a plain step; in float64."""
    W = STATIC["path"].matrix(0)
    dense = Dense(torch.zeros(4, sum(p.numel() for p in net().parameters())).double(), W, top, 0.4)

    def mix(stacks: list[Tensor]) -> None:
        dense.x = torch.cat([stack.flatten(1) for stack in stacks], dim=1)
        for stack, part in zip(stacks, dense.step().split([stack[0].numel() for stack in stacks], 1), strict=True):
            stack.copy_(part.view_as(stack))

    ranks = train_ranks(lambda: Choco(TopK(0.3), step_size=0.4), STATIC["path"], 6)
    for got, want in zip(ranks, train_dense(mix, W, 6), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
