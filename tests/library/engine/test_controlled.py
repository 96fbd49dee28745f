"""Rounds under `ConsensusControl`, on ranks: what they measure, decide and keep."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import D2, Choco, ConsensusControl, DiLoCo, GossipDataParallel, Membership, Schedule, SignNorm
from gossip_modules.graph_manager import CompleteGraph
from gossip_modules.graph_manager.named_graphs import undirected_ring
from gossip_modules.mixing_manager import MetropolisHastingsMixing
from gossip_modules.wrappers.choices import Choices
from tests.harness.problems import loss_of, mlp
from tests.harness.progress import engine_of
from tests.harness.ranks import TIMEOUT, run_ranks, solo_group
from tests.harness.reference import flatten

LR = 0.1
CONTROLLED = ("consensus_estimate", "gossip_interval", "num_skipped_steps", "num_added_rounds", "num_averages")


class Point(nn.Module):
    """x [16], float64, whose loss is half its squared distance from a target."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(16, dtype=torch.float64))

    def forward(self, target: Tensor) -> Tensor:
        return 0.5 * ((self.x - target) ** 2).sum()


def wrap(module: nn.Module, group: dist.ProcessGroup, **options: Any) -> GossipDataParallel:
    """On a ring with both neighbours, if nothing else is said."""
    defaults = {"graph": undirected_ring, "push_sum": False, "timeout": TIMEOUT}
    return GossipDataParallel(module, process_group=group, **{**defaults, **options})


def targets(rank: int, num_steps: int) -> Tensor:
    """What the model of this rank is drawn to in each step, [num_steps, 16]: its own point, and noise."""
    generator = torch.Generator().manual_seed(rank)
    mean = torch.randn(16, generator=generator, dtype=torch.float64)
    return mean + 0.3 * torch.randn(num_steps, 16, generator=generator, dtype=torch.float64)


def train(
    group: dist.ProcessGroup,
    num_steps: int,
    after_step: Callable[[GossipDataParallel, int], None] = lambda model, step: None,
    **options: Any,
) -> tuple[list[Tensor], list[dict[str, float]]]:
    """Ranks with different targets and noise; the model in each forward, and comm_stats() after each step."""
    model, drawn_to = wrap(Point(), group, **options), targets(group.rank(), num_steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    points, stats = [], []
    for step in range(num_steps):
        loss = model(drawn_to[step])
        points.append(flatten(model.module).clone())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after_step(model, step)
        stats.append(model.comm_stats())
    model.flush()
    stats[-1] = model.comm_stats()
    model.close()
    return points, stats


def distances(ranks: list[tuple[list[Tensor], list[dict[str, float]]]]) -> list[float]:
    """The consensus distance in each forward."""
    points = torch.stack([torch.stack(points) for points, _ in ranks])
    return ((points - points.mean(dim=0)) ** 2).sum(dim=2).mean(dim=0).sqrt().tolist()


def free_distances(n: int, num_steps: int) -> list[float]:
    """The same as `distances` with a round of gossip in every step."""
    x = torch.zeros(n, 16, dtype=torch.float64)
    drawn_to = torch.stack([targets(rank, num_steps) for rank in range(n)])
    matrix, found = MetropolisHastingsMixing(undirected_ring(n)).matrix(0), []
    for step in range(num_steps):
        x = matrix @ x
        found.append(float(((x - x.mean(dim=0)) ** 2).sum(dim=1).mean().sqrt()))
        x = x - LR * (x - drawn_to[:, step])
    return found


@pytest.mark.parametrize("remedy", ["average", "rounds"])
def test_a_ring_of_8_with_different_data_stays_within_the_target(remedy: Any) -> None:
    """With a round in every step they are 0.6 apart. Ranks take the same decisions, from the same numbers."""
    target, num_steps = 0.5, 20
    control = ConsensusControl(target, is_relative=False, remedy=remedy, average_every=8)
    ranks = run_ranks(8, lambda group: train(group, num_steps, schedule=control))
    assert min(free_distances(8, num_steps)[8:]) > 1.15 * target
    assert max(distances(ranks)[8:]) < target
    decisions = [[[stats[name] for name in CONTROLLED] for stats in each[1][1:]] for each in ranks]
    assert all(each == decisions[0] for each in decisions)
    last = ranks[0][1][-1]
    assert last["consensus_bound"] == target
    assert last["num_averages"] >= 3
    assert (last["num_added_rounds"] > 0) == (remedy == "rounds")


def test_fewer_rounds_where_models_are_close() -> None:
    control = ConsensusControl(100.0, max_interval=4, average_every=0)
    (_, stats), *_ = run_ranks(2, lambda group: train(group, 20, schedule=control))
    assert [step for step in range(1, 20) if stats[step]["num_rounds"] > stats[step - 1]["num_rounds"]] == [
        *(1, 3, 6, 10, 14, 18)
    ]
    assert stats[-1]["num_skipped_steps"] == 13
    assert stats[-1]["gossip_interval"] == 4


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("average_every", [0, 1])
def test_control_that_never_acts_changes_no_bit(average_every: int, overlap: bool) -> None:
    """Neither rounds of gossip in every step, nor exact averages."""
    control = ConsensusControl(1e6, max_interval=1, average_every=average_every)
    plain = Schedule(average_every=average_every)

    def body(group: dist.ProcessGroup) -> None:
        controlled, free = (train(group, 6, schedule=how, overlap=overlap)[0] for how in (control, plain))
        for got, want in zip(controlled, free, strict=True):
            assert torch.equal(got, want)

    run_ranks(3, body)


@pytest.mark.parametrize("average_every", [1, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_estimate_is_the_distance_on_a_complete_graph_and_in_exact_averages(
    overlap: bool, average_every: int
) -> None:
    """What a round measures is how far ranks were when it began: in the forward before it, less the step since."""
    begun: dict[int, dict[int, Tensor]] = {}

    def body(group: dist.ProcessGroup) -> list[dict[str, float]]:
        n, rank = group.size(), group.rank()

        def note(model: GossipDataParallel, step: int) -> None:
            model.flush()
            begun.setdefault(step, {})[rank] = flatten(model.module).clone()

        control = ConsensusControl(3.0, average_every=average_every, max_interval=1)
        graph = undirected_ring(n) if average_every == 1 else CompleteGraph(n, peers_per_itr=n - 1)
        return train(group, 6, note, schedule=control, overlap=overlap, graph=graph)[1]

    stats = run_ranks(4, body)[0]
    for step in range(1, 6):
        points = torch.stack(list(begun[step - 1].values()))
        distance = float(((points - points.mean(dim=0)) ** 2).sum(dim=1).mean().sqrt())
        assert stats[step]["consensus_estimate"] == pytest.approx(distance, abs=1e-10)


def test_exact_averages_alone_send_nothing_else() -> None:
    """2 (n - 1) / n models, and 32 bytes to each of the others."""
    n, num_steps = 4, 12
    control = ConsensusControl(2.0, average_every=1)
    ranks = run_ranks(n, lambda group: train(group, num_steps, schedule=control))
    last = ranks[0][1][-1]
    assert 0 < last["num_averages"] == last["num_rounds"] == num_steps - last["num_skipped_steps"] < num_steps
    one = run_ranks(n, lambda group: train(group, 1, schedule=control))[0][1][-1]["bytes_sent"]
    assert last["bytes_sent"] == one * last["num_rounds"]
    assert one == 2 * (n - 1) / n * 16 * 8 + 32 * (n - 1)


def test_ranks_that_flush_at_other_times_decide_alike() -> None:
    """With overlap and late rounds; each rank flushes after other steps."""
    control = ConsensusControl(1.0, max_interval=5, average_every=4)

    def body(group: dist.ProcessGroup) -> list[float]:
        def flush(model: GossipDataParallel, step: int) -> None:
            if (step + group.rank()) % (group.rank() + 2) == 0:
                model.flush()

        _, stats = train(group, 25, flush, schedule=control, overlap=True, max_staleness=1)
        return [stats[-1][name] for name in ("num_skipped_steps", "num_averages", "bytes_sent")]

    first, *others = run_ranks(3, body)
    assert all(other == first for other in others)
    assert first[1] > 1


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"is_relative": False}, {"average_every": 1}], ids=str)
def test_resuming_is_exact(options: dict[str, Any]) -> None:
    options = dict(options)
    is_relative, average_every = options.pop("is_relative", True), options.pop("average_every", 4)
    control = ConsensusControl(0.5 if is_relative else 0.02, is_relative=is_relative, average_every=average_every)

    def steps(model: GossipDataParallel, rank: int, some: range) -> list[Tensor]:
        found, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.1)
        for step in some:
            loss = loss_of(model, rank, step)
            found.append(flatten(model.module).clone())
            model.zero_grad()
            loss.backward()
            optimizer.step()
        model.flush()  # collectives of two wrappers over one group must not meet
        return found

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        model = wrap(mlp(), group, schedule=control, **options)
        steps(model, rank, range(7))
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        resumed = wrap(mlp(1), group, schedule=control, **options)
        resumed.load_state_dict(torch.load(file, weights_only=True))
        for got, want in zip(steps(resumed, rank, range(7, 16)), steps(model, rank, range(7, 16)), strict=True):
            assert torch.equal(got, want)
        assert resumed.comm_stats()["num_averages"] > 2

    run_ranks(3, body)


def test_ranks_with_states_of_different_times_raise() -> None:
    control = ConsensusControl(1e6, max_interval=1)

    def body(group: dist.ProcessGroup) -> None:
        model = wrap(mlp(), group, schedule=control)
        loss_of(model, 0, 0)
        engine = engine_of(model)
        engine._control.law.num_gossip_rounds += (
            2 * group.rank()
        )  # the period of the graph is 1, but rounds have numbers
        engine.gossiper.start = lambda s, t: None
        engine.gossiper.finish = lambda s: None
        loss_of(model, 0, 1)

    with pytest.raises(RuntimeError, match=r"got ranks after \[2, 4\] rounds of gossip under ConsensusControl"):
        run_ranks(2, body)


def test_one_rank_and_checkpoints_of_plain_schedules() -> None:
    plain = wrap(mlp(), solo_group())
    loss_of(plain, 0, 0)
    model = wrap(mlp(1), solo_group(), schedule=ConsensusControl(1.0, average_every=2))
    model.load_state_dict(plain.state_dict())
    for step in range(4):
        loss_of(model, 0, step)
    assert model.comm_stats()["num_averages"] == 2
    assert model.comm_stats()["num_skipped_steps"] == 0
    assert "consensus_bound" not in plain.comm_stats()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"algorithm": Choco(SignNorm(), step_size=0.4)},
            "with Choco.*, expected plain gossip: the corrections of other",
        ),
        ({"algorithm": DiLoCo(2)}, "got graph beside DiLoCo.*, expected none: it averages over all ranks"),
        ({"algorithm": D2()}, r"got schedule=ConsensusControl\(target=1.0, .* with D2\(\), expected plain gossip"),
        (
            {"schedule": "often"},
            "got schedule='often', expected a Schedule, a ConsensusControl, or the number of steps",
        ),
        ({"overlap": True, "max_staleness": 20}, "got max_interval=16 and gossip_every=21, expected no less"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrap(mlp(), solo_group(), **{"schedule": ConsensusControl(1.0), **options})


def test_push_sum_weights_nodes_and_a_membership_are_refused() -> None:
    control = ConsensusControl(1.0)

    def body(group: dist.ProcessGroup) -> None:
        import networkx as nx

        graph = nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)])
        with pytest.raises(ValueError, match="expected doubly stochastic weights, with which a correction tells"):
            wrap(mlp(), group, graph=graph, push_sum=True, schedule=control)

    run_ranks(3, body)
    chosen = Choices(push_sum=False, schedule=control)
    with pytest.raises(ValueError, match=r"got schedule=.*\(nprocs_per_node=2, or fully_shard\), expected a whole"):
        chosen.check(overlap=False, init_sync=True, nprocs_per_node=2)
    with pytest.raises(ValueError, match=r"with a membership, expected a Schedule: ranks that may lose messages"):
        GossipDataParallel(
            mlp(), push_sum=False, schedule=control, membership=Membership(dist.HashStore(), min_workers=2)
        )


def test_a_state_of_another_layout_is_refused_and_changes_nothing() -> None:
    model = wrap(mlp(), solo_group(), schedule=ConsensusControl(1.0))
    for step in range(4):
        loss_of(model, 0, step)
    engine = engine_of(model)
    saved = copy.deepcopy(engine.state_dict())
    control = saved["control"]
    older = {name: value for name, value in control["law"].items() if name != "interval"}
    for other in ({**control, "law": older}, {"law": control["law"]}, {**control, "version": 2}):
        with pytest.raises(ValueError, match=r"got a state of ConsensusControl\(.* of version .*, expected version 1"):
            engine.load_state_dict({**saved, "control": other, "step": 77})
        assert (engine.step, str(engine.state_dict()["control"])) == (saved["step"], str(control))
    engine.load_state_dict(saved)
