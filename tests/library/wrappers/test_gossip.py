"""What a user of DistributedDataParallel expects of a wrapper, and what gossip adds."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import re
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gossip_modules import (
    CompleteGraph,
    GossipDataParallel,
    MatrixMixing,
    MetropolisHastingsMixing,
    NetworkXGraph,
    PushPull,
    RingGraph,
    Schedule,
    SimpleGossipDataParallel,
    UniformMixing,
)
from gossip_modules.wrappers.base import GossipWrapper
from tests.harness.problems import adamw, batch, fill_, loss_of, mlp, net, numerator, sgd, train_step
from tests.harness.ranks import assert_no_gossip_threads, run_ranks, solo_group
from tests.harness.reference import flatten

MODES: list[dict[str, Any]] = [{}, {"overlap": True}, {"overlap": True, "max_staleness": 2}]


def irregular() -> NetworkXGraph:
    """0 -> 1 -> 2 -> 0 and 0 -> 2: the smallest digraph on which the push-sum weight moves."""
    return NetworkXGraph(nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)]))


def wrap(module: nn.Module, group: dist.ProcessGroup, **options: Any) -> GossipDataParallel:
    """The wrapper on a group of the tests; every rank keeps its own start."""
    return GossipDataParallel(module, process_group=group, **{"init_sync": False, **options})


# Like DistributedDataParallel.


class Structured(nn.Module):
    """Keyword-only inputs, nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, *, pixels: Tensor, scale: float = 1.0) -> dict[str, tuple[Tensor, float]]:
        return {"out": (self.linear(pixels) * scale, scale)}


@pytest.mark.parametrize("options", MODES)
def test_forward_passes_keywords_and_structures(options: dict[str, Any]) -> None:
    module = Structured()
    wrapper = wrap(module, solo_group(), **options)
    x = torch.ones(1, 3)
    out, scale = wrapper(pixels=x, scale=2.0)["out"]
    assert wrapper.module is module
    assert scale == 2.0
    assert torch.equal(out, module.linear(x) * 2)
    wrapper.close()


@pytest.mark.parametrize("graph", [RingGraph(3), irregular()], ids=str)
def test_accumulation_under_no_sync_equals_one_big_batch(graph: NetworkXGraph) -> None:
    def train(group: dist.ProcessGroup, num_parts: int) -> Tensor:
        model = mlp(group.rank())
        wrapper, optimizer = wrap(model, group, graph=graph), sgd(model)
        for step in range(4):
            optimizer.zero_grad()
            x, y = batch(group.rank(), step)
            parts = list(zip(x.chunk(num_parts), y.chunk(num_parts), strict=True))
            with wrapper.no_sync():
                for part_x, part_y in parts[:-1]:
                    (nn.functional.mse_loss(wrapper(part_x), part_y) / num_parts).backward()
            (nn.functional.mse_loss(wrapper(parts[-1][0]), parts[-1][1]) / num_parts).backward()
            optimizer.step()
        assert wrapper.comm_stats()["num_rounds"] == 4
        wrapper.close()
        return flatten(model)

    for one, three in run_ranks(3, lambda group: (train(group, 1), train(group, 3))):
        torch.testing.assert_close(one, three, rtol=0, atol=1e-6)


@pytest.mark.parametrize("graph", [RingGraph(3), irregular()], ids=str)
def test_two_forwards_before_one_backward(graph: NetworkXGraph) -> None:
    """The first one in no_sync(): no round comes between them and the gradients are right."""

    def body(group: dist.ProcessGroup) -> None:
        model = mlp(group.rank())
        wrapper, optimizer = wrap(model, group, graph=graph), sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            with wrapper.no_sync():
                first = loss_of(wrapper, group.rank(), step)
            bare = copy.deepcopy(model)
            (first + loss_of(wrapper, group.rank(), step + 100)).backward()
            (loss_of(bare, group.rank(), step) + loss_of(bare, group.rank(), step + 100)).backward()
            for p, q in zip(model.parameters(), bare.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)
            optimizer.step()
        wrapper.close()

    run_ranks(3, body)


def test_no_sync_nests_and_survives_an_error() -> None:
    wrapper = wrap(mlp(), solo_group())
    with pytest.raises(KeyError), wrapper.no_sync(), wrapper.no_sync():
        raise KeyError
    for step in range(2):
        loss_of(wrapper, 0, step)
    assert wrapper.comm_stats()["num_rounds"] == 2


def test_backward_through_a_graph_from_before_a_round_raises() -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(group.rank()), group)
        early = loss_of(wrapper, 0, 0)
        loss_of(wrapper, 0, 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            early.backward()

    run_ranks(2, body)


def test_a_second_backward_through_one_graph_is_right() -> None:
    """After the first backward the storage holds numerators: gradients of them would be wrong."""

    def body(group: dist.ProcessGroup) -> None:
        model = mlp(group.rank())
        wrapper, optimizer = wrap(model, group, graph=irregular()), sgd(model)
        for step in range(2):
            train_step(wrapper, optimizer, group.rank(), step)
        loss = loss_of(wrapper, 0, 2)
        first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        wrapper.zero_grad()
        for _ in range(2):
            loss.backward(retain_graph=True)
        for p, gradient in zip(model.parameters(), first, strict=True):
            torch.testing.assert_close(p.grad, 2 * gradient)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        wrapper.close()

    run_ranks(3, body)


def assert_gradients_equal(module: nn.Module, bare: nn.Module) -> None:
    """All gradients are there, or missing, in both."""
    for p, q in zip(module.parameters(), bare.parameters(), strict=True):
        assert (p.grad is None) is (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("with_loss", [False, True])
def test_a_gradient_penalty_is_taken_at_the_estimate(with_loss: bool) -> None:
    """Double backward, on a digraph where the push-sum weight moves."""

    def penalty(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
        x = x.clone().requires_grad_()
        out = model(x)

        def loss() -> Tensor:
            (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return (gradient.norm(dim=1) - 1).pow(2).mean() + (out.pow(2).mean() if with_loss else 0.0)

        return loss

    def body(group: dist.ProcessGroup) -> float:
        model = mlp(group.rank()).double()
        wrapper, optimizer = wrap(model, group, graph=irregular()), sgd(model)
        for step in range(4):
            x = batch(group.rank(), step)[0].double()
            optimizer.zero_grad()
            loss = penalty(wrapper, x)
            bare = copy.deepcopy(model)
            loss().backward()
            penalty(bare, x)().backward()
            assert_gradients_equal(model, bare)
            optimizer.step()
        return float(wrapper.get_extra_state()["weight"])

    assert max(abs(weight - 1) for weight in run_ranks(3, body)) > 0.1


def test_a_second_backward_from_a_captured_feature_is_right() -> None:
    """A loss on what a hook saw inside, after a backward from the output."""

    def losses(model: nn.Module, layer: nn.Module, x: Tensor) -> list[Tensor]:
        features: list[Tensor] = []
        with layer.register_forward_hook(lambda module, args, out: features.append(out)):
            out = model(x)
        return [out.sum(), features[0].pow(2).sum()]

    def body(group: dist.ProcessGroup) -> float:
        # Deep enough for the feature's gradient to need weights.
        layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        model = fill_(layers, group.rank()).double()
        wrapper, optimizer = wrap(model, group, graph=irregular()), sgd(model)
        for step in range(4):
            x = batch(group.rank(), step)[0].double()
            optimizer.zero_grad()
            from_output, from_feature = losses(wrapper, model.get_submodule("2"), x)
            bare = copy.deepcopy(model)
            from_output.backward(retain_graph=True)
            from_feature.backward()
            sum(losses(bare, bare.get_submodule("2"), x)).backward()  # type: ignore[union-attr]
            assert_gradients_equal(model, bare)
            optimizer.step()
        return float(wrapper.get_extra_state()["weight"])

    assert max(abs(weight - 1) for weight in run_ranks(3, body)) > 0.1


@pytest.mark.parametrize("graph", [RingGraph(3), irregular()], ids=str)
@pytest.mark.parametrize("options", MODES[:2])
def test_a_checkpointed_wrapper_gossips_once_per_step(options: dict[str, Any], graph: NetworkXGraph) -> None:
    """The forward that the backward repeats is no step of its own."""

    def body(group: dist.ProcessGroup) -> None:
        model = mlp(group.rank()).double()
        wrapper, optimizer = wrap(model, group, graph=graph, **options), sgd(model)
        for step in range(4):
            x = batch(group.rank(), step)[0].double()
            optimizer.zero_grad()
            out = checkpoint(wrapper, x, use_reentrant=False)
            bare = copy.deepcopy(model)
            out.pow(2).sum().backward()
            bare(x).pow(2).sum().backward()
            assert_gradients_equal(model, bare)
            optimizer.step()
        wrapper.close()
        assert wrapper.comm_stats()["num_rounds"] == 4

    run_ranks(3, body)


@pytest.mark.parametrize("options", MODES)
def test_ranks_stay_in_step_when_an_epoch_ends_inside_no_sync(options: dict[str, Any]) -> None:
    """Two micro-batches per step: with 5 and with 6 of them an epoch has 3 steps."""

    def body(group: dist.ProcessGroup) -> tuple[float, ...]:
        wrapper = wrap(mlp(group.rank()), group, timeout=timedelta(seconds=3), **options)
        optimizer = sgd(wrapper)
        steps = []
        for num_batches in (5 + group.rank(), 4, 6 - group.rank(), 2):
            for number in range(num_batches):
                with wrapper.no_sync() if number % 2 == 0 else contextlib.nullcontext():
                    loss_of(wrapper, group.rank(), number).backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            wrapper.eval()
            wrapper.train()
            steps.append(wrapper._engine.step)
        wrapper.close()
        return tuple(steps)

    assert run_ranks(2, body) == [(3, 5, 8, 9)] * 2


@pytest.mark.parametrize("options", MODES)
def test_train_and_eval_are_chainable_and_eval_flushes(options: dict[str, Any]) -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(group.rank()), group, **options)
        assert wrapper.train() is wrapper
        loss_of(wrapper, 0, 0)
        assert wrapper._engine.is_in_flight is wrapper.overlap
        assert wrapper.eval() is wrapper
        assert not wrapper._engine.is_in_flight
        assert not wrapper.module.training
        rounds = wrapper.comm_stats()["num_rounds"]
        loss_of(wrapper, 0, 1)
        with torch.no_grad():
            loss_of(wrapper.train(), 0, 1)
        assert wrapper.comm_stats()["num_rounds"] == rounds == 1
        wrapper.close()

    run_ranks(2, body)


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("options", MODES)
def test_world_of_one_is_plain_training(options: dict[str, Any], make: Callable[..., torch.optim.Optimizer]) -> None:
    bare, module = net(), net()
    wrapper = wrap(module, solo_group(), schedule=Schedule(average_every=2), **options)
    first, second = make(bare), make(module)
    for step in range(5):
        train_step(bare, first, 0, step)
        train_step(wrapper, second, 0, step)
    wrapper.close()
    assert torch.equal(flatten(bare), flatten(module))
    assert wrapper.comm_stats()["bytes_sent"] == 0


def test_initial_broadcast_covers_frozen_parameters_and_integer_buffers() -> None:
    def body(group: dist.ProcessGroup) -> dict[str, Tensor]:
        model = net(group.rank())
        first = model.get_submodule("first")
        first.requires_grad_(False)
        model.get_buffer("norm.num_batches_tracked").fill_(group.rank() + 7)
        model.register_buffer("mask", torch.tensor([group.rank() == 0, True]))
        model.register_buffer("phase", torch.tensor([1j * group.rank()]))
        model.half() if group.rank() < 0 else model
        return dict(GossipDataParallel(model, process_group=group).module.state_dict())

    expected, *others = run_ranks(3, body)
    assert int(expected["norm.num_batches_tracked"]) == 7
    for state in others:
        assert all(torch.equal(state[key], expected[key]) for key in expected)


def test_init_sync_false_keeps_every_rank() -> None:
    def body(group: dist.ProcessGroup) -> bool:
        return torch.equal(flatten(wrap(net(group.rank()), group).module), flatten(net(group.rank())))

    assert all(run_ranks(2, body))


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
            for layer in self.layers.children():
                x = checkpoint(layer, x, use_reentrant=use_reentrant) if self.use_checkpoint else layer(x)
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


# State.


def test_state_dict_loads_into_the_bare_model() -> None:
    wrapper = wrap(net(1), solo_group())
    state = wrapper.state_dict()
    assert all(key.startswith("module.") for key in state)
    bare = net(2)
    assert bare.load_state_dict({key.removeprefix("module."): x for key, x in state.items()}) is not None
    assert torch.equal(flatten(bare), flatten(wrapper.module))
    bare = net(3)
    nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    bare.load_state_dict(state)
    assert torch.equal(flatten(bare), flatten(wrapper.module))


@pytest.mark.parametrize("options", MODES[:2])
def test_after_a_step_the_module_itself_holds_the_estimate(options: dict[str, Any]) -> None:
    """Who saves or evaluates the inner module gets z, not the push-sum numerator."""

    def body(group: dist.ProcessGroup) -> float:
        wrapper = wrap(net(group.rank()), group, graph=irregular(), **options)
        optimizer = sgd(wrapper)
        for step in range(5):
            train_step(wrapper, optimizer, group.rank(), step)
            if not wrapper.overlap:  # else state_dict() applies a round first
                inner = {f"module.{key}": x.clone() for key, x in wrapper.module.state_dict().items()}
                outer = wrapper.state_dict()
                assert list(inner) == list(outer)
                assert all(torch.equal(inner[key], outer[key]) for key in inner)
        weight = wrapper.get_extra_state()["weight"]
        inside = flatten(wrapper.module)
        wrapper._debias.to_numerator()
        torch.testing.assert_close(flatten(wrapper.module), inside * weight)
        wrapper._debias.to_estimate()
        wrapper.close()
        return float(weight)

    assert max(abs(weight - 1) for weight in run_ranks(3, body)) > 0.1


def test_state_dict_of_a_model_around_the_wrapper() -> None:
    outer = nn.Sequential(nn.Identity(), wrap(net(1), solo_group()))
    other = nn.Sequential(nn.Identity(), wrap(net(2), solo_group()))
    loss_of(outer, 0, 0)
    state = outer.state_dict()
    assert all(key.startswith("1.module.") for key in state)
    other.load_state_dict(state)
    assert other[1].get_extra_state() == outer[1].get_extra_state()
    assert torch.equal(flatten(other), flatten(outer))


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("graph", [RingGraph(3), irregular()], ids=str)
def test_resuming_from_a_file_is_bit_identical(
    graph: NetworkXGraph, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    """Training goes on as if it had not stopped: parameters, push-sum weight and round counter are all restored."""

    def save(wrapper: GossipWrapper, optimizer: torch.optim.Optimizer) -> io.BytesIO:
        file = io.BytesIO()
        torch.save({"model": wrapper.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        return file

    def go_on(wrapper: GossipWrapper, optimizer: torch.optim.Optimizer, rank: int) -> tuple[Tensor, Tensor]:
        for step in range(5, 10):
            train_step(wrapper, optimizer, rank, step)
        wrapper.flush()
        return flatten(wrapper.module), wrapper.get_extra_state()["weight"]

    def body(group: dist.ProcessGroup) -> None:
        schedule = Schedule(gossip_every=2, average_every=3)
        wrapper = wrap(net(group.rank()), group, graph=graph, schedule=schedule)
        optimizer = make(wrapper)
        for step in range(5):
            train_step(wrapper, optimizer, group.rank(), step)
        file = save(wrapper, optimizer)
        resumed = wrap(net(99), group, graph=graph, schedule=schedule)
        state = torch.load(file, weights_only=True)
        resumed.load_state_dict(state["model"])
        other = make(resumed)
        other.load_state_dict(state["optimizer"])
        assert resumed.get_extra_state() == wrapper.get_extra_state()
        for got, want in zip(go_on(resumed, other, group.rank()), go_on(wrapper, optimizer, group.rank()), strict=True):
            assert torch.equal(got, want)

    run_ranks(3, body)


def test_resuming_overlap_keeps_round_and_weight() -> None:
    def body(group: dist.ProcessGroup) -> None:
        options = {"graph": irregular(), "overlap": True, "max_staleness": 1}
        wrapper = wrap(net(group.rank()), group, **options)
        optimizer = sgd(wrapper)
        for step in range(5):
            train_step(wrapper, optimizer, group.rank(), step)
        resumed = wrap(net(99), group, **options)
        resumed.load_state_dict(wrapper.state_dict())
        assert resumed.get_extra_state() == wrapper.get_extra_state()
        assert resumed.get_extra_state()["weight"] != 1
        assert torch.equal(flatten(resumed.module), flatten(wrapper.module))
        wrapper.close()
        resumed.close()

    run_ranks(3, body)


def test_loading_a_plain_checkpoint_warns_and_starts_anew() -> None:
    wrapper = wrap(net(1), solo_group())
    loss_of(wrapper, 0, 0)
    plain = OrderedDict((f"module.{key}", x) for key, x in net(2).state_dict().items())
    with pytest.warns(UserWarning, match="no gossip state: counting rounds from 0"):
        wrapper.load_state_dict(plain)
    assert wrapper.get_extra_state()["engine"]["t"] == 0
    assert torch.equal(flatten(wrapper.module), flatten(net(2)))


def test_load_state_dict_still_names_wrong_keys() -> None:
    wrapper = wrap(net(1), solo_group())
    state = wrapper.state_dict()
    state["module.third.weight"] = state.pop("module.second.weight")
    with pytest.raises(
        RuntimeError, match=r"(?s)Missing key.*module.second.weight.*Unexpected key.*module.third.weight"
    ):
        wrapper.load_state_dict(state)


@pytest.mark.parametrize("options", MODES)
def test_load_state_dict_with_assign_keeps_gossiping(options: dict[str, Any]) -> None:
    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(net(group.rank()), group, **options)
        loss_of(wrapper, group.rank(), 0)
        state = OrderedDict((key, x.clone()) for key, x in wrapper.state_dict().items())
        state._metadata = wrapper.state_dict()._metadata  # type: ignore[attr-defined]
        wrapper.load_state_dict(state, assign=True)
        for step in range(2):
            loss_of(wrapper, group.rank(), step)
        wrapper.close()
        return torch.cat([p.detach().flatten() for p in wrapper.parameters()])

    first, second = run_ranks(2, body)
    torch.testing.assert_close(first, second)  # two ranks agree after one round of any W = J


@pytest.mark.parametrize("graph", [RingGraph(2), RingGraph(3), irregular()], ids=str)
@pytest.mark.parametrize("options", MODES)
def test_its_own_state_assigned_makes_parameters_that_are_noticed(
    options: dict[str, Any], graph: NetworkXGraph
) -> None:
    """New Parameter objects over the same memory: they gossip, and autograd and the optimizer hooks know them."""

    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(mlp(group.rank()), group, graph=graph, **options)
        loss_of(wrapper, group.rank(), 0)
        before = list(wrapper.parameters())
        wrapper.load_state_dict(wrapper.state_dict(), assign=True)
        parameters = list(wrapper.parameters())
        assert not any(p is q for p, q in zip(before, parameters, strict=True))
        optimizer = sgd(wrapper)
        for step in range(2):
            train_step(wrapper, optimizer, group.rank(), step)
        assert all(p is q for p, q in zip(parameters, wrapper.parameters(), strict=True))
        assert {id(p) for p in parameters} == {id(p) for p in wrapper._buffer.parameters}
        assert wrapper._debias.is_stepped_by(optimizer)
        early = loss_of(wrapper, group.rank(), 2)
        for step in range(wrapper.max_staleness + 1):
            loss_of(wrapper, group.rank(), step)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            early.backward()
        for step in range(60):
            loss_of(wrapper, group.rank(), step)
        wrapper.close()
        return flatten(wrapper.module)

    results = run_ranks(graph.world_size, body)
    for x in results:
        torch.testing.assert_close(x, results[0], rtol=0, atol=1e-5)


def notice(wrapper: GossipWrapper, how: str) -> None:
    """Whatever makes a wrapper look at requires_grad again."""
    if how == "train":
        wrapper.train()
    elif how == "eval":
        wrapper.eval().train()
    elif how == "flush":
        wrapper.flush()
    elif how == "double":
        wrapper.double()
    else:
        assert how == "inner double"
        wrapper.module.double()


HOW_NOTICED = ["train", "eval", "flush", "double", "inner double"]


@pytest.mark.parametrize("how", HOW_NOTICED)
@pytest.mark.parametrize("options", MODES)
def test_parameters_unfrozen_after_wrapping_gossip(options: dict[str, Any], how: str) -> None:
    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        model = mlp(group.rank())
        first = model.get_submodule("0").requires_grad_(False)
        wrapper = wrap(model, group, **options)
        loss_of(wrapper, group.rank(), 0)  # with overlap: a round of the second layer alone is in flight
        assert torch.equal(first.get_parameter("weight"), mlp(group.rank()).get_parameter("0.weight"))
        first.requires_grad_(True)
        notice(wrapper, how)
        for step in range(4):
            loss_of(wrapper, group.rank(), step)
        wrapper.average_()
        wrapper.close()
        return flatten(first), flatten(model)

    (first, whole), (other_first, other_whole) = run_ranks(2, body)
    mean = (flatten(mlp(0)) + flatten(mlp(1))) / 2
    torch.testing.assert_close(first, other_first)
    torch.testing.assert_close(whole, other_whole)
    torch.testing.assert_close(whole, mean.to(whole))


@pytest.mark.parametrize("how", HOW_NOTICED)
@pytest.mark.parametrize("options", MODES)
def test_parameters_frozen_after_wrapping_stay_local(options: dict[str, Any], how: str) -> None:
    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        model = mlp(group.rank())
        first, last = model.get_submodule("0"), model.get_submodule("2")
        wrapper = wrap(model, group, **options)
        loss_of(wrapper, group.rank(), 0)  # with overlap: a round of both layers is in flight
        first.requires_grad_(False)
        notice(wrapper, how)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(group.rank()))
        for step in range(4):
            loss_of(wrapper, group.rank(), step)
        wrapper.average_()
        wrapper.close()
        return nn.utils.parameters_to_vector(first.parameters()).detach(), flatten(last)

    results = run_ranks(2, body)
    for rank, (first, last) in enumerate(results):
        assert torch.equal(first, torch.full_like(first, float(rank)))
        torch.testing.assert_close(last, torch.full_like(last, 0.5))


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("options", MODES)
def test_a_cast_keeps_gossiping(options: dict[str, Any], inner: bool) -> None:
    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(mlp(group.rank()), group, **options)
        loss_of(wrapper, group.rank(), 0)
        (wrapper.module if inner else wrapper).double()
        for step in range(4):
            loss_of(wrapper, group.rank(), step)
        wrapper.close()
        assert {p.dtype for p in wrapper.parameters()} == {torch.float64}
        return flatten(wrapper.module)

    first, second = run_ranks(2, body)
    torch.testing.assert_close(first, second)


class Tokens(nn.Module):
    """Only what stands in the middle has a memory format, as in a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 4))
        self.patches = nn.Conv2d(3, 4, 2)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.patches(x).mean((2, 3)) + self.token[:, 0])


@pytest.mark.parametrize("change", ["channels_last", "assign"])
@pytest.mark.parametrize("options", MODES)
def test_a_change_in_the_middle_of_the_module_keeps_gossiping(options: dict[str, Any], change: str) -> None:
    """The first and the last tensor stay where they are."""

    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(fill_(Tokens(), group.rank()), group, **options)
        x = torch.ones(1, 3, 4, 4)
        wrapper(x)
        if change == "assign":
            state = wrapper.state_dict()
            for key in set(state) - {"module.patches.weight"}:
                del state[key]
            state["module.patches.weight"] = state["module.patches.weight"].clone()
            wrapper.load_state_dict(state, strict=False, assign=True)
        else:
            wrapper.to(memory_format=torch.channels_last)
        for _ in range(4):
            wrapper(x)
        wrapper.close()
        return flatten(wrapper.module)

    first, second = run_ranks(2, body)
    torch.testing.assert_close(first, second)


# The average.


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("make", [GossipDataParallel, SimpleGossipDataParallel])
def test_average_and_averaged(make: Callable[..., GossipWrapper], options: dict[str, Any]) -> None:
    options = options if make is GossipDataParallel else {}

    def body(group: dist.ProcessGroup) -> tuple[Tensor, ...]:
        wrapper = make(net(group.rank()), process_group=group, graph=irregular(), init_sync=False, **options)
        optimizer = sgd(wrapper)
        for step in range(3):
            train_step(wrapper, optimizer, group.rank(), step)
        wrapper.flush()
        z, w = flatten(wrapper.module), wrapper.get_extra_state()["weight"]
        distance = wrapper.consensus_distance()
        assert wrapper.comm_stats()["consensus_distance"] == distance
        after_distance = flatten(wrapper.module)
        with wrapper.averaged() as inside:
            assert inside is wrapper
            average = flatten(wrapper.module)
        with pytest.raises(KeyError), wrapper.averaged():
            raise KeyError
        restored, weight = flatten(wrapper.module), wrapper.get_extra_state()["weight"]
        assert torch.equal(weight, w)
        train_step(wrapper, optimizer, group.rank(), 3)
        wrapper.average_()
        assert wrapper.get_extra_state()["weight"] == 1
        final = flatten(wrapper.module)
        assert wrapper.consensus_distance() == 0
        wrapper.close()
        return z, w, after_distance, average, restored, final, torch.tensor(distance)

    results = run_ranks(3, body)
    z = torch.stack([result[0] for result in results])
    w = torch.stack([result[1] for result in results])
    mean = (z * w).mean(0)
    num_parameters = sum(p.numel() for p in net().parameters())
    distance = (z - mean)[:, :num_parameters].pow(2).sum(1).mean().sqrt()
    for i, (_, _, after_distance, average, restored, final, measured) in enumerate(results):
        torch.testing.assert_close(average, mean, rtol=0, atol=1e-6)
        torch.testing.assert_close(restored, z[i], rtol=0, atol=1e-6)
        torch.testing.assert_close(after_distance, z[i], rtol=0, atol=1e-6)
        torch.testing.assert_close(measured.double(), distance, rtol=1e-5, atol=0)
        assert torch.equal(final, results[0][5])


def test_averaged_restores_bit_identically_where_weights_stay_one() -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(net(group.rank()), group)
        before = flatten(wrapper.module)
        wrapper.consensus_distance()
        with wrapper.averaged():
            wrapper.eval()
        assert torch.equal(flatten(wrapper.module), before)

    run_ranks(3, body)


@pytest.mark.parametrize("options", MODES)
def test_the_average_after_close_is_weighted_as_before(options: dict[str, Any]) -> None:
    def body(group: dist.ProcessGroup) -> float:
        wrapper = wrap(net(group.rank()), group, graph=irregular(), **options)
        optimizer = sgd(wrapper)
        for step in range(5):
            train_step(wrapper, optimizer, group.rank(), step)
        with wrapper.averaged():
            before = flatten(wrapper.module)
        weight = float(wrapper.get_extra_state()["weight"])
        wrapper.close()
        with wrapper.averaged():
            torch.testing.assert_close(flatten(wrapper.module), before, rtol=0, atol=1e-6)
        wrapper.average_()
        torch.testing.assert_close(flatten(wrapper.module), before, rtol=0, atol=1e-6)
        return weight

    assert max(abs(weight - 1) for weight in run_ranks(3, body)) > 0.1


# Very different weights.


@pytest.mark.parametrize(
    ("dtype", "row"),
    [
        (torch.float16, (0.5, 0.499, 0.001)),
        (torch.float16, (0.5, 0.001, 0.499)),
        (torch.float32, (0.5, 0.5, 1e-40)),
        (torch.float32, (0.5, 1e-40, 0.5)),
        (torch.float32, (0.5, 1e-6, 0.5 - 1e-6)),
    ],
)
def test_overlap_stands_very_different_weights(dtype: torch.dtype, row: tuple[float, float, float]) -> None:
    """No factor of a correction leaves the range of its dtype, and its value is that of the synchronous round."""
    matrix = [[row[(j - i) % 3] for j in range(3)] for i in range(3)]

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        results = []
        for overlap in (False, True):
            module = fill_(nn.Linear(40, 5), group.rank()).to(dtype)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(300.0).add_(150.0)
            mixing = MatrixMixing(CompleteGraph(3, peers_per_itr=2), matrix)
            wrapper = wrap(module, group, mixing=mixing, overlap=overlap)
            for _ in range(2):
                wrapper(torch.ones(1, 40, dtype=dtype))
            wrapper.close()
            results.append(flatten(module).double())
        return results[0], results[1]

    start = torch.stack([flatten(fill_(nn.Linear(40, 5), rank)).to(dtype) * 300 + 150 for rank in range(3)]).double()
    mixing = torch.tensor(matrix, dtype=torch.float64)
    tolerance = 4 * torch.finfo(dtype).eps * float(start.max())
    for (sync, overlapped), want in zip(run_ranks(3, body), mixing @ mixing @ start, strict=True):
        assert bool(overlapped.isfinite().all())
        torch.testing.assert_close(sync, want, rtol=0, atol=tolerance)
        torch.testing.assert_close(overlapped, want, rtol=0, atol=tolerance)


# What it costs, and where it shows.


def test_comm_stats_count_bytes_exactly() -> None:
    """One-peer rounds send the padded vector once; where the weight travels, 8 bytes more for each peer."""

    def body(group: dist.ProcessGroup) -> tuple[float, float, float]:
        module = mlp(group.rank())
        num_bytes = -(-sum(4 * p.numel() for p in module.parameters()) // 64) * 64
        wrapper = wrap(module, group)
        start = wrapper.comm_stats()
        assert set(start) == {
            *(
                "bytes_sent",
                "wait_seconds",
                "num_rounds",
                "num_skipped",
                "mean_staleness",
                "max_staleness",
                "consensus_distance",
            )
        }
        assert start["num_rounds"] == 0
        for step in range(5):
            loss_of(wrapper, 0, step)
        stats = wrapper.comm_stats()
        assert stats["num_rounds"] == 5
        assert stats["wait_seconds"] > 0
        assert stats["bytes_sent"] - start["bytes_sent"] == 5 * num_bytes
        weighted = wrap(mlp(group.rank()), group, graph=irregular())
        start = weighted.comm_stats()
        for step in range(5):
            loss_of(weighted, 0, step)
        num_peers = len(irregular().out_peers(group.rank(), 0))
        assert weighted.comm_stats()["bytes_sent"] - start["bytes_sent"] == 5 * num_peers * (num_bytes + 8)
        return stats["mean_staleness"], stats["max_staleness"], stats["num_rounds"]

    assert run_ranks(3, body) == [(0.0, 0, 5)] * 3


@pytest.mark.parametrize("options", MODES[:2])
def test_a_profiler_trace_shows_every_round(options: dict[str, Any]) -> None:
    wrapper = wrap(mlp(), solo_group(), **options)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for step in range(3):
            loss_of(wrapper, 0, step)
        wrapper.flush()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["GossipDataParallel.forward"] == counts["GossipDataParallel.mix"] == 3
    # The profiler does not follow the gossip thread, but what the training thread waits for and adds.
    for name in ("gossip.wait", "gossip.apply") if wrapper.overlap else ("gossip.round",):
        assert counts[name] == 3
    wrapper.close()


# The end.


@pytest.mark.parametrize("options", MODES)
def test_close_ends_threads_and_training_goes_on_locally(options: dict[str, Any]) -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(group.rank()), group, graph=irregular(), **options)
        optimizer = sgd(wrapper)
        for step in range(3):
            train_step(wrapper, optimizer, group.rank(), step)
        wrapper.close()
        wrapper.close()
        num_bytes = wrapper.comm_stats()["bytes_sent"]
        bare = copy.deepcopy(wrapper.module)
        first, second = torch.optim.SGD(bare.parameters(), lr=0.1), torch.optim.SGD(wrapper.parameters(), lr=0.1)
        for step in range(3):
            train_step(bare, first, group.rank(), step)
            train_step(wrapper, second, group.rank(), step)
        wrapper.flush()
        wrapper.eval()
        assert torch.equal(flatten(bare), flatten(wrapper.module))
        assert wrapper.comm_stats()["bytes_sent"] == num_bytes

    run_ranks(3, body)
    assert_no_gossip_threads()


# Mistakes.

MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"max_staleness": 1}, r"got max_staleness=1 with overlap=False, expected .* pass overlap=True"),
    ({"overlap": True, "max_staleness": -1}, r"got max_staleness=-1"),
    ({"nprocs_per_node": 0}, r"got nprocs_per_node=0 in a world of 1, expected a divisor"),
    ({"nprocs_per_node": 2}, r"got nprocs_per_node=2 in a world of 1, expected a divisor"),
    ({"graph": RingGraph(3)}, r"got a graph of 3 ranks, expected 1, the size of the process group; build"),
    (
        {"graph": RingGraph(3), "mixing": UniformMixing(RingGraph(4))},
        r"got graph=RingGraph\(3.* and a mixing over RingGraph\(4.*expected one graph",
    ),
    (
        {"mixing": UniformMixing(irregular()), "push_sum": False},
        r"got UniformMixing.* whose rows do not sum to one, expected row-stochastic .* use push_sum=True",
    ),
    (
        {"mixing": MatrixMixing(RingGraph(2), [[0.5, 0.5], [0.25, 0.75]])},
        r"got MatrixMixing.* whose columns do not sum to one, expected column-stochastic .* use push_sum=False",
    ),
    ({"graph": irregular(), "gossiper": PushPull()}, r"rows do not sum to one"),
    ({"comm_device": "meta"}, r"got comm_device=meta, expected 'cpu' or the module's device"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES, ids=[str(i) for i in range(len(MISTAKES))])
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        wrap(mlp(), solo_group(), **options)


def test_without_torch_distributed() -> None:
    with pytest.raises(RuntimeError, match=r"torch.distributed is not initialised, expected .*; start with torchrun"):
        GossipDataParallel(mlp())


def test_several_processes_per_node_make_their_own_groups() -> None:
    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match="got a process group and nprocs_per_node=2, expected one of them"):
            wrap(mlp(), group, nprocs_per_node=2)

    run_ranks(2, body)


DISAGREEMENTS: list[tuple[Callable[[int, dist.ProcessGroup], GossipWrapper], str]] = [
    (
        lambda r, g: wrap(mlp(), g, graph=RingGraph(3, peers_per_itr=1 + r // 2)),
        r"rank 2: graph: got .*peers_per_itr=2",
    ),
    (
        lambda r, g: wrap(
            mlp(), g, mixing=[UniformMixing, MetropolisHastingsMixing][r // 2](RingGraph(3, peers_per_itr=2))
        ),
        r"rank 2: mixing: got MetropolisHastingsMixing.*expected UniformMixing",
    ),
    (lambda r, g: wrap(mlp(), g, overlap=r == 2), r"rank 2: options .*got .*overlap=True.*expected .*overlap=False"),
    (lambda r, g: wrap(mlp(), g, schedule=Schedule(1 + r // 2)), r"rank 2: options .*got .*gossip_every=2"),
    (lambda r, g: wrap(mlp(), g, gossip_buffers=r < 2), r"rank 2: options"),
    (lambda r, g: wrap(mlp(), g, init_sync=r < 2), r"rank 2: options .*init_sync.*got .*False.*expected .*True"),
    (
        lambda r, g: wrap(mlp(), g, comm_device="cpu" if r < 2 else None),
        r"rank 2: options .*comm_device.*got .*None.*cpu",
    ),
    (lambda r, g: wrap(mlp(), g, push_sum=r < 2, graph=RingGraph(3)), r"rank 2: gossiper: got PushPull.*PushSum"),
    (lambda r, g: wrap(nn.Linear(3, 2 + r // 2), g), r"rank 2: model: got weight \(3, 3\) .*expected weight \(2, 3\)"),
    (lambda r, g: wrap(nn.Linear(3, 2, dtype=[torch.float32, torch.float64][r // 2]), g), r"rank 2: .*float64"),
    (lambda r, g: wrap(nn.Linear(3, 2, bias=r < 2), g), r"rank 2: model: got 1 entries, expected 2"),
    (
        lambda r, g: [GossipDataParallel, SimpleGossipDataParallel][r // 2](mlp(), process_group=g),
        r"rank 2: wrapper: got SimpleGossipDataParallel, expected GossipDataParallel",
    ),
]


@pytest.mark.parametrize("number", range(len(DISAGREEMENTS)))
def test_disagreement_is_named_on_every_rank(number: int) -> None:
    make, message = DISAGREEMENTS[number]

    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match=f"ranks do not agree with rank 0: {message}"):
            make(group.rank(), group)

    run_ranks(3, body)


def test_a_missing_rank_is_named_at_construction() -> None:
    def body(group: dist.ProcessGroup) -> None:
        if group.rank() == 0:
            with pytest.raises(
                TimeoutError, match=r"(?s)rank 0: comparing model .*timeout 0.3 s.*rank 1 did not take part"
            ):
                wrap(mlp(), group, timeout=timedelta(seconds=0.3))

    run_ranks(2, body)


@pytest.mark.parametrize("options", MODES)
def test_wrappers_on_one_group_do_not_mix_up(options: dict[str, Any]) -> None:
    """Two wrapped models that take turns (a GAN): their rounds have the same numbers.

    A group given by hand carries one wrapper's rounds at a time, so with overlap the second model wraps a copy.
    """

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        first = wrap(mlp(group.rank()), group, **options)
        second = copy.deepcopy(first) if first.overlap else wrap(mlp(), group)
        second.module.load_state_dict(mlp(10 + group.rank()).state_dict())
        for step, model in itertools.product(range(9), (first, second)):
            loss_of(model, 0, step)
        first.close()
        second.close()
        return flatten(first.module), flatten(second.module)

    results = run_ranks(4, body)
    for i in range(2):
        mean = torch.stack([flatten(mlp(10 * i + rank)) for rank in range(4)]).mean(0)
        for result in results:
            torch.testing.assert_close(result[i], mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("is_inner", [False, True])
@pytest.mark.parametrize("graph", [RingGraph(3), irregular()], ids=str)
def test_a_cast_under_a_round_in_flight_loses_no_mass(graph: NetworkXGraph, is_inner: bool) -> None:
    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        model = mlp(group.rank())
        wrapper, start = wrap(model, group, graph=graph, overlap=True), flatten(model)
        for step in range(2):
            loss_of(wrapper, 0, step)
        assert wrapper._engine.is_in_flight
        (model if is_inner else wrapper).double()
        loss_of(wrapper, 0, 2)
        wrapper.flush()
        wrapper.close()
        return start, numerator(wrapper)

    starts, ends = (torch.stack(list(values)) for values in zip(*run_ranks(3, body), strict=True))
    torch.testing.assert_close(ends.sum(0), starts.sum(0), rtol=0, atol=1e-6)
    assert float((ends - starts).abs().max()) > 1e-3


def test_a_reentrant_checkpoint_of_the_whole_wrapper_is_refused() -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(), group)
        x = torch.ones(2, 3, requires_grad=True)
        loss = checkpoint(wrapper, x, use_reentrant=True).sum()
        with pytest.raises(RuntimeError, match=r"got a training forward inside a backward and none before it"):
            loss.backward()
        wrapper.close()

    run_ranks(2, body)


def test_a_setting_without_effect_warns() -> None:
    with pytest.warns(UserWarning, match="find_unused_parameters has no effect with nprocs_per_node=1"):
        GossipDataParallel(mlp(), process_group=solo_group(), find_unused_parameters=True).close()
