"""Which forwards start rounds, and which tensors travel, when modes and requires_grad change after wrapping."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import GossipDataParallel, RingGraph
from tests.harness.cases import each_once
from tests.harness.problems import batch, fill_, loss_of, mlp, net, sgd, train_step
from tests.harness.ranks import run_ranks, solo_group
from tests.harness.reference import flatten

MODES: list[dict[str, Any]] = [{}, {"overlap": True}, {"overlap": True, "max_staleness": 2}]
TIMEOUT = timedelta(seconds=5)


def wrap(module: nn.Module, group: dist.ProcessGroup, **options: Any) -> GossipDataParallel:
    return GossipDataParallel(module, process_group=group, **{"init_sync": False, "timeout": TIMEOUT, **options})


def num_rounds(wrapper: GossipDataParallel) -> float:
    wrapper.flush()
    return wrapper.comm_stats()["num_rounds"]


# The mode.


def restore_like_a_trainer(wrapper: nn.Module) -> None:
    """As Lightning after a validation: each module's own flag, not `train()`."""
    for module in wrapper.modules():
        module.training = module is not wrapper


BACK_TO_TRAINING: dict[str, Callable[[nn.Module], Any]] = {
    "the wrapped module's train()": lambda wrapper: wrapper.get_submodule("module").train(),
    "flags of modules": restore_like_a_trainer,
    "the wrapper's train()": lambda wrapper: wrapper.train(),
}


@pytest.mark.parametrize("how", BACK_TO_TRAINING)
@pytest.mark.parametrize("options", MODES[:2])
def test_rounds_follow_the_mode_of_the_module(options: dict[str, Any], how: str) -> None:
    def body(group: dist.ProcessGroup) -> float:
        wrapper = wrap(mlp(group.rank()), group, **options)
        optimizer = sgd(wrapper)
        for step in range(3):
            train_step(wrapper, optimizer, group.rank(), step)
        wrapper.eval()
        with torch.no_grad():
            loss_of(wrapper, group.rank(), 3)
        BACK_TO_TRAINING[how](wrapper)
        for step in range(10):
            train_step(wrapper, optimizer, group.rank(), step)
        rounds = num_rounds(wrapper)
        wrapper.close()
        return rounds

    assert run_ranks(2, body) == [13, 13]


def test_a_module_in_eval_mode_starts_no_round_whatever_the_wrapper_says() -> None:
    wrapper = wrap(net(), solo_group())
    wrapper.module.eval()
    assert wrapper.training
    loss_of(wrapper, 0, 0)
    assert num_rounds(wrapper) == 0
    wrapper.close()


@pytest.mark.parametrize("options", MODES[:2])
def test_training_in_eval_mode_gossips_where_it_is_asked_for(options: dict[str, Any]) -> None:
    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(net(group.rank()), group, gossip_in_eval_mode=True, **options)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.0)
        wrapper.eval()
        for step in range(3):
            train_step(wrapper, optimizer, group.rank(), step)
        assert num_rounds(wrapper) == 3
        with torch.no_grad():
            loss_of(wrapper, 0, 4)
        assert num_rounds(wrapper) == 3
        wrapper.close()
        return flatten(wrapper.module)

    first, second = run_ranks(2, body)
    torch.testing.assert_close(first, second)


def test_training_in_eval_mode_otherwise_is_an_error_once() -> None:
    wrapper = wrap(net(), solo_group())
    optimizer = sgd(wrapper)
    wrapper.eval()
    train_step(wrapper, optimizer, 0, 0)
    message = r"optimizer step after a forward in eval mode.*model\.train\(\).*gossip_in_eval_mode=True"
    with pytest.raises(RuntimeError, match=message):
        loss_of(wrapper, 0, 1)
    for step in range(3):
        train_step(wrapper, optimizer, 0, step)
    wrapper.close()


def attack(wrapper: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Adversarial examples are made in eval mode, and trained on in train mode."""
    wrapper.eval()
    x = batch(0, 0)[0].requires_grad_()
    wrapper(x).sum().backward()
    optimizer.zero_grad()
    wrapper.train()


def evaluate_two_checkpoints(wrapper: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """By somebody who has forgotten no_grad()."""
    wrapper.eval()
    for seed in range(2):
        loss_of(wrapper, 0, 0)
        wrapper.get_submodule("module").load_state_dict(net(seed).state_dict())
    loss_of(wrapper, 0, 0)
    wrapper.train()


def look_at_gradients(wrapper: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    wrapper.eval()
    for step in range(3):
        optimizer.zero_grad()
        loss_of(wrapper, 0, step).backward()
    wrapper.train()


@pytest.mark.parametrize("between", [attack, evaluate_two_checkpoints, look_at_gradients])
def test_evaluation_that_looks_like_training_is_allowed(
    between: Callable[[nn.Module, torch.optim.Optimizer], None],
) -> None:
    wrapper = wrap(net(), solo_group())
    optimizer = sgd(wrapper)
    for step in range(3):
        between(wrapper, optimizer)
        train_step(wrapper, optimizer, 0, step)
    assert num_rounds(wrapper) == 3
    wrapper.close()


def test_a_model_that_is_frozen_for_a_while_starts_no_round() -> None:
    """A GAN: the critic is frozen while the generator steps, and only its own steps are rounds."""

    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(mlp(group.rank()), group)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.0)
        generator = fill_(nn.Linear(3, 3), group.rank())
        for step in range(2):
            train_step(wrapper, optimizer, group.rank(), step)
            wrapper.requires_grad_(False)
            wrapper(generator(torch.ones(1, 3))).sum().backward()
            wrapper.requires_grad_(True)
        assert num_rounds(wrapper) == 2
        wrapper.close()
        return flatten(wrapper.module)

    first, second = run_ranks(2, body)
    torch.testing.assert_close(first, second)


# Exchanged tensors.


def save(wrapper: GossipDataParallel) -> None:
    wrapper.state_dict()


def evaluate(wrapper: GossipDataParallel) -> None:
    wrapper.eval().train()


@pytest.mark.parametrize(
    ("options", "action", "num_savers"), each_once([*MODES, *MODES], [save, evaluate], [1, 2, 2, 1])
)
def test_a_layer_that_is_frozen_and_unfrozen_goes_on_gossiping(
    options: dict[str, Any], action: Callable[[GossipDataParallel], None], num_savers: int
) -> None:
    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(mlp(group.rank()), group, **options)
        first = wrapper.module.get_submodule("0")
        loss_of(wrapper, 0, 0)
        first.requires_grad_(False)
        if group.rank() < num_savers:
            action(wrapper)
        first.requires_grad_(True)
        for step in range(8):
            loss_of(wrapper, 0, step)
        wrapper.flush()
        wrapper.close()
        return flatten(first)

    results = run_ranks(2, body)
    for result in results:
        torch.testing.assert_close(result, results[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", MODES)
def test_a_layer_that_is_unfrozen_gossips_from_the_next_forward_on(options: dict[str, Any]) -> None:
    def body(group: dist.ProcessGroup) -> Tensor:
        model = mlp(group.rank())
        first = model.get_submodule("0").requires_grad_(False)
        wrapper = wrap(model, group, **options)
        loss_of(wrapper, 0, 0)
        first.requires_grad_(True)
        for step in range(7):
            loss_of(wrapper, 0, step)
        wrapper.flush()
        wrapper.close()
        return flatten(first)

    one, other = run_ranks(2, body)
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("options", MODES)
def test_a_layer_that_is_added_or_exchanged_gossips(options: dict[str, Any]) -> None:
    def body(group: dist.ProcessGroup) -> list[Tensor]:
        model = mlp(group.rank())
        wrapper = wrap(model, group, **options)
        loss_of(wrapper, 0, 0)
        model.add_module("more", fill_(nn.Linear(2, 2), 10 + group.rank()))
        model[2] = fill_(nn.Linear(4, 2), 20 + group.rank())  # type: ignore[operator]
        for step in range(7):
            loss_of(wrapper, 0, step)
        wrapper.flush()
        wrapper.close()
        return [flatten(model.get_submodule(name)) for name in ("more", "2")]

    one, other = run_ranks(2, body)
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("options", MODES[:2])
def test_everything_may_be_frozen(options: dict[str, Any]) -> None:
    wrapper = wrap(net(), solo_group(), **options)
    loss_of(wrapper, 0, 0)
    wrapper.requires_grad_(False)
    before = flatten_all(wrapper)
    wrapper.eval()
    wrapper.train()
    wrapper.load_state_dict(wrapper.state_dict())
    wrapper.double()
    loss_of(wrapper, 0, 1)
    assert torch.equal(flatten_all(wrapper)[: len(before) - 8], before[: len(before) - 8])  # but running statistics
    wrapper.close()


def flatten_all(wrapper: nn.Module) -> Tensor:
    tensors = (*wrapper.parameters(), *(b for b in wrapper.buffers() if b.is_floating_point()))
    return torch.cat([x.detach().double().flatten() for x in tensors])


def test_an_average_after_unfreezing_is_of_all_that_is_trained() -> None:
    def body(group: dist.ProcessGroup) -> Tensor:
        model = mlp(group.rank())
        first = model.get_submodule("0").requires_grad_(False)
        wrapper = wrap(model, group)
        first.requires_grad_(True)
        wrapper.average_()
        wrapper.close()
        return flatten(model)

    mean = (flatten(mlp(0)) + flatten(mlp(1))) / 2
    for result in run_ranks(2, body):
        torch.testing.assert_close(result, mean)


# Statistics of BatchNorm.


class Statistics(nn.Module):
    """A parameter, and a variance that decays as fast as one says."""

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.norm = nn.BatchNorm1d(3, momentum=momentum, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x * self.scale)


@pytest.mark.parametrize("max_staleness", [0, 3])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_late_rounds_leave_variances_positive(max_staleness: int, scale: float) -> None:
    """One rank's inputs are large for a while; its statistics decay under no_sync while a round takes the old away."""

    def body(group: dist.ProcessGroup) -> float:
        wrapper = wrap(Statistics(0.9), group, overlap=True, max_staleness=max_staleness, graph=RingGraph(3))
        variance = wrapper.module.get_buffer("norm.running_var")
        generator = torch.Generator().manual_seed(group.rank())
        least = float("inf")
        for step in range(24):
            large = scale if step % 4 == 0 and group.rank() == step % 3 else 1e-4
            for k in range(4):
                x = large * torch.randn(8, 3, generator=generator)
                if k == 3:
                    wrapper(x)
                else:
                    with wrapper.no_sync():
                        wrapper(x * 1e-4)
                least = min(least, float(variance.min()))
        wrapper.flush()
        least = min(least, float(variance.min()))
        wrapper.close()
        return least

    assert min(run_ranks(3, body)) >= 0


def test_late_rounds_still_bring_statistics_together() -> None:
    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(net(group.rank()), group, overlap=True, graph=RingGraph(3, peers_per_itr=2))
        wrapper.module.get_submodule("norm").momentum = 0.0  # type: ignore[assignment]
        mean = wrapper.module.get_buffer("norm.running_mean")
        mean.fill_(float(group.rank()))
        for step in range(20):
            loss_of(wrapper, 0, step)
        wrapper.flush()
        wrapper.close()
        return mean.clone()

    for mean in run_ranks(3, body):
        torch.testing.assert_close(mean, torch.ones(4))
