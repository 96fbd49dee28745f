"""The average over ranks, what it costs, and what mistakes are told."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gossip_modules import GossipDataParallel, LocalSGD, PairwiseDataParallel, RingGraph, Schedule
from gossip_modules.extend import PushPull
from gossip_modules.graph_manager import CompleteGraph, NetworkXGraph
from gossip_modules.mixing_manager import MatrixMixing, MetropolisHastingsMixing, UniformMixing
from gossip_modules.regions import Regions
from gossip_modules.transport.traffic import down_tree
from gossip_modules.wrappers.base import GossipWrapper
from tests.harness.problems import fill_, loss_of, mlp, net, numerator, sgd, train_step
from tests.harness.ranks import assert_no_gossip_threads, run_ranks, solo_group
from tests.harness.reference import flatten
from tests.library.wrappers.wrapping import MODES, irregular, wrap

PLACES = (NEAR, FAR) = ("inside_region", "between_regions")

# The average.


@pytest.mark.parametrize("options", MODES)
def test_average_and_averaged(options: dict[str, Any]) -> None:
    def body(group: dist.ProcessGroup) -> tuple[Tensor, ...]:
        wrapper = wrap(net(group.rank()), group, graph=irregular(), init_sync=False, **options)
        optimizer = sgd(wrapper)
        for step in range(3):
            train_step(wrapper, optimizer, group.rank(), step)
        wrapper.flush()
        z, w = flatten(wrapper.module), wrapper.get_extra_state()["weight"]
        distance = wrapper.consensus_distance()
        assert wrapper.comm_stats()["consensus_distance"] == distance
        after_distance = flatten(wrapper.module)
        with wrapper.averaged() as inside:
            assert inside is wrapper
            average = flatten(wrapper.module)
        with pytest.raises(KeyError), wrapper.averaged():
            raise KeyError
        restored, weight = flatten(wrapper.module), wrapper.get_extra_state()["weight"]
        assert torch.equal(weight, w)
        train_step(wrapper, optimizer, group.rank(), 3)
        wrapper.average_()
        assert wrapper.get_extra_state()["weight"] == 1
        final = flatten(wrapper.module)
        assert wrapper.consensus_distance() == 0
        wrapper.close()
        return z, w, after_distance, average, restored, final, torch.tensor(distance)

    results = run_ranks(3, body)
    z = torch.stack([result[0] for result in results])
    w = torch.stack([result[1] for result in results])
    mean = (z * w).mean(0)
    num_parameters = sum(p.numel() for p in net().parameters())
    distance = (z - mean)[:, :num_parameters].pow(2).sum(1).mean().sqrt()
    for i, (_, _, after_distance, average, restored, final, measured) in enumerate(results):
        torch.testing.assert_close(average, mean, rtol=0, atol=1e-6)
        torch.testing.assert_close(restored, z[i], rtol=0, atol=1e-6)
        torch.testing.assert_close(after_distance, z[i], rtol=0, atol=1e-6)
        torch.testing.assert_close(measured.double(), distance, rtol=1e-5, atol=0)
        assert torch.equal(final, results[0][5])


def test_averaged_restores_bit_identically_where_weights_stay_one() -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(net(group.rank()), group)
        before = flatten(wrapper.module)
        wrapper.consensus_distance()
        with wrapper.averaged():
            wrapper.eval()
        assert torch.equal(flatten(wrapper.module), before)

    run_ranks(3, body)


@pytest.mark.parametrize("options", MODES)
def test_the_average_after_close_is_weighted_as_before(options: dict[str, Any]) -> None:
    def body(group: dist.ProcessGroup) -> float:
        wrapper = wrap(net(group.rank()), group, graph=irregular(), **options)
        optimizer = sgd(wrapper)
        for step in range(5):
            train_step(wrapper, optimizer, group.rank(), step)
        with wrapper.averaged():
            before = flatten(wrapper.module)
        weight = float(wrapper.get_extra_state()["weight"])
        wrapper.close()
        with wrapper.averaged():
            torch.testing.assert_close(flatten(wrapper.module), before, rtol=0, atol=1e-6)
        wrapper.average_()
        torch.testing.assert_close(flatten(wrapper.module), before, rtol=0, atol=1e-6)
        return weight

    assert max(abs(weight - 1) for weight in run_ranks(3, body)) > 0.1


# Very different weights.


@pytest.mark.parametrize(
    ("dtype", "row"),
    [
        (torch.float16, (0.5, 0.499, 0.001)),
        (torch.float16, (0.5, 0.001, 0.499)),
        (torch.float32, (0.5, 0.5, 1e-40)),
        (torch.float32, (0.5, 1e-40, 0.5)),
        (torch.float32, (0.5, 1e-6, 0.5 - 1e-6)),
    ],
)
def test_overlap_stands_very_different_weights(dtype: torch.dtype, row: tuple[float, float, float]) -> None:
    """No factor of a correction leaves the range of its dtype, and its value is that of the synchronous round."""
    matrix = [[row[(j - i) % 3] for j in range(3)] for i in range(3)]

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        results = []
        for overlap in (False, True):
            module = fill_(nn.Linear(40, 5), group.rank()).to(dtype)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(300.0).add_(150.0)
            mixing = MatrixMixing(CompleteGraph(3, peers_per_itr=2), matrix)
            wrapper = wrap(module, group, mixing=mixing, overlap=overlap)
            for _ in range(2):
                wrapper(torch.ones(1, 40, dtype=dtype))
            wrapper.close()
            results.append(flatten(module).double())
        return results[0], results[1]

    start = torch.stack([flatten(fill_(nn.Linear(40, 5), rank)).to(dtype) * 300 + 150 for rank in range(3)]).double()
    mixing = torch.tensor(matrix, dtype=torch.float64)
    tolerance = 4 * torch.finfo(dtype).eps * float(start.max())
    for (sync, overlapped), want in zip(run_ranks(3, body), mixing @ mixing @ start, strict=True):
        assert bool(overlapped.isfinite().all())
        torch.testing.assert_close(sync, want, rtol=0, atol=tolerance)
        torch.testing.assert_close(overlapped, want, rtol=0, atol=tolerance)


# What it costs, and where it shows.


def test_comm_stats_count_bytes_exactly() -> None:
    """One-peer rounds send the padded vector once; where the weight travels, 8 bytes more for each peer."""

    def body(group: dist.ProcessGroup) -> tuple[float, float, float]:
        module = mlp(group.rank())
        num_bytes = -(-sum(4 * p.numel() for p in module.parameters()) // 64) * 64
        wrapper = wrap(module, group)
        start = wrapper.comm_stats()
        assert set(start) == {
            *(
                "bytes_sent",
                "wait_seconds",
                "num_rounds",
                "num_skipped",
                "mean_staleness",
                "max_staleness",
                "consensus_distance",
            )
        }
        assert start["num_rounds"] == 0
        for step in range(5):
            loss_of(wrapper, 0, step)
        stats = wrapper.comm_stats()
        assert stats["num_rounds"] == 5
        assert stats["wait_seconds"] > 0
        assert stats["bytes_sent"] - start["bytes_sent"] == 5 * num_bytes
        weighted = wrap(mlp(group.rank()), group, graph=irregular())
        start = weighted.comm_stats()
        for step in range(5):
            loss_of(weighted, 0, step)
        num_peers = len(irregular().out_peers(group.rank(), 0))
        assert weighted.comm_stats()["bytes_sent"] - start["bytes_sent"] == 5 * num_peers * (num_bytes + 8)
        return stats["mean_staleness"], stats["max_staleness"], stats["num_rounds"]

    assert run_ranks(3, body) == [(0.0, 0, 5)] * 3


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"overlap": True, "max_staleness": 1}], ids=str)
def test_comm_stats_tell_the_cost_of_each_peer(options: dict[str, Any]) -> None:
    def body(group: dist.ProcessGroup) -> tuple[dict[str, float], float]:
        wrapper = wrap(mlp(group.rank()), group, graph=irregular(), **options)
        before = wrapper.comm_stats()["bytes_sent"]
        for step in range(6):
            loss_of(wrapper, group.rank(), step)
        wrapper.flush()
        stats = wrapper.comm_stats()
        wrapper.close()
        return stats, before

    results = run_ranks(3, body)
    for rank, (stats, before) in enumerate(results):
        out_peers, in_peers = irregular().out_peers(rank, 0), irregular().in_peers(rank, 0)
        sent = [stats[f"bytes_sent/{peer}"] for peer in out_peers]
        assert len(set(sent)) == 1
        assert sum(sent) == stats["bytes_sent"] - before
        for peer in in_peers:
            assert stats[f"bytes_received/{peer}"] == results[peer][0][f"bytes_sent/{rank}"]
            assert stats[f"staleness/{peer}"] == stats["mean_staleness"]
        for peer in {*in_peers, *out_peers}:
            assert 0 < stats[f"wait_median/{peer}"] < 60
            assert stats[f"wait_mad/{peer}"] >= 0
        assert {name.partition("/")[2] for name in stats if "/" in name} == {str(j) for j in {*in_peers, *out_peers}}


@pytest.mark.parametrize(
    "options", [{"graph": RingGraph}, {"algorithm": LocalSGD(sync_every=2)}, {"overlap": True}], ids=str
)
def test_bytes_and_waits_inside_and_between_regions(options: dict[str, Any]) -> None:
    regions = Regions.of("0-1,2-3")

    def body(group: dist.ProcessGroup) -> dict[str, float]:
        wrapper = wrap(mlp(group.rank()), group, **options)
        assert not [name for name in wrapper.comm_stats() if "region" in name]
        wrapper.declare_regions("0-1,2-3")
        before = wrapper.comm_stats()
        for step in range(4):
            loss_of(wrapper, group.rank(), step)
        wrapper.flush()
        after = wrapper.comm_stats()
        wrapper.close()
        # What a rank sends is inside or between; the tree of the first broadcast is another sum, see `broadcast`.
        sent = [after[f"bytes_sent_{place}"] - before[f"bytes_sent_{place}"] for place in PLACES]
        assert sum(sent) == after["bytes_sent"] - before["bytes_sent"] > 0
        return after

    results = run_ranks(4, body)
    for place in PLACES:
        # A message arrives where it was counted as sent; collectives have a sender's count only.
        by_peer = [
            [
                sum(
                    stats.get(f"{way}/{peer}", 0) for peer in range(4) if regions.separate(rank, peer) is (place == FAR)
                )
                for rank, stats in enumerate(results)
            ]
            for way in ("bytes_sent", "bytes_received")
        ]
        assert by_peer[1] == [stats[f"bytes_received_{place}"] for stats in results]
        assert sum(by_peer[0]) == sum(by_peer[1])
    waits = [stats["wait_seconds_inside_region"] + stats["wait_seconds_between_regions"] for stats in results]
    has_rounds = "algorithm" not in options
    assert all((seconds > 0) is has_rounds for seconds in waits)


def test_a_ring_crosses_each_border_once_and_a_tree_as_its_branches() -> None:
    def body(group: dist.ProcessGroup) -> list[float]:
        wrapper = wrap(mlp(), group, algorithm=LocalSGD(sync_every=2))
        wrapper.declare_regions(Regions.of([[0, 1], [2, 3]]))
        start = wrapper.comm_stats()
        wrapper.average_()
        end = wrapper.comm_stats()
        wrapper.close()
        return [end[f"bytes_sent_{place}"] - start[f"bytes_sent_{place}"] for place in PLACES]

    inside, between = zip(*run_ranks(4, body), strict=True)
    assert inside[0] == between[1] == 0  # Gloo's ring goes down: 0 sends to 3, and 1 to 0
    assert between[0] == between[2] == inside[1] == inside[3] > 0
    assert [down_tree(rank, 4, 5, source=1) for rank in range(4)] == [{}, {2: 5, 3: 5}, {0: 5}, {}]


def test_wrong_regions_are_refused() -> None:
    wrapper = wrap(mlp(), solo_group())
    with pytest.raises(ValueError, match="expected regions of ranks, each rank from 0 on once"):
        wrapper.declare_regions("1-2")
    wrapper.close()
    served = PairwiseDataParallel(mlp(), name="a", peers={"a": "tcp://127.0.0.1:*"})
    with pytest.raises(ValueError, match="peers of dpwa have names"):
        served.declare_regions("0")
    served.close()


@pytest.mark.parametrize("options", MODES[:2])
def test_a_profiler_trace_shows_every_round(options: dict[str, Any]) -> None:
    wrapper = wrap(mlp(), solo_group(), **options)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for step in range(3):
            loss_of(wrapper, 0, step)
        wrapper.flush()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["GossipDataParallel.forward"] == counts["GossipDataParallel.mix"] == 3
    # The profiler does not follow the gossip thread, but what the training thread waits for and adds.
    for name in ("gossip.wait", "gossip.apply") if wrapper.overlap else ("gossip.round",):
        assert counts[name] == 3
    wrapper.close()


def test_an_error_names_the_method_that_was_called() -> None:
    def body(group: dist.ProcessGroup) -> str:
        wrapper = wrap(mlp(), group)
        with pytest.raises(RuntimeError, match="all ranks must call the same") as caught:
            (wrapper.consensus_distance if group.rank() else wrapper.averaged_state_dict)()
        wrapper.close()
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first.startswith("rank 0: averaged_state_dict(): ")
    assert "rank 1 is in 'consensus_distance(): " in first
    assert second.startswith("rank 1: consensus_distance(): ")
    assert "rank 0 is in 'averaged_state_dict(): " in second


# The end.


@pytest.mark.filterwarnings("ignore:got a training forward after close")
@pytest.mark.parametrize("options", MODES)
def test_close_ends_threads_and_training_goes_on_locally(options: dict[str, Any]) -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(group.rank()), group, graph=irregular(), **options)
        optimizer = sgd(wrapper)
        for step in range(3):
            train_step(wrapper, optimizer, group.rank(), step)
        wrapper.close()
        wrapper.close()
        num_bytes = wrapper.comm_stats()["bytes_sent"]
        bare = copy.deepcopy(wrapper.module)
        first, second = torch.optim.SGD(bare.parameters(), lr=0.1), torch.optim.SGD(wrapper.parameters(), lr=0.1)
        for step in range(3):
            train_step(bare, first, group.rank(), step)
            train_step(wrapper, second, group.rank(), step)
        wrapper.flush()
        wrapper.eval()
        assert torch.equal(flatten(bare), flatten(wrapper.module))
        assert wrapper.comm_stats()["bytes_sent"] == num_bytes

    run_ranks(3, body)
    assert_no_gossip_threads()


# Mistakes.

MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"max_staleness": 1}, r"got max_staleness=1 with overlap=False, expected .* pass overlap=True"),
    ({"overlap": True, "max_staleness": -1}, r"got max_staleness=-1"),
    ({"nprocs_per_node": 0}, r"got nprocs_per_node=0, expected 1 or more"),
    ({"nprocs_per_node": 2}, r"got nprocs_per_node=2 in a world of 1, expected a divisor"),
    ({"graph": RingGraph(3)}, r"got a graph of 3 ranks, expected 1, the size of the process group .*build"),
    (
        {"graph": RingGraph(3), "mixing": UniformMixing(RingGraph(4))},
        r"got graph=RingGraph\(3.* and a mixing over RingGraph\(4.*expected one graph",
    ),
    ({"comm_device": "meta"}, r"got comm_device=meta, expected 'cpu' or the module's device"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES, ids=[str(i) for i in range(len(MISTAKES))])
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        wrap(mlp(), solo_group(), **options)


WRONG_WEIGHTS: list[tuple[int, dict[str, Any], str]] = [
    (
        3,
        {"mixing": UniformMixing(irregular()), "push_sum": False},
        r"got UniformMixing.* whose rows do not sum to one, expected row-stochastic .* use push_sum=True",
    ),
    (
        2,
        {"mixing": MatrixMixing(RingGraph(2), [[0.5, 0.5], [0.25, 0.75]])},
        r"got MatrixMixing.* whose columns do not sum to one, expected column-stochastic .* use push_sum=False",
    ),
    (3, {"graph": irregular(), "algorithm": PushPull()}, r"rows do not sum to one"),
]


@pytest.mark.parametrize(("world_size", "options", "message"), WRONG_WEIGHTS, ids=["rows", "columns", "graph"])
def test_wrong_weights_are_named(world_size: int, options: dict[str, Any], message: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        own = {**options, "algorithm": PushPull()} if "algorithm" in options else options
        with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
            wrap(mlp(), group, **own)

    run_ranks(world_size, body)


def test_without_torch_distributed() -> None:
    with pytest.raises(RuntimeError, match=r"torch.distributed is not initialised, expected .*; start with torchrun"):
        GossipDataParallel(mlp())


def test_several_processes_per_node_make_their_own_groups() -> None:
    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match="got a process group and nprocs_per_node=2, expected one of them"):
            wrap(mlp(), group, nprocs_per_node=2)

    run_ranks(2, body)


class OtherWrapper(GossipDataParallel):
    """Another class."""


DISAGREEMENTS: list[tuple[Callable[[int, dist.ProcessGroup], GossipWrapper], str]] = [
    (
        lambda r, g: wrap(mlp(), g, graph=RingGraph(3, peers_per_itr=1 + r // 2)),
        r"rank 2: graph: got .*peers_per_itr=2",
    ),
    (
        lambda r, g: wrap(
            mlp(), g, mixing=[UniformMixing, MetropolisHastingsMixing][r // 2](RingGraph(3, peers_per_itr=2))
        ),
        r"rank 2: mixing: got MetropolisHastingsMixing.*expected UniformMixing",
    ),
    (lambda r, g: wrap(mlp(), g, overlap=r == 2), r"rank 2: overlap: got True, expected False"),
    (lambda r, g: wrap(mlp(), g, schedule=Schedule(1 + r // 2)), r"rank 2: schedule: got .*gossip_every=2"),
    (lambda r, g: wrap(mlp(), g, gossip_buffers=r < 2), r"rank 2: gossip_buffers: got False"),
    (lambda r, g: wrap(mlp(), g, init_sync=r < 2), r"rank 2: init_sync: got False, expected True"),
    (
        lambda r, g: wrap(mlp(), g, comm_device="cpu" if r < 2 else None),
        r"rank 2: comm_device: got None, expected cpu",
    ),
    (lambda r, g: wrap(mlp(), g, push_sum=r < 2, graph=RingGraph(3)), r"rank 2: algorithm: got PushPull.*PushSum"),
    (lambda r, g: wrap(nn.Linear(3, 2 + r // 2), g), r"rank 2: model: got weight \(3, 3\) .*expected weight \(2, 3\)"),
    (lambda r, g: wrap(nn.Linear(3, 2, dtype=[torch.float32, torch.float64][r // 2]), g), r"rank 2: .*float64"),
    (lambda r, g: wrap(nn.Linear(3, 2, bias=r < 2), g), r"rank 2: model: got 1 entries, expected 2"),
    (
        lambda r, g: [GossipDataParallel, OtherWrapper][r // 2](mlp(), process_group=g),
        r"rank 2: wrapper: got OtherWrapper, expected GossipDataParallel",
    ),
]


@pytest.mark.parametrize("number", range(len(DISAGREEMENTS)))
def test_disagreement_is_named_on_every_rank(number: int) -> None:
    make, message = DISAGREEMENTS[number]

    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match=f"ranks do not agree with rank 0: {message}"):
            make(group.rank(), group)

    run_ranks(3, body)


def test_a_missing_rank_is_named_at_construction() -> None:
    def body(group: dist.ProcessGroup) -> None:
        if group.rank() == 0:
            with pytest.raises(
                TimeoutError, match=r"(?s)rank 0: comparing model .*timeout 0.3 s.*rank 1 did not take part"
            ):
                wrap(mlp(), group, timeout=timedelta(seconds=0.3))

    run_ranks(2, body)


@pytest.mark.parametrize("options", MODES)
def test_wrappers_on_one_group_do_not_mix_up(options: dict[str, Any]) -> None:
    """Two wrapped models that take turns (a GAN): their rounds have the same numbers.

    A group given by hand carries one wrapper's rounds at a time, so with overlap the second model wraps a copy.
    """

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        first = wrap(mlp(group.rank()), group, **options)
        second = copy.deepcopy(first) if first.overlap else wrap(mlp(), group)
        second.module.load_state_dict(mlp(10 + group.rank()).state_dict())
        for step, model in itertools.product(range(9), (first, second)):
            loss_of(model, 0, step)
        first.close()
        second.close()
        return flatten(first.module), flatten(second.module)

    results = run_ranks(4, body)
    for i in range(2):
        mean = torch.stack([flatten(mlp(10 * i + rank)) for rank in range(4)]).mean(0)
        for result in results:
            torch.testing.assert_close(result[i], mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("is_inner", [False, True])
@pytest.mark.parametrize("graph", [RingGraph(3), irregular()], ids=str)
def test_a_cast_under_a_round_in_flight_loses_no_mass(graph: NetworkXGraph, is_inner: bool) -> None:
    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        model = mlp(group.rank())
        wrapper, start = wrap(model, group, graph=graph, overlap=True), flatten(model)
        for step in range(2):
            loss_of(wrapper, 0, step)
        (model if is_inner else wrapper).double()
        loss_of(wrapper, 0, 2)
        wrapper.flush()
        wrapper.close()
        return start, numerator(wrapper)

    starts, ends = (torch.stack(list(values)) for values in zip(*run_ranks(3, body), strict=True))
    torch.testing.assert_close(ends.sum(0), starts.sum(0), rtol=0, atol=1e-6)
    assert float((ends - starts).abs().max()) > 1e-3


def test_a_reentrant_checkpoint_of_the_whole_wrapper_is_refused() -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(), group)
        x = torch.ones(2, 3, requires_grad=True)
        loss = checkpoint(wrapper, x, use_reentrant=True, preserve_rng_state=False).sum()
        with pytest.raises(RuntimeError, match=r"got a training forward inside a backward and none before it"):
            loss.backward()
        wrapper.close()

    run_ranks(2, body)


def test_a_setting_without_effect_warns() -> None:
    with pytest.warns(UserWarning, match="find_unused_parameters has no effect with nprocs_per_node=1"):
        GossipDataParallel(mlp(), process_group=solo_group(), find_unused_parameters=True).close()
