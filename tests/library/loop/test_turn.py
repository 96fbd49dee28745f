"""Other threads and signal handlers use a model while it trains: the sum over ranks stays exact."""

from __future__ import annotations

import copy
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import BilatGossipDataParallel, GossipDataParallel, gossip
from gossip_modules.loop.turn import Turn, is_in_signal_handler
from tests.harness.problems import loss_of, mlp
from tests.harness.progress import engine_of, local_of, weight_of
from tests.harness.ranks import run_ranks, solo_group
from tests.harness.reference import flatten
from tests.library.wrappers.wrapping import irregular

NUM_STEPS = 6
RATE = 0.01


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(1, 3, dtype=torch.float64))


def save(model: nn.Module) -> None:
    model.state_dict()


def change_mode(model: nn.Module) -> None:
    model.eval()
    model.train()


def change_of_mean(
    options: dict[str, Any], around: Callable[[Any, Callable[[], None]], None], *, num: int = 3
) -> Tensor:
    """The change of the mean of x over ranks, whose steps are -RATE (rank + 1): exactly -2 RATE a step.

    Args:
        options: of the wrapper.
        around: called in each step with the wrapper and the function that takes the step of the optimizer.
    """

    def body(group: dist.ProcessGroup) -> Tensor:
        module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
        model = GossipDataParallel(module, process_group=group, **options)
        start = flatten(module).clone()
        optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
        for _ in range(NUM_STEPS):

            def step() -> None:
                loss = model(torch.ones(1, 3, dtype=torch.float64)).sum() * 0
                (loss + (group.rank() + 1) * sum(p.sum() for p in module.parameters())).backward()
                optimizer.step()

            optimizer.zero_grad()
            around(model, step)
        model.settle()
        result = flatten(module) * weight_of(model) - start
        model.close()
        return result

    return torch.stack(run_ranks(3, body)).mean(0)


OPTIONS: list[dict[str, Any]] = [{"graph": irregular()}, {"graph": irregular(), "overlap": True}, {"overlap": True}]
EXACT = -RATE * NUM_STEPS * 2


@pytest.mark.parametrize("act", [evaluate, save])
@pytest.mark.parametrize("options", OPTIONS, ids=["moving", "moving, overlap", "overlap"])
def test_a_second_thread_leaves_the_sum_over_ranks(options: dict[str, Any], act: Callable[[nn.Module], None]) -> None:
    def around(model: Any, step: Callable[[], None]) -> None:
        has_ended = threading.Event()

        def other() -> None:
            while not has_ended.is_set():
                act(model)

        thread = threading.Thread(target=other)
        thread.start()
        try:
            step()
        finally:
            has_ended.set()
            thread.join()

    change = change_of_mean(options, around)
    torch.testing.assert_close(change, torch.full_like(change, EXACT))


@pytest.mark.parametrize("act", [save, change_mode, lambda model: model.flush()], ids=["save", "mode", "flush"])
@pytest.mark.parametrize("options", OPTIONS, ids=["moving", "moving, overlap", "overlap"])
def test_a_call_inside_a_round_leaves_the_sum_over_ranks(
    options: dict[str, Any], act: Callable[[nn.Module], None]
) -> None:
    def around(model: Any, step: Callable[[], None]) -> None:
        engine = engine_of(model)
        run = type(engine).round

        def interrupted(x: Any) -> bool:
            act(model)
            is_written = run(engine, x)
            act(model)
            return is_written

        engine.round = interrupted
        step()
        del engine.round

    with pytest.warns(UserWarning, match="inside a gossip round") if act is save else pytest.MonkeyPatch.context():
        change = change_of_mean(options, around)
    torch.testing.assert_close(change, torch.full_like(change, EXACT))


@pytest.mark.parametrize("make", [GossipDataParallel, gossip])
def test_a_state_that_was_saved_inside_a_round_is_refused(make: Callable[..., Any]) -> None:
    model = make(mlp(), process_group=solo_group())
    engine = engine_of(getattr(model, "_gossip", model))
    saved: list[Any] = []
    run = engine.round

    def interrupted(x: Any) -> bool:
        saved.append(model.state_dict())
        return run(x)

    engine.round = interrupted
    with pytest.warns(UserWarning, match=r"state_dict\(\) of a GossipDataParallel inside a gossip round"):
        loss_of(model, 0, 0)
    with pytest.raises(ValueError, match=r"saved inside a gossip round.*set a flag"):
        model.load_state_dict(saved[0])
    model.close()


def test_forwards_and_steps_inside_a_round_are_errors_with_the_remedy() -> None:
    model = GossipDataParallel(mlp(), process_group=solo_group())
    with local_of(model).loop.turn.change:
        with pytest.raises(RuntimeError, match=r"a forward of a GossipDataParallel inside a gossip round.*set a flag"):
            loss_of(model, 0, 0)
        with pytest.raises(RuntimeError, match=r"a step of a GossipDataParallel inside a gossip round.*set a flag"):
            model.gossip_step()
    model.close()


@pytest.fixture
def interrupt() -> Iterator[Callable[[Callable[[], object]], None]]:
    """A function that calls another one in the handler of a signal."""
    acts: list[Callable[[], object]] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: acts.pop()())

    def call(act: Callable[[], object]) -> None:
        acts.append(act)
        signal.raise_signal(signal.SIGUSR1)

    yield call
    signal.signal(signal.SIGUSR1, before)


def in_thread(act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


@pytest.mark.parametrize("is_signal", [True, False], ids=["signal handler", "thread"])
@pytest.mark.parametrize("act", [save, change_mode, lambda model: model.flush()], ids=["save", "mode", "flush"])
def test_corrections_wait_while_autograd_needs_the_weights(
    act: Callable[[nn.Module], None], is_signal: bool, interrupt: Callable[[Callable[[], object]], None]
) -> None:
    model = BilatGossipDataParallel(mlp(), process_group=solo_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        loss_of(model, 0, 0).backward()
        optimizer.step()
    before = flatten(model.module).clone()
    loss = loss_of(model, 0, 1)
    correction = local_of(model).vector.like()
    correction.segments[0].fill_(1.0)
    engine_of(model).shared.deliver(correction, alpha=1.0, step=0)
    (interrupt if is_signal else in_thread)(lambda: act(model))
    assert torch.equal(flatten(model.module), before)
    loss.backward()
    optimizer.step()
    loss_of(model, 0, 2)
    torch.testing.assert_close(flatten(model.module) - before, torch.ones_like(before))
    model.close()


class Interrupted(torch.optim.SGD):
    """Inside its step another thread begins to save the model, and waits for the end of the step."""

    saver: threading.Thread

    def step(self, closure: Any = None) -> Any:
        self.saver.start()
        self.saver.join(0.01)
        assert self.saver.is_alive()
        return super().step(closure)


def test_a_second_thread_saves_copies_of_estimates_after_the_optimizer_step() -> None:
    def body(group: dist.ProcessGroup) -> None:
        model = GossipDataParallel(mlp(), process_group=group, graph=irregular())
        optimizer = Interrupted(model.parameters(), lr=0.1)
        saved: list[Any] = []
        for step in range(3):
            loss_of(model, group.rank(), step).backward()
            optimizer.saver = threading.Thread(target=lambda: saved.append(model.state_dict()))
            optimizer.step()
            optimizer.saver.join()
            found = torch.cat([x.flatten() for name, x in saved[-1].items() if name.startswith("module.")])
            assert torch.equal(found, flatten(model.module))
        before = found.clone()
        loss_of(model, group.rank(), 3)
        assert torch.equal(found, before)
        model.close()

    run_ranks(3, body)


def test_an_optimizer_step_that_raises_blocks_no_other_thread() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("no memory")

    def body(group: dist.ProcessGroup) -> None:
        model = GossipDataParallel(mlp(), process_group=group, graph=irregular())
        optimizer = Failing(model.parameters(), lr=0.1)
        loss_of(model, group.rank(), 0).backward()
        with pytest.raises(RuntimeError, match="no memory"):
            optimizer.step()
        in_thread(model.state_dict)
        model.close()

    run_ranks(3, body)


def test_a_thread_that_waits_too_long_is_told_so() -> None:
    turn = Turn()
    turn.limit = 0.01
    has_begun, may_end = threading.Event(), threading.Event()

    def long() -> None:
        with turn.change:
            has_begun.set()
            may_end.wait(10)

    thread = threading.Thread(target=long)
    thread.start()
    has_begun.wait(10)
    try:
        with pytest.raises(TimeoutError, match=r"a gossip round of another thread has not ended after 0\.01 s"):
            turn.__enter__()
    finally:
        may_end.set()
        thread.join()
    with copy.deepcopy(turn):
        assert not turn.is_in_change


def test_handlers_of_all_kinds_are_known(interrupt: Callable[[Callable[[], object]], None]) -> None:
    class Handler:
        def __call__(self, *_: object) -> None:
            found.append(is_in_signal_handler())

        def method(self, *_: object) -> None:
            found.append(is_in_signal_handler())

    found: list[bool] = []
    interrupt(lambda: found.append(is_in_signal_handler()))
    for handler in (Handler(), Handler().method):
        signal.signal(signal.SIGUSR1, handler)
        signal.raise_signal(signal.SIGUSR1)
    assert found == [True] * 3
    assert not is_in_signal_handler()
