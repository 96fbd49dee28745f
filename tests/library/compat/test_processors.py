"""MATCHA's processors: the graph of the library by the arguments and attributes of MATCHA's code."""

from __future__ import annotations

import networkx as nx
import pytest

import gossip_modules as gm
from gossip_modules.compat.processors import FixedProcessor, MatchaProcessor
from gossip_modules.graph_manager.matchings import predefined_matchings


def test_the_processor_is_the_graph() -> None:
    graph = gm.MatchaGraph(gm.graph_manager.select_graph(0), budget=0.5)
    for base, is_list in (
        (gm.graph_manager.select_graph(0), False),
        (gm.graph_manager.select_graph(0), True),
        (predefined_matchings(0), True),
    ):
        processor = MatchaProcessor(base, commBudget=0.5, rank=0, size=8, iterations=50, issubgraph=is_list)
        assert isinstance(processor, gm.MatchaGraph)
        assert processor.probabilities == graph.probabilities
        assert processor.neighbor_weight == graph.alpha
        assert [processor.out_peers(3, t) for t in range(9)] == [graph.out_peers(3, t) for t in range(9)]
    flags = processor.active_flags
    assert [len(flags), len(flags[0])] == [50, 5]
    assert flags[7] == [int(is_active) for is_active in graph.active(7)]
    assert processor.neighbors_info[1] == [-1, 7, -1, 6, -1, -1, 3, 1]


def test_the_fixed_one_uses_all_matchings_or_none() -> None:
    processor = FixedProcessor(gm.graph_manager.select_graph(5), 0.5, 0, 8, 40)
    assert {tuple(flags) for flags in processor.active_flags} == {(0, 0), (1, 1)}
    whole = FixedProcessor(gm.graph_manager.select_graph(1), 1.0, 0, 16, 3)
    assert whole.active_flags == [[1] * 5] * 3
    assert not whole.is_dynamic
    assert whole.alpha == pytest.approx(2 / (0.1177 + 6.4945), abs=1e-4)


def test_refused_arguments() -> None:
    with pytest.raises(ValueError, match=r"got size=4 for a graph of 8 ranks, expected the same number; start 8"):
        MatchaProcessor(gm.graph_manager.select_graph(0), 0.5, 0, 4, 1)
    with pytest.raises(ValueError, match=r"got matchings as base_graph with issubgraph=False.*pass issubgraph=True"):
        MatchaProcessor(predefined_matchings(0), 0.5, 0, 8, 1)
    with pytest.raises(ValueError, match=r"rank"):
        MatchaProcessor(nx.path_graph(2), 0.5, 2, 2, 1)
