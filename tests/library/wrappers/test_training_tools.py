"""Mixed precision, clipping, unused parameters, checkpointing, compilation, copies and the optimizer's state."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gossip_modules import GossipDataParallel, Membership, RingGraph
from gossip_modules.graph_manager import NetworkXGraph
from gossip_modules.wrappers.base import GossipWrapper
from tests.harness.problems import adamw, batch, fill_, loss_of, mlp, net, numerator, sgd, train_step
from tests.harness.ranks import run_ranks, solo_group
from tests.harness.reference import flatten
from tests.library.wrappers.wrapping import MODES, irregular, wrap

# Mixed precision, clipping, unused parameters, compilation, copies, checkpointing.


def test_autocast() -> None:
    def body(group: dist.ProcessGroup) -> None:
        model = mlp(group.rank())
        wrapper, optimizer = wrap(model, group), sgd(model)
        for step in range(3):
            x, y = batch(group.rank(), step)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                out = wrapper(x)
                assert out.dtype is torch.bfloat16
                loss = nn.functional.mse_loss(out.float(), y)
            loss.backward()
            optimizer.step()
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        wrapper.close()

    run_ranks(2, body)


@pytest.mark.parametrize("options", MODES)
def test_a_step_skipped_by_grad_scaler_keeps_lock_step(options: dict[str, Any]) -> None:
    def body(group: dist.ProcessGroup) -> tuple[float, float, Tensor]:
        model = mlp(group.rank())
        wrapper, optimizer = wrap(model, group, graph=irregular(), **options), sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for step in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(wrapper, group.rank(), step)
            if step == 2 and group.rank() == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        wrapper.close()
        return scaler.get_scale(), wrapper.comm_stats()["num_rounds"], flatten(model)

    results = run_ranks(3, body)
    assert [scale for scale, _, _ in results] == [2.0, 1.0, 2.0]
    assert len({rounds for _, rounds, _ in results}) == 1
    assert all(x.isfinite().all() for _, _, x in results)


def test_clipping_sees_the_gradients_of_the_module() -> None:
    bare, module = mlp(), mlp()
    wrapper = wrap(module, solo_group())
    loss_of(bare, 0, 0).backward()
    loss_of(wrapper, 0, 0).backward()
    norm = nn.utils.clip_grad_norm_(bare.parameters(), 0.1)
    assert torch.equal(nn.utils.clip_grad_norm_(wrapper.parameters(), 0.1), norm)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(bare.parameters(), wrapper.parameters(), strict=True))  # type: ignore[arg-type]


class Branches(nn.Module):
    """Uses one of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](x)


@pytest.mark.parametrize("graph", [RingGraph(3), irregular()], ids=str)
def test_unused_parameters_are_mixed_too(graph: NetworkXGraph) -> None:
    """Each rank uses another branch; the other one changes by gossip alone, and no mass is lost."""

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        model = fill_(Branches(), group.rank())
        start = flatten(model)
        wrapper, optimizer = wrap(model, group, graph=graph), torch.optim.SGD(model.parameters(), lr=0.1)
        pushed = torch.zeros_like(start)
        for _ in range(5):
            optimizer.zero_grad()
            wrapper(torch.ones(2, 3), group.rank() % 2).sum().backward()
            before = numerator(wrapper)
            optimizer.step()
            pushed += numerator(wrapper) - before
        wrapper.close()
        return flatten(model) * wrapper.get_extra_state()["weight"] - start - pushed, start

    lost = torch.stack([x for x, _ in run_ranks(3, body)])
    assert lost.sum(0).abs().max() < 1e-6
    assert lost.abs().max() > 1e-2


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("graph", [RingGraph(3), irregular()], ids=str)
def test_gradient_checkpointing_changes_nothing(graph: NetworkXGraph, use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, layers: nn.Module, use_checkpoint: bool) -> None:
            super().__init__()
            self.layers, self.use_checkpoint = layers, use_checkpoint

        def forward(self, x: Tensor) -> Tensor:
            options: Any = {"use_reentrant": use_reentrant, "preserve_rng_state": False}  # see test_gossip.py
            for layer in self.layers.children():
                x = checkpoint(layer, x, **options) if self.use_checkpoint else layer(x)
            return x

    def train(group: dist.ProcessGroup, use_checkpoint: bool) -> Tensor:
        # Deep enough for the weights to matter after the first recomputed layer is done.
        layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        model = Checkpointed(fill_(layers, group.rank()), use_checkpoint)
        wrapper, optimizer = wrap(model, group, graph=graph), sgd(model)
        for step in range(4):
            x, y = batch(group.rank(), step)
            optimizer.zero_grad()
            nn.functional.mse_loss(wrapper(x.requires_grad_()), y).backward()
            optimizer.step()
        wrapper.close()
        return flatten(model)

    for plain, checkpointed in run_ranks(3, lambda group: (train(group, False), train(group, True))):
        assert torch.equal(plain, checkpointed)


def test_compiled_wrapper() -> None:
    bare, module = mlp(), mlp()
    wrapper = wrap(module, solo_group())
    compiled = torch.compile(wrapper, backend="eager")
    first, second = sgd(bare), sgd(module)
    for step in range(3):
        train_step(bare, first, 0, step)
        train_step(cast(nn.Module, compiled), second, 0, step)
    torch.testing.assert_close(flatten(module), flatten(bare))
    assert wrapper.comm_stats()["num_rounds"] == 3


@pytest.mark.parametrize("in_place", [False, True])
def test_torch_compile_does_not_trace_the_round(monkeypatch: pytest.MonkeyPatch, in_place: bool) -> None:
    """A traced round would run while compiling, or would be recompiled as its counters change."""
    begin, is_traced, num_graphs = GossipWrapper._begin_step, [], itertools.count()

    def begin_step(wrapper: GossipWrapper) -> None:
        is_traced.append(torch.compiler.is_compiling())
        begin(wrapper)

    def compile_eagerly(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        next(num_graphs)
        return graph.forward

    monkeypatch.setattr(GossipWrapper, "_begin_step", begin_step)
    module = mlp()
    wrapper = wrap(module, solo_group())
    optimizer = sgd(module)
    if in_place:
        wrapper.compile(backend=compile_eagerly)
    compiled = wrapper if in_place else cast(nn.Module, torch.compile(wrapper, backend=compile_eagerly))
    for step in range(3):
        train_step(compiled, optimizer, 0, step)
    assert is_traced == [False] * 3
    assert wrapper.comm_stats()["num_rounds"] == 3
    assert next(num_graphs) == 1, "the module is compiled once"


@pytest.mark.skipif(torch.__version__ < "2.8", reason="torch 2.7 traces its own context that disables tracing")
@pytest.mark.parametrize("rounds", ["step", "manual"])
def test_torch_compile_of_a_step_does_not_trace_the_round(monkeypatch: pytest.MonkeyPatch, rounds: str) -> None:
    begin, is_traced = GossipWrapper._begin_step, []

    def begin_step(wrapper: GossipWrapper) -> None:
        is_traced.append(torch.compiler.is_compiling())
        begin(wrapper)

    monkeypatch.setattr(GossipWrapper, "_begin_step", begin_step)
    module = mlp()
    wrapper = wrap(module, solo_group(), rounds=rounds)
    optimizer = sgd(module)

    @torch.compile(backend="eager")
    def step_and_gossip() -> None:
        optimizer.step()
        if rounds == "manual":
            wrapper.gossip_step()

    for step in range(2):
        loss_of(wrapper, 0, step).backward()
        step_and_gossip()
    assert is_traced == [False] * 2
    wrapper.close()


@pytest.mark.parametrize("options", MODES)
def test_deepcopy_is_a_wrapper_of_its_own(options: dict[str, Any]) -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(net(group.rank()), group, graph=irregular(), **options)
        optimizer = sgd(wrapper)
        for step in range(3):
            train_step(wrapper, optimizer, group.rank(), step)
        twin = copy.deepcopy(wrapper)
        assert twin.get_extra_state()["engine"] == wrapper.get_extra_state()["engine"]
        assert torch.equal(flatten(twin.module), flatten(wrapper.module))
        before = flatten(wrapper.module)
        for step in range(3):
            train_step(twin, sgd(twin), group.rank(), step)
        twin.close()
        assert torch.equal(flatten(wrapper.module), before)
        assert not torch.equal(flatten(twin.module), before)
        # Two copies that take turns, each on data of its own, go on as two that train alone. With overlap each rank has
        # its own order, so that rounds of both are under way at once.
        pair, alone = ([copy.deepcopy(wrapper) for _ in range(2)] for _ in range(2))
        turns = list(itertools.product(range(3), [1, 0] if wrapper.overlap and group.rank() % 2 else [0, 1]))
        for models, order in ((pair, turns), (alone, sorted(turns, key=lambda turn: turn[1]))):
            plain = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
            for step, number in order:
                train_step(models[number], plain[number], group.rank(), 10 * number + step)
            for model in models:
                model.close()
        if not options.get("max_staleness"):  # else rounds are applied as soon as they are there
            for model, other in zip(pair, alone, strict=True):
                assert torch.equal(flatten(model.module), flatten(other.module))
        wrapper.close()

    run_ranks(3, body)


@pytest.mark.parametrize("options", MODES)
def test_a_copy_and_its_original_do_not_mix_up(options: dict[str, Any]) -> None:
    """Both train in turn; with overlap, each rank in its own order, so that both have rounds under way at once."""

    def body(group: dist.ProcessGroup) -> list[Tensor]:
        first = wrap(mlp(), group, **options)
        models = [first, copy.deepcopy(first)]
        models.append(copy.deepcopy(models[1]))
        with torch.no_grad():
            for i, model in enumerate(models):
                for parameter in model.parameters():
                    parameter.fill_(100.0 * i + group.rank())
        shift = group.rank() if first.overlap else 0
        for step in range(9):
            for i in range(len(models)):
                loss_of(models[(i + shift) % len(models)], 0, step)
        for model in models:
            model.close()
        return [flatten(model.module) for model in models]

    for result in run_ranks(4, body):
        for i, x in enumerate(result):
            torch.testing.assert_close(x, torch.full_like(x, 100.0 * i + 1.5))


# The state of optimizers.


def test_the_state_of_optimizers_is_averaged_on_demand() -> None:
    def body(group: dist.ProcessGroup) -> tuple[list[Tensor], list[Tensor], float]:
        model = mlp()
        wrapper, optimizer = GossipDataParallel(model, process_group=group), adamw(model)
        for step in range(2):
            train_step(wrapper, optimizer, group.rank(), step)
        parameter = next(model.parameters())
        state = optimizer.state[parameter]
        before = [state[name].clone() for name in ("exp_avg", "exp_avg_sq")]
        if group.rank():
            state["step"] += 5
        wrapper.average_optimizer_state(optimizer)
        after = [state[name].clone() for name in ("exp_avg", "exp_avg_sq")]
        if group.rank():
            del state["exp_avg"]
        with pytest.raises(ValueError, match=r"ranks do not agree with rank 0: rank 1: .*optimizer state"):
            wrapper.average_optimizer_state(optimizer)
        wrapper.close()
        return before, after, float(state["step"])

    (one, first, steps), (other, second, more) = run_ranks(2, body)
    for x, y, mean, same in zip(one, other, first, second, strict=True):
        assert not torch.equal(x, y)
        torch.testing.assert_close(mean, (x + y) / 2)
        assert torch.equal(mean, same)
    assert (steps, more) == (2, 7)


@pytest.mark.parametrize("chosen", ["exp_avg", "exp_avg_sq"])
def test_only_the_state_that_is_named_is_averaged(chosen: str) -> None:
    """DES-LOC: each moment at a period of its own."""
    other = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}[chosen]

    def body(group: dist.ProcessGroup) -> list[dict[str, Tensor]]:
        model = mlp()
        wrapper, optimizer = GossipDataParallel(model, process_group=group), adamw(model)
        for step in range(2):
            train_step(wrapper, optimizer, group.rank(), step)
        state = optimizer.state[next(model.parameters())]
        before = {name: value.clone() for name, value in state.items()}
        wrapper.average_optimizer_state(optimizer, names=(chosen,))
        wrapper.close()
        return [before, dict(state)]

    (before, after), (others_before, others_after) = run_ranks(2, body)
    assert not torch.equal(before[chosen], others_before[chosen])
    torch.testing.assert_close(after[chosen], (before[chosen] + others_before[chosen]) / 2)
    assert torch.equal(after[chosen], others_after[chosen])
    for name in (other, "step"):
        assert torch.equal(after[name], before[name])
        assert torch.equal(others_after[name], others_before[name])


def test_names_that_an_optimizer_has_no_state_of_are_refused_on_all_ranks() -> None:
    def body(group: dist.ProcessGroup) -> None:
        model = mlp()
        wrapper, optimizer = GossipDataParallel(model, process_group=group), adamw(model)
        with pytest.raises(ValueError, match=r"got names=\('exp_avg',\) of AdamW, expected none yet: it has no such"):
            wrapper.average_optimizer_state(optimizer, names=("exp_avg",))
        train_step(wrapper, optimizer, group.rank(), 0)
        for name in ("momentum_buffer", "step"):
            with pytest.raises(ValueError, match=rf"expected some of exp_avg, exp_avg_sq; leave out {name}, which is"):
                wrapper.average_optimizer_state(optimizer, names=["exp_avg", name])
        wrong: tuple[Any, ...] = ("exp_avg", 5, (5,))
        for names in wrong:
            with pytest.raises(ValueError, match=rf"got names={re.escape(repr(names))}, expected a sequence of names"):
                wrapper.average_optimizer_state(optimizer, names=names)
        with pytest.raises(ValueError, match=r"ranks do not agree with rank 0: rank 1: "):
            wrapper.average_optimizer_state(optimizer, names=wrong[1] if group.rank() else None)
        both = ["exp_avg", "exp_avg_sq"]
        wrapper.average_optimizer_state(optimizer, names=both[:: 1 - 2 * group.rank()])  # in another order
        with pytest.raises(ValueError, match=r"ranks do not agree with rank 0: rank 1: "):
            wrapper.average_optimizer_state(optimizer, names=["exp_avg", "exp_avg_sq"][: 2 - group.rank()])
        wrapper.close()

    run_ranks(2, body)


def test_the_state_of_optimizers_is_not_averaged_over_workers_of_a_membership() -> None:
    membership = Membership(dist.HashStore(), min_workers=1, host="127.0.0.1")
    try:
        model = mlp()
        wrapper = GossipDataParallel(model, membership=membership)
        with pytest.raises(ValueError, match=r"without a process group, expected .* without a membership; keep the"):
            wrapper.average_optimizer_state(adamw(model), names=("exp_avg",))
        wrapper.close()
    finally:
        membership.close()
