"""MixedMomentum: rounds mix the first moments of the optimizer as the model, by ranks and in the Lab alike."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gossip_modules as gm
from gossip_modules import GossipAdamW, MixedMomentum
from gossip_modules.graph_manager import NPeerDynamicDirectedExponentialGraph
from gossip_modules.lab import Compute, LabTask, Network, Setting
from gossip_modules.lab.comparison import LabTraining
from gossip_modules.lab.plan import LabPlan
from gossip_modules.mixing_manager import UniformMixing
from tests.harness.ranks import run_ranks

N, STEPS = 4, 6


def net() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    MixedMomentum(module)
    return module


def momentum_of(module: nn.Module) -> MixedMomentum:
    found = module.mixed_momentum
    assert isinstance(found, MixedMomentum)
    return found


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * rank + step))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :3].cumsum(1)).square().mean()


def gossip_adamw(parameters: Any) -> torch.optim.Optimizer:
    return GossipAdamW(parameters, lr=0.01, num_ranks=N)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, foreach=False)


def by_ranks(make: Any, **arguments: Any) -> list[tuple[Tensor, Tensor]]:
    """The model and the moments of each rank, after a round that follows the last step."""

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        module = copy.deepcopy(start)
        model = gm.GossipDataParallel(module, process_group=group, **arguments)
        optimizer = momentum_of(module).of(make(model.parameters()))
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(model, batch(group.rank(), step)).backward()
            optimizer.step()
        model(batch(group.rank(), STEPS))
        model.settle()
        moments = [next(m for key, m in optimizer.state[p].items() if key in MOMENTS) for p in module.parameters()]
        found = _flat(module.parameters()), _flat(moments)
        model.close()
        return found

    start = net()
    return run_ranks(N, body)


MOMENTS = ("exp_avg", "momentum_buffer")


def _flat(tensors: Any) -> Tensor:
    return torch.cat([x.detach().flatten() for x in tensors])


def oracle(make: Any) -> tuple[Tensor, Tensor]:
    """Models and moments [n, d] by D-PSGD on the exponential graph, written as matrices."""
    mixing = UniformMixing(NPeerDynamicDirectedExponentialGraph(N))
    nets = [net() for _ in range(N)]
    optimizers = [make(list(each.parameters())) for each in nets]
    for step in range(STEPS + 1):
        W = mixing.matrix(step)
        with torch.no_grad():
            for k, rows in enumerate(zip(*(each.parameters() for each in nets), strict=True)):
                mixed = torch.einsum("ij,j...->i...", W, torch.stack(rows))
                for own, value in zip(rows, mixed, strict=True):
                    own.copy_(value)
                if step:
                    states = [o.state[list(each.parameters())[k]] for o, each in zip(optimizers, nets, strict=True)]
                    key = next(name for name in MOMENTS if name in states[0])
                    mixed = torch.einsum("ij,j...->i...", W, torch.stack([state[key] for state in states]))
                    for state, value in zip(states, mixed, strict=True):
                        state[key].copy_(value)
        if step < STEPS:
            for rank, (each, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
                optimizer.zero_grad()
                loss(each, batch(rank, step)).backward()
                optimizer.step()
    moments = [
        _flat(next(m for key, m in o.state[p].items() if key in MOMENTS) for p in each.parameters())
        for o, each in zip(optimizers, nets, strict=True)
    ]
    return torch.stack([_flat(each.parameters()) for each in nets]), torch.stack(moments)


@pytest.mark.parametrize("make", [gossip_adamw, adamw, sgd])
def test_rounds_mix_the_moments_with_the_weights_of_the_model(make: Any) -> None:
    found = by_ranks(make, push_sum=False, graph=NPeerDynamicDirectedExponentialGraph(N))
    models, moments = oracle(make)
    torch.testing.assert_close(torch.stack([x for x, _ in found]), models, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.stack([m for _, m in found]), moments, rtol=0, atol=1e-12)


def lab(what: str, make: Any) -> LabTraining:
    task = LabTask(net, loss, lambda worker, step, generator: batch(worker, step), make)
    training = LabTraining(LabPlan.of(what), Setting(N, None, Compute(0.1), Network("1 Gbit/s")), task)
    for _ in training.run(STEPS):
        pass
    return training


@pytest.mark.parametrize(("what", "arguments"), [("sgp", {}), ("LocalSGD(3)", {"algorithm": gm.LocalSGD(3)})])
@pytest.mark.parametrize("make", [gossip_adamw, sgd])
def test_the_lab_mixes_the_moments_as_ranks_do(what: str, arguments: dict[str, Any], make: Any) -> None:
    training, found = lab(what, make), by_ranks(make, **arguments)
    assert training.models.by == "vmap"
    own = {name.rpartition("mixed_momentum.")[2]: rows for name, rows in training.models.buffers.items()}
    names = [name for name, _ in net().named_parameters()]
    moments = torch.cat([own[name.replace(".", "/")].flatten(1) for name in names], 1)
    torch.testing.assert_close(torch.stack([m for _, m in found]), moments, rtol=0, atol=1e-9)
    views = training.models.views(training.settle())
    models = torch.cat([views[f"model.{name}"].flatten(1) for name in names], 1)
    torch.testing.assert_close(torch.stack([x for x, _ in found]), models, rtol=0, atol=1e-9)


def test_workers_with_an_optimizer_each_mix_their_moments_in_the_lab() -> None:
    training = lab("adpsgd", gossip_adamw)
    moments = {name: rows for name, rows in training.models.buffers.items() if "mixed_momentum" in name}
    assert len(moments) == 4
    own = [optimizer.state[leaf]["exp_avg"] for optimizer, (leaf, *_) in _each(training)]
    first = moments[f"model.mixed_momentum.{training.models.names[0].removeprefix('model.').replace('.', '/')}"]
    assert all(torch.equal(each, row) for each, row in zip(own, first, strict=True))


def _each(training: LabTraining) -> Any:
    return zip(training.models.optimizers, training.models._leaves, strict=True)


def test_a_late_round_mixes_the_moments_too() -> None:
    """With overlap they are mixed with their present values, and end nearer to each other than without."""
    mixed = torch.stack([m for _, m in by_ranks(gossip_adamw, overlap=True)])
    assert torch.isfinite(mixed).all()
    assert float((mixed - mixed.mean(0)).norm()) > 0
    assert float((mixed - mixed.mean(0)).norm() / mixed.norm()) < 0.8


def test_training_goes_on_from_a_state_of_the_optimizer() -> None:
    def trained(num_steps: int, state: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = net()
        optimizer = momentum_of(module).of(gossip_adamw(module.parameters()))
        if state is not None:
            module.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        for step in range(num_steps):
            optimizer.zero_grad()
            loss(module, batch(0, step + 3 * (state is not None))).backward()
            optimizer.step()
        return module, optimizer

    whole, _ = trained(6)
    module, optimizer = trained(3)
    again, loaded = trained(3, copy.deepcopy((module.state_dict(), optimizer.state_dict())))
    assert "mixed_momentum" not in "".join(module.state_dict())
    torch.testing.assert_close(_flat(again.parameters()), _flat(whole.parameters()), rtol=0, atol=0)
    first = next(iter(again.parameters()))
    assert loaded.state[first]["exp_avg"] is momentum_of(again).get_buffer("0/weight")


def test_parameters_without_a_buffer_are_refused() -> None:
    module = net()
    with pytest.raises(ValueError, match=r"a parameter of shape \(2, 2\) that the MixedMomentum does not know"):
        momentum_of(module).of(gossip_adamw([*module.parameters(), nn.Parameter(torch.zeros(2, 2))]))


def test_an_optimizer_without_a_first_moment_is_refused() -> None:
    module = net()
    with pytest.raises(ValueError, match="expected a first moment exp_avg or momentum_buffer"):
        momentum_of(module).of(torch.optim.Adagrad(module.parameters()))


def test_a_cast_after_it_is_refused() -> None:
    module = net().float()
    momentum_of(module).double()
    optimizer = momentum_of(module).of(gossip_adamw(module.parameters()))
    loss(module, batch(0, 0).float()).backward()
    with pytest.raises(ValueError, match="make it after casts of the module, and do not shard the module"):
        optimizer.step()


@pytest.mark.parametrize("gossip_buffers", [False, []])
def test_a_wrapper_that_leaves_its_buffers_local_is_refused(gossip_buffers: Any) -> None:
    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match=r"and a MixedMomentum, .* add 'mixed_momentum\.\*' to its list"):
            gm.GossipDataParallel(net(), process_group=group, gossip_buffers=gossip_buffers)
        gm.GossipDataParallel(net(), process_group=group, gossip_buffers=["mixed_momentum.*"]).close()

    run_ranks(2, body)


def test_modules_that_cannot_have_one_are_refused() -> None:
    with pytest.raises(ValueError, match="with a mixed_momentum, expected none"):
        MixedMomentum(net())
    with pytest.raises(ValueError, match="got a ReLU without trained parameters"):
        MixedMomentum(nn.ReLU())
