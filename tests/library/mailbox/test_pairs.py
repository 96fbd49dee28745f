"""Pairs by mail keep the sum of the models, however late an answer comes, and no step is lost."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from gossip_modules.mailbox.letters import path_of
from gossip_modules.mailbox.pairs import PairsByMail
from gossip_modules.wrappers.choices import PairChoices
from tests.harness.letters import LetterRun, Shares, Worker

MODELS = ((1.0, 8.0), (2.0, -4.0), (4.0, 2.0), (-3.0, 0.0))
MEAN = torch.tensor(MODELS, dtype=torch.float64).mean(0)


def started(num_workers: int = 4) -> LetterRun:
    """A run of workers that have not had a round."""
    run = LetterRun(PairsByMail, PairChoices())
    for model in MODELS[:num_workers]:
        run.add(*model)
    return run


def held(worker: Worker) -> Tensor:
    """The model of a worker, with the corrections that it has taken or not sent yet."""
    total, found = worker.x.clone(), Shares(worker.run)
    letters = worker.mixer.letters
    for letter in letters.arrived if letters else ():
        if "sign" in letter.header:
            total += letter.header["sign"] * letter.vector.segments[0]
    for (to, number), data in letters.posted.items() if letters else ():
        path = path_of(to, worker.number, number)
        taker = found.taker(path)
        if taker == worker.number or (taker is None and path not in found.paths):
            header, vector = found.content(data or found.bytes_of(path))
            if "sign" in header:
                total += vector
    for path in found.shares:
        _, to, sender, number = path.split("/")
        is_own = int(to) == worker.number and found.taker(path) == worker.number
        header, vector = found.content(found.bytes_of(path))
        if is_own and "sign" in header and not letters.is_decided(int(sender), int(number)):
            total += vector
    return total


def in_mail(run: LetterRun) -> Tensor:
    """The sum of the answers that nobody has taken."""
    total, found = torch.zeros(2, dtype=torch.float64), Shares(run)
    for path in found.shares:
        header, vector = found.content(found.bytes_of(path))
        if "sign" in header and found.taker(path) is None:
            total += vector
    return total


def total(run: LetterRun) -> list[float]:
    result: list[float] = (torch.stack([held(worker) for worker in run.workers]).sum(0) + in_mail(run)).tolist()
    return result


def near(expected: list[float]) -> object:
    return pytest.approx(expected, rel=0, abs=1e-12)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_the_sum_is_constant_and_models_become_the_mean(num_workers: int) -> None:
    run = started(num_workers)
    before = total(run)
    for _ in range(80):
        run.rounds(1)
        assert total(run) == near(before)
    for worker in run.workers:
        assert worker.x.tolist() == pytest.approx([x / num_workers for x in before], abs=1e-6)


def test_no_step_is_lost_at_any_pace() -> None:
    """The sum moves by the steps of all workers, wherever their requests and answers are."""
    run = started()
    before, added = total(run), 0.0
    for k in range(30):
        for worker in run.workers[: 2 + k % 3]:
            worker.vector.segments[0].add_(0.5)
            added += 0.5
            run.rounds(1, [worker])
    assert total(run) == near([x + added for x in before])


def test_an_answer_is_half_of_the_difference() -> None:
    run = started(2)
    passive, active = run.workers
    run.rounds(1, [active])
    run.rounds(1, [passive])
    run.rounds(1, [active])
    assert passive.x.tolist() == active.x.tolist() == [1.5, 2.0]


def test_a_request_to_a_silent_worker_changes_nothing() -> None:
    run = started(2)
    passive, active = run.workers
    run.rounds(1, [active])
    passive.medium.is_dead = True
    run.wait_for_silence()
    run.rounds(4)
    assert active.x.tolist() == list(MODELS[1])
    assert not active.mixer.letters.posted
    assert Shares(run).shares == []


def test_an_answer_to_a_silent_worker_is_taken_back() -> None:
    run = started(2)
    passive, active = run.workers
    run.rounds(1, [active])
    active.medium.is_dead = True
    run.rounds(1, [passive])
    assert passive.x.tolist() == [1.5, 2.0]
    run.wait_for_silence()
    run.rounds(2)
    assert passive.x.tolist() == pytest.approx(list(MODELS[0]), abs=1e-15)


def test_a_worker_that_was_slow_does_not_add_an_answer_that_was_taken_back() -> None:
    run = started(2)
    passive, active = run.workers
    run.rounds(1, [active])
    before = total(run)
    run.rounds(1, [passive])
    run.wait_for_silence([passive])
    run.rounds(2, [passive])
    run.rounds(1, [active])
    assert active.x.tolist() == list(MODELS[1])
    run.rounds(3)
    assert total(run) == near(before)


@pytest.mark.parametrize("fault", ["refused", "unsure", "lost", "killed", "killed late"])
@pytest.mark.parametrize("victim", [0, 1], ids=["passive", "active"])
def test_a_fault_in_any_request_keeps_the_sum(fault: str, victim: int) -> None:
    def with_letters() -> LetterRun:
        run = started(2)
        run.rounds(1)
        return run

    warm = with_letters()
    first = warm.workers[victim].medium.num_tries
    warm.rounds(2)
    numbers = range(first, warm.workers[victim].medium.num_tries)
    assert len(numbers) > 8
    for number in numbers:
        run = with_letters()
        before, medium = total(run), run.workers[victim].medium
        medium.fault_at, medium.fault = number, fault
        run.rounds(2)
        assert total(run) == near(before)
        run.wait_for_silence()
        run.rounds(3)
        assert total(run) == near(before)


@pytest.mark.parametrize("seed", range(8))
def test_drawn_faults_and_a_death_keep_the_sum(seed: int) -> None:
    run, draw = started(), random.Random(seed)
    before, victim = total(run), run.workers[seed % 4]
    for worker in run.workers:
        worker.medium.odds, worker.medium.drawn = 0.2, random.Random(draw.random())
    victim.medium.fault = "killed"
    for k in range(20):
        if k == 10:
            victim.medium.fault_at = victim.medium.num_tries + draw.randrange(10)
        run.rounds(1, draw.sample(run.live, k=3))
        assert total(run) == near(before)
    assert victim.is_dead
    for worker in run.workers:
        worker.medium.odds = 0.0
    run.wait_for_silence()
    run.rounds(4)
    assert total(run) == near(before)


def test_workers_that_leave_answer_their_requests() -> None:
    run = started(2)
    before = total(run)
    passive, active = run.workers
    run.rounds(1, [active])
    passive.leave()
    active.leave()
    assert total(run) == near(before)
    assert passive.x.tolist() == active.x.tolist() == [1.5, 2.0]


def test_a_round_has_at_most_three_writes() -> None:
    run = started()
    run.rounds(2)
    first = [worker.medium.counts.writes for worker in run.workers]
    run.rounds(20)
    for worker, writes in zip(run.workers, first, strict=True):
        assert worker.medium.counts.writes - writes <= 3 * 20


def test_answers_of_a_narrow_dtype_are_equal_at_both_ends() -> None:
    run = LetterRun(PairsByMail, PairChoices())
    passive = run.add(0.3, 1.7, dtype=torch.bfloat16)
    active = run.add(-0.9, 2.3, dtype=torch.bfloat16)
    before = (passive.x + active.x).tolist()
    run.rounds(1, [active])
    run.rounds(1, [passive])
    run.rounds(1, [active])
    assert passive.x.tolist() == pytest.approx(active.x.tolist(), abs=2**-8)
    assert (passive.x + active.x).tolist() == pytest.approx(before, abs=2**-8)
