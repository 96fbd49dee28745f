"""One gossip round for each optimizer step, whatever the loop looks like."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import (
    D2,
    BilatGossipDataParallel,
    DiLoCo,
    GossipDataParallel,
    GroupAverageDataParallel,
    Membership,
    RingGraph,
    Schedule,
    gossip,
)
from gossip_modules.loop.hooks import STEP_HOOKS
from tests.harness.cases import each_once
from tests.harness.problems import batch, fill_, loss_of, mlp, sgd, train_step
from tests.harness.progress import local_of, step_of
from tests.harness.ranks import run_ranks, solo_group
from tests.harness.reference import flatten

WRAPPERS: dict[str, Callable[..., Any]] = {
    "SGP": GossipDataParallel,
    "overlap": lambda module, **options: GossipDataParallel(module, overlap=True, **options),
    "gossip()": gossip,
    "AD-PSGD": BilatGossipDataParallel,
    "WAGMA": lambda module, **options: GroupAverageDataParallel(module, sync_period=0, **options),
}
FORWARD_WRAPPERS = ["SGP", "overlap", "gossip()"]


def wrap(module: nn.Module, group: dist.ProcessGroup, **options: Any) -> GossipDataParallel:
    return GossipDataParallel(module, process_group=group, **{"init_sync": False, "timeout": 20, **options})


def num_rounds(wrapper: Any) -> float:
    wrapper.flush()
    return float(wrapper.comm_stats()["num_rounds"])


# Several forwards of one step.


@pytest.mark.parametrize("kind", FORWARD_WRAPPERS)
def test_the_attribute_of_ddp_marks_the_last_micro_batch(kind: str) -> None:
    wrapper = WRAPPERS[kind](mlp(), process_group=solo_group())
    optimizer = sgd(wrapper)
    for step in range(6):
        for micro in range(4):
            wrapper.require_backward_grad_sync = micro == 3
            loss_of(wrapper, micro, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert wrapper.require_backward_grad_sync
    with wrapper.no_sync():
        assert not wrapper.require_backward_grad_sync
    assert num_rounds(wrapper) == 6
    wrapper.close()


@pytest.mark.parametrize("value", ["yes", None])
def test_the_attribute_of_ddp_is_a_bool(value: Any) -> None:
    wrapper = wrap(mlp(), solo_group())
    with pytest.raises(ValueError, match=r"require_backward_grad_sync"):
        wrapper.require_backward_grad_sync = value
    wrapper.close()


def test_an_outer_method_counts_optimizer_steps() -> None:
    wrapper = wrap(mlp(), solo_group(), algorithm=DiLoCo(sync_every=3), init_sync=True)
    optimizer = sgd(wrapper)
    for step in range(7):  # the round of step k runs before forward k, k = 0 ... 6
        for micro in range(4):
            wrapper.require_backward_grad_sync = micro == 3
            loss_of(wrapper, micro, step).backward()
        optimizer.step()
    assert num_rounds(wrapper) == 2
    wrapper.close()


@pytest.mark.parametrize("kind", FORWARD_WRAPPERS)
def test_micro_batches_outside_no_sync_are_of_one_step_and_warn_once(kind: str) -> None:
    wrapper = WRAPPERS[kind](mlp(), process_group=solo_group())
    optimizer = sgd(wrapper)

    def loop() -> None:
        for step in range(6):
            for micro in range(4):
                loss_of(wrapper, micro, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(UserWarning, match=r"got 4 training forwards .* one optimizer step.*no_sync\(\)") as caught:
        loop()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert num_rounds(wrapper) == 6
    wrapper.close()


def test_micro_batches_outside_no_sync_train_as_those_inside() -> None:
    def body(group: dist.ProcessGroup, is_inside: bool) -> Tensor:
        model = mlp(group.rank())
        wrapper = wrap(model, group)
        optimizer = sgd(wrapper)
        for step in range(4):
            for micro in range(3):
                with wrapper.no_sync() if is_inside and micro < 2 else contextlib.nullcontext():
                    loss_of(wrapper, 10 * micro + group.rank(), step).backward()
            optimizer.step()
            optimizer.zero_grad()
        wrapper.close()
        return flatten(model)

    inside = run_ranks(3, lambda group: body(group, True))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no_sync.*")
        outside = run_ranks(3, lambda group: body(group, False))
    for x, y in zip(inside, outside, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_two_forwards_of_one_loss_compute_right_gradients(dtype: torch.dtype | None) -> None:
    """Under autocast autograd would not notice that parameters change between them."""

    def gradient(model: nn.Module, forward: nn.Module) -> Tensor:
        # Without the cache of casts, which threads share and clear.
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False):
            (forward(batch(0, 0)[0]).float() - forward(batch(1, 0)[0]).float()).square().mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor, float]:
        model = mlp(group.rank())
        wrapper = wrap(model, group)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.0)
        train_step(wrapper, optimizer, group.rank(), 0)
        optimizer.zero_grad()
        found = gradient(model, wrapper)
        optimizer.zero_grad()
        right = gradient(model, model)
        optimizer.zero_grad()
        rounds = num_rounds(wrapper)
        wrapper.close()
        return found, right, rounds

    for found, right, rounds in run_ranks(2, body):
        assert torch.equal(found, right)
        assert rounds == 2


class Sharpness(torch.optim.SGD):
    """Sharpness-aware minimisation in two passes, as its usual implementations do it."""

    @torch.no_grad()
    def climb(self) -> None:
        self.before = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(0.5 * p.grad)
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        for p, before in zip(parameters, self.before, strict=True):
            p.data = before
        self.step()
        self.zero_grad()


@pytest.mark.parametrize("options", [{}, {"overlap": True}])
def test_the_second_pass_of_sharpness_aware_minimisation_mixes_nothing(options: dict[str, Any]) -> None:
    def body(group: dist.ProcessGroup, is_inside: bool) -> tuple[float, Tensor]:
        model = mlp(group.rank())
        wrapper = wrap(model, group, **options)
        optimizer = Sharpness(wrapper.parameters(), lr=0.05)
        for step in range(5):
            with wrapper.no_sync() if is_inside else contextlib.nullcontext():
                loss_of(wrapper, group.rank(), step).backward()
            optimizer.climb()
            loss_of(wrapper, group.rank(), step).backward()
            optimizer.descend()
        rounds = num_rounds(wrapper)
        wrapper.close()
        return rounds, flatten(model)

    inside = run_ranks(4, lambda group: body(group, True))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no_sync.*")
        outside = run_ranks(4, lambda group: body(group, False))
    for (rounds, x), (_, y) in zip(outside, inside, strict=True):
        assert rounds == 5
        assert torch.equal(x, y)


@pytest.mark.parametrize("kind", FORWARD_WRAPPERS)
def test_closures_of_lbfgs_are_of_one_step(kind: str) -> None:
    def body(group: dist.ProcessGroup) -> tuple[list[int], float]:
        model = mlp(group.rank()).double()
        wrapper = WRAPPERS[kind](model, process_group=group, timeout=20)
        optimizer = torch.optim.LBFGS(wrapper.parameters(), line_search_fn="strong_wolfe", max_iter=4 + group.rank())
        counts = []
        for step in range(4):
            num_evaluations = 0

            def closure(step: int = step) -> Tensor:
                nonlocal num_evaluations
                num_evaluations += 1
                optimizer.zero_grad()
                loss = loss_of(wrapper, group.rank(), step)
                loss.backward()
                return loss

            optimizer.step(closure)
            counts.append(num_evaluations)
        wrapper.consensus_distance()
        rounds = num_rounds(wrapper)
        wrapper.close()
        return counts, rounds

    results = run_ranks(3, body)
    assert [rounds for _, rounds in results] == [4, 4, 4]
    assert len({tuple(counts) for counts, _ in results}) > 1, (
        "ranks evaluate closures equally often, which shows nothing"
    )


class SmallMemory(nn.Module):
    """Has room for eight rows at a time."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 8:
            raise torch.OutOfMemoryError("out of memory")
        return self.layers(x)


@pytest.mark.parametrize("kind", FORWARD_WRAPPERS)
@pytest.mark.parametrize("has_optimizer", [True, False])
def test_a_forward_that_is_tried_again_is_of_the_same_step(has_optimizer: bool, kind: str) -> None:
    def update(module: nn.Module) -> None:
        for p in module.parameters():
            assert p.grad is not None
            p.data.sub_(p.grad, alpha=0.05)
            p.grad = None

    def body(group: dist.ProcessGroup) -> float:
        model = SmallMemory(mlp(group.rank()))
        wrapper = WRAPPERS[kind](model, process_group=group, timeout=20)
        optimizer = sgd(wrapper) if has_optimizer else None
        for step in range(6):
            x = batch(group.rank(), step, size=12 if (group.rank(), step) == (1, 3) else 8)[0]
            try:
                wrapper(x).square().mean().backward()
            except torch.OutOfMemoryError:
                with wrapper.no_sync():
                    wrapper(x[:6]).square().mean().backward()
                wrapper(x[6:]).square().mean().backward()
            if optimizer is None:
                update(wrapper)
            else:
                optimizer.step()
                optimizer.zero_grad()
        wrapper.consensus_distance()
        rounds = num_rounds(wrapper)
        wrapper.close()
        return rounds

    assert run_ranks(2, body) == [6, 6]


# Steps without a round.


class Model(nn.Module):
    """Computes its loss in a method of its own, as some models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = fill_(nn.Linear(3, 2), 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


def inner_forward(wrapper: Any, step: int) -> Tensor:
    x, y = batch(0, step)
    return nn.functional.mse_loss(wrapper.module(x), y)


def inner_method(wrapper: Any, step: int) -> Tensor:
    return getattr(wrapper, "module", wrapper).loss(*batch(0, step))


def in_no_sync(wrapper: Any, step: int) -> Tensor:
    with wrapper.no_sync():
        return loss_of(wrapper, 0, step)


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        *((kind, inner_method) for kind in WRAPPERS),
        *((kind, inner_forward) for kind in WRAPPERS if kind != "gossip()"),
        *((kind, in_no_sync) for kind in WRAPPERS),
    ],
)
def test_steps_without_rounds_are_an_error_once(kind: str, loss: Callable[[Any, int], Tensor]) -> None:
    wrapper = WRAPPERS[kind](Model(), process_group=solo_group())
    optimizer = sgd(wrapper)

    def step() -> None:
        optimizer.zero_grad()
        loss(wrapper, 0).backward()
        optimizer.step()

    step()
    with pytest.raises(RuntimeError, match=r"got two steps of SGD .*no_sync\(\).*inner module.*gossip_step\(\)"):
        step()
    for _ in range(3):
        step()
    wrapper.close()


@pytest.mark.parametrize(
    "options",
    [{"schedule": 3}, {"schedule": Schedule(gossip_every=4, average_every=1)}, {"algorithm": DiLoCo(sync_every=5)}],
)
def test_steps_between_the_rounds_of_a_schedule_are_no_error(options: dict[str, Any]) -> None:
    wrapper = wrap(mlp(), solo_group(), **options, init_sync=True)
    optimizer = sgd(wrapper)
    for step in range(8):
        train_step(wrapper, optimizer, 0, step)
    wrapper.close()


def test_optimizers_that_step_in_turn_or_inside_the_backward_are_no_error() -> None:
    model = mlp()
    wrapper = wrap(model, solo_group())
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()  # type: ignore[index]
        optimizers[p].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for k in range(4):
        loss_of(wrapper, 0, k).backward()
    assert num_rounds(wrapper) == 4
    wrapper.close()


def test_steps_after_close_are_no_error() -> None:
    wrapper = wrap(mlp(), solo_group())
    optimizer = sgd(wrapper)
    wrapper.close()
    for step in range(3):
        optimizer.zero_grad()
        loss_of(wrapper.module, 0, step).backward()
        optimizer.step()


class Comparable(torch.optim.SGD):
    """An optimizer of a class without a hash."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("options", [{}, {"algorithm": D2()}], ids=str)
def test_optimizers_that_compare_equal_and_have_no_hash_are_watched_and_forgotten(options: dict[str, Any]) -> None:
    model = GossipDataParallel(mlp(), process_group=solo_group(), **options)
    optimizer, other = Comparable(model.parameters(), lr=0.1), Comparable(mlp().parameters(), lr=0.1)
    for t in range(3):
        train_step(model, optimizer, 0, t)
        other.step()
    assert model.comm_stats()["num_rounds"] == 3
    num_calls = len(STEP_HOOKS._calls)
    del other
    gc.collect()
    assert len(STEP_HOOKS._calls) == num_calls - 1
    model.close()
    train_step(model.module, optimizer, 0, 3)


def test_a_discriminator_has_one_round_for_each_of_its_steps() -> None:
    """Its second and third forward are those of its own loss, and of the generator's."""
    critic, maker = mlp(), fill_(nn.Linear(3, 3), 1)
    wrapper = wrap(critic, solo_group())
    own, other = sgd(wrapper), sgd(maker)

    def loop() -> None:
        for step in range(5):
            x = batch(0, step)[0]
            own.zero_grad()
            (wrapper(x) - wrapper(maker(x).detach())).mean().backward()
            own.step()
            other.zero_grad()
            wrapper(maker(x)).mean().backward()
            other.step()

    with pytest.warns(UserWarning, match=r"no_sync\(\)"):
        loop()
    assert num_rounds(wrapper) == 6
    wrapper.close()


# Steps that one rank leaves out.


def skip_by_scaler(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def skip_by_hand(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    loss.backward()
    if loss.isfinite():
        optimizer.step()


@pytest.mark.parametrize("where", ["before the forward", "after the forward"])
@pytest.mark.parametrize(
    ("rounds", "set_to_none", "skip"),
    [("forward", True, skip_by_hand), ("forward", False, skip_by_scaler), ("step", True, skip_by_scaler)],
)
def test_a_rank_that_leaves_out_steps_takes_part_in_all_rounds(
    rounds: str, where: str, set_to_none: bool, skip: Callable[..., None]
) -> None:
    def body(group: dist.ProcessGroup) -> tuple[float, float]:
        wrapper = wrap(mlp(group.rank()), group, graph=RingGraph, push_sum=False, rounds=rounds)
        optimizer = sgd(wrapper)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for step in range(8):
            if where == "before the forward":
                optimizer.zero_grad(set_to_none=set_to_none)
            loss = loss_of(wrapper, group.rank(), step)
            if where == "after the forward":
                optimizer.zero_grad(set_to_none=set_to_none)
            if step in (2, 3, 5) and group.rank() == 1:
                loss = loss * float("inf")
            skip(scaler, optimizer, loss)
        distance = wrapper.consensus_distance()
        rounds_done = num_rounds(wrapper)
        wrapper.close()
        return rounds_done, distance

    results = run_ranks(3, body)
    assert [done for done, _ in results] == [8, 8, 8]
    assert len({distance for _, distance in results}) == 1


def test_two_backwards_of_one_forward_are_of_one_step() -> None:
    """Gradients of several losses, one after the other, as methods for many tasks look at them."""
    model = mlp()
    wrapper = wrap(model, solo_group())
    optimizer = sgd(wrapper)
    for step in range(4):
        out = wrapper(batch(0, step)[0])
        for task in range(2):
            optimizer.zero_grad()
            out[:, task].mean().backward(retain_graph=True)
        loss_of(model, 0, step).backward()  # of the inner module, to look at
        optimizer.step()
    assert num_rounds(wrapper) == 4
    wrapper.close()


def test_the_exact_average_between_a_step_left_out_and_the_next_forward_changes_nothing_of_that() -> None:
    def body(group: dist.ProcessGroup) -> float:
        wrapper = wrap(mlp(group.rank()), group)
        optimizer = sgd(wrapper)
        for step in range(5):
            loss_of(wrapper, group.rank(), step).backward()
            if (group.rank(), step) != (1, 2):
                optimizer.step()
            optimizer.zero_grad()
            wrapper.consensus_distance()
        rounds = num_rounds(wrapper)
        wrapper.close()
        return rounds

    assert run_ranks(2, body) == [5, 5]


# When rounds run.


def test_rounds_after_steps_train_as_those_before_forwards_and_mix_once_more() -> None:
    def body(group: dist.ProcessGroup, rounds: str) -> tuple[float, Tensor]:
        model = mlp(group.rank())
        wrapper = wrap(model, group, init_sync=True, rounds=rounds)
        optimizer = sgd(wrapper)
        for step in range(5):
            train_step(wrapper, optimizer, group.rank(), step)
            if rounds == "manual":
                wrapper.gossip_step()
        done = num_rounds(wrapper)
        if rounds == "forward":
            wrapper.gossip_step()  # the round before the forward that would come next
        wrapper.close()
        return done, flatten(model)

    before = run_ranks(2, lambda group: body(group, "forward"))
    for rounds in ("step", "manual"):
        after = run_ranks(2, functools.partial(body, rounds=rounds))
        for (done, x), (_, y) in zip(after, before, strict=True):
            assert done == 5
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    ("options", "rounds"),
    each_once([{"algorithm": DiLoCo(sync_every=3)}, {"algorithm": D2()}, {"overlap": True}], ["step", "manual"]),
)
def test_methods_do_the_same_whenever_rounds_run(options: dict[str, Any], rounds: str) -> None:
    """An anchor is the model before the first step, and every third step is an outer step."""

    def body(group: dist.ProcessGroup, rounds: str) -> Tensor:
        model = mlp(group.rank())
        wrapper = wrap(model, group, **options, push_sum=False, init_sync=True, rounds=rounds)
        optimizer = sgd(wrapper)
        for step in range(7):
            train_step(wrapper, optimizer, group.rank(), step)
            if rounds == "manual":
                wrapper.gossip_step()
        if rounds == "forward":
            wrapper.gossip_step()
        wrapper.flush()
        wrapper.close()
        return flatten(model)

    for x, y in zip(
        run_ranks(2, lambda group: body(group, rounds)), run_ranks(2, lambda group: body(group, "forward")), strict=True
    ):
        torch.testing.assert_close(x, y)


def test_rounds_after_steps_of_two_optimizers_run_once_for_both() -> None:
    model = mlp()
    wrapper = wrap(model, solo_group(), rounds="step")
    first, *_, last = model.children()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (first, last)]
    for step in range(4):
        loss_of(wrapper, 0, step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert num_rounds(wrapper) == 4
    wrapper.close()


def test_rounds_after_steps_need_a_torch_optimizer() -> None:
    wrapper = wrap(mlp(), solo_group(), rounds="step")
    loss_of(wrapper, 0, 0).backward()
    with pytest.raises(RuntimeError, match=r"got rounds='step' and no torch.optim.Optimizer .*rounds='manual'"):
        loss_of(wrapper, 0, 1)
    loss_of(wrapper, 0, 2)
    wrapper.close()


def test_rounds_by_hand_run_only_then_and_their_absence_is_told() -> None:
    wrapper = wrap(mlp(), solo_group(), rounds="manual")
    optimizer = sgd(wrapper)
    for _ in range(99):
        train_step(wrapper, optimizer, 0, 0)
    assert num_rounds(wrapper) == 0
    with pytest.warns(UserWarning, match=r"got 100 optimizer steps without a round .*gossip_step\(\)"):
        optimizer.step()
    wrapper.gossip_step()
    assert num_rounds(wrapper) == 1
    wrapper.close()


def test_a_round_now_is_that_of_the_present_step() -> None:
    wrapper = wrap(mlp(), solo_group())
    optimizer = sgd(wrapper)
    for step in range(3):
        train_step(wrapper, optimizer, 0, step)
        wrapper.gossip_step()  # in place of the round before the next forward
    assert num_rounds(wrapper) == 4
    wrapper.close()


def test_a_rank_that_leaves_out_a_batch_runs_its_round_by_hand() -> None:
    def body(group: dist.ProcessGroup) -> float:
        wrapper = wrap(mlp(group.rank()), group)
        optimizer = sgd(wrapper)
        for step in range(5):
            loss = loss_of(wrapper, group.rank(), step)
            if (group.rank(), step) == (1, 2):
                wrapper.gossip_step()
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        rounds = num_rounds(wrapper)
        wrapper.close()
        return rounds

    assert run_ranks(2, body) == [5, 5]


def test_a_round_now_is_refused_in_a_backward_and_after_close() -> None:
    wrapper = wrap(mlp(), solo_group())
    out = loss_of(wrapper, 0, 0)
    out.register_hook(lambda gradient: wrapper.gossip_step())
    with pytest.raises(RuntimeError, match=r"got gossip_step\(\) of a GossipDataParallel inside a backward"):
        out.backward()
    with wrapper.averaged(), pytest.raises(RuntimeError, match=r"got gossip_step\(\) .* inside averaged\(\)"):
        wrapper.gossip_step()
    wrapper.close()
    with pytest.raises(RuntimeError, match=r"got gossip_step\(\) after close\(\)"):
        wrapper.gossip_step()


@pytest.mark.parametrize("value", ["steps", None, True])
def test_other_times_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"expected 'forward' .*'step' .*'manual'"):
        GossipDataParallel(mlp(), process_group=solo_group(), rounds=value)


def test_ranks_agree_on_when_rounds_run() -> None:
    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match=r"rounds.*step"):
            GossipDataParallel(mlp(), process_group=group, rounds="step" if group.rank() else "forward")

    run_ranks(2, body)


@pytest.fixture
def membership() -> Iterator[Membership]:
    membership = Membership(dist.HashStore(), min_workers=1, host="127.0.0.1")
    yield membership
    membership.close()


def test_workers_that_come_and_go_have_rounds_in_forwards(membership: Membership) -> None:
    with pytest.raises(ValueError, match=r"got rounds='manual' with a membership, expected 'forward'"):
        GossipDataParallel(mlp(), membership=membership, rounds="manual")


def test_a_step_of_a_membership_is_one_round_also_where_no_optimizer_steps(membership: Membership) -> None:
    wrapper = GossipDataParallel(mlp(), membership=membership)
    optimizer = sgd(wrapper)
    for step in membership.steps(5):
        with wrapper.no_sync():
            loss_of(wrapper, 0, step).backward()
        loss = loss_of(wrapper, 1, step)
        if step == 2:
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert step_of(wrapper) == 5
    wrapper.close()


def test_a_trained_module_is_copied_and_saved_as_without_a_watch_on_its_gradients(tmp_path: Path) -> None:
    wrapper = wrap(mlp(), solo_group())
    train_step(wrapper, sgd(wrapper), 0, 0)
    torch.save(wrapper.module, tmp_path / "module.pt")
    twin = copy.deepcopy(wrapper.module)
    loss_of(twin, 0, 0).backward()
    assert torch.equal(flatten(twin), flatten(wrapper.module))
    wrapper.close()
    assert all(not p._post_accumulate_grad_hooks for p in wrapper.module.parameters())


@pytest.mark.parametrize("options", [{}, {"overlap": True}])
def test_forwards_of_the_average_mix_nothing_and_take_no_round_away(options: dict[str, Any]) -> None:
    """In train mode and with gradients, on one rank more often than on the other."""

    def body(group: dist.ProcessGroup) -> tuple[float, Tensor]:
        wrapper = wrap(mlp(group.rank()), group, **options)
        optimizer = sgd(wrapper)
        for step in range(4):
            train_step(wrapper, optimizer, group.rank(), step)
            with wrapper.averaged():
                before = flatten(wrapper.module)
                for _ in range(1 + group.rank()):
                    loss_of(wrapper, group.rank(), step)
                assert torch.equal(flatten(wrapper.module), before)
        rounds = num_rounds(wrapper)
        wrapper.close()
        return rounds, before

    (rounds, one), (others, other) = run_ranks(2, body)
    assert rounds == others == 4
    assert torch.equal(one, other)


# Loops that drop gradients, and yet leave out no step.


@pytest.mark.parametrize("rounds", ["forward", "step"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_second_pass_at_points_written_through_data_mixes_nothing(set_to_none: bool, rounds: str) -> None:
    """Sharpness-aware minimisation as many write it: `.data` changes no version of a tensor."""
    wrapper = wrap(mlp(), solo_group(), rounds=rounds)
    optimizer = sgd(wrapper)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no_sync.*")
        for step in range(5):
            loss_of(wrapper, 0, step).backward()
            shifts = [0.05 * torch.ones_like(parameter) for parameter in wrapper.parameters()]
            for parameter, shift in zip(wrapper.parameters(), shifts, strict=True):
                parameter.data.add_(shift)
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(wrapper, 0, step).backward()
            for parameter, shift in zip(wrapper.parameters(), shifts, strict=True):
                parameter.data.sub_(shift)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    assert num_rounds(wrapper) == 5
    wrapper.close()


def many_tasks(wrapper: Any, optimizer: torch.optim.Optimizer, step: int, *, says_so: bool) -> None:
    """A forward and the gradients of each task, which are then put together."""
    parts = []
    for task in range(3):
        wrapper.require_backward_grad_sync = not says_so or task == 2
        optimizer.zero_grad()
        loss_of(wrapper, task, step).backward()
        parts.append([parameter.grad for parameter in wrapper.parameters()])
    for parameter, *gradients in zip(wrapper.parameters(), *parts, strict=True):
        parameter.grad = torch.stack(gradients).mean(0)
    optimizer.step()


@pytest.mark.parametrize("rounds", ["forward", "step"])
def test_gradients_that_are_dropped_inside_no_sync_are_of_one_step(rounds: str) -> None:
    wrapper = wrap(mlp(), solo_group(), rounds=rounds)
    optimizer = sgd(wrapper)
    for step in range(5):
        many_tasks(wrapper, optimizer, step, says_so=True)
    assert num_rounds(wrapper) == 5
    wrapper.close()


@pytest.mark.parametrize("rounds", ["forward", "step"])
def test_rounds_for_gradients_that_are_dropped_in_every_step_warn_once(rounds: str) -> None:
    wrapper = wrap(mlp(), solo_group(), rounds=rounds)
    optimizer = sgd(wrapper)

    def loop() -> None:
        for step in range(8):
            many_tasks(wrapper, optimizer, step, says_so=False)

    with pytest.warns(UserWarning, match=r"each after gradients that were dropped.*no_sync\(\)") as caught:
        loop()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    wrapper.close()


class OutOfMemory(torch.autograd.Function):
    """Raises in the backward, once."""

    is_next = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        if OutOfMemory.is_next:
            OutOfMemory.is_next = False
            raise RuntimeError("out of memory")
        return gradients[0]


@pytest.mark.parametrize("rounds", ["forward", "step"])
def test_a_backward_that_raises_and_is_tried_again_leaves_out_no_step(rounds: str) -> None:
    """Some parameters, the last ones, have their gradients by then."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model[1].register_forward_hook(lambda module, args, out: OutOfMemory.apply(out))
    wrapper = wrap(model, solo_group(), rounds=rounds)
    optimizer, x = sgd(wrapper), torch.ones(3, 4)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no_sync.*")
        for step in range(5):
            optimizer.zero_grad()
            OutOfMemory.is_next = step in (1, 3)
            try:
                wrapper(x).mean().backward()
            except RuntimeError:
                optimizer.zero_grad()
                wrapper(x).mean().backward()
            optimizer.step()
    assert num_rounds(wrapper) == 5
    wrapper.close()


def test_gradients_that_are_accumulated_with_their_graph_are_of_one_step() -> None:
    wrapper = wrap(mlp(), solo_group())
    optimizer = sgd(wrapper)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(no_sync|create_graph).*")
        for step in range(4):
            for micro in range(3):
                loss_of(wrapper, micro, step).backward(create_graph=True)
            optimizer.step()
            optimizer.zero_grad()
    assert num_rounds(wrapper) == 4
    wrapper.close()


def test_a_discriminator_has_one_round_after_each_of_its_steps() -> None:
    """The generator's loss leaves gradients in the discriminator, which are dropped."""
    generator, discriminator = (wrap(nn.Linear(3, 3), solo_group(), rounds="step") for _ in range(2))
    optimizers = [sgd(generator), sgd(discriminator)]
    noise = torch.ones(2, 3)
    for _ in range(5):
        optimizers[1].zero_grad()
        discriminator(generator(noise).detach()).mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        discriminator(generator(noise)).mean().backward()
        optimizers[0].step()
    assert [num_rounds(wrapper) for wrapper in (generator, discriminator)] == [5, 5]
    generator.close()
    discriminator.close()


class PartlyUsed(nn.Module):
    """The smallest parameter has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(4, 1), nn.Parameter(torch.zeros(()))
        self.halves = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.halves[1](self.halves[0](x)))
        return out


@pytest.mark.parametrize(("rounds", "alternates"), [("forward", False), ("forward", True), ("step", False)])
def test_a_rank_that_leaves_out_steps_is_noticed_whatever_has_gradients(rounds: str, alternates: bool) -> None:
    def body(group: dist.ProcessGroup) -> float:
        model = PartlyUsed()
        model.linear.requires_grad_(not alternates)
        wrapper = wrap(model, group, init_sync=True, rounds=rounds)
        parts: list[nn.Module] = [*model.halves] if alternates else [model]
        optimizers = [sgd(part) for part in parts]
        for step in range(8):
            optimizer = optimizers[step % len(parts)]
            if alternates:
                for k, part in enumerate(parts):
                    part.requires_grad_(k == step % 2)
            optimizer.zero_grad()
            wrapper(torch.ones(3, 4)).mean().backward()
            if (group.rank(), step) not in ((1, 3), (1, 4)):
                optimizer.step()
        wrapper.consensus_distance()
        rounds_done = num_rounds(wrapper)
        wrapper.close()
        return rounds_done

    assert run_ranks(2, body) == [8, 8]


def test_an_optimizer_that_is_made_anew_has_a_round_after_its_first_step() -> None:
    wrapper = wrap(mlp(), solo_group(), rounds="step")
    optimizers = []
    for step in range(6):
        if step % 2 == 0:
            optimizers.append(sgd(wrapper))
        optimizers[-1].zero_grad()
        loss_of(wrapper, 0, step).backward()
        optimizers[-1].step()
    assert num_rounds(wrapper) == 6
    wrapper.close()


@pytest.mark.parametrize("left_out", [{3}, {3, 4}])
def test_steps_that_are_left_out_at_the_end_have_their_rounds(left_out: set[int]) -> None:
    """Gradients are dropped after the forward, so that only a backward tells of the step before."""

    def body(group: dist.ProcessGroup) -> float:
        wrapper = wrap(mlp(), group)
        optimizer = sgd(wrapper)
        for step in range(5):
            loss = loss_of(wrapper, group.rank(), step)
            optimizer.zero_grad()
            loss.backward()
            if group.rank() == 0 or step not in left_out:
                optimizer.step()
        wrapper.consensus_distance()
        rounds = num_rounds(wrapper)
        wrapper.close()
        return rounds

    assert run_ranks(2, body) == [5, 5]


def test_a_rank_that_leaves_out_the_steps_of_two_optimizers_takes_part_in_all_rounds() -> None:
    def body(group: dist.ProcessGroup) -> float:
        parts = nn.Linear(3, 3), nn.Linear(3, 1)
        wrapper = wrap(nn.Sequential(*parts), group, init_sync=True, rounds="step")
        optimizers = [sgd(part) for part in parts]
        for step in range(6):
            wrapper.zero_grad()
            wrapper(torch.ones(2, 3)).mean().backward()
            for optimizer in optimizers:
                if (group.rank(), step) not in ((1, 2), (1, 3)):
                    optimizer.step()
        wrapper.consensus_distance()
        rounds = num_rounds(wrapper)
        wrapper.close()
        return rounds

    assert run_ranks(2, body) == [6, 6]


# Mistakes: see also test_usual_mistakes.py.


def test_steps_before_a_loaded_checkpoint_are_not_without_a_round() -> None:
    """A wrapper that only evaluates a checkpoint trains nothing; warnings are errors here."""

    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(), group, init_sync=True, algorithm=DiLoCo(5))
        optimizer = sgd(wrapper)
        for step in range(20):
            train_step(wrapper, optimizer, group.rank(), step)
        state = copy.deepcopy(wrapper.state_dict())
        wrapper.close()
        other = wrap(mlp(), group, init_sync=True, algorithm=DiLoCo(5))
        other.load_state_dict(state)
        other.eval()
        other.close()

    run_ranks(2, body)


@pytest.mark.parametrize("has_masters", [False, True])
def test_listeners_with_nothing_to_do_are_not_called_in_a_step(has_masters: bool) -> None:
    model = wrap(mlp(), solo_group())
    optimizer = sgd(model)
    for step in range(3):
        train_step(model, optimizer, 0, step)
    loop = local_of(model).loop
    if has_masters:
        model.follow([(x, optimizer.state[x].setdefault("copy", x.detach().clone())) for x in model.parameters()])
    assert loop.stepped_by(optimizer) == [loop.copies, loop][not has_masters :]
    model.close()
    assert loop.stepped_by(optimizer) == []
