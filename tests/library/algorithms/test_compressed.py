"""The contract of every compressed gossiper: what a round does, and misuse."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gossip_modules
from gossip_modules import Choco, DeepSqueeze, Moniqua, PowerGossip, RingGraph, SignNorm, Sparta, TopK
from gossip_modules.extend import FlatVector
from gossip_modules.flat.layout import FlatLayout, TensorSpec
from gossip_modules.graph_manager import NPeerDynamicDirectedExponentialGraph
from gossip_modules.mixing_manager import MatrixMixing, MixingManager, UniformMixing
from gossip_modules.rounds.algorithm import Algorithm
from gossip_modules.rounds.stacked import Stacked
from tests.harness.ranks import run_ranks, solo_group
from tests.library.algorithms.contract import (
    ALGORITHMS,
    ANY_MEMORY,
    ANY_NAME,
    BUFFERS,
    EACH_MEMORY,
    LAYOUT,
    MIXINGS,
    SPECS,
    Make,
    bound,
    cases,
    ring,
    vector_of,
)


def rounds_of(
    make: Make, mixing: MixingManager, num_rounds: int, layout: FlatLayout = LAYOUT, n: int = 4
) -> list[Tensor]:
    """The first segment of all ranks, [n, d], before round 0 and after each round."""

    def body(group: dist.ProcessGroup) -> list[Tensor]:
        gossiper, s = bound(make(), mixing, group), vector_of(group.rank(), layout)
        return [s.segments[0].clone(), *(gossiper.mix(s, t).segments[0].clone() for t in range(num_rounds))]

    return [torch.stack(ranks) for ranks in zip(*run_ranks(n, body), strict=True)]


def test_every_class_is_in_the_contract() -> None:
    exported = {getattr(gossip_modules, name) for name in gossip_modules.__all__}
    algorithms = {x for x in exported if inspect.isclass(x) and issubclass(x, Algorithm) and x.checks_messages}
    classes = {x for x in algorithms if re.search(r"yield (Share|Exchange)\(", inspect.getsource(x.round))}
    assert classes == {type(make()) for make in ALGORITHMS.values()}


# What a round does.


@cases("star", "MATCHA", of=ANY_MEMORY)
def test_difference_is_finish_minus_the_sent_vector(name: str, graph: str) -> None:
    """The law: s + alpha * difference(s) = finish(s), over rounds; and s is only read between start and then."""

    def body(group: dist.ProcessGroup) -> None:
        one, other = (bound(ALGORITHMS[name](), MIXINGS[graph], group) for _ in range(2))
        x = vector_of(group.rank())
        for t in range(4):
            finished, s = x.clone(), x.clone()
            one.start(finished, t)
            assert torch.equal(finished.raw, x.raw)
            one.finish(finished)
            other.start(s, t)
            alpha = other.difference(s)
            x.add_(s, alpha=alpha)
            torch.testing.assert_close(x.segments[0], finished.segments[0], rtol=0, atol=1e-12)
            assert float(x.push_sum_weight) == float(finished.push_sum_weight) == 1
            x.copy_(finished)

    run_ranks(4, body)


@cases("negative", "bipartite")
def test_the_mean_is_kept(name: str, graph: str) -> None:
    first, *rest = rounds_of(ALGORITHMS[name], MIXINGS[graph], 6, FlatLayout.of([(torch.float32, [*SPECS, *BUFFERS])]))
    assert not torch.equal(first, rest[0]), "nothing was mixed"
    tolerance = 20 * torch.finfo(torch.float32).eps
    for x in rest:
        torch.testing.assert_close(x.double().mean(0), first.double().mean(0), rtol=0, atol=tolerance)


# How far apart ranks are after 30 rounds over how far they were, twice of what it is. Codes of the model itself, and
# of few bits, leave an error; the others have not ended.
RESIDUES = {"DeepSqueeze SignNorm": 0.6, "DeepSqueeze RandomK": 0.4, "PowerGossip cold": 0.4}


@cases("path", "bipartite")
def test_ranks_come_to_agree(name: str, graph: str) -> None:
    driver = Stacked(ALGORITHMS[name](), MIXINGS[graph], shapes=[(6, 7)])
    x = torch.randn(4, 42, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    first = (x - x.mean(0)).norm()
    for k in range(30):
        driver.step(x, k)
    assert (x - x.mean(0)).norm() < RESIDUES.get(name, 0.2) * first


@cases("negative")
def test_buffers_are_mixed_exactly_by_weights_that_are_not_negative(name: str, graph: str) -> None:
    """Never in code, never with a step size: a variance must not become negative."""
    mixing = MIXINGS[graph]
    rows = [mixing.buffer_weights(rank, 0) for rank in range(mixing.graph.world_size)]
    W = torch.diag(torch.tensor([own for own, _ in rows], dtype=torch.float64))
    for rank, (_, inp) in enumerate(rows):
        W[rank, list(inp)] = torch.tensor(list(inp.values()), dtype=torch.float64)
    assert float(W.min()) >= 0 > float(mixing.matrix(0).min())
    torch.testing.assert_close(W.sum(0), torch.ones(4, dtype=torch.float64))
    first, *rest = rounds_of(ALGORITHMS[name], MIXINGS[graph], 3)
    expected = first[:, -4:]
    for x in rest:
        expected = W @ expected
        torch.testing.assert_close(x[:, -4:], expected, rtol=0, atol=1e-13)


MANY = FlatLayout.of(
    [
        (torch.bfloat16, [TensorSpec((6, 4)), TensorSpec((5,))]),
        (torch.float32, [TensorSpec((3, 4)), TensorSpec((2,), True)]),
        (torch.float16, [TensorSpec((9, 2))]),
        (torch.float64, [TensorSpec((2, 3)), TensorSpec(())]),
        (torch.bfloat16, [TensorSpec((8,), True)]),
        (torch.float32, 0),
    ]
)


@ANY_NAME
def test_segments_of_all_dtypes(name: str) -> None:
    """The mean is kept to the rounding of each dtype, and its own narrow values never lose a correction by coding."""

    def body(group: dist.ProcessGroup) -> list[Tensor]:
        gossiper, s = bound(ALGORITHMS[name](), ring(2), group), vector_of(group.rank(), MANY)
        for t in range(4):
            gossiper.mix(s, t)
        return [segment.double() for segment in s.segments]

    ranks = run_ranks(2, body)
    for k, segment in enumerate(MANY.segments):
        before = torch.stack([vector_of(rank, MANY).segments[k].double() for rank in range(2)])
        after = torch.stack([rank[k] for rank in ranks])
        if segment.numel:
            assert not torch.equal(before, after)
        tolerance = 16 * torch.finfo(segment.dtype).eps
        torch.testing.assert_close(after.mean(0), before.mean(0), rtol=tolerance, atol=tolerance)


SHAPES: list[tuple[int, ...]] = [(), (1,), (0,), (3, 0), (1, 9), (9, 1), (2, 3, 2, 2), (17,)]


COMPLEX: list[torch.dtype] = [torch.complex64, torch.complex128]


@ANY_NAME
def test_any_shape(name: str) -> None:
    def body(group: dist.ProcessGroup) -> list[Tensor]:
        x = [torch.full(shape, 2.0 * group.rank() + 1) for shape in SHAPES]
        x += [torch.full((3, 4), (1 + 2j) * (2 * group.rank() + 1), dtype=dtype) for dtype in COMPLEX]
        return [bound(ALGORITHMS[name](), ring(2), group).average(value, num_rounds=3) for value in x]

    for first, second, shape in zip(*run_ranks(2, body), [*SHAPES, (3, 4), (3, 4)], strict=True):
        mean = 2.0 if first.is_floating_point() else 2.0 + 4j
        assert first.shape == second.shape == shape
        torch.testing.assert_close((first + second) / 2, torch.full_like(first, mean))
        if first.numel():
            spread = float((first - second).norm())
            assert spread < float(abs(torch.full_like(first, mean)).norm()), "ranks have not come closer"


@EACH_MEMORY
def test_shards_of_a_vector(name: str) -> None:
    """As the processes of a node gossip: cut anywhere, in the middle of matrices too."""
    specs = [*map(TensorSpec, [(9, 11), (9, 11), (21,)]), *BUFFERS]
    layout = FlatLayout.of([(torch.float32, specs), (torch.float64, [TensorSpec((5, 5))])], 4)

    def body(group: dist.ProcessGroup) -> FlatVector:
        s = vector_of(group.rank(), layout)
        shards = [(bound(ALGORITHMS[name](), ring(4), group), s.shard(i, 4)) for i in range(4)]
        for t in range(6):
            for gossiper, shard in shards:
                gossiper.mix(shard, t)
        return s

    ranks = run_ranks(4, body)
    for k in range(2):
        before = torch.stack([vector_of(rank, layout).segments[k].double() for rank in range(4)])
        after = torch.stack([s.segments[k].double() for s in ranks])
        torch.testing.assert_close(after.mean(0), before.mean(0), rtol=0, atol=1e-5)
        assert float((after - after.mean(0)).norm()) < 0.95 * float((before - before.mean(0)).norm())


@ANY_NAME
def test_world_of_one_keeps_its_value(name: str) -> None:
    gossiper, s = bound(ALGORITHMS[name](), ring(1), solo_group()), vector_of(0)
    for t in range(3):
        gossiper.mix(s, t)
    torch.testing.assert_close(s.segments[0], vector_of(0).segments[0], rtol=0, atol=1e-13)
    gossiper.start(s, 3)
    gossiper.difference(s)
    assert float(s.segments[0].abs().max()) < 1e-13
    assert gossiper.transport.num_bytes_sent == 0


@EACH_MEMORY
def test_autocast_changes_no_bit(name: str) -> None:
    layout = FlatLayout.of([(torch.float32, SPECS)])

    def body(group: dist.ProcessGroup) -> None:
        results = []
        for enabled in (False, True):
            gossiper, s = bound(ALGORITHMS[name](), ring(2), group), vector_of(group.rank(), layout)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                for t in range(4):
                    gossiper.mix(s, t)
            results.append(s)
        assert torch.equal(results[0].raw, results[1].raw)

    run_ranks(2, body)


@EACH_MEMORY
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_model_that_is_not_finite_is_seen(name: str, value: float) -> None:
    """By an error or in the neighbour's model, within a few rounds; never taken for numbers."""

    def body(group: dist.ProcessGroup) -> bool:
        gossiper, s = bound(ALGORITHMS[name](), ring(2), group), vector_of(group.rank())
        s.segments[0].mul_(0.01)
        if group.rank() == 1:
            s.segments[0].fill_(value)
        for t in range(4):
            gossiper.mix(s, t)
        return not bool(s.segments[0][:-4].isfinite().all())  # the parameters

    if "Moniqua" in name:
        with pytest.raises(RuntimeError, match=r"rank \d: round 0: got .* not finite"):
            run_ranks(2, body)
    else:
        assert all(run_ranks(2, body))


# Misuse.

ASYMMETRIC = MatrixMixing(
    RingGraph(4, peers_per_itr=2),
    [[0.5, 0.3, 0.0, 0.2], [0.2, 0.5, 0.3, 0.0], [0.0, 0.2, 0.5, 0.3], [0.3, 0.0, 0.2, 0.5]],
)


@ANY_NAME
def test_weights_that_are_not_symmetric_are_refused(name: str) -> None:
    kind = type(ALGORITHMS[name]()).__name__
    message = rf"{kind}: got .*Mixing\(.*, expected symmetric weights on an undirected graph; take"
    directed = UniformMixing(NPeerDynamicDirectedExponentialGraph(4)), UniformMixing(RingGraph(4))
    for mixing in (*directed, ASYMMETRIC):
        with pytest.raises(ValueError, match=message):
            bound(ALGORITHMS[name](), mixing, solo_group())


@pytest.mark.parametrize("step_size", [0, -0.5, float("nan"), float("inf"), None, "1"])
def test_step_size_must_be_positive(step_size: Any) -> None:
    makes: list[Callable[[], Algorithm]] = [
        lambda: Choco(SignNorm(), step_size=step_size),
        lambda: DeepSqueeze(SignNorm(), step_size=step_size),
        lambda: Moniqua(1.0, step_size=step_size),
    ]
    if step_size is not None:  # PowerGossip's default
        makes.append(lambda: PowerGossip(step_size=step_size))
    for make in makes:
        with pytest.raises(ValueError, match=rf"\w+: got step_size={step_size!r}, expected a positive number; 1 mixes"):
            make()


OTHERS: dict[type[Algorithm], Mapping[str, Any]] = {
    Choco: {"compressor": TopK(0.5), "step_size": 0.7},
    DeepSqueeze: {"compressor": TopK(0.5), "step_size": 0.7},
    Moniqua: {"theta": 2.5, "bits": 4, "step_size": 0.7, "seed": 3},
    Sparta: {"ratio": 0.5, "seed": 3},
    PowerGossip: {
        "rank": 2,
        "num_iterations": 2,
        "warm_start": False,
        "step_size": 0.7,
        "compress_vectors": True,
        "check_every": 7,
        "seed": 3,
    },
}


REQUIRED: dict[type[Algorithm], Mapping[str, Any]] = {
    Choco: {"compressor": SignNorm(), "step_size": 0.1},
    DeepSqueeze: {"compressor": SignNorm(), "step_size": 0.1},
    Moniqua: {"theta": 1.0},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_repr_shows_every_option(kind: type[Algorithm]) -> None:
    """Ranks compare it at construction of the wrapper: those that disagree about any option are refused."""
    options = REQUIRED.get(kind, {})
    assert set(inspect.signature(kind).parameters) == set(OTHERS[kind])
    shown = {repr(kind(**options))}
    for key, value in OTHERS[kind].items():
        shown.add(repr(kind(**{**options, key: value})))
    assert len(shown) == 1 + len(OTHERS[kind])
