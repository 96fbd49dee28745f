"""Contract of all compressed gossip: the law, the mean, consensus, memory that is checkpointed, misuse."""

from __future__ import annotations

import copy
import inspect
import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gossip_modules
from gossip_modules import (
    QSGD,
    Choco,
    CompleteGraph,
    DeepSqueeze,
    DynamicBipartiteExponentialGraph,
    FlatVector,
    GossipDataParallel,
    LaplacianMixing,
    MatchaGraph,
    MatrixMixing,
    MetropolisHastingsMixing,
    MixingManager,
    Moniqua,
    NetworkXGraph,
    NPeerDynamicDirectedExponentialGraph,
    PowerGossip,
    PushPull,
    RandomK,
    RingGraph,
    SignNorm,
    TopK,
    UniformMixing,
    connect,
)
from gossip_modules.flat.buffer import FlatBuffer
from gossip_modules.flat.layout import FlatLayout, Part
from gossip_modules.gossip.compressed import CompressedGossiper
from tests.harness.problems import loss_of, mlp, net, numerator, sgd, train_step
from tests.harness.ranks import CPU, TIMEOUT, HangUp, run_ranks, solo_group
from tests.harness.reference import flatten

Make = Callable[[], CompressedGossiper]
GOSSIPERS: dict[str, Make] = {
    "Choco SignNorm": lambda: Choco(SignNorm(8), step_size=0.3),
    "Choco TopK": lambda: Choco(TopK(0.3), step_size=0.3),
    "Choco QSGD": lambda: Choco(QSGD(bits=4, bucket_size=16), step_size=0.3),
    "DeepSqueeze SignNorm": lambda: DeepSqueeze(SignNorm(8), step_size=0.1),
    "DeepSqueeze RandomK": lambda: DeepSqueeze(RandomK(0.5), step_size=0.2),
    "Moniqua": lambda: Moniqua(20.0),
    "PowerGossip": PowerGossip,
    "PowerGossip rank 2, twice": lambda: PowerGossip(rank=2, num_iterations=2, compress_vectors=True, check_every=1),
    "PowerGossip cold": lambda: PowerGossip(warm_start=False, step_size=1.0),
}
ANY_GRAPH = [name for name in GOSSIPERS if "Choco" not in name]
ANY_NAME = pytest.mark.parametrize("name", GOSSIPERS)


def ring(n: int) -> MixingManager:
    """Both neighbours."""
    return MetropolisHastingsMixing(RingGraph(n, peers_per_itr=2 if n > 2 else 1))


STATIC: dict[str, MixingManager] = {
    "ring": ring(4),
    "star": MetropolisHastingsMixing(NetworkXGraph(nx.star_graph(3))),
    "path": MetropolisHastingsMixing(NetworkXGraph(nx.path_graph(4))),
    "negative": LaplacianMixing(NetworkXGraph(nx.star_graph(3))),  # the centre gives itself a negative weight
}
DYNAMIC: dict[str, MixingManager] = {
    "bipartite": MetropolisHastingsMixing(DynamicBipartiteExponentialGraph(4)),
    "MATCHA": LaplacianMixing(MatchaGraph(nx.cycle_graph(4), budget=0.5, seed=1)),
}
MIXINGS = STATIC | DYNAMIC

PARTS = [Part((4, 3)), Part((4, 3)), Part((3, 2, 2)), Part((1, 7)), Part((7,)), Part(()), Part((0, 3))]
BUFFERS = [Part((3,), True), Part((), True)]
LAYOUT = FlatLayout.of([(torch.float64, [*PARTS, *BUFFERS])])


def cases(*graphs: str) -> pytest.MarkDecorator:
    """Every gossiper on those of the graphs that it takes."""
    pairs = [(name, graph) for name in GOSSIPERS for graph in graphs if graph in STATIC or name in ANY_GRAPH]
    return pytest.mark.parametrize(("name", "graph"), pairs)


def bound(gossiper: CompressedGossiper, mixing: MixingManager, group: dist.ProcessGroup) -> CompressedGossiper:
    """Ready to talk on a group of the tests."""
    gossiper.bind(mixing, connect(group, module_device=CPU, timeout=TIMEOUT))
    return gossiper


def vector_of(rank: int, layout: FlatLayout = LAYOUT) -> FlatVector:
    """This rank's values, standard normal."""
    generator = torch.Generator().manual_seed(rank)
    s = FlatVector.zeros(layout, CPU)
    for segment in s.segments:
        segment.copy_(torch.randn(segment.shape, generator=generator, dtype=torch.float64))
    return s


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
    classes = {x for x in exported if inspect.isclass(x) and issubclass(x, CompressedGossiper)}
    assert classes == {type(make()) for make in GOSSIPERS.values()}


# What a round does.


@cases("star", "MATCHA")
def test_difference_is_finish_minus_what_was_sent(name: str, graph: str) -> None:
    """The law: s + alpha * difference(s) = finish(s), over rounds; and s is only read between start and then."""

    def body(group: dist.ProcessGroup) -> None:
        one, other = (bound(GOSSIPERS[name](), MIXINGS[graph], group) for _ in range(2))
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
            assert float(x.weight) == float(finished.weight) == 1
            x.copy_(finished)

    run_ranks(4, body)


@cases("path", "negative", "bipartite")
def test_the_mean_is_kept(name: str, graph: str) -> None:
    for dtype in (torch.float32, torch.float64):
        first, *rest = rounds_of(GOSSIPERS[name], MIXINGS[graph], 6, FlatLayout.of([(dtype, [*PARTS, *BUFFERS])]))
        assert not torch.equal(first, rest[0]), "nothing was mixed"
        tolerance = 20 * torch.finfo(dtype).eps
        for x in rest:
            torch.testing.assert_close(x.double().mean(0), first.double().mean(0), rtol=0, atol=tolerance)


# How far apart ranks are after 30 rounds over how far they were, twice of what it is. Codes of the model itself, and
# of few bits, leave an error; the others have not ended.
RESIDUES = {"DeepSqueeze SignNorm": 0.6, "DeepSqueeze RandomK": 0.4, "PowerGossip cold": 0.4}


@cases("path", "bipartite")
def test_ranks_come_to_agree(name: str, graph: str) -> None:
    layout = FlatLayout.of([(torch.float64, [Part((6, 5)), Part((7,))])])
    first, *_, last = rounds_of(GOSSIPERS[name], MIXINGS[graph], 30, layout)
    spread = [float((x - x.mean(0)).norm()) for x in (first, last)]
    assert spread[1] < RESIDUES.get(name, 0.2) * spread[0]


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
    first, *rest = rounds_of(GOSSIPERS[name], MIXINGS[graph], 3)
    expected = first[:, -4:]
    for x in rest:
        expected = W @ expected
        torch.testing.assert_close(x[:, -4:], expected, rtol=0, atol=1e-13)


MANY = FlatLayout.of(
    [
        (torch.bfloat16, [Part((6, 4)), Part((5,))]),
        (torch.float32, [Part((3, 4)), Part((2,), True)]),
        (torch.float16, [Part((9, 2))]),
        (torch.float64, [Part((2, 3)), Part(())]),
        (torch.bfloat16, [Part((8,), True)]),
        (torch.float32, 0),
    ]
)


@ANY_NAME
def test_segments_of_all_dtypes(name: str) -> None:
    """The mean is kept to the rounding of each dtype, and its own narrow values never lose a correction by coding."""

    def body(group: dist.ProcessGroup) -> list[Tensor]:
        gossiper, s = bound(GOSSIPERS[name](), ring(2), group), vector_of(group.rank(), MANY)
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
        return [bound(GOSSIPERS[name](), ring(2), group).average(value, num_rounds=3) for value in x]

    for first, second, shape in zip(*run_ranks(2, body), [*SHAPES, (3, 4), (3, 4)], strict=True):
        mean = 2.0 if first.is_floating_point() else 2.0 + 4j
        assert first.shape == second.shape == shape
        torch.testing.assert_close((first + second) / 2, torch.full_like(first, mean))
        if first.numel():
            spread = float((first - second).norm())
            assert spread < float(abs(torch.full_like(first, mean)).norm()), "ranks have not come closer"


@ANY_NAME
def test_slices_of_a_vector(name: str) -> None:
    """As the processes of a node gossip: cut anywhere, in the middle of matrices too."""
    layout = FlatLayout.of(
        [(torch.float32, [Part((9, 11)), Part((9, 11)), Part((21,)), *BUFFERS]), (torch.float64, [Part((5, 5))])], 4
    )

    def body(group: dist.ProcessGroup) -> FlatVector:
        s = vector_of(group.rank(), layout)
        pieces = [(bound(GOSSIPERS[name](), ring(4), group), s.slice(i, 4)) for i in range(4)]
        for t in range(6):
            for gossiper, piece in pieces:
                gossiper.mix(piece, t)
        return s

    ranks = run_ranks(4, body)
    for k in range(2):
        before = torch.stack([vector_of(rank, layout).segments[k].double() for rank in range(4)])
        after = torch.stack([s.segments[k].double() for s in ranks])
        torch.testing.assert_close(after.mean(0), before.mean(0), rtol=0, atol=1e-5)
        assert float((after - after.mean(0)).norm()) < 0.95 * float((before - before.mean(0)).norm())


@ANY_NAME
def test_world_of_one_keeps_its_value(name: str) -> None:
    gossiper, s = bound(GOSSIPERS[name](), ring(1), solo_group()), vector_of(0)
    for t in range(3):
        gossiper.mix(s, t)
    torch.testing.assert_close(s.segments[0], vector_of(0).segments[0], rtol=0, atol=1e-13)
    gossiper.start(s, 3)
    gossiper.difference(s)
    assert float(s.segments[0].abs().max()) < 1e-13
    assert gossiper.transport.num_bytes_sent == 0


@ANY_NAME
def test_autocast_changes_no_bit(name: str) -> None:
    layout = FlatLayout.of([(torch.float32, PARTS)])

    def body(group: dist.ProcessGroup) -> None:
        results = []
        for enabled in (False, True):
            gossiper, s = bound(GOSSIPERS[name](), ring(2), group), vector_of(group.rank(), layout)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                for t in range(4):
                    gossiper.mix(s, t)
            results.append(s)
        assert torch.equal(results[0].raw, results[1].raw)

    run_ranks(2, body)


@ANY_NAME
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_model_that_is_not_finite_is_seen(name: str, value: float) -> None:
    """By an error or in the neighbour's model, within a few rounds; never taken for numbers."""

    def body(group: dist.ProcessGroup) -> bool:
        gossiper, s = bound(GOSSIPERS[name](), ring(2), group), vector_of(group.rank())
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
    kind = type(GOSSIPERS[name]()).__name__
    message = rf"{kind}: got .*Mixing\(.*, expected symmetric weights on an undirected graph; take"
    directed = UniformMixing(NPeerDynamicDirectedExponentialGraph(4)), UniformMixing(RingGraph(4))
    for mixing in (*directed, ASYMMETRIC):
        with pytest.raises(ValueError, match=message):
            bound(GOSSIPERS[name](), mixing, solo_group())


@pytest.mark.parametrize("step_size", [0, -0.5, float("nan"), float("inf"), None, "1"])
def test_step_size_must_be_positive(step_size: Any) -> None:
    makes: list[Callable[[], CompressedGossiper]] = [
        lambda: Choco(SignNorm(), step_size=step_size),
        lambda: DeepSqueeze(SignNorm(), step_size=step_size),
        lambda: Moniqua(1.0, step_size=step_size),
    ]
    if step_size is not None:  # PowerGossip's default
        makes.append(lambda: PowerGossip(step_size=step_size))
    for make in makes:
        with pytest.raises(ValueError, match=rf"\w+: got step_size={step_size!r}, expected a positive number; 1 mixes"):
            make()


OTHERS: dict[type[CompressedGossiper], Mapping[str, Any]] = {
    Choco: {"compressor": TopK(0.5), "step_size": 0.7},
    DeepSqueeze: {"compressor": TopK(0.5), "step_size": 0.7},
    Moniqua: {"theta": 2.5, "bits": 4, "step_size": 0.7, "seed": 3},
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
REQUIRED: dict[type[CompressedGossiper], Mapping[str, Any]] = {
    Choco: {"compressor": SignNorm(), "step_size": 0.1},
    DeepSqueeze: {"compressor": SignNorm(), "step_size": 0.1},
    Moniqua: {"theta": 1.0},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_repr_shows_every_option(kind: type[CompressedGossiper]) -> None:
    """Ranks compare it at construction of the wrapper: those that disagree about any option are refused."""
    options = REQUIRED.get(kind, {})
    assert set(inspect.signature(kind).parameters) == set(OTHERS[kind])
    shown = {repr(kind(**options))}
    for key, value in OTHERS[kind].items():
        shown.add(repr(kind(**{**options, key: value})))
    assert len(shown) == 1 + len(OTHERS[kind])


# Memory.


def restored(state: dict[str, Any]) -> dict[str, Any]:
    """As from a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@cases("star", "bipartite")
def test_a_checkpoint_continues_bit_for_bit(name: str, graph: str) -> None:
    """Also one that is taken before the first round, and one of a gossiper that has itself just been loaded."""

    def body(group: dist.ProcessGroup) -> None:
        for num_rounds in (0, 3):
            gossiper, s = bound(GOSSIPERS[name](), MIXINGS[graph], group), vector_of(group.rank())
            for t in range(num_rounds):
                gossiper.mix(s, t)
            between, resumed = (bound(GOSSIPERS[name](), MIXINGS[graph], group) for _ in range(2))
            between.load_state_dict(restored(gossiper.state_dict()))
            resumed.load_state_dict(restored(between.state_dict()))
            twin = s.clone()
            for t in range(num_rounds, num_rounds + 3):
                gossiper.mix(s, t)
                resumed.mix(twin, t)
                assert torch.equal(s.raw, twin.raw)

    run_ranks(4, body)


@ANY_NAME
def test_a_loaded_state_is_a_copy(name: str) -> None:
    """The one that it came from goes on before the other one has begun."""

    def body(group: dist.ProcessGroup) -> None:
        gossiper, s = bound(GOSSIPERS[name](), ring(2), group), vector_of(group.rank())
        for t in range(3):
            gossiper.mix(s, t)
        resumed, twin = bound(GOSSIPERS[name](), ring(2), group), s.clone()
        resumed.load_state_dict(gossiper.state_dict())
        for t in range(3, 6):
            gossiper.mix(s, t)
        for t in range(3, 6):
            resumed.mix(twin, t)
        assert torch.equal(s.raw, twin.raw)

    run_ranks(2, body)


@ANY_NAME
def test_an_empty_state_starts_afresh(name: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        results = []
        gossiper = bound(GOSSIPERS[name](), ring(2), group)
        for _ in range(2):
            s = vector_of(group.rank())
            for t in range(3):
                gossiper.mix(s, t)
            results.append(s)
            gossiper.load_state_dict({})
        assert torch.equal(results[0].raw, results[1].raw)

    run_ranks(2, body)


@ANY_NAME
def test_a_copy_goes_its_own_way(name: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        gossiper, s = bound(GOSSIPERS[name](), ring(2), group), vector_of(group.rank())
        for t in range(3):
            gossiper.mix(s, t)
        other, twin = copy.deepcopy(gossiper), s.clone()
        for t in range(3, 6):
            gossiper.mix(s, t)
        for t in range(3, 6):
            other.mix(twin, t)
        assert torch.equal(s.raw, twin.raw)

    run_ranks(2, body)


@ANY_NAME
def test_a_state_of_another_algorithm_is_refused(name: str) -> None:
    gossiper = GOSSIPERS[name]()
    for other in GOSSIPERS.values():
        if type(other()) is not type(gossiper):
            donor, s = bound(other(), ring(1), solo_group()), vector_of(0)
            donor.mix(s, 0)
            kinds = type(donor).__name__, type(gossiper).__name__
            message = rf"got state \[.*\] of {kinds[0]}, expected that of {kinds[1]}; load a checkpoint of the same"
            with pytest.raises(ValueError, match=message):
                gossiper.load_state_dict(donor.state_dict())
            with pytest.raises(ValueError, match=r"got state \[.*\] of another algorithm, expected none for PushPull"):
                PushPull().load_state_dict(donor.state_dict())


@pytest.mark.parametrize("name", ["Choco TopK", "DeepSqueeze SignNorm", "PowerGossip"])
def test_a_state_of_another_model_is_refused(name: str) -> None:
    other = FlatLayout.of([(torch.float64, [Part((6, 6))])])

    def body(group: dist.ProcessGroup) -> None:
        gossiper, s = bound(GOSSIPERS[name](), ring(2), group), vector_of(group.rank())
        gossiper.mix(s, 0)
        resumed = bound(GOSSIPERS[name](), ring(2), group)
        resumed.load_state_dict(gossiper.state_dict())
        with pytest.raises(
            ValueError, match=r"got state of tensors .*, expected .*; load a checkpoint of the same model"
        ):
            resumed.mix(vector_of(group.rank(), other), 1)

    run_ranks(2, body)


@pytest.mark.parametrize("name", ["Choco TopK", "PowerGossip"])
def test_a_state_of_other_neighbours_is_refused(name: str) -> None:
    """What a rank remembers of its neighbours means nothing among others."""

    def body(group: dist.ProcessGroup) -> None:
        gossiper, s = bound(GOSSIPERS[name](), ring(4), group), vector_of(group.rank())
        gossiper.mix(s, 0)
        resumed = bound(GOSSIPERS[name](), MetropolisHastingsMixing(CompleteGraph(4, peers_per_itr=3)), group)
        resumed.load_state_dict(gossiper.state_dict())
        with pytest.raises(ValueError, match=r"\w+\(.*\): got state of .*, expected .*; (load|resume)"):
            resumed.mix(s, 1)

    run_ranks(4, body)


@ANY_NAME
def test_other_tensors_restart_the_memory_with_a_warning(name: str) -> None:
    other = FlatLayout.of([(torch.float64, [Part((6, 6))])])

    def body(group: dist.ProcessGroup) -> None:
        gossiper = bound(GOSSIPERS[name](), ring(2), group)
        s = vector_of(group.rank())
        for t in range(3):
            gossiper.mix(s, t)
        fresh, x, y = bound(GOSSIPERS[name](), ring(2), group), *(vector_of(group.rank(), other) for _ in range(2))
        for t in range(3):
            gossiper.mix(x, t)
            fresh.mix(y, t)
        assert torch.equal(x.raw, y.raw)

    with pytest.warns(UserWarning, match=r"\w+\(.*\): .* memory starts afresh"):
        run_ranks(2, body)


@ANY_NAME
def test_ranks_out_of_step_are_named(name: str) -> None:
    """One resumes an older checkpoint: an error on both ends, never silent corruption. [Note: out of step]"""

    def body(group: dist.ProcessGroup) -> None:
        gossiper, s = bound(GOSSIPERS[name](), ring(2), group), vector_of(group.rank())
        for t in range(3):
            gossiper.mix(s, t)
            if t == 0:
                state = restored(gossiper.state_dict())
        if group.rank() == 1:
            gossiper.load_state_dict(state)
        step = gossiper.num_phases
        got, expected = (step, 3 * step) if group.rank() == 0 else (3 * step, step)
        message = (
            rf"rank {group.rank()}: round 3: rank {1 - group.rank()} sent its message number {got}, expected number "
            rf"{expected}: the two remember different rounds; resume all ranks from the same checkpoint"
        )
        with pytest.raises(RuntimeError, match=message):
            gossiper.mix(s, 3)

    run_ranks(2, body)


@pytest.mark.parametrize("name", ["Choco TopK", "PowerGossip rank 2, twice"])
def test_a_peer_that_ends_is_named(name: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        gossiper, s = bound(GOSSIPERS[name](), ring(3), group), vector_of(group.rank())
        for t in range(3):
            if t == 2 and group.rank() == 1:
                raise HangUp
            gossiper.mix(s, t)

    with pytest.raises(
        ConnectionError, match=r"rank [02]: round 2(, header)?: (receive from|send to) rank 1 failed after"
    ):
        run_ranks(3, body)


@pytest.mark.parametrize("name", ["Choco TopK", "Moniqua", "PowerGossip rank 2, twice"])
def test_another_run_of_the_same_number_is_seen(name: str) -> None:
    """Two checkpoints of one step, of two runs: the digest of what was said before tells them apart."""

    def body(group: dist.ProcessGroup) -> None:
        states = []
        for run in range(2):
            gossiper, s = bound(GOSSIPERS[name](), ring(2), group), vector_of(group.rank() + 2 * run)
            for t in range(3):
                gossiper.mix(s, t)
            states.append(gossiper.state_dict())
        gossiper = bound(GOSSIPERS[name](), ring(2), group)
        gossiper.load_state_dict(states[group.rank()])
        message = rf"rank {group.rank()}: round 3: rank {1 - group.rank()} remembers another past of message number"
        with pytest.raises(RuntimeError, match=message):
            gossiper.mix(vector_of(group.rank()), 3)

    run_ranks(2, body)


def test_after_a_failed_round_only_a_checkpoint_goes_on() -> None:
    def body(group: dist.ProcessGroup) -> None:
        gossiper, s = bound(GOSSIPERS["Choco TopK"](), ring(2), group), vector_of(group.rank())
        gossiper.mix(s, 0)
        state = gossiper.state_dict() if group.rank() else {}
        gossiper.load_state_dict(state)
        with pytest.raises(RuntimeError, match="the two remember different rounds"):
            gossiper.mix(s, 1)
        assert gossiper.state_dict() == {}
        copy.deepcopy(gossiper)
        with pytest.raises(RuntimeError, match=r"got a round after one that failed.* start again from a checkpoint"):
            gossiper.mix(s, 2)

    run_ranks(2, body)


def test_a_wrapper_resumed_from_an_older_step_is_named() -> None:
    """Round counters differ as well then, so headers must meet whatever the round."""

    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(net(0), group, gossiper=PowerGossip(), init_sync=True)
        states = []
        for step in range(4):
            states.append(copy.deepcopy(wrapper.state_dict()))
            train(wrapper, group.rank(), [step])
        if group.rank() == 1:
            wrapper.load_state_dict(states[2])
        with pytest.raises(RuntimeError, match=rf"rank {1 - group.rank()} sent its message number"):
            train(wrapper, group.rank(), [4])

    run_ranks(2, body)


# Around a model.


def wrap(module: nn.Module, group: dist.ProcessGroup, **options: Any) -> GossipDataParallel:
    """The wrapper on a group of the tests; every rank keeps its own start."""
    return GossipDataParallel(module, process_group=group, **{"init_sync": False, **options})


def train(wrapper: GossipDataParallel, rank: int, steps: Sequence[int]) -> None:
    """Plain SGD, which remembers nothing."""
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.02)
    for step in steps:
        train_step(wrapper, optimizer, rank, step)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_gossiper_alone_is_enough(n: int) -> None:
    """The wrapper takes an undirected ring in every world."""

    def body(group: dist.ProcessGroup) -> None:
        for make in GOSSIPERS.values():
            wrapper = wrap(net(group.rank()), group, gossiper=make())
            train(wrapper, group.rank(), range(2))
            assert wrapper.comm_stats()["num_rounds"] == 2
            assert (wrapper.comm_stats()["bytes_sent"] > 0) is (n > 1)
            wrapper.close()

    run_ranks(n, body)


@ANY_NAME
@pytest.mark.parametrize("overlap", [False, True])
def test_gradient_steps_in_flight_are_kept(name: str, overlap: bool) -> None:
    """sum_i x_i = sum_i x_i(0) + all that the optimizers did."""

    def body(group: dist.ProcessGroup) -> Tensor:
        model = mlp(group.rank()).double()
        x = flatten(model)
        wrapper = wrap(model, group, mixing=STATIC["star"], gossiper=GOSSIPERS[name](), overlap=overlap)
        optimizer = sgd(model)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(wrapper, group.rank(), step).backward()
            before = numerator(wrapper)
            optimizer.step()
            x += numerator(wrapper) - before
        wrapper.close()
        return flatten(model) - x

    lost = torch.stack(run_ranks(4, body))
    assert float(lost.sum(0).abs().max()) < 1e-12
    assert float(lost.abs().max()) > 1e-3, "nothing was mixed"


@ANY_NAME
def test_a_resumed_wrapper_is_bit_identical(name: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        options: dict[str, Any] = {"mixing": STATIC["path"]}
        wrapper = wrap(net(group.rank()), group, gossiper=GOSSIPERS[name](), **options)
        train(wrapper, group.rank(), range(3))
        resumed = wrap(net(9), group, gossiper=GOSSIPERS[name](), **options)
        resumed.load_state_dict(restored(wrapper.state_dict()))
        for other in (wrapper, resumed):
            train(other, group.rank(), range(3, 6))
        assert torch.equal(flatten(wrapper.module), flatten(resumed.module))
        with pytest.raises(ValueError, match=r"got state \[.*\] of another algorithm, expected none for PushPull"):
            wrap(net(9), group, gossiper=PushPull(), **options).load_state_dict(wrapper.state_dict())

    run_ranks(4, body)


@ANY_NAME
@pytest.mark.parametrize("overlap", [False, True])
def test_a_copied_wrapper_trains_on(name: str, overlap: bool) -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(net(group.rank()), group, mixing=ring(2), gossiper=GOSSIPERS[name](), overlap=overlap)
        train(wrapper, group.rank(), range(3))
        twin = copy.deepcopy(wrapper)
        for other in (wrapper, twin):
            train(other, group.rank(), range(3, 6))
            other.flush()
        assert torch.equal(flatten(wrapper.module), flatten(twin.module))
        for other in (wrapper, twin):
            other.close()

    run_ranks(2, body)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "freeze": lambda module: module.get_submodule("first").requires_grad_(False),
    "double": lambda module: module.double(),
}


@ANY_NAME
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changes_restarts_the_memory_everywhere(name: str, change: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(net(group.rank()), group, mixing=ring(2), gossiper=GOSSIPERS[name]())
        train(wrapper, group.rank(), range(2))
        CHANGES[change](wrapper.module)
        wrapper.flush()
        train(wrapper, group.rank(), range(2, 4))
        assert wrapper.comm_stats()["num_rounds"] == 4
        assert bool(flatten(wrapper.module).isfinite().all())

    with pytest.warns(UserWarning, match=r"\w+\(.*\): .* memory starts afresh"):
        run_ranks(2, body)


def test_ranks_that_disagree_about_an_option_are_refused() -> None:
    def body(group: dist.ProcessGroup) -> None:
        for one, other in (
            (Choco(SignNorm(), step_size=0.1), Choco(SignNorm(8), step_size=0.1)),
            (PowerGossip(), PowerGossip(seed=1)),
            (Moniqua(1.0), DeepSqueeze(SignNorm(), step_size=0.1)),
        ):
            gossiper = (one, other)[group.rank()]
            message = re.escape(f"rank 1: gossiper: got {other}, expected {one}")
            with pytest.raises(ValueError, match=message):
                wrap(net(), group, mixing=ring(2), gossiper=gossiper)

    run_ranks(2, body)


class Mostly(nn.Module):
    """A model of so many parameters of one dimension, and so many in a matrix."""

    def __init__(self, num_vector: int, num_matrix: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(num_vector, dtype=dtype))
        self.matrix = nn.Parameter(torch.zeros(16, num_matrix // 16, dtype=dtype))
        self.register_buffer("statistics", torch.zeros(5000))


def warnings_of(module: Callable[[], nn.Module], make: Callable[[], CompressedGossiper]) -> list[str]:
    """What three rounds of two ranks warn of."""

    def body(group: dist.ProcessGroup) -> None:
        gossiper = bound(make(), ring(2), group)
        vector = FlatBuffer(module()).vector
        for t in range(3):
            gossiper.mix(vector, t)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run_ranks(2, body)
    return [str(warning.message) for warning in seen]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_is_mostly_vectors_is_told_so_once(dtype: torch.dtype) -> None:
    """Buffers do not count: no code may touch them."""
    (warning,) = warnings_of(lambda: Mostly(3840, 160 * 16, dtype), PowerGossip)
    num_bytes = f"{3840 * dtype.itemsize:,}"
    assert re.search(
        rf"60% of the parameters' bytes \({num_bytes}\) are .* one dimension, which are sent as they are, .*; pass "
        r"compress_vectors=True",
        warning,
    )
    assert warnings_of(lambda: Mostly(1920, 160 * 16, dtype), PowerGossip) == []
    assert warnings_of(lambda: Mostly(3840, 160 * 16, dtype), lambda: PowerGossip(compress_vectors=True)) == []
    assert warnings_of(lambda: Mostly(3840, 160 * 16, dtype), lambda: Moniqua(1.0)) == []


@pytest.mark.parametrize(
    "make",
    [lambda: Choco(TopK(1.0), step_size=0.1), lambda: DeepSqueeze(TopK(1.0), step_size=0.1)],
)
def test_a_code_that_saves_nothing_is_named_once(make: Callable[[], CompressedGossiper]) -> None:
    """All values and their indices are more than the values. Of what is tiny nothing is said."""
    (warning,) = warnings_of(lambda: nn.Linear(40, 40), make)
    assert re.search(
        r"in code [\d,]+ bytes are sent for 6,560 of parameters, so nothing is saved: the code is too", warning
    )
    assert warnings_of(lambda: nn.Linear(8, 8), make) == []
