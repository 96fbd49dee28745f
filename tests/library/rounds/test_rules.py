"""Algorithms for uneven data beside all else that a wrapper does: checkpoints, copies, buffers, optimizers, dtypes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import (
    D2,
    EXTRA,
    KGT,
    DecentLaM,
    DiLoCo,
    ExactDiffusion,
    GossipDataParallel,
    GradientTracking,
    ProxSkip,
    QGDSGDm,
    RingGraph,
    Schedule,
    gossip,
)
from gossip_modules.engine.lockstep import SyncEngine
from gossip_modules.extend import Algorithm, FlatBuffer, Memory, ProcessGroupTransport, PushPull
from gossip_modules.mixing_manager import MetropolisHastingsMixing
from gossip_modules.rounds.rounds import Rounds, mixer_of
from gossip_modules.wrappers.choices import Choices
from tests.harness.problems import adamw, loss_of, mlp, net, train_step
from tests.harness.progress import engine_of
from tests.harness.ranks import CPU, TIMEOUT, run_ranks, solo_group
from tests.harness.reference import flatten


def memory_of(wrapper: GossipDataParallel) -> Memory:
    rounds = engine_of(wrapper).mixer
    assert isinstance(rounds, Rounds)
    return rounds.drivers[0].memory


RULES: list[Algorithm] = [
    D2(),
    ExactDiffusion(),
    EXTRA(),
    GradientTracking(),
    KGT(2),
    ProxSkip(0.7),
    QGDSGDm(),
    DecentLaM(),
]
LR = 0.05


def sgd(module: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=LR, **{"momentum": 0.9, **options})


def wrap(module: nn.Module, group: dist.ProcessGroup, rule: Algorithm, **options: Any) -> GossipDataParallel:
    return GossipDataParallel(module, process_group=group, algorithm=rule, **options)


@pytest.mark.parametrize("rule", [QGDSGDm(), DecentLaM()], ids=str)
def test_a_checkpoint_between_forward_and_step_goes_on_to_the_bit(rule: Algorithm) -> None:
    model, other = mlp(), mlp(4)
    wrapper, optimizer = wrap(model, solo_group(), rule), sgd(model)
    for step in range(2):
        train_step(wrapper, optimizer, 0, step)
    optimizer.zero_grad()
    loss_of(wrapper, 0, 2).backward()
    saved, rates = copy.deepcopy(wrapper.state_dict()), copy.deepcopy(optimizer.state_dict())
    resumed, again = wrap(other, solo_group(), rule), sgd(other)
    resumed.load_state_dict(saved)
    again.load_state_dict(rates)
    for parameter, twin in zip(model.parameters(), other.parameters(), strict=True):
        twin.grad = None if parameter.grad is None else parameter.grad.clone()
    for each, stepped in ((wrapper, optimizer), (resumed, again)):
        stepped.step()
        train_step(each, stepped, 0, 3)
    assert torch.equal(flatten(other), flatten(model))
    wrapper.close()
    resumed.close()


def test_the_momentum_of_the_optimizer_is_the_one_of_the_law() -> None:
    """In a world of one, x - x' is the step itself: mh <- mu mh + (1 - mu) m."""
    model = mlp()
    wrapper, optimizer = wrap(model, solo_group(), QGDSGDm(mu=0.5)), sgd(model)
    for step in range(2):
        train_step(wrapper, optimizer, 0, step)
    m = [optimizer.state[parameter]["momentum_buffer"].clone() for parameter in model.parameters()]
    x = flatten(model)
    loss_of(wrapper, 0, 2)
    assert torch.equal(flatten(model), x)
    mh = [optimizer.state[parameter]["momentum_buffer"].clone() for parameter in model.parameters()]
    wrapper_state = wrapper.state_dict()._metadata[""]["gossip_state"]["engine"]
    (kept,) = wrapper_state["gossiper"]["memory"]["vectors"]["momentum"]
    assert torch.equal(torch.cat([x.flatten() for x in mh]).sort().values, kept.sort().values)
    assert not torch.equal(mh[0], m[0])
    with torch.no_grad():
        for group in optimizer.param_groups:
            group["lr"] = 0.0  # such a step moves nothing, and so makes no momentum either
        optimizer.step()
    loss_of(wrapper, 0, 3)
    for parameter, momentum in zip(model.parameters(), mh, strict=True):
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], momentum)
    wrapper.close()
    optimizer.step()  # nobody looks any more
    optimizer.step()


@pytest.mark.parametrize(
    ("rule", "make", "message"),
    [
        (QGDSGDm(), adamw, "QGDSGDm: got AdamW that steps the model, expected one torch.optim.SGD .*; its law is .*D2"),
        (QGDSGDm(), lambda model: sgd(model, momentum=0.0), "got SGD with {'momentum': 0.0, .*; pass momentum=0.9"),
        (QGDSGDm(), lambda model: sgd(model, dampening=0.1), "got SGD with .*'dampening': 0.1"),
        (
            DecentLaM(),
            lambda model: sgd(model, nesterov=True),
            "DecentLaM: got SGD with nesterov=True, expected .*, without nesterov, .*; pass nesterov=False, or take QG",
        ),
        (QGDSGDm(), lambda model: sgd(model[0]), "QGDSGDm: got SGD over some of the trained parameters, expected one"),
        (
            QGDSGDm(),
            lambda model: torch.optim.SGD(
                [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.2}],
                momentum=0.9,
            ),
            r"got SGD with lr of \[0.1, 0.2\] in its groups of parameters, expected one for all",
        ),
    ],
)
def test_an_optimizer_that_the_law_is_not_for_is_refused(
    rule: Algorithm, make: Callable[[Any], torch.optim.Optimizer], message: str
) -> None:
    model = mlp()
    wrapper = wrap(model, solo_group(), rule)
    optimizer = make(model)
    before = flatten(model)
    with pytest.raises(ValueError, match=message):
        train_step(wrapper, optimizer, 0, 0)
    assert torch.equal(flatten(model), before)
    wrapper.close()


def test_two_steps_after_one_forward_are_refused() -> None:
    model = mlp()
    wrapper, optimizer = wrap(model, solo_group(), DecentLaM()), sgd(model)
    train_step(wrapper, optimizer, 0, 0)
    with pytest.raises(RuntimeError, match="DecentLaM: got a second optimizer step after one training forward, expec"):
        optimizer.step()
    wrapper.close()


@pytest.mark.parametrize("algorithm", [D2(), GradientTracking(), DiLoCo(sync_every=1)], ids=str)
def test_buffers_that_come_and_go_change_nothing_for_parameters(algorithm: Algorithm) -> None:
    """A layer without parameters is replaced: other buffers are mixed, and what rounds keep stays."""

    def body(group: dist.ProcessGroup) -> None:
        model: Any = mlp()
        model.append(nn.BatchNorm1d(2, affine=False, device="cpu"))
        wrapper, optimizer = wrap(model, group, algorithm), sgd(model)
        for step in range(2):
            train_step(wrapper, optimizer, group.rank(), step)
        for norm in (nn.Identity(), model[-1]):
            model[-1] = norm
            for step in range(2):
                train_step(wrapper, optimizer, group.rank(), step)
        assert memory_of(wrapper).num_rounds >= 5
        wrapper.close()

    run_ranks(2, body)


def test_a_state_is_loaded_between_two_rounds_and_training_goes_on() -> None:
    """The step after it has no round before it, and its rate is counted all the same."""

    def body(group: dist.ProcessGroup) -> list[Tensor]:
        ends = []
        for is_loaded in (False, True):
            model: Any = mlp()
            wrapper, optimizer = wrap(model, group, D2(), schedule=Schedule(gossip_every=2)), sgd(model)
            for step in range(6):
                if is_loaded and step in (2, 3):
                    wrapper.load_state_dict(copy.deepcopy(wrapper.state_dict()))
                train_step(wrapper, optimizer, group.rank(), step)
            wrapper.close()
            ends.append(flatten(model))
        return ends

    for alone, loaded in run_ranks(2, body):
        torch.testing.assert_close(loaded, alone, rtol=0, atol=0)


def test_the_memory_of_a_narrow_model_is_float32() -> None:
    model = mlp().bfloat16()
    wrapper, optimizer = wrap(model, solo_group(), QGDSGDm()), sgd(model)
    for step in range(2):
        train_step(wrapper, optimizer, 0, step)
    state = wrapper.state_dict()._metadata[""]["gossip_state"]["engine"]["gossiper"]["memory"]["vectors"]
    assert {x.dtype for tensors in state.values() for x in tensors} == {torch.float32}
    assert {state["momentum_buffer"].dtype for state in optimizer.state.values()} == {torch.bfloat16}
    wrapper.close()


def test_freezing_keeps_the_rest_and_other_states_are_refused() -> None:
    model: Any = mlp()
    wrapper, optimizer = wrap(model, solo_group(), QGDSGDm()), sgd(model)
    for step in range(2):
        train_step(wrapper, optimizer, 0, step)
    state = wrapper.get_extra_state()
    model[0].requires_grad_(False)
    train_step(wrapper, optimizer, 0, 2)  # takes along what was trained since the last round
    memory = memory_of(wrapper)
    before = memory.momentum.parts[0].clone()
    train_step(wrapper, optimizer, 0, 3)
    assert len(memory.momentum.parts[0]) < len(before)
    assert memory.num_rounds == 4
    wrapper.set_extra_state(state)  # of when more was trained
    loss_of(wrapper, 0, 4)
    assert len(memory.momentum.parts[0]) < len(before)
    fewer = wrapper.get_extra_state()
    wrapper.set_extra_state(None)
    loss_of(wrapper, 0, 5)
    model[0].requires_grad_(True)
    wrapper.set_extra_state(fewer)
    optimizer.step()  # `fewer` is of the middle of a step
    with pytest.raises(
        ValueError, match=r"got the state of vector .* with \[10\] elements, expected \[26\]: other ten"
    ):
        loss_of(wrapper, 0, 6)
    wrapper.set_extra_state(None)
    loss_of(wrapper, 0, 7)
    other = wrap(mlp(), solo_group(), D2())
    with pytest.raises(ValueError, match="got the state of QGDSGDm, expected the state of D2; wrap as"):
        other.set_extra_state(state)
    for each in (wrapper, other):
        each.close()


@pytest.mark.parametrize("rule", [D2(), GradientTracking()], ids=str)
def test_rounds_on_the_shards_of_a_node_are_those_of_the_whole(rule: Algorithm) -> None:
    def engine(group: dist.ProcessGroup) -> SyncEngine:
        gossiper = mixer_of(rule, PushPull())
        mixing = MetropolisHastingsMixing(RingGraph(group.size(), peers_per_itr=2))
        gossiper.bind(mixing, ProcessGroupTransport(group, device=CPU, timeout=TIMEOUT))
        return SyncEngine(gossiper, Schedule())

    def body(group: dist.ProcessGroup) -> Tensor:
        whole, cut = (FlatBuffer(net(), num_shards=7).vector for _ in range(2))
        shards = [cut.shard(k, 7) for k in range(7)]
        one, engines = engine(group), [engine(group) for _ in shards]
        for step in range(3):
            for x in (whole.segments[0], cut.segments[0]):
                x.mul_(1 + 0.1 * step * group.rank())
            one.round(whole)
            for each, shard in zip(engines, shards, strict=True):
                each.round(shard)
            torch.testing.assert_close(cut.segments[0], whole.segments[0])
        return whole.segments[0]

    results = run_ranks(3, body)
    assert not torch.equal(results[0], results[1])


def test_gossip_in_place_follows_rules_too_and_infinities_are_noticed() -> None:
    model = gossip(mlp(), process_group=solo_group(), algorithm=D2())
    for step in range(3):
        loss_of(model, 0, step)
    assert model.comm_stats()["num_rounds"] == 3
    with torch.no_grad():
        next(model.parameters())[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="in round 3 its own model holds infinities or NaN"):
        loss_of(model, 0, 3)
    model.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap": True}, "got overlap=True with D2.*: it needs the result of a round before the next step"),
        ({"algorithm": QGDSGDm(), "schedule": 2}, "got schedule=.* with QGDSGDm.*, expected a round after every step"),
    ],
)
def test_options_that_break_the_law_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GossipDataParallel(mlp(), process_group=solo_group(), **{"algorithm": D2(), **options})


def test_an_algorithm_that_changes_the_optimizer_is_refused_on_nodes() -> None:
    options: dict[str, Any] = {"overlap": False, "init_sync": True, "nprocs_per_node": 2}
    Choices(algorithm=D2()).check(**options)
    with pytest.raises(ValueError, match=r"got nprocs_per_node=2 with QGDSGDm.*: it writes the momentum of the whole"):
        Choices(algorithm=QGDSGDm()).check(**options)


def test_decentlam_steps_a_parameter_without_a_gradient_by_its_momentum() -> None:
    """One rank, where the round changes nothing: momentum SGD with a gradient of zero, which torch would leave out."""

    def trained(*, has_rule: bool) -> Tensor:
        model = nn.ParameterDict({"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(2))})
        net: Any = nn.Module()
        net.p = model
        wrapper = GossipDataParallel(net, process_group=solo_group(), algorithm=DecentLaM()) if has_rule else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        net.forward = lambda is_first: model["a"].sum() + (2 * model["b"].sum() if is_first else 0.0)
        for step in range(3):
            optimizer.zero_grad()
            loss = net.forward(step == 0) if wrapper is None else wrapper(step == 0)
            loss.backward()
            if wrapper is None and step:
                model["b"].grad = torch.zeros(2)
            optimizer.step()
        if wrapper is not None:
            wrapper.close()
        return model["b"].detach().clone()

    torch.testing.assert_close(trained(has_rule=True), trained(has_rule=False))
