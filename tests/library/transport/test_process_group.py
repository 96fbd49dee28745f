"""Contract of every transport: what arrives, what is counted, and who is named when something does not arrive."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules import connect
from gossip_modules.extend import ProcessGroupTransport, Transport
from gossip_modules.transport.exchange import ROUND_BITS
from tests.harness.ranks import CPU, TIMEOUT, HangUp, run_ranks, solo_group

SECONDS = 0.4


def over_group(group: dist.ProcessGroup, timeout: timedelta = TIMEOUT) -> ProcessGroupTransport:
    """The transport of the wrappers."""
    return connect(group, module_device=CPU, timeout=timeout)


# A new transport adds itself here.
TRANSPORTS: dict[str, Callable[[dist.ProcessGroup, timedelta], Transport]] = {"process group": over_group}
every_transport = pytest.mark.parametrize("make", TRANSPORTS.values(), ids=TRANSPORTS.keys())
Make = Callable[[dist.ProcessGroup, timedelta], Transport]


def filled(rank: int, length: int = 4) -> Tensor:
    """What this rank sends."""
    return torch.arange(length) + 10.0 * rank


@every_transport
@pytest.mark.parametrize("n", [1, 2, 5])
def test_everyone_hears_from_everyone(make: Make, n: int) -> None:
    def body(group: dist.ProcessGroup) -> None:
        transport = make(group, TIMEOUT)
        assert (transport.rank, transport.world_size) == (group.rank(), n)
        peers = [j for j in range(n) if j != transport.rank]
        for tag in (0, 1, (1 << ROUND_BITS), 3 * (1 << ROUND_BITS) + 5):
            inbox = {j: [torch.zeros(4)] for j in peers}
            transport.exchange({j: [filled(transport.rank)] for j in peers}, inbox, tag=tag).wait()
            assert all(torch.equal(inbox[j][0], filled(j)) for j in peers)
        assert transport.num_bytes_sent == 4 * (n - 1) * 16

    run_ranks(n, body)


@every_transport
def test_several_tensors_of_one_peer_arrive_in_order(make: Make) -> None:
    def body(group: dist.ProcessGroup) -> None:
        transport = make(group, TIMEOUT)
        peer = 1 - transport.rank
        sends = [filled(transport.rank), torch.tensor([transport.rank], dtype=torch.float64), torch.zeros(3).byte()]
        recvs = [torch.zeros(4), torch.zeros(1, dtype=torch.float64), torch.ones(3).byte()]
        transport.exchange({peer: sends}, {peer: recvs}, tag=0).wait()
        assert torch.equal(recvs[0], filled(peer))
        assert float(recvs[1]) == peer
        assert not recvs[2].any()
        assert transport.num_bytes_sent == 16 + 8 + 3

    run_ranks(2, body)


@every_transport
def test_one_way_and_idle_ranks(make: Make) -> None:
    """0 -> 1 twice while 2 takes no part; two rounds may be under way at once, in any order of waiting."""

    def body(group: dist.ProcessGroup) -> None:
        transport = make(group, TIMEOUT)
        inbox = [torch.zeros(4), torch.zeros(4)]
        outgoing = [filled(0), filled(7)]
        pending = [
            transport.exchange(
                {1: [outgoing[t]]} if transport.rank == 0 else {},
                {0: [inbox[t]]} if transport.rank == 1 else {},
                tag=t,
            )
            for t in (0, 1)
        ]
        for t in (1, 0):
            pending[t].wait()
        if transport.rank == 1:
            assert torch.equal(inbox[0], filled(0))
            assert torch.equal(inbox[1], filled(7))
        assert transport.num_bytes_sent == (32 if transport.rank == 0 else 0)

    run_ranks(3, body)


@every_transport
@pytest.mark.parametrize("n", [1, 3])
def test_collectives_and_their_bytes(make: Make, n: int) -> None:
    def body(group: dist.ProcessGroup) -> None:
        transport = make(group, TIMEOUT)
        counts = [0]

        def sent() -> int:
            counts.append(transport.num_bytes_sent)
            return counts[-1] - counts[-2]

        x = filled(transport.rank, 6)
        transport.all_reduce(x, what="a sum")
        torch.testing.assert_close(x, sum((filled(j, 6) for j in range(n)), torch.zeros(6)))
        assert sent() == 2 * (n - 1) * 24 // n
        x = filled(transport.rank)
        transport.broadcast(x, source=n - 1, what="a broadcast")
        assert torch.equal(x, filled(n - 1))
        assert sent() == 16 * (transport.rank == n - 1)
        out = torch.zeros(4 * n)
        transport.all_gather(out, filled(transport.rank), what="a gather")
        assert torch.equal(out, torch.cat([filled(j) for j in range(n)]))
        assert sent() == 16 * (n - 1)
        out = torch.zeros(2 * n)
        transport.all_to_all(out, transport.rank + torch.arange(n).repeat_interleave(2) / 10, what="an all-to-all")
        torch.testing.assert_close(out, torch.arange(n).repeat_interleave(2) + transport.rank / 10)
        assert sent() == 8 * (n - 1)

    run_ranks(n, body)


@every_transport
def test_one_wait_may_be_shorter_than_the_others(make: Make) -> None:
    def body(group: dist.ProcessGroup) -> None:
        transport = make(group, TIMEOUT)
        if transport.rank == 0:
            pending = transport.exchange({}, {1: [torch.zeros(4)]}, tag=17)
            with pytest.raises(TimeoutError, match=r"receive from rank 1 failed after \d\.\d s \(timeout 0\.4 s\)"):
                pending.wait(timedelta(seconds=SECONDS))

    run_ranks(2, body)


@every_transport
def test_a_late_peer_is_named_with_round_and_seconds(make: Make) -> None:
    def body(group: dist.ProcessGroup) -> None:
        if group.rank() == 0:
            transport = make(group, timedelta(seconds=SECONDS))
            pending = transport.exchange({}, {1: [torch.zeros(4)]}, tag=17)
            pattern = r"^rank 0: round 17: receive from rank 1 failed after \d\.\d s \(timeout 0\.4 s\)"
            with pytest.raises(TimeoutError, match=pattern):
                pending.wait()

    run_ranks(2, body)


@every_transport
def test_the_late_one_of_several_peers_is_named(make: Make) -> None:
    """Rank 1 sends, rank 2 does not."""

    def body(group: dist.ProcessGroup) -> None:
        if group.rank() == 1:
            make(group, TIMEOUT).exchange({0: [filled(1)]}, {}, tag=3).wait()
        if group.rank() == 0:
            transport = make(group, timedelta(seconds=SECONDS))
            pending = transport.exchange({}, {1: [torch.zeros(4)], 2: [torch.zeros(4)]}, tag=3)
            with pytest.raises(TimeoutError, match=r"round 3: receive from rank 2 failed"):
                pending.wait()

    run_ranks(3, body)


@every_transport
@pytest.mark.parametrize("is_send", [False, True])
def test_a_closed_peer_is_named_at_once(make: Make, is_send: bool) -> None:
    def body(group: dist.ProcessGroup) -> None:
        transport = make(group, TIMEOUT)
        if transport.rank == 1:
            raise HangUp
        tensors = {1: [torch.zeros(1 << 20)]}
        pattern = rf"^rank 0: round 5: {'send to' if is_send else 'receive from'} rank 1 failed after [0-5]\.\d s"
        with pytest.raises(ConnectionError, match=pattern):
            transport.exchange(tensors if is_send else {}, {} if is_send else tensors, tag=5).wait()

    run_ranks(2, body)


@every_transport
@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather", "all_to_all"])
def test_a_collective_names_itself_and_the_missing_ranks(make: Make, name: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        if group.rank() == 1:
            return
        transport = make(group, timedelta(seconds=SECONDS))
        call: dict[str, Callable[[], None]] = {
            "all_reduce": lambda: transport.all_reduce(torch.zeros(4), what="a test"),
            "broadcast": lambda: transport.broadcast(torch.zeros(4), source=0, what="a test"),
            "all_gather": lambda: transport.all_gather(torch.zeros(12), torch.zeros(4), what="a test"),
            "all_to_all": lambda: transport.all_to_all(torch.zeros(6), torch.zeros(6), what="a test"),
        }
        pattern = rf"(?s)^rank {group.rank()}: a test among ranks \[0, 1, 2\] failed after \d\.\d s \(timeout 0\.4 s\)"
        pattern += r": rank 1 did not take part in a test; all ranks must, at the same point"
        with pytest.raises((TimeoutError, ConnectionError), match=pattern):
            call[name]()

    run_ranks(3, body)


# Of this transport.


def test_a_collective_names_the_rank_that_died() -> None:
    def body(group: dist.ProcessGroup) -> None:
        if group.rank() == 2:
            raise HangUp
        with pytest.raises(RuntimeError):  # wait until the connection to rank 2 is closed or reset
            group.recv([torch.zeros(1)], 2, 0).wait()
        transport = ProcessGroupTransport(group, device=CPU, timeout=timedelta(seconds=SECONDS))
        pattern = rf"^rank {group.rank()}: a sum among ranks \[0, 1, 2\] .*, connections to ranks \[.*2\] are closed"
        with pytest.raises((ConnectionError, TimeoutError), match=pattern):
            transport.all_reduce(torch.zeros(4), what="a sum")

    run_ranks(3, body, timeout=timedelta(seconds=3))  # also how long rank 1 waits for rank 0's verdict


def test_names_are_global_ranks() -> None:
    def body(group: dist.ProcessGroup) -> None:
        if group.rank() == 0:
            transport = ProcessGroupTransport(group, device=CPU, timeout=timedelta(seconds=SECONDS), names=[4, 6])
            with pytest.raises(TimeoutError, match="rank 4: round 0: receive from rank 6"):
                transport.exchange({}, {1: [torch.zeros(1)]}, tag=0).wait()

    run_ranks(2, body)


def test_a_copy_shares_the_connection_on_a_channel_of_its_own() -> None:
    transport = over_group(solo_group())
    twice = [copy.deepcopy(transport), copy.deepcopy(copy.deepcopy(transport))]
    assert all(other.group is transport.group for other in twice)
    assert len({other.wire_tag(7, 8) for other in (transport, *twice)}) == 3


def test_connect_without_torch_distributed() -> None:
    with pytest.raises(RuntimeError, match=r"torch.distributed is not initialised, expected a process group; start"):
        connect(None, module_device=CPU, timeout=TIMEOUT)


def test_connect_refuses_another_device() -> None:
    with pytest.raises(ValueError, match=r"got comm_device=cuda, expected 'cpu' or the module's device cpu"):
        connect(solo_group(), module_device=CPU, comm_device="cuda", timeout=TIMEOUT)


def test_connect_refuses_a_group_without_a_backend() -> None:
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    with pytest.raises(ValueError, match=r"got a process group without a backend for cpu tensors.* pass a Gloo group"):
        connect(group, module_device=CPU, timeout=TIMEOUT)


def test_a_collective_in_a_subgroup_has_global_ranks() -> None:
    """The processes of a node."""

    def body(group: dist.ProcessGroup) -> None:
        transport = ProcessGroupTransport(group, device=CPU, timeout=timedelta(seconds=0.3), names=[2, 3])
        if group.rank() == 0:
            what = r"sharing buffers among ranks \[2, 3\] failed .*: rank 3 did not take part in sharing buffers;"
            with pytest.raises(TimeoutError, match=rf"(?s)^rank 2: {what}"):
                transport.broadcast(torch.zeros(1), source=0, what="sharing buffers")

    run_ranks(2, body)


def test_messages_of_two_sizes_do_not_meet() -> None:
    """Gloo would abort the process on a message that is longer than the receiver's room."""

    def body(group: dist.ProcessGroup) -> None:
        transport = ProcessGroupTransport(group, device=CPU, timeout=timedelta(seconds=SECONDS))
        peer = 1 - transport.rank
        inbox = torch.zeros(3 + transport.rank)
        with pytest.raises(
            (TimeoutError, ConnectionError), match=rf"round 0: (send to|receive from) rank {peer} failed"
        ):
            transport.exchange({peer: [torch.ones(3 + transport.rank)]}, {peer: [inbox]}, tag=0).wait()

    run_ranks(2, body)
