"""The calls of five older libraries as their READMEs write them: each works, or the code in its error runs.

SGP, MATCHA, WAGMA-SGD, dpwa and PowerGossip, in a world of one rank.
"""

from __future__ import annotations

import ast
import functools
import re
import warnings
from collections.abc import Iterator
from typing import Any

import networkx as nx
import pytest
import torch
from torch import nn

import gossip_modules as gm
from gossip_modules import communicator, extend, gossiper, simple_distributed
from gossip_modules.integrations.host import check_gossip, wrap
from gossip_modules.registry import METHODS
from gossip_modules.testing import run_ranks
from gossip_modules.wrappers.choices import as_algorithm
from tests.harness.ranks import solo_group

LINES = """
GossipDataParallel(module)
GossipDataParallel(module, [0])
GossipDataParallel(module, device_ids=[0], rank=0, world_size=1)
GossipDataParallel(module, graph=RingGraph(0, 1), mixing=UniformMixing(RingGraph(1), "cpu"), push_sum=True)
GossipDataParallel(module, comm_device=torch.device("cpu"), overlap=False, synch_freq=0, verbose=True)
GossipDataParallel(module, overlap=False, synch_freq=3)
GossipDataParallel(module, nprocs_per_node=1, local_node_group=None, master_group=None, use_streams=True)
GossipDataParallel(module, algorithm="sgp")
GossipDataParallel(module, algorithm="osgp")
GossipDataParallel(module, algorithm="matcha")
GossipDataParallel(module, algorithm="adpsgd")
GossipDataParallel(module, algorithm="wagma")
GossipDataParallel(module, algorithm="ar")
SimpleGossipDataParallel(module, graph=RingGraph(1), push_sum=True)
AllReduceDataParallel(module, comm_device=torch.device("cpu"), verbose=True)
BilatGossipDataParallel(module, master_addr="127.0.0.1", master_port="40100", backend="gloo", num_peers=1)
BilatGossipDataParallel(module, graph_class=RingGraph, mixing_class=UniformMixing, lr=0.1, momentum=0.9)
NPeerDynamicDirectedExponentialGraph(0, 8, 1, 0, 1)
DynamicBipartiteExponentialGraph(0, 8, peers_per_itr=1)
UniformMixing(graph, "cpu")
UniformMixing(graph, "cpu", 3)
PushSum(message, graph)
PushSum(message, graph, torch.device("cpu"), mixing)
PushPull(message, graph=graph, mixing=mixing)
PushPull(msg=message, graph=graph, rank=0, world_size=1)
BilatPushPull(message, graph)
GossipDataParallel(module).transfer_params()
GossipDataParallel(module).sync_comms()
GossipDataParallel(module).block()
GossipDataParallel(module).unbias()
GossipDataParallel(module).ps_weight
GossipDataParallel(module).gossip_params
GossipDataParallel(module).state_dict(finish_gossip=True)
graph.get_peers()
graph.is_regular_graph()
mixing.get_mixing_weights()
MatchaProcessor(select_graph(0), 0.5, 0, 8, 100, True)
FixedProcessor(select_graph(0), 0.5, 0, 8, 100, True)
MatchaGraph(select_graph(0), 0.5)
MatchaGraph(select_graph(0), 0.5, 0, 8, 100, True)
MatchaGraph(select_graph(0), commBudget=0.5, rank=0, size=8, iterations=10, issubgraph=True)
decenCommunicator(0, 1, RingGraph(1))
ChocoCommunicator(0, 1, RingGraph(1), 0.9, 0.1)
centralizedCommunicator(0, 1)
GroupAverageDataParallel(module, groupsize=1, tau=10)
GroupAverageDataParallel(module, 1)
GossipDataParallel(module, algorithm=PowerGossip())
PowerGossip(rank=1, num_iterations=2, warm_start=True)
""".strip().splitlines()
# The parts of a remedy that are code: what stands behind "write", "read", "pass", "call" or "as in", as far as it goes.
BEHIND = re.compile(r"\b(?:write|read|pass|call|as in|use) ")


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """What a script has: the names that it imports, a module, a graph, a mixing and a tensor."""
    group, graph, made = solo_group(), gm.RingGraph(1), list[Any]()
    found: dict[str, Any] = {name: getattr(gm, name) for name in dir(gm) if name in gm.__all__}
    for part in (extend, communicator, gossiper, gm.graph_manager, gm.mixing_manager, simple_distributed):
        public = getattr(part, "__all__", [name for name in dir(part) if name[0].isupper()])
        found.update({name: getattr(part, name) for name in public})
    mixing = gm.mixing_manager.UniformMixing(graph)
    found.update(torch=torch, nx=nx, functools=functools)
    found.update(module=nn.Linear(2, 1), graph=graph, mixing=mixing, message=torch.ones(3), gossiper=extend.PushSum())
    found.update(world_size=8, base=gm.graph_manager.select_graph(0), device=torch.device("cpu"))
    found["connect"] = functools.partial(gm.connect, group)
    for name, kind in found.items():
        if name.endswith("DataParallel") and "Pairwise" not in name:
            found[name] = closing(kind, made, process_group=group)
    for name in ("decenCommunicator", "ChocoCommunicator", "centralizedCommunicator"):
        found[name] = functools.partial(found[name], process_group=group)
    found["PairwiseDataParallel"] = closing(gm.PairwiseDataParallel, made)
    yield found
    for wrapper in made:
        wrapper.close()


def closing(kind: Any, made: list[Any], **options: Any) -> Any:
    """A class whose wrappers are closed at the end, in this process group."""

    @functools.wraps(kind)
    def make(*args: Any, **kwargs: Any) -> Any:
        wrapper = kind(*args, **options, **kwargs)
        made.append(wrapper)
        return wrapper

    return make


def code_in(message: str) -> list[str]:
    """The longest code behind each verb in the remedy of a message; arguments stay arguments: "overlap=True"."""
    found = []
    for verb in BEHIND.finditer(message):
        text = re.split(r"; |, (?:then|in|and|or|for|with|where|as|the|after)\b", message[verb.end() :])[0]
        for stop in range(len(text), 0, -1):
            if is_code(text[:stop]) and not text[stop : stop + 1].isidentifier():
                found.append(text[:stop].strip())
                break
    return found


def is_code(text: str) -> bool:
    for form in (text, f"call({text})"):
        try:
            parsed = ast.parse(form, mode="eval").body
        except SyntaxError:
            continue
        if form is not text:
            return isinstance(parsed, ast.Call) and not parsed.args and bool(parsed.keywords)
        return isinstance(parsed, ast.Call | ast.Attribute)
    return False


def run(line: str, names: dict[str, Any]) -> str:
    """The error of a line; "" if it works."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            eval(line, dict(names))
        except (TypeError, ValueError, AttributeError) as error:
            return str(error)
    return ""


@pytest.mark.parametrize("line", LINES)
def test_a_line_works_or_its_remedy_runs(line: str, names: dict[str, Any]) -> None:
    message = run(line, names)
    if not message:
        return
    codes = code_in(message)
    assert codes, message
    names["model"] = nn.Linear(2, 1)
    if "object has no attribute" in message:
        names["model"] = names["GossipDataParallel"](nn.Linear(2, 1))
        names["rank"], names["t"] = 0, 0
    for code in codes:
        names["module"] = nn.Linear(2, 1)
        if not code.endswith(")") and "=" in code:
            code = f"{line.partition('(')[0]}(module, {code})"
        assert run(code, names) == "", f"{message} -> {code}"


@pytest.mark.parametrize("name", METHODS)
def test_the_names_of_methods_work_in_a_host_or_their_remedy_does(name: str) -> None:
    """Also the list of names in an error has only names that `algorithm=` takes."""
    given: dict[str, Any] = {"algorithm": name}
    try:
        check_gossip(given, host="GossipTrainer")
    except ValueError as error:
        message = str(error)
        assert "GossipDataParallel(model" not in message
        if name == "ar":
            assert message.endswith("whose DistributedDataParallel averages gradients")
            return
        code = message.partition("; write gossip=")[2]
        given = eval(code, {**vars(gm), "functools": functools, "nx": nx})
    with pytest.raises(ValueError, match="expected an Algorithm or a name of ") as caught:
        as_algorithm("nothing of the kind")
    listed = str(caught.value).partition("a name of ")[2].partition(";")[0].split(", ")
    assert (name in listed) == METHODS[name].is_complete

    def body(group: Any) -> None:
        options: dict[str, Any] = {} if name == "dpwa" else {"process_group": group}
        gossip: Any = {**given, **options} if isinstance(given, dict) else functools.partial(given, **options)
        wrap(nn.Linear(2, 1), gossip, host="GossipTrainer").close()

    run_ranks(1 if name == "dpwa" else 2, body)
