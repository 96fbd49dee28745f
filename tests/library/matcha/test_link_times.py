"""Link times: every link really measured, the same dict on all ranks, ready to be planned with."""

from __future__ import annotations

from typing import Any

import networkx as nx
import pytest
import torch.distributed as dist

from gossip_modules.graph_manager.matchings import decompose, graph_edges
from gossip_modules.matcha.graph import MatchaGraph
from gossip_modules.matcha.link_times import measure_link_times
from gossip_modules.transport.process_group import ProcessGroupTransport
from tests.harness.ranks import CPU, TIMEOUT, run_ranks, solo_group

PAW = nx.Graph([(0, 1), (1, 2), (2, 0), (2, 3)])


def transport_over(group: dist.ProcessGroup) -> ProcessGroupTransport:
    return ProcessGroupTransport(group, device=CPU, timeout=TIMEOUT)


@pytest.mark.parametrize("base", [PAW, decompose(PAW)])
def test_all_ranks_hold_the_same_seconds_of_every_link(base: Any) -> None:
    def body(group: dist.ProcessGroup) -> tuple[dict[tuple[int, int], float], int]:
        transport = transport_over(group)
        times = measure_link_times(base, transport, num_bytes=1000, num_repeats=3)
        return times, transport.num_bytes_sent

    results = run_ranks(4, body)
    times = [result[0] for result in results]
    assert all(one == times[0] for one in times)
    assert list(times[0]) == graph_edges(PAW)
    assert all(seconds > 0 for seconds in times[0].values())
    # Four exchanges, one of them to warm up, each with a byte ahead; the rest are collectives of a few bytes.
    for rank, (_, num_bytes) in enumerate(results):
        assert 0 <= num_bytes - 4 * 1001 * PAW.degree[rank] < 200
    graphs = [MatchaGraph(PAW, budget=0.5, costs=one) for one in times]
    assert len({repr(graph) for graph in graphs}) == 1
    assert graphs[0].expected_cost == pytest.approx(0.5 * graphs[0].full_cost, rel=1e-4)


def test_a_world_of_one_has_no_links() -> None:
    assert measure_link_times(nx.empty_graph(1), transport_over(solo_group()), num_bytes=8) == {}


@pytest.mark.parametrize(
    ("base", "options", "message"),
    [
        (PAW, {"num_bytes": 8}, "got a base graph of 4 ranks, expected 1, the size of the transport"),
        (nx.empty_graph(1), {"num_bytes": 0}, "got num_bytes=0 and num_repeats=5, expected at least 1"),
        (nx.empty_graph(1), {"num_bytes": 8, "num_repeats": 0}, "num_repeats=0, expected at least 1"),
        (nx.empty_graph(2), {"num_bytes": 8}, "in 2 pieces"),
    ],
)
def test_mistakes_are_named(base: nx.Graph, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure_link_times(base, transport_over(solo_group()), **options)
