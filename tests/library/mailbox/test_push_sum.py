"""Push-sum by mail keeps its mass: a share is in a model, in the mail, or back at its sender."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from gossip_modules.graph_manager import RingGraph
from gossip_modules.mailbox.push_sum import PushSumByMail
from gossip_modules.wrappers.choices import Choices
from tests.harness.letters import GRACE, SILENCE, LetterRun, Shares, Worker, mass_in_mail, mass_of

MODELS = ((1.0, 8.0), (2.0, -4.0), (4.0, 2.0))
MEAN = torch.tensor(MODELS, dtype=torch.float64).mean(0).tolist()
FAULTS = ("refused", "unsure", "lost", "killed", "killed late")


def started(num_workers: int = 3, **choices: object) -> LetterRun:
    """A run of workers that have not had a round."""
    run = LetterRun(PushSumByMail, Choices(**choices))  # type: ignore[arg-type]
    for model in MODELS[:num_workers]:
        run.add(*model)
    return run


def total(run: LetterRun) -> Tensor:
    """The mass (w, w z) of all workers, dead ones included, and of the mail."""
    return torch.stack([mass_in_mail(run), *map(mass_of, run.workers)]).sum(0)


def assert_kept(run: LetterRun, before: Tensor) -> None:
    found = total(run)
    assert found[0] == before[0]  # halves are exact
    assert found.tolist() == pytest.approx(before.tolist(), rel=0, abs=1e-12)


def end(run: LetterRun) -> Worker:
    """All live workers leave in turn; returns the last one, which has the mass of all."""
    *others, last = run.live
    for worker in (*others, last):
        worker.leave()
    return last


def num_requests(run: LetterRun, worker: Worker, num_rounds: int) -> range:
    """The numbers of the requests of a worker in so many rounds."""
    first = worker.medium.num_tries
    run.rounds(num_rounds)
    return range(first, worker.medium.num_tries)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_the_sums_are_constant_in_each_round(num_workers: int) -> None:
    run = started(num_workers)
    before = total(run)
    for _ in range(20):
        run.rounds(1)
        assert_kept(run, before)


def test_estimates_become_the_mean() -> None:
    run = started()
    run.rounds(60)
    for worker in run.workers:
        assert worker.x.tolist() == pytest.approx(MEAN, abs=1e-9)


def test_the_last_worker_to_leave_has_the_mass_of_all() -> None:
    run = started()
    run.rounds(5)
    last = end(run)
    assert last.mixer.weight == 3.0
    assert last.x.tolist() == pytest.approx(MEAN, abs=1e-12)


def test_a_worker_at_a_fourth_of_the_pace_keeps_the_sums() -> None:
    run = started()
    before = total(run)
    for _ in range(10):
        run.rounds(4, run.workers[:2])
        run.rounds(1, run.workers[2:])
        assert_kept(run, before)
    assert end(run).mixer.weight == 3.0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_any_request_of_a_round_keeps_the_sums(fault: str) -> None:
    def with_shares() -> LetterRun:
        run = started()
        run.rounds(1)
        return run

    numbers = num_requests(warm := with_shares(), warm.workers[1], 2)
    assert len(numbers) > 14
    for number in numbers:
        run = with_shares()
        before, victim = total(run), run.workers[1]
        victim.medium.fault_at, victim.medium.fault = number, fault
        run.rounds(2)
        assert_kept(run, before)
        run.wait_for_silence()
        run.rounds(2)
        assert_kept(run, before)
        lost = mass_of(victim)[0] if victim.is_dead else 0.0
        assert end(run).mixer.weight == 3.0 - lost
        assert victim.is_dead == fault.startswith("killed")


@pytest.mark.parametrize("fault", ["refused", "unsure", "lost"])
def test_a_fault_in_any_request_of_taking_back_keeps_the_sums(fault: str) -> None:
    def with_a_silent_receiver() -> LetterRun:
        run = started(2)
        run.rounds(2)
        run.workers[0].medium.is_dead = True
        run.wait_for_silence()
        return run

    numbers = num_requests(warm := with_a_silent_receiver(), warm.workers[1], 2)
    for number in numbers:
        run = with_a_silent_receiver()
        before, sender = total(run), run.workers[1]
        sender.medium.fault_at, sender.medium.fault = number, fault
        run.rounds(10)
        assert_kept(run, before)
        sender.leave()
        assert sender.mixer.weight == 2.0 - mass_of(run.workers[0])[0]


@pytest.mark.parametrize("fault", ["refused", "unsure", "lost"])
def test_a_receiver_that_comes_back_while_its_sender_takes_shares_back_keeps_the_sums(fault: str) -> None:
    def with_a_slow_receiver() -> tuple[LetterRun, Worker]:
        run = started(2)
        run.rounds(2)
        run.wait_for_silence(run.workers[1:])
        return run, run.workers[1]

    run, sender = with_a_slow_receiver()
    first = sender.medium.num_tries
    run.rounds(1, [sender])
    for number in range(first, sender.medium.num_tries):
        run, sender = with_a_slow_receiver()
        before = total(run)
        sender.medium.fault_at, sender.medium.fault = number, fault
        run.rounds(1, [sender])
        assert_kept(run, before)
        run.rounds(12)
        assert_kept(run, before)
        assert end(run).mixer.weight == 2.0


def test_a_worker_that_was_slow_does_not_add_a_share_that_its_sender_took_back() -> None:
    run = started(2)
    _, sender = run.workers
    run.rounds(1)
    before = total(run)
    run.rounds(1, [sender])
    assert mass_in_mail(run)[0] > 0
    run.wait_for_silence([sender])
    run.rounds(2, [sender])
    assert mass_in_mail(run)[0] == 0.0
    assert_kept(run, before)
    run.rounds(10)
    assert_kept(run, before)
    assert end(run).mixer.weight == 2.0


def test_a_share_that_was_listed_before_it_was_taken_back_is_not_added() -> None:
    """The sender takes a share back between the read and the create of its receiver."""
    run = started(2)
    receiver, sender = run.workers
    run.rounds(1)
    before = total(run)
    run.rounds(1, [sender])
    medium = receiver.medium
    get = medium._get

    def get_late(path: str, max_bytes: int) -> bytes | None:
        data = get(path, max_bytes)
        if path.startswith("mail/000000/000001/") and not path.endswith(".taken"):
            letters = sender.mixer.letters
            assert letters is not None
            letters.settle([sender.number], deadline=run.clock.now() + 1.0)
        return data

    medium._get = get_late  # type: ignore[method-assign]
    run.rounds(1, [receiver])
    medium._get = get  # type: ignore[method-assign]
    assert_kept(run, before)
    run.rounds(6)
    assert_kept(run, before)
    assert end(run).mixer.weight == 2.0


def test_stale_lists_add_no_share_twice() -> None:
    run = started()
    before = total(run)
    for k in range(40):
        for worker in run.workers:
            worker.medium.stale = (k + worker.number) % 3 > 0
        run.rounds(1)
        assert_kept(run, before)
    for worker in run.workers:
        worker.medium.stale = False
    assert end(run).mixer.weight == 3.0


def test_objects_and_memory_of_old_shares_are_bounded() -> None:
    run = started()
    sizes = []
    for _ in range(4):
        run.rounds(15)
        sizes.append(len(Shares(run).paths))
        for worker in run.workers:
            letters = worker.mixer.letters
            assert letters is not None
            assert len(letters.posted) <= 2
            assert len(letters._decided) <= 6
    assert max(sizes) <= 12


def test_a_share_that_a_lost_write_brings_back_is_not_added() -> None:
    """A write whose answer was lost arrives once more, after its share was taken and deleted."""
    run = started(2)
    before = total(run)
    written: list[tuple[str, bytes]] = []
    sender = run.workers[1].medium
    create = sender._create

    def noted(path: str, data: bytes) -> bool:
        if path.startswith("mail/") and not path.endswith(".taken"):
            written.append((path, data))
        return create(path, data)

    sender._create = noted  # type: ignore[method-assign]
    for _ in range(12):
        run.rounds(1)
        for path, data in written[:-1]:
            create(path, data)
        run.rounds(1, run.workers[:1])
        assert total(run)[0] == before[0]
    assert len(written) > 5


def test_a_worker_that_starts_again_finds_empty_mail_and_its_sender_takes_the_old_shares_back() -> None:
    run = started(2)
    run.rounds(3)
    run.rounds(1, run.workers[1:])
    first = run.workers[0]
    first.medium.is_dead = True
    again = run.add(*MODELS[0])
    before, held = total(run), mass_of(first)[0]
    assert (again.number, again.mixer.weight) == (2, 1.0)
    run.wait_for_silence()
    run.rounds(4)
    assert_kept(run, before)
    assert not [path for path in Shares(run).shares if path.startswith("mail/000000/")]
    assert end(run).mixer.weight == 3.0 - held


def test_a_joining_worker_brings_the_weight_one() -> None:
    run = started(2)
    run.rounds(3)
    before = total(run)[0]
    run.add(0.0, 0.0)
    assert total(run)[0] == before + 1
    run.rounds(5)
    assert end(run).mixer.weight == 3.0


def test_workers_that_leave_at_once_lose_nothing() -> None:
    """The receiver of a last share may have read its mail for the last time before it."""
    run = started()
    run.rounds(4)
    first, second, third = run.workers
    collects = 0
    list_ = first.medium._list

    def list_while_others_leave(prefix: str) -> dict[str, object]:
        nonlocal collects
        if prefix.startswith("worker") and (collects := collects + 1) == 1:
            second.leave()
        return list_(prefix)

    first.medium._list = list_while_others_leave  # type: ignore[method-assign]
    first.leave()
    third.leave()
    assert third.mixer.weight == 3.0


def test_a_worker_that_leaves_in_an_outage_applies_the_shares_that_have_come() -> None:
    run = started(2)
    run.rounds(1)
    before, (worker, _) = total(run), run.workers
    worker.mixer.start(worker.vector, 1)
    worker.mixer.finish(worker.vector)
    assert worker.mixer.letters.arrived
    weight = worker.mixer.weight
    worker.medium._until = run.clock.now() + 4 * GRACE
    worker.leave()
    assert not worker.mixer.letters.arrived
    assert worker.mixer.weight > weight
    assert_kept(run, before)


def test_a_worker_of_little_weight_sends_nothing() -> None:
    run = started(2)
    fast = run.workers[1]
    fast.mixer.weight = 1 / 32
    run.rounds(4, [fast])
    assert Shares(run).shares == []
    fast.mixer.weight = 1 / 16
    run.rounds(1, [fast])
    assert len(Shares(run).shares) == 1


def test_a_worker_that_lives_without_reading_gets_a_bounded_number_of_shares() -> None:
    run = started()
    for _ in range(60):
        run.workers[0].beat()
        run.rounds(1, run.workers[1:])
    shares = [path for path in Shares(run).shares if path.startswith("mail/000000/")]
    assert len(shares) == 4
    assert sum(worker.mixer.weight for worker in run.workers[1:]) > 0.5
    assert end(run).mixer.weight == 3.0


@pytest.mark.parametrize("num_peers", [1, 2])
def test_weights_of_thirds_are_kept_to_rounding(num_peers: int) -> None:
    run = started(graph=lambda n: RingGraph(n, peers_per_itr=min(num_peers, n - 1) or 1))
    before = total(run)
    run.rounds(40)
    assert total(run).tolist() == pytest.approx(before.tolist(), rel=0, abs=1e-12)


def test_a_round_has_at_most_three_writes() -> None:
    run = started()
    run.rounds(2)
    first = [worker.medium.counts.writes for worker in run.workers]
    run.rounds(20)
    for worker, writes in zip(run.workers, first, strict=True):
        assert worker.medium.counts.writes - writes <= 3 * 20


@pytest.mark.parametrize("seed", [*range(9), 49, 50, 70, 72, 86, 90, 114, 149, 158, 258, 275])
def test_drawn_faults_and_a_death_keep_the_sums(seed: int) -> None:
    run, draw = started(), random.Random(seed)
    before, victim = total(run), run.workers[seed % 3]
    for worker in run.workers:
        worker.medium.odds, worker.medium.drawn = 0.2, random.Random(draw.random())
    victim.medium.fault = "killed"
    for k in range(20):
        if k == 10:
            victim.medium.fault_at = victim.medium.num_tries + draw.randrange(10)
        run.rounds(1, draw.sample(run.live, k=2))
        assert_kept(run, before)
    assert victim.is_dead
    for worker in run.workers:
        worker.medium.odds = 0.0
    run.wait_for_silence()
    run.rounds(3)
    assert_kept(run, before)
    assert end(run).mixer.weight == 3.0 - mass_of(victim)[0]


def test_workers_at_different_paces_count_about_equally() -> None:
    """The sum moves by the weight of a worker times its steps."""
    run, speeds = LetterRun(PushSumByMail), (1, 1, 1, 1, 1, 1, 4, 4)
    moved = [0.0] * len(speeds)
    for _ in speeds:
        run.add(0.0)
    for _ in range(60):
        for i, worker in enumerate(run.workers):
            for _ in range(speeds[i]):
                moved[i] += worker.mixer.weight
                worker.round()
        run.clock.sleep(1.0)
    slow, fast = sum(moved[:6]) / 6, sum(moved[6:]) / 2
    assert fast / slow < 1.4  # and not 4


def test_shares_of_a_narrow_dtype_are_the_model_itself() -> None:
    run = LetterRun(PushSumByMail)
    x = torch.tensor([0.1, 65000.0], dtype=torch.float16)
    for _ in range(3):
        run.add(*x.tolist(), dtype=torch.float16)
    run.rounds(20)
    for worker in run.workers:
        assert torch.equal(worker.x, x)


def test_narrow_models_become_the_mean_up_to_their_rounding() -> None:
    run = LetterRun(PushSumByMail)
    for value in (1.0, 1.5, 2.75):
        run.add(value, dtype=torch.bfloat16)
    run.rounds(40)
    for worker in run.workers:
        assert worker.x.item() == pytest.approx(1.75, abs=2**-6)


def test_an_outage_leaves_rounds_out_and_loses_nothing() -> None:
    run = started()
    run.rounds(2)
    before = total(run)
    for worker in run.workers:
        worker.medium._until = run.clock.now() + 3 * SILENCE
    run.rounds(20)
    assert_kept(run, before)
    run.rounds(3)
    assert end(run).mixer.weight == 3.0
