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
from gossip_modules.flat.selection import Selection
from gossip_modules.graph_manager import NPeerDynamicDirectedExponentialGraph
from gossip_modules.lab import Compute, LabTask, Network, Setting
from gossip_modules.lab.comparison import LabTraining
from gossip_modules.lab.plan import LabPlan
from gossip_modules.mixing_manager import UniformMixing
from gossip_modules.optim.gossip_adamw import noise_share
from tests.harness.processes import run_processes
from tests.harness.ranks import run_ranks
from tests.library.membership.conftest import _no_thread_stays
from tests.library.membership.test_membership import Job, Worker, close, member_of

__all__ = ["_no_thread_stays"]

N, STEPS = 4, 6


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def net() -> nn.Module:
    module = plain()
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


@pytest.mark.parametrize(("what", "arguments"), [("sgp", {}), ("osgp", {"overlap": True})])
@pytest.mark.parametrize("make", [gossip_adamw, adamw])
def test_the_lab_mixes_the_moments_as_ranks_do(what: str, arguments: dict[str, Any], make: Any) -> None:
    training, found = lab(what, make), by_ranks(make, **arguments)
    assert training.models.by == "vmap"
    views = training.models.views(training.settle())
    own = {name.rpartition("mixed_momentum.")[2]: rows for name, rows in training.models.buffers.items()}
    names = [name for name, _ in net().named_parameters()]
    moments = torch.cat([own[name.replace(".", "/")].flatten(1) for name in names], 1)
    torch.testing.assert_close(torch.stack([m for _, m in found]), moments, rtol=0, atol=1e-9)
    models = torch.cat([views[f"model.{name}"].flatten(1) for name in names], 1)
    torch.testing.assert_close(torch.stack([x for x, _ in found]), models, rtol=0, atol=1e-9)


def test_a_late_round_mixes_the_moments_too() -> None:
    """With overlap they are mixed with their present values, and end nearer to each other than without."""
    mixed = torch.stack([m for _, m in by_ranks(gossip_adamw, overlap=True)])
    assert torch.isfinite(mixed).all()
    assert float((mixed - mixed.mean(0)).norm()) > 0
    assert float((mixed - mixed.mean(0)).norm() / mixed.norm()) < 0.8


WRAPPERS: dict[str, Any] = {
    "GossipDataParallel": lambda module, group: gm.GossipDataParallel(module, process_group=group),
    "gossip": lambda module, group: gm.gossip(module, process_group=group),
    "BilatGossipDataParallel": lambda module, group: gm.BilatGossipDataParallel(module, process_group=group),
    "GroupAverageDataParallel": lambda module, group: gm.GroupAverageDataParallel(module, process_group=group),
}


# The share of the noise in mixed moments.


def share_of_mixed(plan: LabPlan, num_workers: int, b1: float, b2: float, steps: int) -> Tensor:
    """K' of each worker, from the covariance of the moments over the workers: C <- W (b1^2 C + (1 - b1)^2 I) W^T."""
    graph = NPeerDynamicDirectedExponentialGraph(num_workers, peers_per_itr=plan.peers_per_itr or 1)
    mixing, covariance, share = UniformMixing(graph), torch.zeros(num_workers, num_workers).double(), torch.zeros(())
    for t in range(1, steps + 1):
        if t > 1:  # a round is before the step
            W = mixing.matrix(t - 1)
            covariance = W @ covariance @ W.T
        covariance = b1**2 * covariance + (1 - b1) ** 2 * torch.eye(num_workers)
        share = b2 * share + (1 - b2) * covariance.diagonal() / (1 - b1**t) ** 2
    return share / (1 - b2**steps)


@pytest.mark.parametrize(("num_workers", "peers"), [(4, 1), (8, 1), (16, 2)])
def test_the_probe_measures_the_share_of_the_noise(num_workers: int, peers: int) -> None:
    """The tolerance is five standard errors: 2,048 signs, in the average of some three independent ones."""
    plan, steps, b1, b2 = LabPlan.of("sgp", peers_per_itr=peers), 120, 0.9, 0.95

    def wide() -> nn.Module:
        torch.manual_seed(0)
        module = nn.ParameterList(nn.Parameter(torch.randn(8, 8)) for _ in range(32)).double()
        MixedMomentum(module)
        return module

    def loss_of(module: nn.Module, x: Tensor) -> Tensor:
        return torch.stack([(p * x).sum() for p in module.parameters()]).sum()

    def make(parameters: Any) -> torch.optim.Optimizer:
        return GossipAdamW(parameters, lr=0.01, betas=(b1, b2), num_ranks=num_workers)

    task = LabTask(wide, loss_of, lambda worker, step, generator: torch.randn(8, 8, generator=generator).double(), make)
    training = LabTraining(plan, Setting(num_workers, None, Compute(0.1), Network("1 Gbit/s")), task)
    for _ in training.run(steps):
        pass
    (optimizer,) = training.models.optimizers
    shares = torch.stack([state["noise_share"] for state in optimizer.state.values()]) / (1 - b2**steps)
    expected = share_of_mixed(plan, num_workers, b1, b2, steps)
    assert shares.std(0).max() == 0  # one for all parameters
    assert float(expected.max()) < 0.6 * noise_share(steps, b1, b2)
    torch.testing.assert_close(shares.mean(0), expected, rtol=5 * (2 / 2048 / 3) ** 0.5, atol=0)


def test_without_rounds_the_probe_has_the_share_of_one_rank() -> None:
    """From the first step on, and from a state without a probe."""
    x = nn.Parameter(torch.zeros(64, 64))
    optimizer = GossipAdamW([x, *(nn.Parameter(torch.zeros(64)) for _ in range(63))], num_ranks=8)
    for t in range(1, 61):
        if t == 21:
            optimizer.sources = lambda: 3
        for each in optimizer.param_groups[0]["params"]:
            each.grad = torch.ones_like(each)
        optimizer.step()
        if t > 20:
            share = float(optimizer.state[x]["noise_share"]) / (1 - 0.95**t)
            assert share == pytest.approx(noise_share(t, 0.9, 0.95), rel=0.08)


@pytest.mark.parametrize(
    "name", ["GossipDataParallel", "gossip", "BilatGossipDataParallel", "GroupAverageDataParallel"]
)
def test_each_rank_draws_its_own_signs(name: str) -> None:
    def body(group: dist.ProcessGroup) -> tuple[int, int]:
        module = net()
        model = WRAPPERS[name](module, group)
        model.close()
        return momentum_of(module).noise_source, group.rank()

    assert all(source == rank for source, rank in run_ranks(N, body))


def in_a_node(rank: int) -> int:
    module = net()
    model = gm.GossipDataParallel(module, nprocs_per_node=2)
    model.close()
    return momentum_of(module).noise_source


@pytest.mark.e2e
def test_processes_of_a_node_draw_the_same_signs() -> None:
    outcomes = run_processes(4, in_a_node)
    assert not any(outcome.error for outcome in outcomes)
    assert [outcome.result for outcome in outcomes] == [0, 0, 1, 1]


@pytest.mark.parametrize("after_gossip", [False, True])
def test_with_averaged_gradients_all_ranks_draw_the_same_signs(after_gossip: bool) -> None:
    """The measured share weighs g^2 here, and differs on no rank, so the models stay equal."""

    def body(group: dist.ProcessGroup) -> tuple[Tensor, int]:
        module = copy.deepcopy(start)
        if after_gossip:
            gm.GossipDataParallel(module, process_group=group).close()
        model = gm.AllReduceDataParallel(module, process_group=group)
        optimizer = momentum_of(module).of(GossipAdamW(model.parameters(), lr=0.01, num_ranks=2))
        for step in range(40):
            optimizer.zero_grad()
            loss(model, batch(group.rank(), step)).backward()
            optimizer.step()
        model.close()
        return _flat(module.parameters()), momentum_of(module).noise_source

    start = net()
    (x, own), (y, other) = run_ranks(2, body)
    assert (own, other) == (0, 0)
    assert torch.equal(x, y)


def test_elastic_workers_with_averaged_gradients_draw_the_same_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[int] = []

    def train(worker: Worker) -> None:
        member = worker.membership = member_of(worker.job.store, min_workers=2)
        momentum = MixedMomentum(worker.model)
        wrapper = worker.wrapper = gm.AllReduceDataParallel(worker.model, membership=member)
        optimizer = momentum.of(GossipAdamW(wrapper.parameters(), lr=0.01, num_ranks=2))
        for step in member.steps(1 << 30):
            with worker.job.lock:
                if step >= worker.job.last:
                    break
                worker.step, worker.first = step + 1, max(worker.first, 0)
            optimizer.zero_grad()
            wrapper(torch.randn(4, 4)).pow(2).mean().backward()
            optimizer.step()
            worker.members = member.members
        sources.append(momentum.noise_source)

    monkeypatch.setattr(Worker, "train", train)
    job = Job(dist.HashStore(), min_workers=2)
    workers = job.start(2)
    job.until_live(workers)
    job.end()
    assert sources == [0, 0]
    close(workers)


@pytest.mark.parametrize("first", [0, 1])
def test_workers_of_dpwa_draw_their_own_signs(first: int) -> None:
    own, other = ("a", "b") if first == 0 else ("b", "a")
    peers = {own: "tcp://127.0.0.1:0", other: "tcp://127.0.0.1:9"}
    module = net()
    model = gm.PairwiseDataParallel(module, name=own, peers=peers, init_from_peers=False)
    assert momentum_of(module).noise_source == first
    model.close()


def test_an_outer_optimizer_has_the_moments_of_the_optimizer_inside() -> None:
    module = net()
    Selection().check(module)
    inner = gossip_adamw(module.parameters())
    outer = gm.OuterOptimizer(inner, gm.DiLoCo(2))
    assert momentum_of(module).of(outer) is outer
    loss(module, batch(0, 0)).backward()
    outer.step()
    first = next(iter(module.parameters()))
    assert inner.state[first]["exp_avg"] is momentum_of(module).get_buffer("0/weight")
    assert inner.state[first]["probe"] is momentum_of(module).get_buffer("0/weight//probe")


def test_an_optimizer_without_its_momentum_forgets_the_probe_and_says_so() -> None:
    """After a copy of model and optimizer, which have no hooks, or a loaded state of mixed moments."""
    module = net()
    Selection().check(module)
    optimizer = momentum_of(module).of(gossip_adamw(module.parameters()))
    loss(module, batch(0, 0)).backward()
    optimizer.step()
    twin, own = copy.deepcopy((module, optimizer))
    loss(twin, batch(0, 1)).backward()
    with pytest.warns(
        UserWarning, match=r"no MixedMomentum knows, expected momentum\.of\(optimizer\), also after a copy"
    ):
        own.step()
    assert all("probe" not in state and "noise_share" not in state for state in own.state.values())
    own.step()  # warns once
    assert torch.isfinite(_flat(twin.parameters())).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_share_is_not_rounded_to_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(torch.zeros(64, dtype=dtype)) for _ in range(32)]
    optimizer = GossipAdamW(parameters, lr=0.0, betas=(0.9, 0.99), num_ranks=8)
    optimizer.sources = lambda: 0
    for _ in range(500):
        for each in parameters:
            each.grad = torch.zeros_like(each)
        optimizer.step()
    share = optimizer.state[parameters[0]]["noise_share"] / (1 - 0.99**500)
    assert share == pytest.approx(noise_share(500, 0.9, 0.99), rel=0.05)


@pytest.mark.parametrize("names", [("w", "w//probe"), ("noise_source",), ("a/b", "a.b")])
def test_names_of_parameters_that_would_meet_are_refused(names: tuple[str, ...]) -> None:
    module = nn.Module()
    for name in names:
        owner = module
        *parts, last = name.split(".")
        for part in parts:
            owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(last, nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match=r"whose buffer would be .* rename the parameter"):
        MixedMomentum(module)


# Resuming, copies, and workers that join.


@pytest.mark.parametrize("arguments", [{}, {"overlap": True}])
def test_training_goes_on_from_the_states_of_model_and_optimizer_on_other_ranks(arguments: dict[str, Any]) -> None:
    """Rank i resumes from the files of rank i + 1, with the batches of that rank, so all models are the same ones."""
    saved: dict[int, Any] = {}

    def train(group: dist.ProcessGroup, place: int, steps: range) -> tuple[Tensor, Tensor]:
        module = net()
        ring = gm.RingGraph(N, peers_per_itr=2)
        model = gm.GossipDataParallel(module, process_group=group, graph=ring, **arguments)
        optimizer = momentum_of(module).of(gossip_adamw(model.parameters()))
        momentum_of(module).noise_source = place  # each rank draws its own signs; here these of the place in all runs
        if steps.start:
            module.load_state_dict(saved[place][0])
            optimizer.load_state_dict(copy.deepcopy(saved[place][1]))  # torch copies no tensor of it
        for step in steps:
            optimizer.zero_grad()
            loss(model, batch(place, step)).backward()
            optimizer.step()
        model.settle()
        if not steps.start:
            assert "mixed_momentum" not in "".join(model.state_dict())
            saved[place] = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
        first = next(iter(module.parameters()))
        assert optimizer.state[first]["exp_avg"] is momentum_of(module).get_buffer("0/weight")
        found = _flat(module.parameters()), _flat(optimizer.state[p]["exp_avg"] for p in module.parameters())
        model.close()
        return found

    def whole(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        return train(group, group.rank(), range(STEPS))

    def resumed(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        return train(group, (group.rank() + 1) % N, range(STEPS, 2 * STEPS))

    start = run_ranks(N, whole)
    again = run_ranks(N, resumed)
    assert not any(torch.equal(x, y) for (x, _), (y, _) in zip(start, again, strict=True))
    rotated = run_ranks(N, lambda group: train(group, group.rank(), range(STEPS, 2 * STEPS)))
    for place, (x, m) in enumerate(rotated):
        torch.testing.assert_close(x, again[place - 1][0], rtol=0, atol=1e-12)
        torch.testing.assert_close(m, again[place - 1][1], rtol=0, atol=1e-12)


def test_a_checkpoint_of_a_wrapper_has_the_moments() -> None:
    def body(group: dist.ProcessGroup) -> None:
        def make() -> tuple[nn.Module, Any, torch.optim.Optimizer]:
            module = net()
            model = gm.GossipDataParallel(module, process_group=group)
            return module, model, momentum_of(module).of(gossip_adamw(model.parameters()))

        def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
            optimizer.zero_grad()
            loss(model, batch(group.rank(), step)).backward()
            optimizer.step()

        module, model, optimizer = make()
        for step in range(3):
            train(model, optimizer, step)
        state = model.checkpoint(optimizer).state_dict()
        other, again, resumed = make()
        again.checkpoint(resumed).load_state_dict(state)
        assert torch.equal(_flat(momentum_of(other).buffers()), _flat(momentum_of(module).buffers()))
        for step in range(3, 6):
            train(model, optimizer, step)
            train(again, resumed, step)
        assert torch.equal(_flat(other.parameters()), _flat(module.parameters()))
        assert torch.equal(_flat(momentum_of(other).buffers()), _flat(momentum_of(module).buffers()))
        model.close()
        again.close()

    run_ranks(2, body)


def test_copies_have_moments_of_their_own() -> None:
    """A copy of the wrapper, and an average of its models for evaluation."""

    def body(group: dist.ProcessGroup) -> None:
        module = net()
        model = gm.GossipDataParallel(module, process_group=group)
        optimizer = momentum_of(module).of(gossip_adamw(model.parameters()))
        average = torch.optim.swa_utils.AveragedModel(model, use_buffers=False)
        for step in range(3):
            optimizer.zero_grad()
            loss(model, batch(group.rank(), step)).backward()
            optimizer.step()
            average.update_parameters(model)
        twin = copy.deepcopy(model)
        moments = _flat(momentum_of(module).buffers())
        assert torch.equal(_flat(momentum_of(twin.module).buffers()), moments)
        own = {p.data_ptr() for p in twin.module.parameters()}
        assert {p.data_ptr() for p in momentum_of(twin.module)._trained} == own
        own_optimizer = momentum_of(twin.module).of(gossip_adamw(twin.parameters()))
        loss(twin.module, batch(0, 0)).backward()
        own_optimizer.step()
        assert torch.equal(_flat(momentum_of(module).buffers()), moments)
        assert not torch.equal(_flat(momentum_of(twin.module).buffers()), moments)
        average(batch(0, 0))
        model.close()
        twin.close()

    run_ranks(2, body)


@pytest.mark.parametrize("options", [{}, {"overlap": True}])
def test_a_joining_worker_has_the_moments_of_its_donor(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[Tensor]] = []
    entries: list[tuple[Tensor, int]] = []

    def train(worker: Worker) -> None:
        member = worker.membership = member_of(worker.job.store, min_workers=1)
        momentum = MixedMomentum(worker.model)
        wrapper = worker.wrapper = gm.GossipDataParallel(worker.model, membership=member, **worker.job.options)
        optimizer = momentum.of(gossip_adamw(wrapper.parameters()))
        member.track(optimizer=optimizer)
        own: list[Tensor] = []
        given.append(own)
        for step in member.steps(1 << 30):
            if worker.first < 0:
                worker.first = step
                if step:
                    state = optimizer.state[next(iter(worker.model.parameters()))]
                    assert state["exp_avg"] is next(momentum.buffers())
                    entries.append((_moments(momentum), state["step"]))
            with worker.job.lock:
                if step >= worker.job.last:
                    break
                worker.step = step + 1
            optimizer.zero_grad()
            wrapper(torch.randn(4, 4)).pow(2).mean().backward()
            optimizer.step()
            wrapper.flush()
            own.append(_moments(momentum))
            worker.members = member.members
        wrapper.flush()

    monkeypatch.setattr(Worker, "train", train)
    job = Job(dist.HashStore(), min_workers=1, **options)
    workers = job.start(1)
    job.until_live(workers)
    workers += job.start(1, seed=1)
    job.until_live(workers)
    job.end()
    ((moments, steps),) = entries
    assert float(moments.norm()) > 0
    assert any(torch.equal(moments, each) for each in given[0])
    assert steps == workers[1].first
    close(workers)


def _moments(momentum: MixedMomentum) -> Tensor:
    """The moments, but for a bias of one element, which is sent again at entry as counts are."""
    return _flat(x for x in momentum.buffers() if x.numel() > 1)


# Mistakes.


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_module_whose_optimizer_was_not_given_is_refused(name: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        module = net()
        model = WRAPPERS[name](module, group)
        with torch.no_grad():
            model(batch(0, 0))  # an evaluation
        with pytest.raises(ValueError, match="with a MixedMomentum and no optimizer"):
            model(batch(0, 0))
        momentum_of(module).of(gossip_adamw(model.parameters()))
        model(batch(0, 0))
        model.close()

    run_ranks(2, body)


@pytest.mark.parametrize("name", [*WRAPPERS, ""])
def test_a_momentum_that_no_wrapper_mixes_is_refused(name: str) -> None:
    """Made of the wrapper, of the module after the wrapper, or without a wrapper."""

    def body(group: dist.ProcessGroup) -> None:
        for of_wrapper in (False, True):
            module = nn.Linear(5, 3).double()
            model: Any = WRAPPERS[name](module, group) if name else module
            optimizer = MixedMomentum(model if of_wrapper else module).of(gossip_adamw(module.parameters()))
            before = _flat(module.parameters())
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter)
            with pytest.raises(ValueError, match=r"no wrapper mixes, expected .* before you wrap the module"):
                optimizer.step()
            assert torch.equal(_flat(module.parameters()), before)
            if name:
                model.close()

    run_ranks(2, body)


def test_all_reduce_keeps_the_moments_equal_and_sends_none() -> None:
    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        module = copy.deepcopy(start)
        model = gm.AllReduceDataParallel(module, process_group=group)
        optimizer: torch.optim.Optimizer = adamw(model.parameters())
        if has_momentum:
            momentum_of(module).of(optimizer)
            assert {f"mixed_momentum.{name}" for name, _ in momentum_of(module).named_buffers()} <= {
                name.removeprefix(".") for name in model.parameters_to_ignore
            }
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(model, batch(group.rank(), step)).backward()
            optimizer.step()
        model.close()
        return _flat(module.parameters()), _flat(optimizer.state[p]["exp_avg"] for p in module.parameters())

    start, has_momentum = net(), True  # once, since threads share the generator that draws it
    (x, m), (y, other) = run_ranks(2, body)
    assert torch.equal(m, other)
    start, has_momentum = plain(), False
    assert torch.equal(x, run_ranks(2, body)[0][0])
    assert torch.equal(x, y)


def test_a_sharded_module_is_refused() -> None:
    module = plain()
    module[0].weight = nn.Parameter(Sharded(torch.zeros(7, 5)))
    with pytest.raises(ValueError, match="got a Sequential that is sharded over processes"):
        MixedMomentum(module)


class Sharded(Tensor):
    """A tensor with the attributes of a DTensor by which the library knows one."""

    placements, device_mesh, _local_tensor = (), None, None


def test_parameters_without_a_buffer_are_refused() -> None:
    module = net()
    with pytest.raises(ValueError, match=r"a parameter of shape \(2, 2\) that the MixedMomentum does not know"):
        momentum_of(module).of(gossip_adamw([*module.parameters(), nn.Parameter(torch.zeros(2, 2))]))


def test_an_optimizer_without_a_first_moment_is_refused() -> None:
    module = net()
    with pytest.raises(ValueError, match="expected a first moment exp_avg or momentum_buffer"):
        momentum_of(module).of(torch.optim.Adagrad(module.parameters()))


def test_an_optimizer_without_a_state_is_refused() -> None:
    module = net()
    Selection().check(module)
    optimizer = momentum_of(module).of(torch.optim.SGD(module.parameters(), lr=0.1))
    loss(module, batch(0, 0)).backward()
    with pytest.raises(ValueError, match="a step of SGD that kept no state, expected a first moment"):
        optimizer.step()


def test_a_cast_after_it_is_refused() -> None:
    module = net().float()
    Selection().check(module)
    momentum_of(module).double()
    optimizer = momentum_of(module).of(gossip_adamw(module.parameters()))
    loss(module, batch(0, 0).float()).backward()
    with pytest.raises(ValueError, match="make it after casts of the module, and do not shard the module"):
        optimizer.step()


@pytest.mark.parametrize("options", [{"gossip_buffers": False}, {"gossip_buffers": []}, {"ignore": ["*0/weight"]}])
def test_a_wrapper_that_leaves_its_buffers_local_is_refused(options: Any) -> None:
    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match=r"with a MixedMomentum, .* add 'mixed_momentum\.\*' to its list"):
            gm.GossipDataParallel(net(), process_group=group, **options)
        gm.GossipDataParallel(net(), process_group=group, gossip_buffers=["mixed_momentum.*"]).close()

    run_ranks(2, body)


def test_modules_that_cannot_have_one_are_refused() -> None:
    with pytest.raises(ValueError, match="with a mixed_momentum, expected none"):
        MixedMomentum(net())
    with pytest.raises(ValueError, match="got a ReLU without trained parameters"):
        MixedMomentum(nn.ReLU())
