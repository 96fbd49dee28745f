"""The simulator's clocks: an event loop and measurements agree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

import gossip_modules as gm
from gossip_modules import DiLoCo, SparseLoCo, StreamingDiLoCo
from gossip_modules.compression import Absmax
from gossip_modules.extend import Algorithm
from gossip_modules.graph_manager.butterfly_groups import ButterflyGroups
from gossip_modules.lab import Compute, Network, Setting, simulate
from gossip_modules.lab.asynchronous import Groups
from gossip_modules.lab.clock import (
    BucketClock,
    LinkSpec,
    MessageCost,
    OverlapClock,
    StepClock,
    WorkerLinks,
    bucket_bytes,
)
from gossip_modules.lab.plan import Running
from gossip_modules.mixing_manager.graph_weights import default_mixing
from gossip_modules.rounds.rows import StackedMixing
from gossip_modules.rounds.stacked import Answered
from gossip_modules.schedule import Schedule
from tests.library.lab.simulations import (
    CLUSTER,
    LINKS,
    MODEL_BYTES,
    UNEVEN,
    Rounds,
    digits,
    graphs,
    made,
    start,
    workers,
)

# Time.


def exchange_of(
    network: WorkerLinks, mixing: gm.mixing_manager.MixingManager, i: int, t: int, message: MessageCost
) -> float:
    """Of rank i in round t, by the definition, link by link."""
    graph, wire = mixing.graph, network.wire_seconds(message.num_bytes)
    peers = graph.in_peers(i, t)
    if not peers:
        return 0.0
    loads = [len(peers) * network.slowness[i], *(len(graph.out_peers(j, t)) * network.slowness[j] for j in peers)]
    return wire * float(max(loads)) + network.latency_s + len(peers) * message.decode_seconds


def event_loop(
    compute: Compute,
    network: WorkerLinks,
    mixing: gm.mixing_manager.MixingManager,
    message: MessageCost,
    steps: int,
    *,
    overlap: bool,
) -> list[list[float]]:
    """Starts of all steps of all ranks: rank by rank, in plain Python."""
    n = network.num_ranks
    here, under_way = [0.0] * n, [0.0] * n
    starts: list[list[float]] = []
    for k in range(steps):
        if k:
            durations = compute.step_seconds(k - 1, workers(n))
            here = [starts[-1][i] + float(durations[i]) for i in range(n)]
        if overlap:
            copies = 2 * network.memory_seconds(message.num_bytes)
            begin = [max(here[i], under_way[i]) + copies for i in range(n)]
        else:
            begin = here
        done = [
            max(begin[j] for j in (i, *mixing.graph.in_peers(i, k)))
            + message.encode_seconds
            + exchange_of(network, mixing, i, k, message)
            for i in range(n)
        ]
        starts.append(begin if overlap else done)
        under_way = done
    return starts


def clock_starts(clock: StepClock, mixing: gm.mixing_manager.MixingManager | None, steps: int) -> list[list[float]]:
    starts = []
    for t in range(steps):
        clock.advance([Answered(None if mixing is None else StackedMixing(mixing).round(t))])
        starts.append(clock.starts.tolist())
    return starts


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("name", ["npeer-exponential 1", "ring 2", "undirected", "directed", "bipartite-complete 1"])
@pytest.mark.parametrize("n", [4, 5, 6])
def test_rounds_take_the_time_of_an_event_loop(n: int, name: str, overlap: bool) -> None:
    links = Network("2 Gbit/s, 3 ms", slow_share=0.3, slow_factor=4, seed=n)
    network, message = WorkerLinks(links, workers(n)), MessageCost(1.5e7, encode_seconds=0.01, decode_seconds=0.02)
    mixing = default_mixing(graphs(n)[name], push_sum=True)
    clock = (OverlapClock if overlap else StepClock)(UNEVEN, network, message)
    expected = event_loop(UNEVEN, network, mixing, message, 15, overlap=overlap)
    got = clock_starts(clock, mixing, 15)
    for k, (mine, theirs) in enumerate(zip(got, expected)):
        assert mine == pytest.approx(theirs, rel=1e-12), f"step {k}"


@pytest.mark.parametrize("n", [4, 5, 6])
@pytest.mark.parametrize("megabytes", [0.5, 30, 60])
def test_buckets_take_the_time_of_an_event_loop(n: int, megabytes: float) -> None:
    network, size = WorkerLinks(Network("2 Gbit/s, 3 ms"), workers(n)), megabytes * 1e6
    got = clock_starts(BucketClock(UNEVEN, network, MessageCost(size)), None, 10)
    begun = 0.0
    for k in range(1, 10):
        compute = UNEVEN.compute_seconds(k - 1, workers(n)).tolist()
        free, reduced = 0.0, 0.0
        for bucket in bucket_bytes(size):
            reduced += bucket
            ready = max(begun + 0.02 + c / 3 + 2 / 3 * c * (reduced / size) for c in compute)
            hop = 8 * bucket / n / (2e9 * 0.957) + 0.003
            free = max(free, ready) + 2 * (n - 1) * hop
        begun = free
        assert got[k] == pytest.approx([begun] * n, rel=1e-12)


def test_periodic_averages_wait_for_the_slowest_and_no_other_step_does() -> None:
    n, size = 5, 1e7
    network = WorkerLinks(LINKS, workers(n))
    method = made("LocalSGD(4)", Setting(n, int(size / 4), UNEVEN, LINKS))
    x, here = start(n), [0.0] * n
    for k in range(13):
        method.forward(x)
        if k and k % 4 == 0:
            here = [max(here) + network.all_reduce_seconds(size)] * n
        assert method.starts.tolist() == pytest.approx(here, rel=1e-12)
        durations = UNEVEN.step_seconds(k, workers(n)).tolist()
        here = [a + b for a, b in zip(here, durations)]


CODES: Mapping[str, Mapping[str, Any]] = {
    "exact": {},
    "gathered codes": {"compressor": Absmax(4, 32)},
    "averaged codes": {"compressor": Absmax(4, 32), "collective": "all_reduce"},
}
AVERAGED: dict[str, Algorithm] = {
    f"{name}, {fragments} fragments": DiLoCo(4 * fragments, fragments=fragments, **code)
    for fragments in (1, 2)
    for name, code in CODES.items()
}
AVERAGED["streaming"] = StreamingDiLoCo(8, fragments=2, delay=1)
AVERAGED["sparse"] = SparseLoCo(4)


@pytest.mark.parametrize("algorithm", AVERAGED.values(), ids=AVERAGED)
def test_an_average_of_the_schedule_takes_the_time_of_all_parameters_without_a_code(algorithm: Algorithm) -> None:
    n, size, num_averages = 4, 1e7, 3
    network = WorkerLinks(LINKS, workers(n))
    setting = Setting(n, int(size / 4), UNEVEN, LINKS)
    method = made(algorithm, setting, schedule=Schedule(average_until=num_averages))
    x, here = start(n), [0.0] * n
    for k in range(num_averages):
        method.forward(x)
        here = [max(here) + network.all_reduce_seconds(size)] * n
        assert method.starts.tolist() == pytest.approx(here, rel=1e-12)
        here = [a + b for a, b in zip(here, UNEVEN.step_seconds(k, workers(n)).tolist(), strict=True)]
    assert method.sent_bytes == pytest.approx(num_averages * 2 * (1 - 1 / n) * size)


@pytest.mark.parametrize("n", [4, 5, 6])
def test_wait_avoiding_groups_take_the_time_of_an_event_loop(n: int) -> None:
    links, message, period = WorkerLinks(Network(LinkSpec(4e9, 0.001)), workers(n)), MessageCost(1e7), 4
    network = links
    groups = Groups(UNEVEN, links, message, ButterflyGroups(n), sync_period=period)
    method, x = Rounds(Running(groups, groups)), start(n)
    here, done = [0.0] * n, 0.0
    phase = links.wire_seconds(message.num_bytes) + links.latency_s
    num_phases = int(math.log2(ButterflyGroups(n).group_size)) + (2 if n in (5, 6) else 0)
    for version in range(16):
        method.forward(x)
        durations = UNEVEN.step_seconds(version, workers(n)).tolist()
        if version % period == period - 1:
            done = max([done, *here]) + network.all_reduce_seconds(message.num_bytes)
            starts = dict.fromkeys(range(n), done)
        else:
            begin = max(done, min(here)) + math.ceil(math.log2(n)) * 0.001
            done = begin + num_phases * phase
            starts = {i: done for i in range(n) if here[i] <= begin}
            while True:  # one after the other, those that come before another one is there for the next round
                next_begin = max(done, min(starts[i] + durations[i] for i in starts))
                left = [i for i in range(n) if i not in starts and here[i] <= next_begin]
                if not left:
                    break
                first = min(left, key=lambda i: here[i])
                starts[first] = max(here[first], done)
        assert method.is_stepping is not None
        assert set(method.is_stepping.nonzero()[0].tolist()) == set(starts)
        for i, begun in starts.items():
            assert method.starts[i] == pytest.approx(begun, rel=1e-12)
            here[i] = begun + durations[i]


@pytest.mark.parametrize("name", ["adpsgd", "dpwa"])
def test_asynchronous_ranks_never_wait(name: str) -> None:
    """Each step starts when the one before has ended and the copies are made; faster ranks take more steps."""
    setting = replace(CLUSTER, world_size=6, compute=replace(UNEVEN, step_spread=0.0, straggle_share=0.0))
    method, x = made(name, setting), start(6)
    copies = 2 * LINKS.on(workers(6)).memory_seconds(MODEL_BYTES)
    durations = setting.compute.step_seconds(0, workers(6))
    steps = torch.zeros(6)
    for _ in range(80):
        method.forward(x)
        assert method.is_stepping is not None
        steps += torch.from_numpy(method.is_stepping)
    for rank in range(6):
        expected = float(steps[rank]) * copies + (float(steps[rank]) - 1) * float(durations[rank])
        assert method.starts[rank] == pytest.approx(expected, rel=1e-9)
    order = torch.from_numpy(durations).argsort()
    assert (steps[order].diff() <= 0).all()
    assert steps[order[0]] > 1.3 * steps[order[-1]]


MEASURED = {"ar": 0.791, "sgp": 0.5495, "dpsgd": 0.550, "osgp": 0.401}
"""Seconds per step on the emulated cluster: 8 hosts, 1 Gbit/s, 44.7 MB, 150 ms of waited compute and 10 around it."""
"""Seconds per step on the emulated cluster: 8 hosts, 1 Gbit/s, 44.7 MB, 150 ms of waited compute and 10 around it."""


@pytest.mark.parametrize("name", MEASURED)
def test_steps_take_the_measured_time_within_15_percent(name: str) -> None:
    prediction = simulate(name, CLUSTER, digits(), target=1e-9, max_steps=40)
    assert prediction.step_seconds == pytest.approx(MEASURED[name], rel=0.15)


def test_an_all_reduce_and_an_exchange_take_the_measured_time() -> None:
    network = LINKS.on(workers(8))
    assert network.all_reduce_seconds(44.7e6) == pytest.approx(0.650, rel=0.15)
    assert network.wire_seconds(44.7e6) == pytest.approx(0.374, rel=0.01)
    local = simulate("sgp", replace(CLUSTER, world_size=1), digits(), target=1e-9, max_steps=10)
    assert local.step_seconds == pytest.approx(0.160, rel=1e-9)


# Lines that the workers of a region share.


def lines(rate: float = 1e8) -> WorkerLinks:
    """Four workers in two regions: 1 Gbit/s for each pair, and a line between the regions."""
    one = LinkSpec(1e9, 0.0)
    return Network([[one] * 4] * 4, (1,) * 4, lines=(0, 0, 1, 1), line_bit_s=rate, memory_byte_s=1e18).on(workers(4))


@pytest.mark.parametrize(("shift", "crowd"), [(1, 1), (2, 2), (3, 1)])
def test_messages_of_a_region_share_its_line(shift: int, crowd: int) -> None:
    mixing = default_mixing(_Shift(4, shift), push_sum=True)
    links, message = lines(), MessageCost(1e6)
    seconds = links.exchange_seconds(StackedMixing(mixing).round(0), message)
    crosses = [rank // 2 != (rank - shift) % 4 // 2 for rank in range(4)]  # the message that the rank waits for
    slow, fast = crowd * 8e6 / (1e8 * 0.957), 8e6 / (1e9 * 0.957)
    assert seconds.tolist() == pytest.approx([slow if crossing else fast for crossing in crosses])


def test_a_ring_through_regions_crosses_each_line_once() -> None:
    links = lines()
    assert links.wire_seconds(1e6) == pytest.approx(8e6 / (1e8 * 0.957))
    mixed = Network("1 Gbit/s", lines=(0,)).on(workers(4))
    assert mixed.wire_seconds(1e6) == pytest.approx(8e6 / (1e9 * 0.957))
    one = LinkSpec(1e9)
    turns = Network([[one] * 4] * 4, (1,) * 4, lines=(0, 1, 0, 1), line_bit_s=1e8).on(workers(4))
    assert turns.wire_seconds(1e6) == pytest.approx(2 * 8e6 / (1e8 * 0.957))


def test_a_pair_between_regions_has_the_line_for_itself() -> None:
    seconds = lines().pair_seconds(workers(4), workers(4)[::-1].copy(), MessageCost(1e6))
    assert seconds.tolist() == pytest.approx([8e6 / (1e8 * 0.957)] * 4)


class _Shift(gm.graph_manager.GraphManager):
    def __init__(self, world_size: int, shift: int) -> None:
        self.shift = shift
        super().__init__(world_size)

    def phone_book(self, rank: int) -> list[int]:
        return [(rank + self.shift) % self.world_size]
