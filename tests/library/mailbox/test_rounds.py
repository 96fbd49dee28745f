"""Rounds of a stream, and signs of life: who closes a round, and with how many requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gossip_modules.mailbox.base import MediumCounts
from gossip_modules.mailbox.clock import Clock
from gossip_modules.mailbox.job import MailJob, Settings
from gossip_modules.mailbox.memory import MemoryMedium
from gossip_modules.mailbox.rounds import Outcome, Stream
from gossip_modules.mailbox.sealed import Seal, pack
from tests.library.mailbox.clock import InstantClock

SETTINGS = Settings(quorum=2, grace=30.0, poll=1.0, interval=10.0, timeout=600.0, audit=0.0, save_every=1)

HEADER = {"has_mean": False, "previous": "", "step": 0}
"""The facts of a message of the first round."""


class Script(InstantClock):
    """A clock that calls functions at their times, in the sleeps of a worker."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[float, Callable[[], object]]] = []

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        due = [event for event in self.events if event[0] <= self.now()]
        self.events = [event for event in self.events if event[0] > self.now()]
        for _, call in due:
            call()


def jobs(name: str, count: int, clock: Script) -> list[MailJob]:
    """Workers of one run, each of which has seen the others."""
    made = [MailJob(MemoryMedium(name, timeout=600.0, clock=clock, seal=Seal(None)), SETTINGS) for _ in range(count)]
    for job in made:
        job.claim({})
        job.beat()
    for job in made:
        assert job.live() == set(range(count))
        job.medium.counts = MediumCounts()
    return made


def run(job: MailJob, value: float, number: int = 0) -> Outcome:
    """Take part in a round that averages."""
    stream = Stream(job, "0-average", max_bytes=1 << 20)
    return stream.post(number, {**HEADER, "layout": "one number"}, [torch.tensor([value])])(lambda close: None)


def test_the_last_writer_closes_and_the_others_read() -> None:
    clock = Script()
    first, last = jobs("few-requests", 2, clock)
    clock.events.append((20.0, lambda: run(last, 3.0)))
    outcome = run(first, 1.0)
    assert outcome.mean is not None
    assert outcome.mean.tensors[0].item() == 2.0
    assert (outcome.close.by, outcome.close.members) == (last.number, (first.number, last.number))
    own = last.medium.counts  # a list of messages; reads of the other message and of the close
    assert (own.writes, own.lists, own.reads) == (3, 1 + 1, 2)  # and a list of workers, after more than `interval`
    waiting = first.medium.counts
    assert waiting.writes == 1 + 1  # a message; a beat after 10 s
    num_looks, num_lists = len(clock.sleeps), 1 + 20 // 2
    assert waiting.lists <= 2 * num_lists
    assert num_looks - num_lists <= waiting.reads <= num_looks + 2


class SimultaneousMedium(MemoryMedium):
    """A medium in which all workers have written before any of them looks."""

    def __init__(self, name: str, all_written: threading.Barrier) -> None:
        super().__init__(name, timeout=600.0, clock=Clock(), seal=Seal(None))
        self._all_written = all_written

    def create(self, path: str, data: bytes, *, deadline: float | None = None) -> bool:
        is_new = super().create(path, data, deadline=deadline)
        if path.startswith("round/") and path[-1].isdigit():
            self._all_written.wait(10.0)
        return is_new


def test_one_worker_reads_the_messages_if_all_write_at_the_same_time() -> None:
    """One worker reads all other messages, and the others read the mean."""
    count, size = 4, 10_000
    barrier, settings = threading.Barrier(count), replace(SETTINGS, quorum=count, poll=4.0)
    made = [MailJob(SimultaneousMedium("at-once", barrier), settings) for _ in range(count)]
    for job in made:
        job.claim({})
        job.beat()
    for job in made:
        assert job.live() == set(range(count))
        job.medium.counts = MediumCounts()

    def work(job: MailJob) -> None:
        stream = Stream(job, "0-average", max_bytes=1 << 20)
        stream.post(0, {**HEADER, "layout": "numbers", "has_mean": True}, [torch.ones(size)])(lambda close: None)

    threads = [threading.Thread(target=work, args=(job,)) for job in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    bytes_read = sum(job.medium.counts.bytes_read for job in made)
    assert bytes_read == pytest.approx(2 * (count - 1) * 4 * size, rel=0.05)
    writes = sum(job.medium.counts.writes for job in made)
    assert count + 3 <= writes <= count + 2 + count  # of "reader" one, or a try of each worker


def test_another_worker_reads_if_the_reader_has_died() -> None:
    clock = Script()
    workers = jobs("dead-reader", 3, clock)
    for job in workers[1:]:
        data = pack({**HEADER, "layout": "one number", "by": job.number}, [torch.tensor([3.0])])
        assert job.medium.create(f"round/0-average/{0:010d}/{job.number:06d}", data)
    assert workers[2].medium.create(f"round/0-average/{0:010d}/reader", pack({"by": 2}))
    outcome = run(workers[0], 0.0)
    assert (outcome.close.by, outcome.close.members) == (0, (0, 1, 2))
    assert clock.now() <= 3 * SETTINGS.poll / 4 + 2 * SETTINGS.poll


def test_another_worker_closes_if_the_last_writer_has_died() -> None:
    clock = Script()
    first, last = jobs("dead-closer", 2, clock)
    stream = Stream(last, "0-average", max_bytes=1 << 20)

    def write_and_die() -> None:
        send = stream.post(0, {**HEADER, "layout": "one number"}, [torch.tensor([3.0])])
        last.stop()  # so that it ends at its first pause
        last.live = lambda **options: {7}  # type: ignore[method-assign]  # it does not close
        try:
            send(lambda close: None)
        except OSError:
            return

    clock.events.append((5.0, write_and_die))
    outcome = run(first, 1.0)
    assert (outcome.close.by, outcome.close.members) == (first.number, (first.number, last.number))
    assert clock.now() <= 5.0 + 2 * SETTINGS.poll + 2 * SETTINGS.poll  # two looks with lists


def test_beats_are_read_at_first_and_before_a_worker_is_silent() -> None:
    clock = Script()
    reader, other = jobs("few-beats", 2, clock)
    counts = reader.medium.counts
    for _ in range(5):
        clock.sleep(9.0)
        other.beat()
        assert reader.live() == {0, 1}
    assert (counts.lists, counts.reads) == (5, 0)
    assert reader.live(max_age=1.0) == {0, 1}
    assert counts.lists == 5  # the answer of a moment ago
    other.last_round = 60.0  # from now on it beats more rarely
    other.beat()
    for seconds in (1.0, *[8.0] * 10):
        clock.sleep(seconds)
        assert reader.live() == {0, 1}  # 81 s are less than three of its periods
    assert counts.reads == 1
    for _ in range(13):
        clock.sleep(8.0)
        live = reader.live()
    assert live == {0}
    assert counts.reads == 1


def test_messages_and_closes_are_signs_of_life() -> None:
    clock = Script()
    reader, other = jobs("closes-are-signs", 2, clock)
    for _ in range(10):
        clock.sleep(8.0)
        reader.heard(other.number)
        assert reader.live() == {0, 1}


def test_an_earlier_answer_keeps_its_live_workers() -> None:
    clock = Script()
    reader, _ = jobs("earlier-answer", 2, clock)
    clock.sleep(100.0)
    assert reader.live(max_age=101.0) == {0, 1}
    assert replace(reader.medium.counts) == MediumCounts()
