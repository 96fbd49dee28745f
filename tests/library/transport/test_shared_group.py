"""SharedGroup: channels of one group never meet, and groups of our own are released."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gossip_modules import BilatGossipDataParallel, GossipDataParallel, GroupAverageDataParallel, RingGraph, connect
from gossip_modules.extend import ProcessGroupTransport
from gossip_modules.transport import process_group
from gossip_modules.transport.gloo import at_once, gloo_group
from gossip_modules.transport.shared_group import CAN_RELEASE, NUM_CHANNELS, Use
from tests.harness.problems import mlp, sgd, train_step
from tests.harness.processes import run_processes
from tests.harness.ranks import CPU, TIMEOUT, run_ranks, solo_group


def over(group: dist.ProcessGroup) -> ProcessGroupTransport:
    return ProcessGroupTransport(group, device=CPU, timeout=TIMEOUT)


def test_messages_of_two_transports_over_one_group_do_not_meet() -> None:
    """Posted in opposite orders at the two ends."""

    def body(group: dist.ProcessGroup) -> None:
        transports, peer = [over(group), over(group)], 1 - group.rank()
        order = transports if group.rank() else transports[::-1]
        inboxes = {id(t): torch.zeros(4) for t in transports}
        sends = {id(t): torch.full((4,), 10.0 * i + group.rank()) for i, t in enumerate(transports)}
        pending = [t.exchange({peer: [sends[id(t)]]}, {peer: [inboxes[id(t)]]}, tag=0) for t in order]
        for one in pending:
            one.wait()
        for i, t in enumerate(transports):
            assert torch.equal(inboxes[id(t)], torch.full((4,), 10.0 * i + peer))

    run_ranks(2, body)


def test_two_wrappers_over_one_group_train_as_over_two() -> None:
    """With overlap their rounds are under way at the same time; the sums of both are kept."""

    def body(group: dist.ProcessGroup) -> list[float]:
        modules = [nn.Linear(2, 2, bias=False) for _ in range(2)]
        wrappers = []
        for i, module in enumerate(modules):
            nn.init.constant_(module.weight, float(group.rank() + 100 * i))
            graph = RingGraph(3, peers_per_itr=2)
            wrappers.append(GossipDataParallel(module, graph=graph, overlap=True, process_group=group, init_sync=False))
        x = torch.ones(1, 2)
        for step in range(20):
            for wrapper in wrappers if (step + group.rank()) % 2 else wrappers[::-1]:
                wrapper(x)
        for wrapper in wrappers:
            wrapper.close()
        return [float(module.weight.detach().mean()) for module in modules]

    first, second = zip(*run_ranks(3, body), strict=True)
    assert sum(first) == pytest.approx(3, rel=1e-5)
    assert sum(second) == pytest.approx(303, rel=1e-5)


@pytest.mark.parametrize("make", [BilatGossipDataParallel, GroupAverageDataParallel])
def test_listeners_over_one_group_hear_their_own_peers(make: type) -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrappers = [make(nn.Linear(size, 1), process_group=group, timeout=TIMEOUT) for size in (3, 5)]
        for _ in range(10):
            for wrapper, size in zip(wrappers, (3, 5), strict=True):
                wrapper(torch.ones(1, size))
        for wrapper in wrappers:
            wrapper.settle()
        for wrapper in wrappers:
            wrapper.close()

    run_ranks(2, body)


def test_channels_are_given_back_and_run_out_with_a_remedy() -> None:
    group = solo_group()
    for _ in range(3 * NUM_CHANNELS):
        over(group).close()
    kept = [over(group) for _ in range(NUM_CHANNELS - 1)]
    kept.append(copy.deepcopy(kept[0]))
    assert len({transport.wire_tag(7, 8) for transport in kept}) == NUM_CHANNELS
    with pytest.raises(ValueError, match=r"carries the messages of 32 wrappers already.*close\(\) wrappers that are"):
        over(group)
    kept.pop()  # has never sent anything
    gc.collect()
    over(group).close()
    kept[0].exchange({}, {}, tag=0).wait()
    del kept[0]  # has: its peers may still send to it
    gc.collect()
    kept.append(over(group))
    with pytest.raises(ValueError, match="carries the messages of 32 wrappers already"):
        over(group)


def test_a_user_may_be_collected_while_another_one_joins() -> None:
    """From Python 3.12 on garbage is collected wherever a loop turns."""

    class CollectingSet(set[int]):
        def __contains__(self, channel: object) -> bool:
            if 0 in iter(self):
                first.lose()
            return super().__contains__(channel)

    group = solo_group()
    first, second = Use(group), Use(group)
    assert [first.channel, second.channel] == [0, 1]
    shared = first.shared
    shared.taken, shared.next_channel = CollectingSet(shared.taken), 0

    joining = threading.Thread(target=Use, args=(group,), daemon=True)
    joining.start()
    joining.join(TIMEOUT.total_seconds())
    assert not joining.is_alive()
    assert (shared.taken, shared.num_users) == ({0, 1}, 2)


def test_a_copy_of_a_closed_group_is_closed() -> None:
    group = solo_group()
    closed = over(group)
    closed.close()
    copies = [copy.deepcopy(closed) for _ in range(NUM_CHANNELS + 1)]  # without channels
    assert copies[0].is_closed
    copies[0].close()
    over(group).close()


def test_close_of_a_given_group_leaves_it_alone() -> None:
    def body(group: dist.ProcessGroup) -> None:
        transport = over(group)
        transport.close()
        transport.close()
        x = torch.ones(2)
        over(group).all_reduce(x, what="a sum")
        assert x[0] == 2

    run_ranks(2, body)


NUM_MADE = 20


def resources() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def settled() -> tuple[int, int]:
    """The same, when threads that release groups have ended."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "releasing-group":
            thread.join(10)
    return resources()


def make_and_close_many(rank: int) -> dict[str, list[int]]:
    """Wrappers that are lost after close(), then transports that are closed; what each has added."""
    counts: dict[str, list[int]] = {}

    def wrapper() -> None:
        model = GossipDataParallel(mlp(), overlap=True, timeout=timedelta(seconds=20))
        train_step(model, sgd(model), rank, 0)
        model.close()

    def transport() -> None:
        one = connect(timeout=timedelta(seconds=20))
        one.close()
        one.close()
        with pytest.raises(ValueError, match=rf"rank {rank}: got an operation among ranks \[0, 1\] after close\(\)"):
            one.all_reduce(torch.ones(1), what="a sum")

    model = GossipDataParallel(mlp(), timeout=timedelta(seconds=20))
    model.close()
    snapshot = copy.deepcopy(model)
    train_step(snapshot, sgd(snapshot), rank, 0)
    snapshot.close()

    for name, make in (("wrapper", wrapper), ("transport", transport)):
        make()
        before = settled()
        for _ in range(NUM_MADE):
            make()
        dist.barrier()
        after = settled()
        counts[name] = [after[0] - before[0], after[1] - before[1]]
    return counts


@pytest.mark.e2e
@pytest.mark.skipif(not CAN_RELEASE, reason="this torch names new groups like released ones")
def test_groups_of_our_own_are_released() -> None:
    for outcome in run_processes(2, make_and_close_many):
        for name, (threads, descriptors) in outcome.result.items():
            # One group has 3 threads and 5 descriptors; the last ones may still be ending.
            assert threads < NUM_MADE, (name, outcome.result)
            assert descriptors < NUM_MADE, (name, outcome.result)


def test_a_group_that_torch_has_not_named_is_released_with_older_torch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a membership: who waits for a rank that has closed its end is told so at once."""
    monkeypatch.setattr(process_group, "CAN_RELEASE", False)
    store, transports = dist.HashStore(), []

    def run(rank: int) -> None:
        transport = over(gloo_group(store, rank, 2, TIMEOUT))
        transports.append(transport)  # closed, not collected
        transport.own_group()
        if rank == 1:
            with pytest.raises(ConnectionError, match="receive from rank 0 failed after"):
                transport.exchange({}, {0: [torch.zeros(1)]}, tag=0).wait()
        transport.close()

    at_once([partial(run, rank) for rank in range(2)], name="rank")


def close_before_the_other(rank: int) -> str:
    """Rank 1 waits for a rank that has closed its end."""
    transport = connect(timeout=timedelta(seconds=20))
    transport.all_reduce(torch.ones(1), what="a sum")
    if rank == 0:
        transport.close()
        dist.barrier()
        return ""
    with pytest.raises(ConnectionError, match="rank 1: round 3: receive from rank 0 failed after") as caught:
        transport.exchange({}, {0: [torch.zeros(1)]}, tag=3).wait()
    dist.barrier()
    return str(caught.value)


@pytest.mark.e2e
@pytest.mark.skipif(not CAN_RELEASE, reason="this torch names new groups like released ones")
def test_a_rank_that_waits_for_a_closed_one_gets_an_error() -> None:
    run_processes(2, close_before_the_other)


LOST = """
import torch, torch.distributed as dist
from gossip_modules import GossipDataParallel

def main():
    dist.init_process_group("gloo")
    model = GossipDataParallel(torch.nn.Linear(3, 2), overlap=True)
    for _ in range(3):
        model(torch.ones(1, 3)).sum().backward()
    model.flush()
    dist.barrier()
    dist.destroy_process_group()

main()
"""


@pytest.mark.soak
@pytest.mark.e2e
def test_a_program_that_ends_without_close_ends_in_order(tmp_path: Path) -> None:
    """[Note: groups at exit] The group is released by a thread, which the end of the interpreter must not overtake."""
    script = tmp_path / "lost.py"
    script.write_text(LOST)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert result.returncode == 0, result.stderr
    assert "terminate" not in result.stderr
