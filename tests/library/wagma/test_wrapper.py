"""WAGMA-SGD as users see it: its corners against the dense oracle, rounds, state, errors."""

from __future__ import annotations

import contextlib
import copy
import random
import threading
import time
from datetime import timedelta
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules.graph_manager.butterfly_groups import ButterflyGroups
from gossip_modules.wagma.engine import WaitAvoidingEngine
from gossip_modules.wagma.wrapper import GroupAverageDataParallel
from tests.harness import progress
from tests.harness.problems import loss_of, mlp, sgd, train_step
from tests.harness.ranks import assert_no_gossip_threads, gossip_threads, run_ranks, solo_group
from tests.harness.reference import Matrix, Oracle, flatten
from tests.library.wagma.workers import be_on_time

PATIENCE = 10.0
NUM_STEPS = 7


def wrap(group: dist.ProcessGroup, module: nn.Module | None = None, **options: Any) -> GroupAverageDataParallel:
    """A model of each rank's own, unless given."""
    module = mlp(group.rank()) if module is None else module
    return GroupAverageDataParallel(module, process_group=group, **{"init_sync": False, **options})


def block_matrix(n: int, size: int) -> Matrix:
    """W(t) of the groups, float64 [n, n]."""
    groups = ButterflyGroups(n, group_size=size)

    def matrix(t: int) -> Tensor:
        W = torch.zeros(n, n, dtype=torch.float64)
        for rank in range(n):
            members = list(groups.members(rank, t))
            W[rank, members] = 1 / len(members)
        return W

    return matrix


def engine_of(wrapper: GroupAverageDataParallel) -> WaitAvoidingEngine:
    """Its engine."""
    found = progress.engine_of(wrapper)
    assert isinstance(found, WaitAvoidingEngine)
    return found


def fill(wrapper: GroupAverageDataParallel, value: float) -> None:
    """All parameters <- value."""
    with torch.no_grad():
        for parameter in wrapper.parameters():
            parameter.fill_(value)


def train_on(wrapper: GroupAverageDataParallel) -> NoReturn:
    """Until an error."""
    while True:
        wrapper(torch.ones(1, 3))


@pytest.mark.parametrize(("n", "size", "period"), [(4, 2, 0), (4, 2, 3), (4, 1, 3), (8, 4, 0), (5, 2, 3), (3, 1, 0)])
def test_blocking_corners_are_those_of_the_oracle(n: int, size: int, period: int) -> None:
    """D-PSGD-like (size 2, never global), local SGD (size 1), and between; with momentum and weight decay."""

    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(group, group_size=size, sync_period=period, wait_avoiding=False)
        optimizer = sgd(wrapper)
        rows = []
        for step in range(NUM_STEPS):
            train_step(wrapper, optimizer, group.rank(), step)
            rows.append(flatten(wrapper.module))
        assert wrapper.round == NUM_STEPS
        wrapper.close()
        return torch.stack(rows)

    models = [mlp(rank).double() for rank in range(n)]
    oracle = Oracle(models, [sgd(model) for model in models], block_matrix(n, size), average_every=period)
    expected = torch.stack([snapshot.numerators for snapshot in oracle.run(NUM_STEPS, loss_of)])
    torch.testing.assert_close(torch.stack(run_ranks(n, body), 1), expected, atol=1e-5, rtol=0)


def test_local_sgd_needs_no_threads() -> None:
    def body(group: dist.ProcessGroup) -> tuple[list[Tensor], Tensor]:
        wrapper = wrap(group, group_size=1, sync_period=3)
        before = flatten(wrapper)
        assert gossip_threads() == []
        rows = []
        for _ in range(3):
            wrapper(torch.ones(1, 3))
            rows.append(flatten(wrapper))
        return rows, before

    results = run_ranks(4, body)
    mean = torch.stack([before for _, before in results]).mean(0)
    for rows, before in results:
        assert torch.equal(rows[0], before)
        assert torch.equal(rows[1], before)
        torch.testing.assert_close(rows[2], mean, atol=1e-6, rtol=0)


def test_blocking_rounds_keep_the_mean() -> None:
    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        wrapper = wrap(group, wait_avoiding=False, sync_period=0)
        before = flatten(wrapper)
        for _ in range(5):
            wrapper(torch.ones(1, 3))
        return before, flatten(wrapper)

    results = run_ranks(6, body)
    before, after = (torch.stack(rows) for rows in zip(*results, strict=True))
    assert (before - before.mean(0)).abs().max() > 0.1
    torch.testing.assert_close(after.mean(0), before.mean(0), atol=1e-6, rtol=0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("wait_avoiding", [False, True])
def test_without_delay_the_average_is_exact_after_log_s_p_rounds(
    wait_avoiding: bool, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 8
    be_on_time(monkeypatch)

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        wrapper = wrap(group, wait_avoiding=wait_avoiding, overlap=overlap)
        before = flatten(wrapper)
        for _ in range(ButterflyGroups(n).num_rounds_to_mix):
            wrapper(torch.ones(1, 3))
        wrapper.flush()
        after = flatten(wrapper)
        wrapper.settle()
        wrapper.close()
        return before, after

    results = run_ranks(n, body)
    mean = torch.stack([before for before, _ in results]).mean(0)
    for _, after in results:
        torch.testing.assert_close(after, mean, atol=1e-6, rtol=0)


@pytest.mark.parametrize("overlap", [False, True])
def test_training_lasts_a_number_of_rounds_and_learns(overlap: bool) -> None:
    num_rounds = 40

    def body(group: dist.ProcessGroup) -> dict[str, float]:
        wrapper = wrap(group, mlp(0), sync_period=5, overlap=overlap)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.05, momentum=0.9)
        first = loss_of(wrapper.eval(), 0, 0).item()
        wrapper.train()
        step = 0
        while wrapper.round < num_rounds:
            optimizer.zero_grad()
            loss_of(wrapper, 0, 0).backward()
            optimizer.step()
            step += 1
        assert wrapper.round == num_rounds
        wrapper.settle()
        assert wrapper.round == num_rounds
        with wrapper.averaged():
            wrapper(torch.ones(4, 3))  # in training mode, but no round: the average is lent
            last = loss_of(wrapper.eval(), 0, 0).item()
        assert last < 0.99 * first
        assert wrapper.consensus_distance() < 1.0
        stats = wrapper.comm_stats()
        assert stats["num_rounds"] == num_rounds
        assert stats["max_staleness"] < 5
        peers = {name.partition("/")[2] for name in stats if "/" in name}
        assert all(stats[f"staleness/{peer}"] < 5 and stats[f"wait_median/{peer}"] > 0 for peer in peers)
        assert len(peers) == 2, "in groups of two, of a butterfly of four"
        assert stats["bytes_sent"] > num_rounds * 4 * sum(p.numel() for p in wrapper.parameters()) / 2
        wrapper.close()
        wrapper(torch.ones(4, 3))  # local from now on
        assert wrapper.round == num_rounds
        return stats

    run_ranks(4, body)


def test_loops_of_equal_length_end_together() -> None:
    def body(group: dist.ProcessGroup) -> int:
        wrapper = wrap(group, sync_period=4)
        for _ in range(9):
            wrapper(torch.ones(1, 3))
        wrapper.settle()
        wrapper.close()
        return wrapper.round

    assert len(set(run_ranks(5, body))) == 1


@pytest.mark.parametrize(("n", "period", "num_steps"), [(2, 0, 5), (3, 4, 4), (4, 5, 9), (5, 3, 7)])
@pytest.mark.parametrize("overlap", [False, True])
def test_equal_steps_and_close_end_together(n: int, period: int, num_steps: int, overlap: bool) -> None:
    """Without `settle()`, at any speed: a rank does not leave while others need it, and leaves no thread behind."""

    def body(group: dist.ProcessGroup) -> int:
        delays = random.Random(100 * n + group.rank())
        wrapper = wrap(group, sync_period=period, overlap=overlap)
        for _ in range(num_steps):
            time.sleep(delays.choice((0.0, 0.0, 0.003)))
            wrapper(torch.ones(1, 3))
        wrapper.close()
        return wrapper.round

    assert len(set(run_ranks(n, body))) == 1
    assert_no_gossip_threads()


def test_close_serves_ranks_that_take_more_steps() -> None:
    def body(group: dist.ProcessGroup) -> int:
        wrapper = wrap(group, sync_period=3)
        for _ in range(2 if group.rank() == 1 else 10):
            wrapper(torch.ones(1, 3))
        wrapper.close()
        return wrapper.round

    rounds = run_ranks(3, body)
    assert len(set(rounds)) == 1
    assert min(rounds) >= 10


def test_a_rank_that_goes_on_after_a_peer_has_closed_is_told() -> None:
    closed = threading.Event()

    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(group)
        wrapper(torch.ones(1, 3))
        wrapper.settle()
        if group.rank() == 2:
            wrapper.close()
            closed.set()
            return
        assert closed.wait(PATIENCE)
        message = (
            rf"^rank {group.rank()}: in round \d, ranks \[2\] have closed; call settle\(\) on all ranks before close"
        )
        with pytest.raises(ConnectionError, match=message):
            train_on(wrapper)
        wrapper.close()

    run_ranks(3, body)
    assert_no_gossip_threads()


def test_a_rank_whose_own_code_fails_is_named() -> None:
    """`close()` in a `finally`: the rank leaves at once, and the others do not take a neighbour for the culprit."""
    n, culprit = 4, 1
    seconds = [0.0] * n

    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(group, sync_period=3, timeout=timedelta(seconds=PATIENCE))
        start = time.monotonic()
        if group.rank() == culprit:
            wrapper(torch.ones(1, 3))
            with pytest.raises(KeyError, match="mine"), contextlib.closing(wrapper):
                raise KeyError("mine")
        else:
            message = rf"^rank {group.rank()}: in round \d+, rank {culprit} left after an error of its own"
            with pytest.raises(ConnectionError, match=message):
                train_on(wrapper)
            wrapper.close()
        seconds[group.rank()] = time.monotonic() - start

    run_ranks(n, body)
    assert max(seconds) < PATIENCE / 2
    assert_no_gossip_threads()


def test_averaged_by_one_rank_alone_names_the_others() -> None:
    failed = threading.Event()

    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(group, timeout=timedelta(seconds=1))
        wrapper(torch.ones(1, 3))
        if group.rank() == 0:
            message = (
                r"^rank 0: waiting until all ranks settle after round \d .*rank 1 did not come; .*; it trains, in round"
            )
            with pytest.raises(TimeoutError, match=message), wrapper.averaged():
                pass
            failed.set()
        else:
            assert failed.wait(PATIENCE)
            with pytest.raises(
                TimeoutError, match=r"^rank 1: .*rank 0 has given this rank up, which it waited for \(timeout 1 s\)"
            ):
                wrapper.settle()
        wrapper.close()

    run_ranks(2, body)


def test_statistics_stay_variances_when_an_average_is_applied_late() -> None:
    """BatchNorm decays its statistics in every forward, also between the publication of a model and its average."""
    n, num_rounds = 2, 4

    def body(group: dist.ProcessGroup) -> Tensor:
        torch_module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        variance = torch_module[1].running_var
        assert isinstance(variance, Tensor)
        variance.fill_(100.0 if group.rank() == 0 else 1.0)
        wrapper = wrap(group, torch_module, overlap=True, sync_period=0)
        lows = []
        for _ in range(num_rounds):
            wrapper(torch.zeros(2, 3))
            with wrapper.no_sync():
                for _ in range(30):
                    wrapper(torch.zeros(2, 3))  # a batch without variance: what is known decays to 1/25
            wrapper.flush()
            lows.append(variance.min().item())
        wrapper.close()
        return torch.tensor(lows)

    assert all(lows.min() >= 0 for lows in run_ranks(n, body))


def test_a_round_is_one_step_and_seen_by_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    be_on_time(monkeypatch)

    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(group)
        with wrapper.no_sync():
            loss = wrapper(torch.ones(1, 3)).sum()
            wrapper(torch.ones(1, 3))
        wrapper(torch.ones(1, 3))  # all three are of one step
        assert wrapper.round == 1
        fill(wrapper, 0.5 + group.rank())
        wrapper(torch.ones(1, 3))
        assert wrapper.round == 2
        assert set(flatten(wrapper).tolist()) == {1.0}
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        wrapper.settle()
        wrapper.close()

    run_ranks(2, body)


@pytest.mark.parametrize("wait_avoiding", [False, True])
def test_a_resumed_run_is_the_run(wait_avoiding: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    be_on_time(monkeypatch)
    n, half = 4, 4
    # Whether a rank has taken its last step before a global average when others are there is a matter of chance.
    options: dict[str, Any] = {"sync_period": 0 if wait_avoiding else 3, "wait_avoiding": wait_avoiding}

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        ends = []
        for is_resumed in (False, True):
            wrapper = wrap(group, **options)
            for step in range(half):
                train_step(wrapper, torch.optim.SGD(wrapper.parameters(), lr=0.05), group.rank(), step)
            wrapper.settle()
            if is_resumed:
                state = wrapper.state_dict()
                wrapper.close()
                wrapper = wrap(group, mlp(99), **options)
                wrapper.load_state_dict(state)
                assert wrapper.round == half
                loaded.wait(PATIENCE)
            for step in range(half, 2 * half):
                train_step(wrapper, torch.optim.SGD(wrapper.parameters(), lr=0.05), group.rank(), step)
            wrapper.settle()
            wrapper.close()
            ends.append(flatten(wrapper))
        return ends[0], ends[1]

    loaded = threading.Barrier(n)
    for whole, halves in run_ranks(n, body):
        assert torch.equal(whole, halves)


@pytest.mark.filterwarnings("ignore:the state dict holds no gossip state")  # on both threads, who share the filters
@pytest.mark.parametrize("assign", [False, True])
def test_peers_get_the_model_of_a_plain_checkpoint(assign: bool) -> None:
    turn = threading.Barrier(2)

    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(group)
        for _ in range(3):
            wrapper(torch.ones(1, 3))
        wrapper.settle()
        plain = {f"module.{name}": torch.full_like(x, 8.0) for name, x in wrapper.module.state_dict().items()}
        wrapper.load_state_dict(plain, assign=assign)
        assert wrapper.round == 0
        engine_of(wrapper).begin()
        turn.wait(PATIENCE)
        if group.rank() == 0:
            fill(wrapper, 4.0)
            wrapper(torch.ones(1, 3))
            assert set(flatten(wrapper).tolist()) == {6.0}  # with the loaded model of a peer that is not there yet
        wrapper.settle()
        wrapper.close()

    run_ranks(2, body)


@pytest.mark.filterwarnings("ignore:got a training forward")
def test_a_copy_is_a_snapshot_that_stays_local() -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(group)
        wrapper(torch.ones(1, 3))
        other = copy.deepcopy(wrapper)
        before = flatten(other)
        other(torch.ones(1, 3))
        other.settle()
        assert torch.equal(flatten(other), before)
        wrapper.settle()
        wrapper.close()

    run_ranks(2, body)


def test_settle_after_close_does_nothing() -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(group)
        wrapper.settle()
        wrapper.close()
        wrapper.settle()
        wrapper.close()

    run_ranks(2, body)


def test_a_world_of_one() -> None:
    wrapper = wrap(solo_group(), sync_period=2)
    before = flatten(wrapper)
    for _ in range(4):
        wrapper(torch.ones(1, 3))
    assert wrapper.round == 4
    assert torch.equal(flatten(wrapper), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_period": -1}, r"got sync_period=-1, expected at least 0"),
        ({"group_size": 3}, r"got group_size=3 for 2 ranks, expected a power of two from 1 to 2"),
        ({"group_size": 4}, r"got group_size=4 for 2 ranks, expected a power of two from 1 to 2"),
        ({"comm_device": "cuda"}, r"got comm_device=cuda with wait_avoiding=True, expected 'cpu' or None"),
    ],
)
def test_arguments_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match=message):
            wrap(group, **options)

    run_ranks(2, body)


def test_ranks_must_agree() -> None:
    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(
            ValueError, match=r"ranks do not agree with rank 0: rank 1: sync_period, wait_avoiding, overlap: got \("
        ):
            wrap(group, sync_period=10 + group.rank())

    run_ranks(2, body)
