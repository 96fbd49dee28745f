"""Outer steps beside everything else that a wrapper does: checkpoints, copies, buffers, narrow types, infinities."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gossip_modules import (
    QSGD,
    DiLoCo,
    EagerDiLoCo,
    GASLoC,
    GossipDataParallel,
    LocalSGD,
    NoLoCo,
    RandomK,
    RingGraph,
    Schedule,
    SlowMo,
    SparseLoCo,
    StreamingDiLoCo,
    TopK,
    gossip,
)
from gossip_modules.compression import ChunkTopK, TwoBit
from gossip_modules.engine.lockstep import SyncEngine
from gossip_modules.extend import Algorithm, FlatBuffer, OuterMethod, ProcessGroupTransport, PushPull
from gossip_modules.graph_manager import NetworkXGraph
from gossip_modules.mixing_manager import UniformMixing
from gossip_modules.rounds.rounds import Rounds
from tests.harness.problems import fill_, loss_of, mlp, net, sgd, train_step
from tests.harness.progress import step_of
from tests.harness.ranks import CPU, TIMEOUT, run_ranks, solo_group
from tests.harness.reference import flatten
from tests.library.rounds.memories import drivers_of, memory_of, optimizer_of

METHODS: list[OuterMethod] = [
    DiLoCo(3),
    DiLoCo(3, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.05)),
    SlowMo(4, gossip_every=2),
    NoLoCo(3),
    GASLoC(3),
    SparseLoCo(3, compressor=ChunkTopK(3, 16, values=TwoBit(8))),
    DiLoCo(3, compressor=QSGD(4, bucket_size=8, unbiased=True)),
    DiLoCo(3, compressor=QSGD(4, bucket_size=8, unbiased=True), collective="all_reduce"),
]
NAMES_BUT_FIRST = [name for name, _ in net().named_children() if name != "first"]
LATE: list[OuterMethod] = [
    StreamingDiLoCo(4, fragments=2, delay=2),
    EagerDiLoCo(3, fragments=[["first"], NAMES_BUT_FIRST]),
    GASLoC(3, fragments=2, delay=1),
    SparseLoCo(3, compressor=RandomK(0.1), fragments=2, delay=1),
    StreamingDiLoCo(4, fragments=2, delay=2, compressor=QSGD(4, bucket_size=8, unbiased=True), error_decay=0.9),
    StreamingDiLoCo(4, fragments=2, delay=2, compressor=QSGD(8, unbiased=True), collective="all_reduce"),
    EagerDiLoCo(3, fragments=[["first"], NAMES_BUT_FIRST], compressor=QSGD(4, bucket_size=8, unbiased=True)),
]


def wrap(module: nn.Module, group: dist.ProcessGroup, outer: OuterMethod, **options: Any) -> GossipDataParallel:
    return GossipDataParallel(module, process_group=group, algorithm=outer, **options)


def test_a_step_of_the_outer_optimizer_runs_no_hook_for_all_optimizers() -> None:
    """Such hooks, as of a profiler and of the loop, are for the optimizers of the user."""

    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(net(), group, DiLoCo(1))
        optimizer, stepped = sgd(wrapper), set()
        with register_optimizer_step_pre_hook(lambda each, args, kwargs: stepped.add(id(each))):
            for step in range(3):
                train_step(wrapper, optimizer, group.rank(), step)
        assert id(optimizer) in stepped
        assert id(optimizer_of(wrapper)) not in stepped
        wrapper.close()

    run_ranks(2, body)


def test_an_anchor_in_host_memory_changes_no_bit() -> None:
    """Here the model is in host memory too. Where it is on a GPU: tests/end_to_end/test_gpu.py."""

    def body(group: dist.ProcessGroup, outer: OuterMethod) -> Tensor:
        model = net()
        wrapper, optimizer = wrap(model, group, outer), sgd(model)
        for step in range(7):
            train_step(wrapper, optimizer, group.rank(), step)
        wrapper.flush()
        anchors = [x for driver in drivers_of(wrapper) for x in driver.memory.vector("phi").parts]
        assert {x.device.type for x in anchors} == {"cpu"}
        wrapper.close()
        return flatten(model)

    def of_all(group: dist.ProcessGroup) -> None:
        for outer in (*METHODS, *LATE):
            in_host = replace(outer, anchor_device="cpu")
            assert str(in_host) == str(outer)  # ranks may differ in it
            assert torch.equal(body(group, in_host), body(group, outer)), outer

    run_ranks(2, of_all)
    with pytest.raises(ValueError, match="DiLoCo: got anchor_device='cuda', expected 'cpu', or None for the device of"):
        DiLoCo(anchor_device="cuda")


def test_the_state_of_another_method_or_model_is_refused() -> None:
    wrapper, other = wrap(mlp(), solo_group(), DiLoCo(1)), wrap(mlp(), solo_group(), SlowMo(1))
    with pytest.raises(ValueError, match="got the state of SlowMo, expected the state of DiLoCo; wrap as"):
        wrapper.set_extra_state(other.get_extra_state())
    plain = GossipDataParallel(mlp(), process_group=solo_group())
    with pytest.raises(ValueError, match=r"got state .*algorithm.* of another algorithm, expected none for PushSum"):
        plain.set_extra_state(wrapper.get_extra_state())
    loss_of(wrapper, 0, 0)
    small = wrap(nn.Linear(3, 2), solo_group(), DiLoCo(1))
    loss_of(small, 0, 0)
    small.set_extra_state(wrapper.get_extra_state())
    with pytest.raises(ValueError, match=r"got the state of vector 'phi' with \[26\] elements, expected \[8\]: other"):
        loss_of(small, 0, 1)
    for each in (wrapper, other, plain, small):
        each.close()


def test_state_without_outer_steps_starts_anew() -> None:
    model = mlp()
    wrapper = wrap(model, solo_group(), DiLoCo(2))
    for step in range(3):
        loss_of(wrapper, 0, step)
    with pytest.warns(UserWarning, match="holds no gossip state"):
        wrapper.load_state_dict({f"module.{name}": x for name, x in mlp(4).state_dict().items()})
    loss_of(wrapper, 0, 0)
    (phi,) = memory_of(wrapper).vector("phi").parts
    assert torch.equal(phi.sort().values, flatten(model).float().sort().values)
    assert step_of(wrapper) == 1
    wrapper.close()


def test_micro_batches_under_no_sync_are_one_step_and_averages_change_nothing() -> None:
    def body(group: dist.ProcessGroup, is_accumulated: bool) -> Tensor:
        model = mlp()
        wrapper, optimizer = wrap(model, group, DiLoCo(2)), sgd(model)
        for step in range(5):
            optimizer.zero_grad()
            if is_accumulated:
                with wrapper.no_sync():
                    (loss_of(wrapper, group.rank(), step) / 2).backward()
                (loss_of(wrapper, group.rank(), step) / 2).backward()
                with wrapper.averaged():
                    average = flatten(model)
                assert wrapper.consensus_distance() >= 0
                wrapper.settle()
                wrapper.flush()
                assert average.isfinite().all()
            else:
                loss_of(wrapper, group.rank(), step).backward()
            optimizer.step()
        wrapper.close()
        return flatten(model)

    once, again = (run_ranks(2, lambda group, flag=flag: body(group, flag)) for flag in (False, True))  # type: ignore[misc]
    torch.testing.assert_close(torch.stack(again), torch.stack(once), rtol=0, atol=1e-6)


def test_the_anchor_of_a_narrow_model_is_float32() -> None:
    model = mlp().bfloat16()
    wrapper = wrap(model, solo_group(), DiLoCo(1, lr=0.01, momentum=0.0))
    loss_of(wrapper, 0, 0)
    start = flatten(model)
    for step in range(50):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter + 1)
        loss_of(wrapper, 0, step)
    (phi,) = memory_of(wrapper).vector("phi").parts
    assert phi.dtype is torch.float32
    torch.testing.assert_close(flatten(model), start + 0.5, rtol=0, atol=0.02)  # in bfloat16 steps of 0.01 would stall
    model.float()  # the same tensors: the anchor stays
    loss_of(wrapper, 0, 0)
    assert memory_of(wrapper).vector("phi").parts[0] is phi
    wrapper.close()


@pytest.mark.parametrize("outer", [DiLoCo(2), SlowMo(2), NoLoCo(2), GASLoC(2)], ids=str)
def test_freezing_leaves_anchor_and_momentum_of_other_layers_as_they_are(outer: OuterMethod) -> None:
    """The layer that is trained throughout ends where it does if the other one is frozen from the beginning of steps.

    Its gradients do not depend on the other layer: the model is their sum.
    """

    def body(group: dist.ProcessGroup, frozen_at: int | None) -> Tensor:
        model = nn.ModuleList(fill_(nn.Linear(3, 2), 10 * k) for k in range(2))
        wrapper = wrap(_Sum(model), group, outer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(group.rank()))
        for step in range(16):
            if step == frozen_at:
                model[0].requires_grad_(False)
            optimizer.zero_grad()
            loss = wrapper(x).sum() * (1 + step % 3)
            loss.backward()
            optimizer.step()
        wrapper.close()
        return flatten(model[1])

    expected = run_ranks(2, lambda group: body(group, None))
    for result, other in zip(run_ranks(2, lambda group: body(group, 5)), expected, strict=True):
        torch.testing.assert_close(result, other)


class _Sum(nn.Module):
    """The sum of what its parts give."""

    def __init__(self, parts: nn.ModuleList) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x) for part in self.parts]).sum(0)


def test_new_tensors_begin_at_the_average() -> None:
    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        model: Any = mlp()
        model[0].requires_grad_(False)
        wrapper, optimizer = wrap(model, group, DiLoCo(2)), sgd(model)
        for step in range(3):
            train_step(wrapper, optimizer, group.rank(), step)
        (state,) = optimizer_of(wrapper).state.values()
        momentum = state["momentum_buffer"].clone()
        model[0].requires_grad_(True)
        for step in (3, 4):
            train_step(wrapper, optimizer, group.rank(), step)
        wrapper.close()
        assert momentum.norm() > 0
        return flatten(model[0]), flatten(model[2])

    # Around both: filters of warnings belong to the process, not to a thread.
    with pytest.warns(UserWarning, match="other tensors are trained than before; the new ones .* become their average"):
        one, other = run_ranks(2, body)
    assert all(torch.isfinite(x).all() for x in (*one, *other))


@pytest.mark.parametrize("outer", [DiLoCo(2), NoLoCo(2), GASLoC(2)], ids=str)
def test_a_rank_that_is_not_finite_raises_before_it_sends_anything(outer: OuterMethod) -> None:
    def body(group: dist.ProcessGroup, policy: str) -> bool:
        model = mlp()
        wrapper = wrap(model, group, outer, on_nonfinite=policy)
        for step in range(2):
            loss_of(wrapper, group.rank(), step)
        if group.rank() == 1:
            with torch.no_grad():
                next(model.parameters())[0, 0] = float("nan")
        if policy == "raise":
            if group.rank() == 1:
                with pytest.raises(FloatingPointError, match="rank 1: in round 0 its own model holds infinities"):
                    loss_of(wrapper, 1, 2)
            return True
        loss_of(wrapper, group.rank(), 2)
        is_finite = bool(flatten(model).isfinite().all())
        wrapper.close()
        return is_finite

    assert run_ranks(2, lambda group: body(group, "spread")) == [False, False]
    run_ranks(2, lambda group: body(group, "raise"))


@pytest.mark.parametrize(
    "outer",
    [
        StreamingDiLoCo(4, fragments=[["first"], NAMES_BUT_FIRST], delay=2),
        StreamingDiLoCo(2, fragments=[["first"], ["norm"], ["second"]], delay=1),  # the first two start in one step
        EagerDiLoCo(3, fragments=[["first"], NAMES_BUT_FIRST]),
        StreamingDiLoCo(4, fragments=[["first"], NAMES_BUT_FIRST], delay=2, compressor=QSGD(4)),
    ],
    ids=["streaming", "two-in-one-step", "eager", "compressed"],
)
def test_a_rank_that_takes_its_model_back_takes_the_step_again(outer: OuterMethod) -> None:
    """Where what a fragment would send is not finite, nothing that has come was applied and nothing was sent."""

    def body(group: dist.ProcessGroup, *, falls_ill: bool) -> tuple[Tensor, int]:
        assert not isinstance(outer.fragments, int)
        model = net()
        wrapper, num_raised = wrap(model, group, outer, timeout=TIMEOUT), 0
        optimizer = sgd(model)
        for step in range(10):
            starting = outer.starting_at(step)
            if falls_ill and group.rank() == 1 and starting:
                healthy = copy.deepcopy(model.state_dict())
                with torch.no_grad():
                    model.get_parameter(f"{outer.fragments[starting[-1]][0]}.weight")[0] = float("nan")
                with pytest.raises(FloatingPointError, match=r"rank 1: in round .* its own model holds infinities"):
                    loss_of(wrapper, 1, step)
                num_raised += 1
                model.load_state_dict(healthy)
            train_step(wrapper, optimizer, group.rank(), step)
        wrapper.flush()
        wrapper.close()
        return flatten(model), num_raised

    undisturbed = run_ranks(2, lambda group: body(group, falls_ill=False))
    results = run_ranks(2, lambda group: body(group, falls_ill=True))
    assert results[1][1] >= 4
    for (got, _), (want, _) in zip(results, undisturbed, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    "outer",
    [DiLoCo(2), SparseLoCo(2, compressor=TopK(1.0)), EagerDiLoCo(2, compressor=TopK(1.0))],
    ids=["diloco", "sparse", "eager"],
)
@pytest.mark.parametrize("num_shards", [2, 7])
def test_outer_steps_on_the_shards_of_a_node_are_those_of_the_whole(num_shards: int, outer: OuterMethod) -> None:
    """A small model has fewer elements than shards, of which some are empty then."""

    def engine() -> SyncEngine:
        gossiper = Rounds(outer, PushPull())
        transport = ProcessGroupTransport(solo_group(), device=CPU, timeout=TIMEOUT)
        gossiper.bind(UniformMixing(RingGraph(1)), transport)
        return SyncEngine(gossiper, Schedule())

    whole, cut = (FlatBuffer(net(), num_shards=num_shards).vector for _ in range(2))
    shards = [cut.shard(k, num_shards) for k in range(num_shards)]
    engines = [engine() for _ in shards]
    one = engine()
    start = whole.segments[0].clone()
    for step in range(7):
        for x in (whole.segments[0], cut.segments[0]):
            x.mul_(1 + 0.1 * step)
        has_changed = one.round(whole)
        assert [each.round(shard) for each, shard in zip(engines, shards, strict=True)] == [has_changed] * num_shards
        torch.testing.assert_close(cut.segments[0], whole.segments[0])
    assert not torch.equal(start, whole.segments[0])


def test_gossip_in_place_takes_outer_steps_too() -> None:
    model = gossip(mlp(), process_group=solo_group(), algorithm=DiLoCo(2, lr=1.0, momentum=0.0))
    for step in range(5):
        loss_of(model, 0, step)
    assert model.comm_stats()["num_rounds"] == 2
    model.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"algorithm": 2.0},
            r"got algorithm=2.0, expected an Algorithm such as DiLoCo\(\) or .*, its class",
        ),
        ({"algorithm": torch.optim.SGD}, "got algorithm=<class .*, expected an Algorithm such as DiLoCo"),
        ({"algorithm": StreamingDiLoCo(), "overlap": True}, "got overlap=True beside StreamingDiLoCo.*its delay says"),
        ({"init_sync": False}, "got init_sync=False beside DiLoCo.*all ranks move one anchor"),
        ({"algorithm": DiLoCo(), "graph": "ring"}, "got graph beside DiLoCo.*never gossips"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GossipDataParallel(mlp(), process_group=solo_group(), **{"algorithm": DiLoCo(), **options})


def test_weights_that_do_not_keep_the_mean_are_refused() -> None:
    graph = NetworkXGraph(nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)]))

    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(
            ValueError, match=r"NoLoCo: got .*expected doubly stochastic weights|rows do not sum to one"
        ):
            wrap(mlp(), group, NoLoCo(), mixing=UniformMixing(graph))

    run_ranks(3, body)


@pytest.mark.parametrize(
    "options", [{"overlap": True}, {"schedule": 2}, {"schedule": Schedule(average_every=3)}], ids=str
)
@pytest.mark.parametrize("outer", [DiLoCo(2), StreamingDiLoCo(4, fragments=2, delay=0), LocalSGD(2)], ids=str)
def test_the_other_arguments_go_with_outer_steps(outer: Algorithm, options: dict[str, Any]) -> None:
    """Models that were moved apart and never train become one, and stay finite."""

    def body(group: dist.ProcessGroup) -> Tensor:
        model = mlp()
        wrapper = GossipDataParallel(model, process_group=group, algorithm=outer, **options)
        loss_of(wrapper, group.rank(), 0)
        fill_(model, group.rank())
        for step in range(17):
            loss_of(wrapper, group.rank(), step)
        wrapper.close()
        return flatten(model)

    one, other = run_ranks(2, body)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
