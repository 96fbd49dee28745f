"""Push-sum with running sums: lost, late and repeated messages change no sum, strangers nothing, and no rank waits."""

from __future__ import annotations

import copy
import itertools
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gossip_modules import GossipDataParallel, RingGraph, RunningSums, Schedule, connect
from gossip_modules.algorithms.running_sums import ONE, Chunks
from gossip_modules.extend import FlatVector
from gossip_modules.graph_manager import CompleteGraph, NPeerDynamicDirectedExponentialGraph
from gossip_modules.mixing_manager import MixingManager, UniformMixing
from gossip_modules.rounds.link_sums import (
    ANSWER,
    LAST_NUMBER,
    MAX_EPOCHS_AHEAD,
    SUMS,
    Inbox,
    ReceivedSums,
    SentSums,
    Silence,
)
from gossip_modules.transport.datagrams import Datagram, Datagrams
from gossip_modules.transport.job_key import VARIABLE
from gossip_modules.wrappers.choices import Choices
from tests.harness.problems import mlp
from tests.harness.progress import local_of
from tests.harness.ranks import CPU, TIMEOUT, run_ranks, solo_group

RING = UniformMixing(RingGraph(4))
GOLDEN = (1.5000042394, 1.4999728026, 1.4999693353, 1.5000320883)
KEY = "a key of sixteen bytes or more"


def is_lost(rank: int, t: int) -> bool:
    """The loss of the golden values: rank i loses its message of round t if (t + i) mod 3 = 2."""
    return (t + rank) % 3 == 2


# The law, without sockets.


def test_golden_values_of_the_law() -> None:
    """Computed by hand from the paper's lines; plain push-sum loses all of its weight meanwhile."""
    z = [torch.tensor([float(rank)]) for rank in range(4)]
    chunks = [Chunks([1], 1, 2.0**-24) for _ in z]
    sent, received = [SentSums(1, 1) for _ in z], [ReceivedSums(1, 1) for _ in z]
    plain = [1.0] * 4
    for t in range(60):
        for i in range(4):
            chunks[i].give([z[i]], sent[i], chunks[i].weights // 2)
        for i in range(4):
            if not is_lost(i, t):
                j = (i + 1) % 4
                news = received[j].news(t + 1, 0, sent[i].x[0], int(sent[i].w[0]))
                assert news is not None
                chunks[j].take([z[j]], news[0][None], np.array([news[1]]))
        plain = [plain[j] / 2 + (0.0 if is_lost(j - 1 if j else 3, t) else plain[j - 1] / 2) for j in range(4)]
    assert [x.item() for x in z] == pytest.approx(GOLDEN, abs=2e-6)
    assert sum(plain) == pytest.approx(2.27e-5, rel=1e-3)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), loss=st.floats(0, 0.95), start=st.sampled_from([0, 2**31 - 40, -(2**31) + 9]))
def test_sums_are_kept_exactly_with_lost_late_and_repeated_messages(seed: int, loss: float, start: int) -> None:
    """In integers, also where a sum wraps around: models and links have together what the models had at the start."""
    draw, n = random.Random(seed), 4
    x, w = [draw.randrange(-1000, 1000) for _ in range(n)], [ONE] * n
    links = {(i, j): (SentSums(1, 1), ReceivedSums(1, 1)) for i, j in itertools.permutations(range(n), 2)}
    for sums, rho in links.values():
        sums.x[:] = rho.x[:] = start
    total, flying = (sum(x), sum(w)), list[tuple[int, int, int, np.ndarray, int]]()
    for _ in range(150):
        if draw.random() < 0.5:
            i, j = draw.sample(range(n), 2)
            sums = links[i, j][0]
            share, weight = int(x[i] * 0.37), int(w[i] * 0.37)
            x[i], w[i] = x[i] - share, w[i] - weight
            sums.x += np.int32(share)
            sums.w += weight
            sums.number += 1
            if draw.random() >= loss:
                flying.append((i, j, sums.number, sums.x[0].copy(), int(sums.w[0])))
        elif flying:
            k = draw.randrange(len(flying))  # in any order
            i, j, number, sigma, weight = flying[k] if draw.random() < 0.3 else flying.pop(k)  # and twice
            if (news := links[i, j][1].news(number, 0, sigma, weight)) is not None:
                x[j], w[j] = x[j] + int(news[0][0]), w[j] + news[1]
        on_links = [(int((sums.x - rho.x)[0, 0]), int((sums.w - rho.w)[0])) for sums, rho in links.values()]
        assert (sum(x) + sum(a for a, _ in on_links), sum(w) + sum(b for _, b in on_links)) == total


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_share_is_rounded_and_the_rest_of_it_stays(dtype: torch.dtype) -> None:
    """x = w z and the share add up to what x was, to the digits of the dtype; z moves by less than a quantum over w."""
    quantum, before = 2.0**-20, torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    z, chunks, sums = before.clone(), Chunks([1000], 64, quantum), SentSums(16, 64)
    chunks.give([z], sums, chunks.weights // 3)
    share = torch.from_numpy(sums.x.reshape(-1)[:1000].copy()).double() * quantum
    w = torch.from_numpy(chunks.weights / ONE).repeat_interleave(64)[:1000]
    digits = torch.finfo(dtype).eps * before.abs().double()
    assert (
        (w * z.double() + share - before.double()).abs() <= digits + 2.0**-50 + quantum * (dtype.itemsize < 4)
    ).all()
    assert ((z.double() - before.double()).abs() <= quantum / w + digits).all()
    chunks.take([z], sums.x, sums.w)  # all comes back
    assert (chunks.weights == ONE).all()
    torch.testing.assert_close(z, before, rtol=4 * torch.finfo(dtype).eps, atol=2 * quantum)


# Over sockets.


def bound(
    mixer: RunningSums, mixing: MixingManager, group: dist.ProcessGroup, *, timeout: timedelta = TIMEOUT
) -> RunningSums:
    mixer.bind(mixing, connect(group, module_device=CPU, timeout=timeout))
    return mixer


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def has_come(mixer: RunningSums, number: int) -> bool:
    """Whether all chunks of the sums with this number, or newer ones, have come from each in-peer that has sent any."""
    assert mixer._inbox is not None
    received = list(mixer._inbox._received.values())
    return bool(received) and all((sums.numbers >= number).all() for sums in received)


def socket_of(mixer: RunningSums) -> Datagrams:
    assert mixer._datagrams is not None
    return mixer._datagrams


def lose(monkeypatch: pytest.MonkeyPatch, is_lost: Callable[[Datagrams, int, Datagram], bool]) -> None:
    """Have the network lose messages, given the socket of the sender, the receiver and the message."""
    send = Datagrams.send

    def lossy(self: Datagrams, peer: int, datagram: Datagram) -> int:
        return 0 if is_lost(self, peer, datagram) else send(self, peer, datagram)

    monkeypatch.setattr(Datagrams, "send", lossy)


def test_golden_values_over_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, together = dict[Datagrams, int](), threading.Barrier(4)
    lose(monkeypatch, lambda self, _, datagram: datagram.kind == 0 and is_lost(ranks[self], datagram.number - 1))

    def body(group: dist.ProcessGroup) -> tuple[Tensor, dict[str, float]]:
        rank = group.rank()
        mixer = bound(RunningSums(quantum=2.0**-24, max_unanswered=100, datagram_bytes=128), RING, group)
        ranks[socket_of(mixer)] = rank
        s = FlatVector.over(torch.full((100,), float(rank)))  # five chunks
        for t in range(60):
            mixer.start(s, t)
            if not is_lost((rank - 1) % 4, t):
                wait_until(lambda t=t: has_come(mixer, t + 1))  # type: ignore[misc]
            together.wait(20)
            mixer.finish(s)
            together.wait(20)
        mixer.close()
        return s.segments[0], mixer.stats()

    for rank, (z, stats) in enumerate(run_ranks(4, body)):
        assert (z - GOLDEN[rank]).abs().max() < 1e-5
        num_lost = sum(is_lost((rank - 1) % 4, t) for t in range(60))
        assert stats["datagrams_lost"] in (5 * num_lost, 5 * (num_lost - 1))  # the last one shows no gap
        assert stats["datagrams_unsent"] == stats["datagrams_refused"] == stats["datagrams_late"] == 0


@pytest.mark.parametrize("mixing", [RING, UniformMixing(NPeerDynamicDirectedExponentialGraph(4))], ids=str)
def test_ranks_find_the_mean_with_a_third_of_the_chunks_lost(
    monkeypatch: pytest.MonkeyPatch, mixing: MixingManager
) -> None:
    draw = random.Random(0)
    lose(monkeypatch, lambda *_: draw.random() < 1 / 3)

    def body(group: dist.ProcessGroup) -> Tensor:
        mixer = bound(RunningSums(datagram_bytes=256), mixing, group)
        x = torch.randn(400, generator=torch.Generator().manual_seed(group.rank()))
        s = FlatVector.over(x)
        for t in range(150):
            mixer.mix(s, t)
            time.sleep(0.002)
        mixer.close()
        return x

    mean = torch.stack([torch.randn(400, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]).mean(0)
    for x in run_ranks(4, body):
        torch.testing.assert_close(x, mean, rtol=0, atol=5e-4)


@pytest.mark.filterwarnings("ignore:rank .. no datagram:UserWarning")
def test_a_dead_peer_takes_a_few_shares_along_and_no_rank_waits() -> None:
    """The others go on and agree, with all of their weights from the timeout on."""
    mixing, together = UniformMixing(CompleteGraph(4, peers_per_itr=1)), threading.Barrier(3)

    def body(group: dist.ProcessGroup) -> tuple[float, float, float]:
        mixer = bound(RunningSums(), mixing, group, timeout=timedelta(seconds=0.5))
        s = FlatVector.over(torch.full((10,), float(group.rank())))
        if group.rank() == 3:
            mixer.close()
            return 0.0, 0.0, 0.0
        slowest, end, weight = 0.0, time.monotonic() + 1.2, 1.0
        for t in itertools.count():
            start = time.monotonic()
            mixer.mix(s, t)
            slowest = max(slowest, time.monotonic() - start)
            weight = 0.9 * weight + 0.1 * mixer.weights.item()
            time.sleep(0.002)
            if time.monotonic() > end:
                break
        assert 3 in mixer._given_up
        assert 3 in mixer._silent
        together.wait(20)
        mixer.close()
        return s.segments[0][0].item(), weight, slowest

    values, weights, seconds = zip(*run_ranks(4, body)[:3], strict=True)
    assert max(values) - min(values) < 1e-3
    assert 1.0 < sum(weights) < 3.2  # some are on their way
    assert max(seconds) < 0.4  # on machines that are busy


def mix_until_silent(mixer: RunningSums, s: FlatVector, rounds: Iterator[int]) -> None:
    while not mixer._silent:
        mixer.mix(s, next(rounds))
        time.sleep(0.02)


def test_a_warning_names_an_in_peer_that_is_silent_and_not_for_a_pause() -> None:
    """Time without own rounds does not count; and a peer that is heard again may be named again."""
    together, limit = threading.Barrier(2), timedelta(seconds=0.3)

    def body(group: dist.ProcessGroup) -> None:
        mixer = bound(RunningSums(), UniformMixing(RingGraph(2)), group, timeout=limit)
        s, rounds = FlatVector.over(torch.ones(3)), itertools.count()
        for k in range(2):
            if group.rank() == 1:
                mixer.mix(s, next(rounds))
                together.wait(20)
            else:
                for _ in range(3):
                    mixer.mix(s, next(rounds))
                together.wait(20)
                wait_until(lambda: has_come(mixer, 1))
                mixer.mix(s, next(rounds))
                assert mixer._silent == set()
                time.sleep(0.4)
                mixer.mix(s, next(rounds))  # no warning
                assert k or mixer._given_up == set()
                with pytest.warns(UserWarning, match=r"rank 0: no datagram of rank 1 has come for 0 s"):
                    mix_until_silent(mixer, s, rounds)
                for _ in range(15):
                    mixer.mix(s, next(rounds))  # once
                    time.sleep(0.02)
                assert mixer._given_up == {1}
            together.wait(20)
        mixer.close()

    run_ranks(2, body)


def test_a_pause_between_rounds_is_no_silence_of_a_peer() -> None:
    silence = Silence(0.1)
    time.sleep(0.2)
    assert not silence.has_ended_patience()
    assert silence.seconds == pytest.approx(0.01)
    for k in range(2, 11):
        time.sleep(0.011)
        assert silence.has_ended_patience() is (k == 10)


def test_datagrams_that_cannot_be_are_refused() -> None:
    """A new weight that no rank has, an answer to sums that were never sent, and an epoch far ahead."""
    inbox, most = Inbox(4 * ONE), 1 << 63
    inbox.begin(0, [1], 1)
    inbox.sends(1, 3)

    def is_refused(kind: int, stamp: int, w: int = 0) -> bool:
        before = inbox.num_refused
        inbox.handle(1, Datagram(kind, stamp, 0, w, bytes(4 * (kind == SUMS))))
        return inbox.num_refused > before

    assert not is_refused(SUMS, 1, ONE)
    for w in (ONE - 1, 0, -ONE, 5 * ONE + 1, most - 1, -most):
        assert is_refused(SUMS, 2, w)
    assert not is_refused(SUMS, 2, 2 * ONE)
    assert is_refused(ANSWER, 4)
    assert not is_refused(ANSWER, 3)
    assert is_refused(ANSWER, (MAX_EPOCHS_AHEAD + 1) << 32)
    assert inbox.newest == 0
    assert not is_refused(ANSWER, 2 << 32)
    assert [inbox.newest, inbox.answered(1)] == [2, 3]
    taken = inbox.take()
    assert taken is not None
    assert taken[1].tolist() == [2 * ONE]


def test_the_weight_of_sums_wraps_around() -> None:
    rho, nothing = ReceivedSums(1, 1), np.zeros(1, np.int32)
    rho.w[0] = 2**63 - 5
    news = rho.news(1, 0, nothing, -(2**63) + 5)
    assert news is not None
    assert news[1] == 10


def test_a_new_epoch_begins_before_numbers_reach_its_bits() -> None:
    def body(group: dist.ProcessGroup) -> None:
        mixer = bound(RunningSums(), UniformMixing(RingGraph(2)), group)
        s = FlatVector.over(torch.ones(3))
        mixer.mix(s, 0)
        mixer._sent[1 - group.rank()].number = LAST_NUMBER - 1
        for t in range(1, 5):
            mixer.mix(s, t)
        assert mixer._inbox is not None
        assert mixer._inbox.epoch >= 1
        assert mixer._sent[1 - group.rank()].number < 10
        mixer.close()

    run_ranks(2, body)


@pytest.mark.parametrize(("n", "quantum"), [(2, 2.0**-19), (3, 2.0**-18), (4, 2.0**-18)])
def test_the_range_of_values_does_not_depend_on_the_number_of_ranks(n: int, quantum: float) -> None:
    def body(group: dist.ProcessGroup) -> float:
        mixer = bound(RunningSums(), UniformMixing(RingGraph(n)), group)
        mixer.start(FlatVector.over(torch.tensor([1000.0, -1000.0])), 0)
        mixer.close()
        assert str(mixer) == "RunningSums()"
        return mixer._unit

    assert run_ranks(n, body) == [quantum] * n


def test_strangers_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    pair, seen = UniformMixing(RingGraph(2)), dict[int, list[bytes]]()

    def body(group: dist.ProcessGroup) -> tuple[Tensor, dict[str, float], dict[str, float]]:
        rank = group.rank()
        mixer = bound(RunningSums(), pair, group)
        s = FlatVector.over(torch.full((10,), float(rank)))
        mixer.start(s, 0)
        wait_until(lambda: has_come(mixer, 1))
        mixer.finish(s)
        before, stats = s.raw.clone(), mixer.stats()
        link, weight = socket_of(mixer)._links[1 - rank], 1 << 39
        message = socket_of(mixer)._senders  # a message of the peer, sealed again by another key
        other = next(known for known, peer in message.items() if peer == 1 - rank)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            for content in (b"", b"gd", b"x" * 2000, _forged(link, weight), _forged(other, weight), b"\0" * 1392):
                stranger.sendto(content, socket_of(mixer).address)
        wait_until(lambda: mixer.stats()["datagrams_refused"] == stats["datagrams_refused"] + 6)
        mixer.finish(s)
        assert torch.equal(s.raw, before)
        seen[rank] = [other]
        mixer.close()
        return s.segments[0], stats, mixer.stats()

    for x, _, _ in run_ranks(2, body):
        torch.testing.assert_close(x, torch.full((10,), 0.5), rtol=0, atol=1e-5)


def _forged(link: bytes, weight: int) -> bytes:
    """Sums of another sender, with the number of a link and the code of another key."""
    from gossip_modules.transport.datagrams import _HEADER, _MAGIC
    from gossip_modules.transport.job_key import code_of

    message = _HEADER.pack(_MAGIC, 0, link, 2, 0, weight) + bytes(40)
    return message + code_of(b"another key of sixteen bytes", "datagram", content=message)


def test_a_recorded_message_has_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same session it is late; of another session its link is unknown."""
    recorded = list[tuple[Datagrams, int, Datagram]]()

    def record(*entry: Any) -> bool:
        recorded.append(entry)
        return False

    lose(monkeypatch, record)
    together = threading.Barrier(2)

    def body(group: dist.ProcessGroup) -> None:
        mixer = bound(RunningSums(), UniformMixing(RingGraph(2)), group)
        s = FlatVector.over(torch.full((10,), float(group.rank())))
        for t in range(3):
            mixer.start(s, t)
            wait_until(lambda t=t: has_come(mixer, t + 1))  # type: ignore[misc]
            mixer.finish(s)
        together.wait(20)
        before, again = s.raw.clone(), [entry for entry in recorded if entry[0] is socket_of(mixer)]
        together.wait(20)
        for entry in again:
            entry[0].send(*entry[1:])
        wait_until(lambda: mixer.stats()["datagrams_late"] == 3)
        mixer.finish(s)
        assert torch.equal(s.raw, before)
        together.wait(20)
        mixer.close()

    run_ranks(2, body)


def test_a_loaded_model_begins_a_new_epoch_on_all_ranks() -> None:
    """Weights are one again, also of the rank that has loaded nothing; shares on their way are dropped."""
    together = threading.Barrier(2)

    def body(group: dist.ProcessGroup) -> tuple[int, int]:
        rank = group.rank()
        mixer = bound(RunningSums(), UniformMixing(RingGraph(2)), group)
        s = FlatVector.over(torch.full((10,), float(rank)))
        mixer.start(s, 0)
        wait_until(lambda: has_come(mixer, 1))  # and is not applied
        together.wait(20)
        if rank == 0:
            assert mixer.state_dict() == {}
            mixer.load_state_dict({})
            s.segments[0].fill_(5.0)
            mixer.start(s, 1)
            together.wait(20)
        else:
            together.wait(20)
            inbox = mixer._inbox
            assert inbox is not None
            wait_until(lambda: inbox.newest == 1)
            mixer.finish(s)  # the share of the epoch before
            mixer.start(s, 1)
            assert mixer.weights.tolist() == [0.5]
            mixer.finish(s)
            mixer.start(s, 2)
            together.wait(20)
        if rank == 0:
            wait_until(lambda: has_come(mixer, 1))
            mixer.finish(s)
            together.wait(20)
        mixer.close()
        assert mixer._inbox is not None
        return mixer._inbox.epoch, weight_at(mixer)

    epochs, weights = zip(*run_ranks(2, body), strict=True)
    assert epochs == (1, 1)
    assert sum(weights) == 2 * ONE


def weight_at(mixer: RunningSums) -> int:
    """The weight of a rank, and its part in the weights on links: what it has sent, less what has come."""
    inbox, chunks = mixer._inbox, mixer._chunks
    assert inbox is not None
    assert chunks is not None
    with inbox._lock:
        came = sum(sums.w.item() for sums in inbox._received.values()) - inbox._new[1].item()
        return chunks.weights.item() + sum(sums.w.item() for sums in mixer._sent.values()) - came


@pytest.mark.parametrize(
    ("value", "kind", "found"),
    [
        (1100.0, ValueError, r"got a model with values from .*, expected values between -1024 and 1024"),
        (float("nan"), FloatingPointError, r"values that are not finite, .*; go on from a checkpoint"),
        (float("-inf"), FloatingPointError, r"values that are not finite, .*; go on from a checkpoint"),
    ],
)
def test_a_model_out_of_range_is_an_error(value: float, kind: type[Exception], found: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        mixer = bound(RunningSums(), UniformMixing(RingGraph(2)), group)
        with pytest.raises(kind, match=found):
            mixer.start(FlatVector.over(torch.tensor([value, 1.0])), 0)
        assert mixer.stats()["datagrams_sent"] == 0
        mixer.close()
        mixer.close()

    run_ranks(2, body)


def test_a_model_that_has_moved_to_the_cpu_keeps_its_values() -> None:
    """The copy in CPU memory of an earlier phase on a GPU is not written over it."""

    def body(group: dist.ProcessGroup) -> None:
        mixer = bound(RunningSums(), UniformMixing(RingGraph(2)), group)
        s = FlatVector.over(torch.full((10,), 3.0))
        mixer._host = FlatVector.over(torch.full((10,), 100.0))
        mixer.mix(s, 0)
        torch.testing.assert_close(s.segments[0], torch.full((10,), 3.0))
        mixer._host = FlatVector.over(torch.full((10,), 100.0))
        mixer.rebind(mixer.mixing, mixer.transport)
        assert mixer._host is None
        mixer.close()

    run_ranks(2, body)


def test_an_error_while_shares_are_added_leaves_no_share_for_later() -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    def body(group: dist.ProcessGroup) -> None:
        mixer = bound(RunningSums(), UniformMixing(RingGraph(2)), group)
        s = FlatVector.over(torch.ones(10))
        mixer.start(s, 0)
        wait_until(lambda: has_come(mixer, 1))
        assert mixer._chunks is not None
        mixer._chunks.take = fail  # type: ignore[method-assign, assignment]
        with pytest.raises(MemoryError):
            mixer.finish(s)
        assert mixer._inbox is not None
        assert not any(values.any() for values in mixer._inbox._spare)
        mixer.close()

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"quantum": 0.3}, r"got quantum=0.3, expected a power of two"),
        ({"quantum": 2}, r"got quantum=2, expected a power of two"),
        ({"datagram_bytes": 64}, r"got datagram_bytes=64, expected an integer of at least 128"),
        ({"datagram_bytes": 70_000}, r"expected at most 65507, the longest datagram of UDP"),
        ({"max_unanswered": 0}, r"got max_unanswered=0, expected an integer of at least 1"),
    ],
)
def test_arguments_out_of_range_are_errors(arguments: dict[str, object], found: str) -> None:
    with pytest.raises(ValueError, match=found):
        RunningSums(**arguments)  # type: ignore[arg-type]


def test_an_address_of_another_machine_is_an_error() -> None:
    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match=r"got host='192.0.2.1', which is no IPv4 address of this machine"):
            bound(RunningSums(host="192.0.2.1"), UniformMixing(RingGraph(2)), group)

    run_ranks(2, body)


# In a wrapper.


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"overlap": True}, r"got overlap=True with RunningSums\(\), expected False: no round waits"),
        ({"overlap": "auto"}, r"got overlap='auto' with RunningSums\(\), expected False: no round waits"),
        (
            {"schedule": Schedule(average_every=4)},
            r"got average_every=4 in the schedule with RunningSums\(\), expected 0: an exact average waits",
        ),
        ({"schedule": Schedule(average_until=3)}, r"got average_until=3 in the schedule with RunningSums\(\)"),
        ({"wire_dtype": torch.bfloat16}, r"got wire_dtype=torch.bfloat16 with RunningSums\(\), expected one of them"),
        ({"deltas": True, "wire_dtype": None}, r"got deltas=True"),
    ],
)
def test_options_that_do_not_fit_are_errors(options: dict[str, object], found: str) -> None:
    with pytest.raises(ValueError, match=found):
        GossipDataParallel(mlp(), algorithm=RunningSums(), process_group=solo_group(), **options)  # type: ignore[arg-type]


def test_a_membership_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"got RunningSums\(\) with a membership, expected another algorithm"):
        RunningSums().check_options(Schedule(), has_membership=True)


def test_a_model_of_several_processes_is_an_error() -> None:
    choices = Choices(algorithm=RunningSums())
    with pytest.raises(ValueError, match=r"got nprocs_per_node=2 with RunningSums\(\), expected 1: each rank has"):
        choices.check(overlap=False, init_sync=True, nprocs_per_node=2)
    with pytest.raises(ValueError, match=r"got a module that is sharded over processes with RunningSums\(\)"):
        choices.check(overlap=False, init_sync=True, nprocs_per_node=1, is_sharded=True)


def test_training_with_losses_and_batch_normalisation(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    lose(monkeypatch, lambda *_: draw.random() < 0.2)

    def body(group: dist.ProcessGroup) -> tuple[float, float, dict[str, float]]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
        model = GossipDataParallel(module, algorithm=RunningSums(datagram_bytes=256), process_group=group)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), list[float]()
        generator = torch.Generator().manual_seed(group.rank())
        for _ in range(80):
            x = torch.randn(32, 8, generator=generator)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            time.sleep(0.001)
        assert local_of(model).loop.equal_steps.start == sys.maxsize  # no step asks the store
        stats, distance = model.comm_stats(), model.consensus_distance()
        with model.averaged():
            pass
        state = model.state_dict()
        model.load_state_dict(state)
        model(torch.randn(32, 8)).sum().backward()
        model.close()
        model.close()
        return sum(losses[-5:]) / sum(losses[:5]), distance, stats

    for ratio, distance, stats in run_ranks(4, body):
        assert ratio < 0.2
        assert distance < 0.5
        assert stats["bytes_sent"] > 0 < stats["datagrams_lost"]
        assert stats["datagrams_sent"] > stats["datagrams_received"] / 2 > 0
        assert stats["num_rounds"] == 79 or stats["num_rounds"] == 80


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()


def test_a_copy_of_a_wrapper_runs_no_round_and_says_so() -> None:
    def body(group: dist.ProcessGroup) -> None:
        model = GossipDataParallel(mlp(), algorithm=RunningSums(), process_group=group)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        x = torch.ones(2, next(model.parameters()).shape[1])
        copied = copy.deepcopy(model)
        for _ in range(2):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(x).sum().backward()
            optimizer.step()
            averaged.update_parameters(model)
        averaged.eval()
        assert averaged(x).isfinite().all()
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match=r"rank \d: got a round of a copy of a wrapper .*; wrap copy.deepcopy"):
            train(copied, optimizer, x)
        model.close()

    run_ranks(2, body)
