"""Uneven inputs: a rank out of data goes on answering its peers until all are done."""

from __future__ import annotations

from typing import Any

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from gossip_modules import AllReduceDataParallel, GossipDataParallel, Schedule, gossip
from gossip_modules.graph_manager import NetworkXGraph
from tests.harness.problems import loss_of, mlp, numerator, sgd
from tests.harness.processes import run_processes
from tests.harness.progress import round_of, take_corrections
from tests.harness.ranks import solo_group
from tests.harness.reference import flatten

NUM_RANKS = 3
NUM_BATCHES = (5, 2, 9)
DIGRAPH = NetworkXGraph(nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)]))
CASES: list[tuple[type[GossipDataParallel], dict[str, Any]]] = [
    (GossipDataParallel, {}),
    (GossipDataParallel, {"graph": DIGRAPH}),
    (GossipDataParallel, {"overlap": True}),
    (GossipDataParallel, {"overlap": True, "max_staleness": 2, "graph": DIGRAPH}),
    (GossipDataParallel, {"schedule": Schedule(gossip_every=2, average_every=2)}),
]


def body(rank: int) -> list[dict[str, Any]]:
    """Each case: what this rank put in (its start and its updates), what it ends with, and its rounds."""
    results = []
    for make, options in CASES:
        model = mlp(rank)
        put_in = flatten(model)
        wrapper, optimizer = make(model, init_sync=False, **options), sgd(model)
        with Join([wrapper]):
            for step in range(NUM_BATCHES[rank]):
                optimizer.zero_grad()
                with wrapper.no_sync():  # micro-batches of one step are one step for the others too
                    (loss_of(wrapper, rank, 100 + step) / 2).backward()
                (loss_of(wrapper, rank, step) / 2).backward()
                before = numerator(wrapper)
                optimizer.step()
                put_in += numerator(wrapper) - before
        assert not take_corrections(wrapper)
        weight = wrapper.get_extra_state()["weight"]
        results.append({"put_in": put_in, "x": flatten(model) * weight, "t": round_of(wrapper), "weight": weight})
        wrapper.close()
    return results


@pytest.mark.e2e
def test_all_finish_and_no_mass_is_lost() -> None:
    results = [outcome.result for outcome in run_processes(NUM_RANKS, body)]
    for i, (_, options) in enumerate(CASES):
        rank_results = [result[i] for result in results]
        every = max(options.get("schedule", Schedule()).gossip_every, options.get("max_staleness", 0) + 1)
        assert [result["t"] for result in rank_results] == [-(-max(NUM_BATCHES) // every)] * NUM_RANKS
        put_in, left = (torch.stack([result[key] for result in rank_results]) for key in ("put_in", "x"))
        assert float(sum(result["weight"] for result in rank_results)) == pytest.approx(NUM_RANKS, abs=1e-12)
        torch.testing.assert_close(left.sum(0), put_in.sum(0), rtol=0, atol=2e-6)
        assert float((left - put_in).abs().max()) > 1e-3


def join_in_a_subgroup(rank: int) -> str:
    """Join counts the ranks of the default group, of which rank 1 takes no part."""
    group = dist.new_group([0])
    if rank == 1:
        return ""
    assert isinstance(group, dist.ProcessGroup)
    wrapper = GossipDataParallel(mlp(), process_group=group)
    with pytest.raises(ValueError, match=r"^got Join over a process group of 1 of 2 ranks, expected all; ") as caught:
        Join([wrapper])
    loss_of(wrapper, rank, 0).backward()  # without Join it trains
    wrapper.close()
    return str(caught.value)


@pytest.mark.e2e
def test_join_over_a_subgroup_is_refused() -> None:
    refused, idle = (outcome.result for outcome in run_processes(2, join_in_a_subgroup))
    assert idle == ""
    assert "process group of 1 of 2 ranks" in refused


def throw_when_one_is_done(rank: int) -> list[tuple[str, float]]:
    """What each wrapper raises in the epoch of uneven batches, and its rounds after another, even one."""
    makers: list[Any] = [AllReduceDataParallel, *(lambda m, t=t, o=o: t(m, **o) for t, o in CASES)]
    results = []
    for make in makers:
        model = make(mlp())
        optimizer = sgd(model)

        def epoch(num_batches: int, model: Any = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            with Join([model], throw_on_early_termination=True):
                for step in range(num_batches):
                    optimizer.zero_grad()
                    loss_of(model, rank, step).backward()
                    optimizer.step()

        with pytest.raises(RuntimeError) as caught:
            epoch(NUM_BATCHES[rank])
        for step in range(2):  # a rank that has ended the epoch goes on, in step with the others
            loss_of(model, rank, step).backward()
        model.flush()  # an overlapped round may be under way, on this rank and not on another
        results.append((str(caught.value), model.comm_stats()["num_rounds"]))
        model.close()
    return results


@pytest.mark.e2e
def test_all_raise_when_one_is_done_if_join_is_told_to() -> None:
    results = [outcome.result for outcome in run_processes(NUM_RANKS, throw_when_one_is_done)]
    for i in range(len(CASES) + 1):
        messages, num_rounds = zip(*(result[i] for result in results), strict=True)
        assert messages[1] == "Rank 1 exhausted all inputs."
        assert {messages[0], messages[2]} == {
            "Detected at least one rank that exhausted inputs. Throwing across all ranks."
        }
        assert len({*num_rounds}) == 1


def test_a_module_of_gossip_in_join_is_told_to_be_a_wrapper() -> None:
    model = gossip(mlp(), process_group=solo_group())
    with pytest.raises(TypeError, match=r"expected a wrapper, .*; use Join\(\[GossipDataParallel\(module\)\]\)"):
        Join([model])  # type: ignore[list-item]
    model.close()
