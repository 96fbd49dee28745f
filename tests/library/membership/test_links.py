"""Rounds over links go on without ranks that die, and nothing is lost but what these held."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules import MatchaGraph, RingGraph
from gossip_modules.extend import PushPull, PushSum
from gossip_modules.flat.vector import FlatVector
from gossip_modules.graph_manager import NPeerDynamicDirectedExponentialGraph
from gossip_modules.membership import addresses
from gossip_modules.membership.links import LinkTransport, alone, connect_links
from gossip_modules.mixing_manager import LaplacianMixing, MetropolisHastingsMixing, MixingManager, UniformMixing
from gossip_modules.transport.exchange import Messages, PendingExchange
from gossip_modules.transport.forks import tcp_sockets
from gossip_modules.transport.waits import Waits
from tests.harness.ranks import TIMEOUT
from tests.library.membership.stores import exchange_over

Body = Callable[[LinkTransport, threading.Barrier], Any]


class Ended(Exception):
    """Raised by a body: the rank's connections close, as at the end of its process."""


def run_links(size: int, mixing: MixingManager, body: Body) -> tuple[list[Any], dict[int, set[int]]]:
    """`body(transport, barrier)` on every rank, in a thread each; the results, and who lost whom (None: it ended).

    The barrier is of all ranks.
    """
    store, barrier, over = dist.HashStore(), threading.Barrier(size), threading.Barrier(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []
    lost: dict[int, set[int]] = {}

    def run(rank: int) -> None:
        graph = mixing.graph
        peers = {*graph.phone_book(rank), *(j for j in range(size) if rank in graph.phone_book(j))}
        seen: set[int] = set()
        transport = connect_links(
            exchange_over(store, rank, size),
            rank,
            size,
            peers,
            store=store,
            names=range(size),
            timeout=TIMEOUT,
            patience=TIMEOUT,
            on_lost=lambda peer, error, is_closed: seen.add(peer),
        )
        try:
            results[rank] = body(transport, barrier)
            lost[rank] = seen
        except Ended:
            transport.close()
        except BaseException as error:  # noqa: BLE001 (raised in the thread of the test)
            errors.append(error)
            barrier.abort()
            transport.close()
        over.wait(2 * TIMEOUT.total_seconds())
        transport.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results, lost


def rounds(
    gossiper: PushPull, mixing: MixingManager, x: Tensor, *, dying: int | set[int], num_rounds: int, late: bool
) -> Body:
    """Rounds on x + rank, of which `dying` takes one; late: the rounds are applied as corrections."""

    def body(transport: LinkTransport, barrier: threading.Barrier) -> tuple[Tensor, float]:
        own = type(gossiper)(chunk_bytes=gossiper.chunk_bytes)
        own.bind(mixing, transport)
        s = FlatVector.over(x + transport.rank)
        for t in range(num_rounds):
            if t == 1:
                barrier.wait()
                if transport.rank in (dying if isinstance(dying, set) else {dying}):
                    raise Ended
            if late:
                correction = s.clone()
                own.start(correction, t)
                s.add_(correction, alpha=own.difference(correction))
            else:
                own.mix(s, t)
        return s.segments[0].clone(), s.push_sum_weight.item()

    return body


@pytest.mark.parametrize("late", [False, True], ids=["in place", "as a correction"])
def test_push_sum_keeps_the_mass_of_living_workers(late: bool) -> None:
    """Rank 3 of 8 dies after round 0 with (2.5, 1): sums stay 25.5 and 7, and z goes to their ratio."""
    mixing = UniformMixing(NPeerDynamicDirectedExponentialGraph(8))
    x = torch.zeros(1, dtype=torch.float64)
    results, lost = run_links(8, mixing, rounds(PushSum(), mixing, x, dying=3, num_rounds=61, late=late))
    alive = [result for result in results if result is not None]
    assert len(alive) == 7
    assert sum(weight for _, weight in alive) == pytest.approx(7.0, abs=1e-12)
    assert sum(value.item() for value, _ in alive) == pytest.approx(25.5, abs=1e-11)
    for value, weight in alive:
        assert value.item() / weight == pytest.approx(25.5 / 7, abs=1e-9)  # 3.6428571429
    assert lost == {rank: {3} if rank in (1, 2, 4, 5, 7) else set() for rank in (0, 1, 2, 4, 5, 6, 7)}


@pytest.mark.parametrize("chunk_bytes", [256, 1 << 22], ids=["in chunks", "whole"])
@pytest.mark.parametrize("late", [False, True], ids=["in place", "as a correction"])
def test_weights_do_not_run_dry(late: bool, chunk_bytes: int) -> None:
    """Without ranks 2 and 3 of 4, rank 0 hears nobody and rank 1 is whom it sends to; it keeps what is left."""
    mixing = UniformMixing(NPeerDynamicDirectedExponentialGraph(4))
    x = torch.linspace(0, 1, 301, dtype=torch.float64)
    gossiper = PushSum(chunk_bytes=chunk_bytes)
    results, _ = run_links(4, mixing, rounds(gossiper, mixing, x, dying={2, 3}, num_rounds=80, late=late))
    (first, weight), (second, other) = results[:2]
    assert 1 / 8 <= weight < 1 / 4
    assert weight + other == pytest.approx(2.0, abs=1e-12)
    (start,) = (0.5 * (x + 0) + 0.5 * (x + 3)).unsqueeze(0)  # after round 0, in which all lived
    torch.testing.assert_close(first / weight, start, rtol=0, atol=1e-12)
    torch.testing.assert_close(first + second, start + 0.5 * (x + 1) + 0.5 * (x + 0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk_bytes", [256, 1 << 22], ids=["in chunks", "whole"])
@pytest.mark.parametrize("late", [False, True], ids=["in place", "as a correction"])
def test_symmetric_weights_keep_the_mean_of_living_workers(late: bool, chunk_bytes: int) -> None:
    """On a ring of 6 without rank 2, W_ii += W_i2: its second eigenvalue is .8727."""
    mixing = MetropolisHastingsMixing(RingGraph(6, peers_per_itr=2))
    x = torch.linspace(0, 1, 301, dtype=torch.float64)
    gossiper = PushPull(chunk_bytes=chunk_bytes)
    results, _ = run_links(6, mixing, rounds(gossiper, mixing, x, dying=2, num_rounds=40, late=late))
    W = mixing.matrix(0)
    start = torch.stack([x + rank for rank in range(6)])
    expected = (W @ start)[[0, 1, 3, 4, 5]]
    V = W[[0, 1, 3, 4, 5]][:, [0, 1, 3, 4, 5]] + torch.diag(W[[0, 1, 3, 4, 5], 2])
    assert sorted(torch.linalg.eigvalsh(V))[-2].item() == pytest.approx(0.8727, abs=1e-4)
    for _ in range(39):
        expected = V @ expected
    got = torch.stack([result[0] for result in results if result is not None])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(got.mean(0), (W @ start)[[0, 1, 3, 4, 5]].mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("late", [False, True], ids=["in place", "as a correction"])
def test_matcha_keeps_the_mean_of_living_workers(late: bool) -> None:
    """Rank 2 of 6 dies in the middle; links that are used in some rounds only give their weight back in these."""
    mixing = LaplacianMixing(MatchaGraph(nx.cycle_graph(6), budget=0.5, seed=3))
    x, alive = torch.linspace(0, 1, 7, dtype=torch.float64), [0, 1, 3, 4, 5]
    results, lost = run_links(6, mixing, rounds(PushPull(), mixing, x, dying=2, num_rounds=60, late=late))
    expected = (mixing.matrix(0) @ torch.stack([x + rank for rank in range(6)]))[alive]
    mean = expected.mean(0)
    for t in range(1, 60):
        W = mixing.matrix(t)
        expected = (W[alive][:, alive] + torch.diag(W[alive, 2])) @ expected
    got = torch.stack([result[0] for result in results if result is not None])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(got.mean(0), mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(got, mean.expand(5, 7), rtol=0, atol=1e-2)  # a path of five agrees in the end
    assert {rank for rank, others in lost.items() if others} == {1, 3}


@pytest.mark.parametrize("late", [False, True], ids=["in place", "as a correction"])
def test_a_message_of_which_only_a_part_came_is_left_out(late: bool) -> None:
    """Rank 1 of a pair ends within a round, with one of five chunks sent: what was mixed of it is unmixed."""
    mixing = MetropolisHastingsMixing(RingGraph(2))
    x = torch.linspace(0, 1, 160, dtype=torch.float64)

    def body(transport: LinkTransport, barrier: threading.Barrier) -> Tensor | None:
        s = FlatVector.over(x + transport.rank)
        if transport.rank == 1:
            message = Messages({0: s.raw.split(256)})
            exchange = PendingExchange(transport, message, Messages({}), tag=0, what="")
            exchange.post(0, message.chunks[0], is_send=True)
            exchange.begin()
            exchange.wait()
            raise Ended
        gossiper = PushPull(chunk_bytes=256)
        gossiper.bind(mixing, transport)
        gossiper.start(s, 0)
        if late:
            correction = gossiper.difference(s) * s.segments[0]
            return x + correction
        gossiper.finish(s)
        return s.segments[0]

    (result, _), lost = run_links(2, mixing, body)
    torch.testing.assert_close(result, x, rtol=0, atol=1e-15)
    assert lost[0] == {1}


def test_a_wait_for_a_message_that_is_half_sent_ends_when_its_link_is_broken() -> None:
    """Gloo itself would wait for all of the timeout; see [Note: waits that do not end] of `Waits`.

    Rank 1 takes no more of the message than its sockets hold, as a process that is stopped does: the buffer that Gloo
    was to receive it in is no more.
    """
    mixing = MetropolisHastingsMixing(RingGraph(2))
    message = torch.zeros(32 << 20, dtype=torch.uint8)
    has_ended = threading.Event()

    def body(transport: LinkTransport, barrier: threading.Barrier) -> bool:
        if transport.rank == 1:
            group, other = transport.route(0)
            tag = transport.wire_tag(0, message.nbytes, total_bytes=message.nbytes)
            group.recv([torch.empty_like(message)], other, tag)
            barrier.wait()
            return has_ended.wait(TIMEOUT.total_seconds() / 2)
        barrier.wait()
        pending = transport.exchange({1: [message]}, {}, tag=0)
        threading.Timer(0.3, transport.break_link, (1,)).start()
        pending.wait()
        assert pending.lost == {1}
        has_ended.set()
        return True

    results, _ = run_links(2, mixing, body)
    assert results == [True, True]


def test_waits_under_way_are_ended_at_the_exit_of_the_interpreter() -> None:
    """Of a collective, and of a round: rank 1 lives and takes part in neither."""

    def end_when(transport: LinkTransport, waits: Waits) -> threading.Thread:
        def run() -> None:
            deadline = time.monotonic() + TIMEOUT.total_seconds()
            while not waits.is_waiting:
                assert time.monotonic() < deadline, "nothing is waited for"
                time.sleep(0.002)
            transport.end_waits()

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def body(transport: LinkTransport, barrier: threading.Barrier) -> frozenset[int]:
        lost: frozenset[int] = frozenset()
        if transport.rank == 0:
            ending = end_when(transport, transport._whole_waits)
            with pytest.raises(ConnectionError, match="the average among ranks"):
                transport.all_reduce(torch.ones(1), what="the average")
            ending.join()
            ending = end_when(transport, transport._own_waits)
            pending = transport.exchange({}, {1: [torch.zeros(1)]}, tag=0)
            pending.wait()
            lost = pending.lost
            ending.join()
        barrier.wait()
        return lost

    results, _ = run_links(2, MetropolisHastingsMixing(RingGraph(2)), body)
    assert results == [{1}, set()]


def test_a_wait_ends_when_its_link_is_broken() -> None:
    """As when heartbeats stop: rank 0 waits for rank 1, which lives and sends nothing; other links stay."""
    mixing = MetropolisHastingsMixing(RingGraph(3, peers_per_itr=2))

    def body(transport: LinkTransport, barrier: threading.Barrier) -> bool:
        y = torch.full((3,), float(transport.rank))
        if transport.rank == 0:
            timer = threading.Timer(0.3, transport.break_link, (1,))
            timer.start()
            pending = transport.exchange({}, {1: [torch.empty(3)]}, tag=0)
            pending.wait()
            assert pending.lost == {1}
        barrier.wait()
        if transport.rank != 1:
            other, got = 2 - transport.rank, torch.empty(3)
            transport.exchange({other: [y]}, {other: [got]}, tag=1).wait(timedelta(seconds=20))
            assert torch.equal(got, torch.full((3,), float(other)))
        return True

    results, lost = run_links(3, mixing, body)
    assert results == [True] * 3
    assert lost[0] == set(), "who breaks a link knows it"


@pytest.mark.parametrize("is_whole", [True, False])
def test_groups_that_were_made_go_with_the_error_of_another_one(
    is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: nobody collects garbage while rounds go on, and each group has threads and descriptors."""
    made: list[weakref.ref[Any]] = []

    class Group:
        pass

    def make(*arguments: Any, **options: Any) -> Group:
        group = Group()
        made.append(weakref.ref(group))
        return group

    def make_or_fail(store: dist.Store, rank: int, size: int, *arguments: Any, **options: Any) -> Group:
        store.set(f"0/{rank}", "address")
        device = make()
        if is_whole == (size == 3):
            raise RuntimeError(f"nobody came to {device}")
        return device

    monkeypatch.setattr(addresses, "gloo_backend", make_or_fail)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="nobody came"):
            connect_links(
                lambda name, text: [text],
                1,
                3,
                (0, 2),
                store=dist.HashStore(),
                names=[0, 1, 2],
                timeout=TIMEOUT,
                patience=TIMEOUT,
                on_lost=lambda peer, error, is_closed: None,
            )
        assert len(made) == 3
        assert all(group() is None for group in made)
    finally:
        gc.enable()


def test_a_world_of_one_has_no_port() -> None:
    before = {listener.getsockname() for listener in tcp_sockets(is_listening=True)}
    transport = alone(TIMEOUT)
    x, gathered = torch.tensor([1.0, 2.0]), torch.zeros(1, 2)
    transport.all_reduce(x, what="a sum")
    transport.broadcast(x, source=0, what="a broadcast")
    transport.all_gather(gathered, x, what="a gather")
    transport.barrier(what="a barrier")
    assert {listener.getsockname() for listener in tcp_sockets(is_listening=True)} <= before
    assert (x.tolist(), gathered.tolist()) == ([1.0, 2.0], [[1.0, 2.0]])
    transport.close()
