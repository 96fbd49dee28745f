"""Every import, argument, attribute and call of the READMEs of SGP, MATCHA, WAGMA-SGD and dpwa, typed as it stands.

Each one works, with a warning where the name is an old one, or says in one line what to write.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import networkx as nx
import pytest
import torch
from torch import nn

import gossip_modules as gm
from gossip_modules.compat.actions import ForeignArguments, Ignored
from gossip_modules.compat.tables import (
    AD_PSGD_ARGUMENTS,
    ALL_REDUCE_ARGUMENTS,
    GOSSIPER_ARGUMENTS,
    GRAPH_ARGUMENTS,
    MATCHA_ARGUMENTS,
    MISSING,
    SGP_ARGUMENTS,
    WAGMA_ARGUMENTS,
    WORKING,
)
from tests.harness.progress import local_of, weight_of
from tests.harness.ranks import solo_group

IMPORTS: Mapping[str, tuple[str, ...]] = {
    "distributed": ("GossipDataParallel",),
    "ar_distributed": ("AllReduceDataParallel",),
    "simple_distributed": ("SimpleGossipDataParallel",),
    "ad_psgd": ("BilatGossipDataParallel",),
    "gossiper": ("Gossiper", "PushSum", "PushPull", "BilatPushPull"),
    "graph_manager": (
        "GraphManager",
        "DynamicBipartiteExponentialGraph",
        "DynamicBipartiteLinearGraph",
        "DynamicDirectedExponentialGraph",
        "DynamicDirectedLinearGraph",
        "NPeerDynamicDirectedExponentialGraph",
        "RingGraph",
        "FixedProcessor",
        "MatchaProcessor",
        "select_graph",
    ),
    "mixing_manager": ("MixingManager", "UniformMixing"),
    "communicator": (
        "decenCommunicator",
        "ChocoCommunicator",
        "centralizedCommunicator",
        "FixedProcessor",
        "MatchaProcessor",
    ),
}
EXAMPLES: Mapping[str, Any] = {
    "rank": 0,
    "world_size": 1,
    "synch_freq": 0,
    "verbose": False,
    "use_streams": True,
    "distributed": True,
    "local_node_group": object(),
    "master_group": object(),
    "master_addr": "127.0.0.1",
    "master_port": "40100",
    "backend": "gloo",
    "graph_class": gm.graph_manager.DynamicBipartiteExponentialGraph,
    "mixing_class": gm.mixing_manager.UniformMixing,
    "num_peers": 1,
    "comm_device": torch.device("cpu"),
    "gossiper": gm.DiLoCo(2),
    "lr": 0.1,
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "nesterov": True,
    "network_interface_type": "ethernet",
    "tcp_interface_name": "eth0",
    "groupsize": 1,
    "tau": 10,
    "optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1),
}
TABLES: list[tuple[Any, ForeignArguments]] = [
    (gm.GossipDataParallel, SGP_ARGUMENTS),
    (gm.BilatGossipDataParallel, AD_PSGD_ARGUMENTS),
    (gm.AllReduceDataParallel, ALL_REDUCE_ARGUMENTS),
    (gm.GroupAverageDataParallel, WAGMA_ARGUMENTS),
]
REFUSED = {
    *("local_node_group", "master_group", "lr", "momentum", "weight_decay", "nesterov"),
    *("network_interface_type", "tcp_interface_name", "optimizer", "groupsize", "tau"),
}


def said(call: Callable[[], Any]) -> tuple[Any, list[str], str]:
    """What a call returns, its warnings, and its error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result, error = call(), ""
        except (TypeError, ValueError, AttributeError) as raised:
            result, error = None, str(raised)
    assert all(warning.filename == __file__ for warning in caught), [warning.filename for warning in caught]
    return result, [str(warning.message) for warning in caught], error


def is_one_line(text: str) -> bool:
    return "\n" not in text and len(text) > 40


def wrapped(wrapper: Any = gm.GossipDataParallel, **options: Any) -> Any:
    return wrapper(nn.Linear(2, 1), process_group=solo_group(), **options)


@pytest.mark.parametrize(("module", "names"), IMPORTS.items())
def test_every_import(module: str, names: tuple[str, ...]) -> None:
    found = importlib.import_module(f"gossip_modules.{module}")
    assert [name for name in names if not callable(getattr(found, name))] == []


@pytest.mark.parametrize("module", ["graph_manager"])
def test_a_name_that_is_nowhere_is_an_attribute_error(module: str) -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'Nothing'"):
        _ = importlib.import_module(f"gossip_modules.{module}").Nothing


@pytest.mark.parametrize(
    ("wrapper", "name"), [(wrapper, name) for wrapper, table in TABLES for name in table], ids=lambda x: str(x)
)
def test_every_argument_of_the_wrappers(wrapper: Any, name: str) -> None:
    model, warned, error = said(lambda: wrapped(wrapper, **{name: EXAMPLES[name]}))
    if model is None:
        assert name in REFUSED
        assert error.startswith(f"got {name}=")
        assert is_one_line(error)
        assert "expected" in error
    else:
        assert name not in REFUSED
        assert len(warned) == 1
        assert warned[0].startswith(f"got {name}=")
        assert is_one_line(warned[0])
        model.close()


@pytest.mark.parametrize(
    ("wrapper", "options", "message"),
    [
        (gm.GossipDataParallel, {"rank": 3}, r"got rank=3, expected none: .*, which is 0 here; leave it out"),
        (
            gm.GossipDataParallel,
            {"world_size": 8},
            r"got world_size=8, expected none: .*, which is 1 here; leave it out",
        ),
        (gm.GossipDataParallel, {"synch_freq": 2}, r"pass overlap=True, max_staleness=2"),
        (gm.GossipDataParallel, {"distributed": False}, r"call the module itself"),
        (gm.BilatGossipDataParallel, {"num_peers": 2}, r"one peer at a time"),
        (gm.BilatGossipDataParallel, {"comm_device": "cuda"}, r"memory of the host"),
    ],
)
def test_values_of_another_meaning_are_refused(wrapper: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrapped(wrapper, **options)


def test_arguments_of_the_same_meaning_take_effect() -> None:
    model, warned, _ = said(lambda: wrapped(overlap=True, synch_freq=2))
    assert model.max_staleness == 2
    assert "which is now max_staleness=2" in warned[0]
    model.close()


def test_the_state_dict_and_the_checkpoint_of_sgp() -> None:
    wrapper = gm.GossipDataParallel(nn.Linear(2, 1), process_group=solo_group())
    match = r"got finish_gossip=True for GossipDataParallel.state_dict, which changes nothing: rounds in flight are"
    with pytest.warns(UserWarning, match=match):
        state = wrapper.state_dict(finish_gossip=True)
    assert set(state) == set(wrapper.state_dict())
    with pytest.raises(ValueError, match=r'checkpoint of Stochastic Gradient Push .*checkpoint\["state_dict"\]'):
        wrapper.load_state_dict({"state_dict": state, "ps_weight": 1.0, "is_ps_numerator": False})
    wrapper.load_state_dict(state)
    wrapper.close()


@pytest.mark.parametrize("name", WORKING)
def test_every_attribute_that_works(name: str) -> None:
    model = wrapped()
    value, warned, _ = said(lambda: getattr(model, name))
    if callable(value):
        value = value()
    expected = {"transfer_params": True, "is_ps_numerator": False, "ps_weight": torch.ones(1, dtype=torch.float64)}
    assert value == expected.get(name)
    assert len(warned) == 1
    assert f".{name}, a name of Stochastic Gradient Push: {WORKING[name].remedy}" in warned[0]
    _, warned, _ = said(lambda: getattr(model, name))
    assert warned == []  # once is enough for a loop
    model.close()


@pytest.mark.parametrize("wrapper", [gm.GossipDataParallel, gm.BilatGossipDataParallel, gm.GroupAverageDataParallel])
def test_every_attribute_that_is_missing(wrapper: Any) -> None:
    model = wrapped(wrapper)
    for name, remedy in MISSING.items():
        assert not hasattr(model, name)
        with pytest.raises(AttributeError, match=rf"has no attribute '{name}': ") as caught:
            getattr(model, name)
        assert str(caught.value).endswith(remedy)
    model.close()


def test_the_all_reduce_wrapper_has_them_too() -> None:
    model = wrapped(gm.AllReduceDataParallel)
    value, warned, _ = said(lambda: model.transfer_params())
    assert value is True
    assert len(warned) == 1
    assert said(lambda: model.ps_weight.item())[0] == 1.0
    assert said(lambda: model.block())[2] == ""
    model.close()


def test_sgp_weights_are_read() -> None:
    model = wrapped(graph=lambda n: gm.graph_manager.NetworkXGraph(nx.empty_graph(n)))
    local_of(model).buffer.vector.push_sum_weight.fill_(0.5)
    weight, _, _ = said(lambda: model.ps_weight)
    assert weight.item() == 0.5
    weight.fill_(3.0)
    assert weight_of(model) == 0.5
    model.close()


@pytest.mark.parametrize("name", [name for name in IMPORTS["graph_manager"] if name.endswith("Graph")])
def test_every_graph_by_rank_and_world_size(name: str) -> None:
    kind: Any = getattr(gm, name)
    expected = repr(kind(8, peers_per_itr=2))
    calls: list[Callable[[], Any]] = [
        lambda: kind(3, 8, peers_per_itr=2),
        lambda: kind(rank=3, world_size=8, peers_per_itr=2),
        lambda: kind(local_rank=0, world_size=8, peers_per_itr=2),
        lambda: kind(world_size=8, nprocs_per_node=4, peers_per_itr=2),
    ]
    for call in calls:
        graph, warned, _ = said(call)
        assert repr(graph) == expected
        assert len(warned) == 1
        assert any(isinstance(x, Ignored) and x.why in warned[0] for x in GRAPH_ARGUMENTS.values())
    with pytest.raises(TypeError, match=r"got 5 positional arguments, expected 1; write \w+\(world_size\), and give"):
        kind(0, 8, 1, 0, 1)


@pytest.mark.parametrize(
    ("instance", "name", "remedy"),
    [
        (gm.RingGraph(4), "get_peers", r"write graph.out_peers\(rank, t\)"),
        (gm.RingGraph(4), "get_edges", r"write graph.out_peers\(rank, t\)"),
        (gm.RingGraph(4), "peers_per_itr", r"write graph.num_peers\(t\); a schedule is an argument"),
        (gm.RingGraph(4), "is_regular_graph", "read graph.is_regular$"),
        (gm.RingGraph(4), "is_bipartite_graph", "read graph.is_bipartite$"),
        (gm.RingGraph(4), "is_dynamic_graph", "read graph.is_dynamic$"),
        (gm.mixing_manager.UniformMixing(gm.RingGraph(4)), "get_mixing_weights", r"write mixing.weights\(rank, t\)"),
        (gm.mixing_manager.UniformMixing(gm.RingGraph(4)), "is_regular", "read mixing.graph.is_regular$"),
    ],
)
def test_every_attribute_of_graphs_and_mixings(instance: Any, name: str, remedy: str) -> None:
    assert not hasattr(instance, name)
    with pytest.raises(AttributeError, match=rf"^'\w+' object has no attribute '{name}': {remedy}"):
        getattr(instance, name)


def test_mixings_and_gossipers_by_their_old_arguments() -> None:
    graph = gm.RingGraph(4)
    uniform: Any = gm.mixing_manager.UniformMixing
    for call in (lambda: uniform(graph, "cpu"), lambda: uniform(graph, device="cpu")):
        mixing, warned, _ = said(call)
        assert repr(mixing) == repr(gm.mixing_manager.UniformMixing(graph))
        assert len(warned) == 1
    kinds: list[Any] = [gm.extend.PushSum, gm.extend.PushPull]
    for kind in kinds:
        with pytest.raises(ValueError, match=r"^got msg=.*write GossipDataParallel\(module, graph=graph\)"):
            kind(torch.zeros(3), graph)
        for name in GOSSIPER_ARGUMENTS:
            with pytest.raises(
                ValueError, match=rf"got {name}=1, expected none: .*gossiper.bind\(UniformMixing\(graph\), connect"
            ):
                kind(**{name: 1})
    with pytest.raises(TypeError, match=r"write BilatGossipDataParallel\(module\)"):
        importlib.import_module("gossip_modules.gossiper").BilatPushPull(torch.zeros(3), graph)


def test_matcha_graph_by_the_arguments_of_the_processors() -> None:
    kind: Any = gm.MatchaGraph
    given = {"rank": 0, "size": 8, "iterations": 10, "issubgraph": True}
    assert {*given, "commBudget"} == set(MATCHA_ARGUMENTS)
    graph, warned, _ = said(lambda: kind(gm.graph_manager.select_graph(0), commBudget=0.5, **given))
    assert repr(graph) == repr(gm.MatchaGraph(gm.graph_manager.select_graph(0), budget=0.5))
    assert len(warned) == 5
    with pytest.raises(TypeError, match=r"got commBudget=0.5 and budget=0.5, expected the second alone"):
        kind(gm.graph_manager.select_graph(0), commBudget=0.5, budget=0.5)
    assert "commBudget" not in inspect.signature(kind).parameters


def test_the_loop_of_sgp() -> None:
    """Of its README and script: transfer_params() after the step, eval() and state_dict() after an epoch."""
    graph = gm.RingGraph(1)
    options: dict[str, Any] = {
        "graph": graph,
        "mixing": gm.mixing_manager.UniformMixing(graph),
        "push_sum": True,
        "overlap": False,
    }
    old = {"synch_freq": 0, "verbose": False, "use_streams": True, "rank": 0, "world_size": 1}
    model, warned, _ = said(lambda: wrapped(**options, **old))
    assert len(warned) == len(old)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    def epoch() -> None:
        for _ in range(3):
            model(torch.ones(4, 2)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.transfer_params()

    _, warned, _ = said(epoch)
    assert len(warned) == 1
    said(lambda: model.block())
    model.eval()
    assert set(model.state_dict()) == {"module.weight", "module.bias"}
    model.train()
    assert model.comm_stats()["num_rounds"] == 3
    model.close()


def test_transfer_params_runs_the_round_where_the_loop_says_when() -> None:
    model = wrapped(rounds="manual")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(4, 2)).square().mean().backward()
        optimizer.step()
        said(lambda: model.transfer_params())
    assert model.comm_stats()["num_rounds"] == 3
    model.close()


def test_the_adapter_of_dpwa_is_answered_with_the_averager() -> None:
    with pytest.raises(ImportError, match=r"write from gossip_modules.dpwa import PairwiseAverager, Pairwise"):
        importlib.import_module("gossip_modules.dpwa.adapters.pytorch")
