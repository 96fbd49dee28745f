"""GossipDataParallel is used like DistributedDataParallel."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gossip_modules import AllReduceDataParallel, GossipDataParallel, RingGraph, Schedule
from gossip_modules.graph_manager import NetworkXGraph
from tests.harness.problems import adamw, batch, fill_, loss_of, mlp, net, sgd, train_step
from tests.harness.progress import step_of, take_corrections
from tests.harness.ranks import run_ranks, solo_group
from tests.harness.reference import flatten
from tests.library.wrappers.wrapping import MODES, irregular, wrap

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
            # Not the state of the generator: threads that read it while garbage is collected may wait for each other.
            out = checkpoint(wrapper, x, use_reentrant=False, preserve_rng_state=False)
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
        wrapper = wrap(mlp(group.rank()), group, **options)
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
            steps.append(step_of(wrapper))
        wrapper.close()
        return tuple(steps)

    assert run_ranks(2, body) == [(3, 5, 8, 9)] * 2


@pytest.mark.parametrize("options", MODES)
def test_train_and_eval_are_chainable_and_eval_flushes(options: dict[str, Any]) -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(group.rank()), group, **options)
        assert wrapper.train() is wrapper
        loss_of(wrapper, 0, 0)
        before = flatten(wrapper)
        assert wrapper.eval() is wrapper
        assert torch.equal(flatten(wrapper), before) is not wrapper.overlap
        assert not take_corrections(wrapper)
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


def test_two_ranks_train_by_sgd_as_by_all_reduce() -> None:
    """With two ranks a round of SGP is an exact average, and the steps of SGD with momentum are linear in gradients."""
    start = mlp().double()

    def trained(kind: Callable[..., Any], group: dist.ProcessGroup, **options: Any) -> Tensor:
        module = copy.deepcopy(start)
        model = kind(module, process_group=group, **options)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2)
        for step in range(20):
            optimizer.zero_grad()
            x, y = batch(group.rank(), step)
            nn.functional.cross_entropy(model(x.double()), y).backward()
            optimizer.step()
        with model.averaged():
            found = flatten(module).clone()
        model.close()
        return found

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
        exact = trained(AllReduceDataParallel, group)
        return exact, trained(GossipDataParallel, group), trained(GossipDataParallel, group, overlap=True)

    for n in (2, 4):
        for exact, gossip, late in run_ranks(n, body):
            assert bool((gossip - exact).abs().max() < 1e-12) == (n == 2)
            assert (late - exact).abs().max() > 1e-6
