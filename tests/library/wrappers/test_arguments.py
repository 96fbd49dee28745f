"""Arguments as a user gives them, defaults that have changed, and usual mistakes, with errors that name the remedy."""

from __future__ import annotations

import copy
import re
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import ModuleType
from typing import Any

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gossip_modules as gm
from gossip_modules.extend import PushPull
from gossip_modules.wrappers.arguments import as_graph, as_mixing, as_schedule, as_timeout
from gossip_modules.wrappers.choices import as_algorithm, choose_mixing
from tests.harness.named_group import NamedGroup
from tests.harness.problems import loss_of, mlp, sgd, train_step
from tests.harness.progress import local_of
from tests.harness.ranks import TIMEOUT, run_ranks, solo_group

RING = gm.RingGraph(4, peers_per_itr=2)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (RING, RING),
        (gm.RingGraph, gm.RingGraph(4)),
        (lambda n: gm.RingGraph(n, peers_per_itr=2), RING),
        ("ring", RING),
        ("exponential", gm.graph_manager.DynamicDirectedExponentialGraph(4)),
        (nx.cycle_graph(4), gm.graph_manager.NetworkXGraph(nx.cycle_graph(4))),
        (nx.cycle_graph, gm.graph_manager.NetworkXGraph(nx.cycle_graph(4))),
    ],
)
def test_a_graph_is_given_in_many_ways(given: Any, expected: gm.graph_manager.GraphManager) -> None:
    assert repr(as_graph(given, 4)) == repr(expected)


@pytest.mark.parametrize(
    "given", [gm.mixing_manager.UniformMixing, lambda graph: gm.mixing_manager.UniformMixing(graph)]
)
def test_a_mixing_is_a_class_or_a_function_of_the_graph(given: Any) -> None:
    assert repr(as_mixing(given, RING)) == repr(gm.mixing_manager.UniformMixing(RING))
    assert repr(choose_mixing("ring", given, push_sum=True, world_size=4)) == repr(
        gm.mixing_manager.UniformMixing(RING)
    )


def test_numbers_and_classes_stand_for_their_objects() -> None:
    assert as_schedule(10) == gm.Schedule(gossip_every=10)
    assert as_schedule(gm.Schedule(2, 3)) == gm.Schedule(2, 3)
    assert as_timeout(30) == timedelta(seconds=30)
    assert as_timeout(0.5) == timedelta(milliseconds=500)
    assert as_timeout(timedelta(minutes=1)) == timedelta(minutes=1)
    assert repr(as_algorithm(gm.extend.PushSum)) == repr(gm.extend.PushSum())


def test_a_wrapper_takes_them_all() -> None:
    """The same training as with objects that were built by hand."""

    def train(group: dist.ProcessGroup, **options: Any) -> torch.Tensor:
        model = mlp(group.rank())
        wrapper = gm.GossipDataParallel(model, process_group=group, **options)
        for step in range(3):
            loss_of(wrapper, group.rank(), step)
        assert wrapper.comm_stats()["num_rounds"] == 2
        wrapper.close()
        return torch.cat([x.detach().flatten() for x in model.parameters()])

    def body(group: dist.ProcessGroup) -> bool:
        named = train(
            group,
            graph="ring",
            mixing=gm.mixing_manager.UniformMixing,
            algorithm=gm.extend.PushSum,
            schedule=2,
            timeout=15,
        )
        built = train(
            group,
            mixing=gm.mixing_manager.UniformMixing(gm.RingGraph(3, peers_per_itr=2)),
            algorithm=gm.extend.PushSum(),
            schedule=gm.Schedule(gossip_every=2),
            timeout=timedelta(seconds=15),
        )
        return torch.equal(named, built)

    assert run_ranks(3, body) == [True] * 3


def gossip(module: Any = None, **options: Any) -> gm.GossipDataParallel:
    return gm.GossipDataParallel(mlp() if module is None else module, **{"process_group": solo_group(), **options})


def used_gossiper() -> gm.extend.PushSum:
    gossiper = gm.extend.PushSum()
    gossip(algorithm=gossiper)
    return gossiper


def gossip_in_ddp() -> Any:
    return DistributedDataParallel(nn.Linear(2, 1), process_group=solo_group())


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a class for a module": (lambda: gossip(nn.Linear), r"expected a torch.nn.Module; build the model first"),
    "parameters for a module": (lambda: gossip(list(mlp().parameters())), r"got \[.*; build the model first"),
    "a module inside DDP": (
        lambda: gossip(gossip_in_ddp()),
        r"that is a DistributedDataParallel.*remove the other one",
    ),
    "a wrapper inside a wrapper": (
        lambda: gossip(gossip()),
        r"that is a GossipDataParallel.*wrap the plain module once",
    ),
    "device_ids": (
        lambda: gossip(device_ids=[0]),
        r"got device_ids=\[0\], expected none.*\(cpu here\); call module.to\(device\) before wrapping, and leave",
    ),
    "a graph of another size": (
        lambda: gossip(graph=gm.RingGraph(8)),
        r"got a graph of 8 ranks, expected 1, .*build the graph of that size, or pass a class .* graph=RingGraph",
    ),
    "a typing error in a name": (lambda: gossip(graph="rign"), r"got graph='rign', expected one of .* mean 'ring'\?"),
    "a class's name": (lambda: gossip(graph="RingGraph"), r"did you mean 'ring'\?"),
    "a networkx graph with names": (
        lambda: gossip(graph=nx.Graph([("a", "b")])),
        r"got the nodes \['a', 'b'\].*convert_node_labels_to_integers",
    ),
    "a class that needs more than a number": (
        lambda: gossip(graph=gm.graph_manager.NetworkXGraph),
        r"got graph=NetworkXGraph, and NetworkXGraph\(1\) fails.*call it yourself .*pass the result",
    ),
    "a number for a graph": (lambda: gossip(graph=4), r"got graph=4, which makes no graph, expected a GraphManager"),
    "a mixing for a graph": (
        lambda: gossip(graph=gm.mixing_manager.UniformMixing(gm.RingGraph(1))),
        r"got the mixing UniformMixing.* as graph.*pass mixing=",
    ),
    "a graph for a mixing": (lambda: gossip(mixing=gm.RingGraph(1)), r"got mixing=RingGraph.*expected a MixingManager"),
    "a mixing that needs a matrix": (
        lambda: gossip(mixing=gm.mixing_manager.MatrixMixing),
        r"MatrixMixing\(.* fails.*pass the result",
    ),
    "a compressor for a gossiper": (
        lambda: gossip(algorithm=gm.TopK(0.1)),
        r"got the compressor TopK.*as algorithm.*Choco\(TopK\(0.01\), step_size=0.04\)",
    ),
    "a compressor's class for a gossiper": (lambda: gossip(algorithm=gm.SignNorm), r"got the compressor.*in Choco"),
    "an algorithm's class that needs a compressor": (
        lambda: gossip(algorithm=gm.Choco),
        r"got algorithm=Choco, expected Choco with its arguments, as compressor and step_size have no default",
    ),
    "a name of no algorithm": (lambda: gossip(algorithm="diloko"), r"got .*diloko.*did you mean 'diloco'"),
    "a gossiper for two models": (lambda: gossip(algorithm=used_gossiper()), r"another wrapper.*make another PushSum"),
    "schedule=0": (lambda: gossip(schedule=0), r"got schedule=0, expected .* at least 1; schedule=1, the default"),
    "a fraction for a schedule": (
        lambda: gossip(schedule=0.5),
        r"got schedule=0.5, .* or the number",
    ),
    "timeout=0": (lambda: gossip(timeout=0), r"got timeout=0, expected more than zero seconds: a number like 30"),
    "timeout=None": (lambda: gossip(timeout=None), r"got timeout=None.*timedelta\(days=1\)"),
    "the name of a dtype": (lambda: gossip(wire_dtype="bfloat16"), r"got wire_dtype='bfloat16'.*pass torch.bfloat16"),
    "a list of ranks for a group": (
        lambda: gossip(process_group=[0, 1]),
        r"got process_group=\[0, 1\], expected a ProcessGroup; make one with torch.distributed.new_group\(ranks\)",
    ),
    "a group without this rank": (
        lambda: gossip(process_group=dist.GroupMember.NON_GROUP_MEMBER),
        r"this rank is no member of.*wrap on the group's ranks only",
    ),
    "a group that cannot listen": (
        lambda: gm.BilatGossipDataParallel(
            mlp(), process_group=NamedGroup("mpi4py", dist.HashStore(), 0, 1, TIMEOUT), init_sync=False
        ),
        r"expected gloo.*new_group\(backend='gloo'\)",
    ),
    "AD-PSGD with device_ids": (
        lambda: gm.BilatGossipDataParallel(mlp(), process_group=solo_group(), device_ids=[0]),  # type: ignore[call-arg]
        r"call module.to\(device\) before wrapping, and leave it out",
    ),
    "WAGMA with device_ids": (
        lambda: gm.GroupAverageDataParallel(mlp(), process_group=solo_group(), device_ids=[0]),  # type: ignore[call-arg]
        r"call module.to\(device\) before wrapping, and leave it out",
    ),
    "WAGMA with timeout=0": (
        lambda: gm.GroupAverageDataParallel(mlp(), process_group=solo_group(), timeout=0),
        r"got timeout=0, expected",
    ),
    "dpwa with timeout=-1": (
        lambda: gm.PairwiseDataParallel(mlp(), name="w0", peers={"w0": "tcp://127.0.0.1:*"}, timeout=-1),
        r"got timeout=-1, expected more than zero seconds",
    ),
    "a string for a flag": (lambda: gossip(push_sum="no"), r"got push_sum='no', expected True or False; leave it out"),
    "a string for overlap": (lambda: gossip(overlap="yes"), r"got overlap='yes', expected True or False"),
    "None for a flag": (lambda: gossip(gossip_buffers=None), r"got gossip_buffers=None, expected True or False"),
    "a string for init_sync": (lambda: gossip(init_sync="rank 0"), r"got init_sync='rank 0', expected True or False"),
    "WAGMA with a string for a flag": (
        lambda: gm.GroupAverageDataParallel(mlp(), process_group=solo_group(), wait_avoiding="yes"),  # type: ignore[arg-type]
        r"got wait_avoiding='yes', expected True or False",
    ),
    "a string for a count": (
        lambda: gossip(overlap=True, max_staleness="1"),
        r"got max_staleness='1', expected a whole number; pass an int, like max_staleness=2",
    ),
    "no number of processes": (lambda: gossip(nprocs_per_node=None), r"got nprocs_per_node=None, expected a whole num"),
    "WAGMA with half a period": (
        lambda: gm.GroupAverageDataParallel(mlp(), process_group=solo_group(), sync_period=2.5),  # type: ignore[arg-type]
        r"got sync_period=2.5, expected a whole number",
    ),
    "WAGMA with a string for a size": (
        lambda: gm.GroupAverageDataParallel(mlp(), process_group=solo_group(), group_size="2"),  # type: ignore[arg-type]
        r"got group_size='2' for 1 ranks, expected a power of two",
    ),
    "all-reduce with a backend for a group": (
        lambda: gm.AllReduceDataParallel(mlp(), process_group="gloo"),
        r"got process_group='gloo', expected a ProcessGroup; make one with torch.distributed.new_group\(ranks\)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_usual_mistake_is_told_its_remedy(mistake: str) -> None:
    make, remedy = MISTAKES[mistake]
    with pytest.raises((ValueError, TypeError), match=re.compile(remedy, re.DOTALL)):
        make()


# Checkpoints of when the default graph was another one.


def without_graph(state: dict[str, Any]) -> dict[str, Any]:
    """As an older version saved it."""
    return {name: value for name, value in state.items() if name != "graph"}


OLD_DEFAULTS: dict[bool, list[dict[str, Any]]] = {
    True: [
        {"push_sum": False},
        {"push_sum": False, "schedule": gm.Schedule(gossip_every=5, average_every=2)},
        {"algorithm": gm.QGDSGDm()},
    ],
    False: [
        {"push_sum": False, "graph": "ring"},
        {"push_sum": False, "schedule": gm.Schedule(gossip_every=5, average_every=1)},
        {"push_sum": True},
        {"algorithm": gm.DiLoCo(5)},
    ],
}
"""Options with which nine ranks mixed on a ring by default, and others."""


@pytest.mark.parametrize("warns", [True, False])
def test_a_checkpoint_from_when_nine_ranks_had_a_ring_says_how_to_go_on_with_it(warns: bool) -> None:
    def body(group: dist.ProcessGroup, is_older: bool) -> None:
        for options in OLD_DEFAULTS[warns]:
            wrapper = gm.GossipDataParallel(nn.Linear(2, 1), process_group=group, **options)
            state = wrapper.get_extra_state()
            wrapper.set_extra_state(without_graph(state) if is_older else state)
            wrapper.close()

    if warns:
        run_ranks(9, partial(body, is_older=False))  # a warning would be an error
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(9, partial(body, is_older=True))
    said = [str(warning.message) for warning in caught if "older version" in str(warning.message)]
    assert len(said) == (9 * len(OLD_DEFAULTS[True]) if warns else 0)
    for message in said:
        assert re.search(r'now it is DynamicBipartiteCompleteGraph.* to go on with the ring: graph="ring"$', message)


def test_a_warning_that_is_an_error_comes_after_everything_is_loaded() -> None:
    def body(group: dist.ProcessGroup) -> tuple[float, int]:
        wrapper = gm.GossipDataParallel(nn.Linear(2, 1), process_group=group, push_sum=False)
        state = without_graph(wrapper.get_extra_state())
        state["engine"] = {**state["engine"], "t": 7}
        local_of(wrapper).buffer.vector.push_sum_weight.fill_(0.5)
        with pytest.raises(UserWarning, match="older version"):
            wrapper.set_extra_state(state)
        loaded = wrapper.get_extra_state()
        wrapper.close()
        return float(loaded["weight"]), loaded["engine"]["t"]

    assert run_ranks(9, body) == [(1.0, 7)] * 9


@pytest.mark.parametrize("graph", [None, "ring"])
def test_with_a_membership_a_checkpoint_names_no_graph(graph: str | None) -> None:
    """It has one for each number of workers, so what is loaded warns of none, whoever saved it."""
    membership = gm.Membership(dist.HashStore(), min_workers=1, timeout=timedelta(seconds=20))
    wrapper = gm.GossipDataParallel(nn.Linear(2, 1), membership=membership, push_sum=False, graph=graph)
    try:
        states = [wrapper.get_extra_state()]
        wrapper(torch.ones(1, 2))
        states += [wrapper.get_extra_state(), copy.deepcopy(wrapper).get_extra_state()]
        assert [state["graph"] for state in states] == [None] * 3
        for state in (states[1], without_graph(states[1])):
            wrapper.set_extra_state(state)  # a warning would be an error
    finally:
        wrapper.close()


def test_a_checkpoint_of_a_membership_warns_in_no_fixed_world() -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = gm.GossipDataParallel(nn.Linear(2, 1), process_group=group, push_sum=False)
        wrapper.set_extra_state({**wrapper.get_extra_state(), "graph": None})
        wrapper.close()

    run_ranks(9, body)  # a warning would be an error


@pytest.mark.parametrize(
    ("algorithm", "made"),
    [
        (lambda: gm.D2(), "D2()"),
        (lambda: gm.D2, "D2()"),
        (lambda: "d2", "D2()"),
        (lambda: "GradientTracking", "GradientTracking()"),
        (lambda: "powergossip", "PowerGossip("),
    ],
)
def test_an_algorithm_is_an_object_a_class_or_a_name(algorithm: Any, made: str) -> None:
    assert repr(as_algorithm(algorithm())).startswith(made)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("diloko", "got algorithm='diloko', expected an Algorithm or a name of dpsgd, .*; did you mean 'diloco'"),
        ("choco", r"got algorithm='choco', expected Choco with its arguments, as compressor and step_size have no def"),
        ("sgp", r"got algorithm='sgp', which is a wrapper with arguments, .*; write GossipDataParallel\(model\)$"),
        ("wagma", r"write GroupAverageDataParallel\(model\)$"),
        (
            gm.SignNorm(),
            r"got the compressor SignNorm\(2048\) as algorithm, .*as in Choco\(TopK\(0.01\), step_size=0.04\)",
        ),
        (3, r"got algorithm=3, expected an Algorithm such as DiLoCo\(\).*its class or its name, such as 'diloco'"),
    ],
)
def test_an_algorithm_that_is_none_is_told_the_remedy(algorithm: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_algorithm(algorithm)


def test_the_older_name_of_the_argument_says_the_new_line() -> None:
    options: Any = {"gossiper": PushPull(), "push_sum": False}
    with pytest.warns(DeprecationWarning, match=r"^got gossiper=PushPull\(\) .* is now algorithm=PushPull\(\)") as told:
        gm.GossipDataParallel(nn.Linear(2, 2), process_group=solo_group(), **options).close()
    assert [warning.filename for warning in told] == [__file__]


@pytest.mark.parametrize("inner", [gm.PowerGossip, "powergossip", gm.TopK(0.1), None])
def test_an_algorithm_is_over_an_algorithm_only(inner: Any) -> None:
    with pytest.raises(
        ValueError, match=r"as the inner algorithm of SlowMo\(.*\), expected an algorithm .*such as PowerGossip\(\)$"
    ):
        gm.SlowMo(gossip_every=1).over(inner)


def test_an_algorithm_that_never_gossips_is_over_none() -> None:
    with pytest.raises(ValueError, match=r"got DiLoCo.*\.over\(.*the outer algorithm never yields `Mix`"):
        gm.GossipDataParallel(nn.Linear(2, 2), algorithm=gm.DiLoCo().over(gm.PowerGossip()), process_group=solo_group())


@pytest.mark.parametrize(
    "module",
    [
        "networkx",
        "torch.distributed.fsdp",
        "torch.distributed.optim.zero_redundancy_optimizer",
        "torch.distributed._composable.contract",
    ],
)
def test_a_module_that_another_thread_imports_now_is_none_yet(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entry in `sys.modules` is there before its names."""
    monkeypatch.setitem(sys.modules, module, ModuleType(module))

    def body(group: dist.ProcessGroup) -> None:
        wrapper = gm.GossipDataParallel(mlp(), process_group=group, graph=gm.RingGraph, timeout=TIMEOUT)
        train_step(wrapper, sgd(wrapper), group.rank(), 0)
        wrapper.close()

    run_ranks(2, body)
