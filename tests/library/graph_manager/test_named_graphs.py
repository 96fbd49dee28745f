"""Graphs by name: the table is what pictures, training and the simulator share."""

from __future__ import annotations

import pytest

import gossip_modules as gm
from gossip_modules.graph_manager.named_graphs import (
    GRAPHS,
    PREDEFINED_GRAPHS,
    STATIC_GRAPHS,
    named_graph,
    num_neighbours,
)
from train.methods import graphs as train_graphs


@pytest.mark.parametrize("name", GRAPHS)
def test_a_name_gives_its_graph(name: str) -> None:
    assert repr(named_graph(name, 8, 1)) == repr(GRAPHS[name](8, peers_per_itr=1))
    schedule = {0: 2, 5: 1}
    if name != "bipartite-complete":
        assert repr(named_graph(name, 8, schedule)) == repr(GRAPHS[name](8, peers_per_itr=schedule))


@pytest.mark.parametrize("name", STATIC_GRAPHS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_static_graphs_take_all_neighbours(name: str, n: int) -> None:
    if name == "hypercube" and n == 3:
        pytest.skip("a hypercube has a power of two of ranks")
    graph = named_graph(name, n)
    assert graph.period == 1
    assert graph.is_symmetric
    assert num_neighbours(name, n) == max(1, len(graph.out_peers(0, 0)))


@pytest.mark.parametrize("name", sorted(set(GRAPHS) - set(STATIC_GRAPHS)))
def test_other_graphs_take_one_peer(name: str) -> None:
    assert named_graph(name, 8).num_peers(0) == 1


@pytest.mark.parametrize(("name", "index"), PREDEFINED_GRAPHS.items())
def test_predefined_graphs_have_their_size(name: str, index: int) -> None:
    expected = gm.NetworkXGraph(gm.select_graph(index))
    assert repr(named_graph(name, expected.world_size)) == repr(expected)
    with pytest.raises(
        ValueError, match=rf"got graph='{name}' for 7 nodes, expected the {expected.world_size} .*; start"
    ):
        named_graph(name, 7)


def test_what_is_no_graph_is_named() -> None:
    with pytest.raises(ValueError, match=r"got graph='star', expected one of exponential, .*, matcha5; choose"):
        named_graph("star", 4)
    with pytest.raises(ValueError, match="got peers_per_itr=4, expected 1 to 3"):
        named_graph("complete", 4, 4)


def test_training_takes_its_names_from_the_table() -> None:
    names = {name for name in train_graphs.GRAPHS if name != "auto"}
    assert names == set(GRAPHS) - {"bipartite-complete"}  # which has no number of peers to choose
    assert all(train_graphs.GRAPHS[name] is GRAPHS[name] for name in names)
