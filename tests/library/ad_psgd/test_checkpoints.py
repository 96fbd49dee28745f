"""Checkpoints of AD-PSGD, staleness, and what is refused."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules import BilatGossipDataParallel, RingGraph
from gossip_modules.graph_manager import (
    DynamicBipartiteCompleteGraph,
    DynamicBipartiteExponentialGraph,
    NetworkXGraph,
)
from tests.harness.named_group import NamedGroup
from tests.harness.problems import loss_of, mlp, net, sgd, train_step
from tests.harness.progress import local_of
from tests.harness.ranks import TIMEOUT, run_ranks
from tests.harness.reference import flatten
from tests.library.ad_psgd.pairs import PATIENCE, Gate, Meeting, X, engine_of, is_active, one_exchange_double, wrap

HEADER_BYTES, REPLY_BYTES = 32, 8


# Checkpoints.


def test_a_run_goes_on_where_it_stopped() -> None:
    """Parameters, rounds and momentum are those of the checkpoint, and no mass is lost between."""
    meeting = Meeting(2)

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        def start(seed: int) -> tuple[BilatGossipDataParallel, torch.optim.Optimizer]:
            wrapper = wrap(mlp(seed).double(), group)
            return wrapper, sgd(wrapper)

        wrapper, optimizer = start(group.rank())
        for step in range(10):
            train_step(wrapper, optimizer, group.rank(), step)
        wrapper.settle()
        file = io.BytesIO()
        torch.save({"model": wrapper.state_dict(), "optimizer": optimizer.state_dict()}, file)
        saved, t = flatten(wrapper.module), engine_of(wrapper).t
        wrapper.close()
        meeting.wait()

        other, its_optimizer = start(77 + group.rank())
        if group.rank() == 1:  # trains before rank 0 has loaded anything
            load(other, its_optimizer, file)
            for _ in range(3):
                other.gossip_step()
                other.flush()
            meeting.wait()
        else:
            meeting.wait()
            load(other, its_optimizer, file)
        assert torch.equal(flatten(other.module), saved)
        assert engine_of(other).t == t + 3 * group.rank()
        meeting.wait()
        updates = saved.clone()
        for step in range(10):
            loss_of(other, group.rank(), step).backward()
            if step == 0:
                other.flush()
                meeting.wait()  # both have something to say from here on, so that the next one is an exchange
            before = flatten(other.module)
            its_optimizer.step()
            its_optimizer.zero_grad()
            updates += flatten(other.module) - before
        other.settle()
        assert other.comm_stats()["num_rounds"] > 0
        end = flatten(other.module)
        other.close()
        return updates, end

    first, second = run_ranks(2, body)
    torch.testing.assert_close(first[0] + second[0], first[1] + second[1], rtol=0, atol=1e-13)


def load(wrapper: BilatGossipDataParallel, optimizer: torch.optim.Optimizer, file: io.BytesIO) -> None:
    """Take back what was saved."""
    file.seek(0)
    state = torch.load(file, weights_only=True)
    wrapper.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


@pytest.mark.filterwarnings("ignore:the state dict holds no gossip state")  # on both threads, who share the filters
def test_a_loaded_model_does_not_mix_with_the_one_published_before() -> None:
    """Also in the middle of a run: the next exchange is with the loaded model, not with the old one."""
    meeting = Meeting(2)

    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(mlp(group.rank()).double(), group)
        for _ in range(3):
            wrapper(X.double())
        meeting.wait()
        wrapper.load_state_dict({f"module.{key}": x for key, x in mlp(5).double().state_dict().items()})
        meeting.wait()
        if group.rank() == 1:
            for _ in range(3):
                wrapper(X.double())
                wrapper.flush()
        wrapper.settle()
        one_exchange_double(wrapper, meeting)
        end = flatten(wrapper.module)
        wrapper.close()
        return end

    for end in run_ranks(2, body):
        assert torch.equal(end, flatten(mlp(5).double()))


# Nobody waits.


def test_a_passive_rank_answers_while_its_training_is_stuck() -> None:
    is_over = threading.Event()

    def body(group: dist.ProcessGroup) -> int:
        wrapper = wrap(mlp(group.rank()), group)
        if group.rank() == 0:
            wrapper(X)
            is_over.set()
            is_over.clear()
            assert is_over.wait(PATIENCE)
        else:
            deadline = time.monotonic() + PATIENCE
            while wrapper.comm_stats()["num_rounds"] < 20:  # rank 0 may not have begun
                assert time.monotonic() < deadline
                wrapper(X)
                wrapper.flush()
            is_over.set()
        wrapper.settle()
        num_rounds = int(wrapper.comm_stats()["num_rounds"])
        wrapper.close()
        return num_rounds

    assert run_ranks(2, body) == [20, 20]


def test_training_goes_on_while_no_answer_comes_and_staleness_says_so() -> None:
    gates: list[Gate] = []
    ready, asked = threading.Event(), threading.Event()

    def body(group: dist.ProcessGroup) -> tuple[float, float, float]:
        wrapper = wrap(mlp(group.rank()), group)
        if group.rank() == 0:
            wrapper(X)
            gates.append(Gate(wrapper))
            ready.set()
            for _ in range(2):
                assert asked.wait(PATIENCE)
                wrapper(X)  # no lock is held over the network
        else:
            bilateral = engine_of(wrapper)._bilateral
            exchange = bilateral._exchange

            def tell(*what: Any) -> None:
                asked.set()
                exchange(*what)

            bilateral._exchange = tell  # type: ignore[assignment]
            assert ready.wait(PATIENCE)
            before = flatten(wrapper.module)
            wrapper(X)
            assert asked.wait(PATIENCE)
            assert gates[0].entered.wait(PATIENCE)
            for _ in range(3):
                wrapper(X)
                assert engine_of(wrapper).t == 1
                assert torch.equal(flatten(wrapper.module), before)
            gates[0].opened.set()
            wrapper.flush()
            assert not torch.equal(flatten(wrapper.module), before)
        wrapper.settle()
        stats = wrapper.comm_stats()
        wrapper.close()
        assert stats[f"wait_median/{1 - group.rank()}"] > 0
        return stats["num_rounds"], stats["mean_staleness"], stats[f"staleness/{1 - group.rank()}"]

    passive, active = run_ranks(2, body)
    assert active == (1.0, 3.0, 3.0)
    assert passive[0] == 1.0


def test_bytes_are_those_of_headers_replies_and_models() -> None:
    meeting = Meeting(2)

    def body(group: dist.ProcessGroup) -> tuple[float, float, int]:
        wrapper = wrap(mlp(group.rank()), group)
        assert wrapper.comm_stats()["bytes_sent"] == 0
        if not is_active(wrapper):
            wrapper(X)
        meeting.wait()
        for _ in range(5 * is_active(wrapper)):
            wrapper(X)
            wrapper.flush()
        meeting.wait()
        wrapper.flush()
        stats = wrapper.comm_stats()
        assert stats[f"bytes_sent/{1 - group.rank()}"] == stats["bytes_sent"]
        meeting.wait()  # a rank that closes sends SHUTDOWN, which the other one returns
        wrapper.close()
        return stats["num_rounds"], stats["bytes_sent"], local_of(wrapper).buffer.vector.layout.num_bytes

    passive, active = run_ranks(2, body)
    assert passive == (5, 5 * (REPLY_BYTES + passive[2]), passive[2])
    assert active == (5, 5 * (HEADER_BYTES + active[2]), active[2])


# What is refused.


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (lambda: RingGraph(4), r"got RingGraph\(4.*, expected a bipartite graph with one peer per round"),
        (lambda: DynamicBipartiteExponentialGraph(4, peers_per_itr=2), r"expected a bipartite graph with one peer"),
        (lambda: NetworkXGraph(nx.path_graph(4)), r"expected a bipartite graph with one peer per round"),
        (lambda: DynamicBipartiteExponentialGraph(6), r"got a graph of 6 ranks, expected 4"),
    ],
)
def test_graphs_without_pairs_are_refused(graph: Callable[[], Any], message: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match=message):
            wrap(mlp(), group, graph=graph())

    run_ranks(4, body)


def test_a_group_that_cannot_listen_is_refused() -> None:
    group = NamedGroup("mpi4py", dist.HashStore(), 0, 1, TIMEOUT)
    with pytest.raises(ValueError, match=r"backend for cpu tensors is \w+, expected gloo.*new_group\(backend='gloo'\)"):
        wrap(mlp(), group)


@pytest.mark.parametrize("difference", ["gossip_buffers", "model", "graph"])
def test_ranks_that_disagree_are_named(difference: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        is_odd_one = group.rank() == 2
        model = net() if is_odd_one and difference == "model" else mlp()
        options: dict[str, Any] = {}
        if is_odd_one and difference == "gossip_buffers":
            options["gossip_buffers"] = False
        if is_odd_one and difference == "graph":
            options["graph"] = DynamicBipartiteCompleteGraph(4)
        with pytest.raises(ValueError, match=rf"ranks do not agree with rank 0: rank 2: {difference}"):
            wrap(model, group, **options)

    run_ranks(4, body)
