"""Checkpoints with a round in flight: it is saved as it is, and a run that goes on from them has the same bits."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import (
    QSGD,
    RDA,
    DiLoCo,
    EagerDiLoCo,
    GASLoC,
    GossipDataParallel,
    LocalSGD,
    Membership,
    MuLoCo,
    NoLoCo,
    PULSELoCo,
    RandomK,
    SlowMo,
    SparseLoCo,
    StreamingDiLoCo,
)
from gossip_modules.extend import Average, Memory, OuterMethod, Round, Vector, Vectors
from tests.harness.problems import fill_, loss_of, mlp, net, sgd, train_step
from tests.harness.progress import engine_of
from tests.harness.ranks import run_ranks, solo_group
from tests.harness.reference import flatten

NAMES_BUT_FIRST = [name for name, _ in net().named_children() if name != "first"]
BY_NAME = [["first"], NAMES_BUT_FIRST]
CASES: dict[str, dict[str, Any]] = {
    "LocalSGD, delay 3": {"algorithm": LocalSGD(4, delay=3)},
    "DiLoCo, delay 3": {"algorithm": DiLoCo(4, delay=3)},
    "DiLoCo, adaptive": {"algorithm": DiLoCo(4, delay=3, arrival="adaptive")},
    "DiLoCo, Adam": {
        "algorithm": DiLoCo(4, delay=2, optimizer=lambda x: torch.optim.Adam(x, lr=0.05), arrival="carry")
    },
    "DiLoCo, codes in two phases": {
        "algorithm": DiLoCo(3, delay=2, compressor=QSGD(4, bucket_size=8, unbiased=True), collective="all_reduce")
    },
    "DiLoCo, compressed": {"algorithm": DiLoCo(3, delay=2, compressor=QSGD(4, bucket_size=8, unbiased=True))},
    "DiLoCo, by tokens": {"algorithm": DiLoCo(4, delay=2, weighted_by="tokens")},
    "DiLoCo, RDA": {"algorithm": DiLoCo(4, delay=2, merge=RDA(without=["first"]))},
    "streaming": {"algorithm": StreamingDiLoCo(4, fragments=2, delay=3)},
    "streaming, compressed": {
        "algorithm": StreamingDiLoCo(4, fragments=2, delay=2, compressor=QSGD(4, bucket_size=8, unbiased=True))
    },
    "eager": {"algorithm": EagerDiLoCo(3, fragments=BY_NAME)},
    "eager, compressed": {
        "algorithm": EagerDiLoCo(3, fragments=BY_NAME, compressor=QSGD(4, bucket_size=8, unbiased=True))
    },
    "MuLoCo": {"algorithm": MuLoCo(4, delay=2)},
    "SlowMo": {"algorithm": SlowMo(3, delay=2)},
    "NoLoCo": {"algorithm": NoLoCo(3, delay=2)},
    "GASLoC": {"algorithm": GASLoC(3, fragments=2, delay=1)},
    "SparseLoCo": {"algorithm": SparseLoCo(3, compressor=RandomK(0.1), fragments=2, delay=2)},
    "PULSELoCo": {"algorithm": PULSELoCo(3, fragments=2, delay=2)},
    "host memory": {"algorithm": DiLoCo(4, delay=3, anchor_device="cpu")},
}
PLACES, LAST = (5, 6, 9), 14


def run(
    group: dist.ProcessGroup, case: dict[str, Any], *, seed: int, first: int, saved: Any = None
) -> tuple[Tensor, Any]:
    """Train from step `first` to the last step; return the parameters and the checkpoints at `PLACES`."""
    model, checkpoints = net(seed), {}
    wrapper, optimizer = GossipDataParallel(model, process_group=group, **case), sgd(model)
    if saved is not None:
        loss_of(wrapper, group.rank(), 0)  # it has an anchor of its own already
        wrapper.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(first, LAST):
        if step in PLACES:
            file = io.BytesIO()
            torch.save({"model": wrapper.state_dict(), "optimizer": optimizer.state_dict()}, file)
            checkpoints[step] = file.getvalue()
        train_step(wrapper, optimizer, group.rank(), step)
        if "tokens" in str(case):
            wrapper.count_tokens(1 + (group.rank() + 2 * step) % 5)
    result = flatten(model).clone()
    wrapper.close()
    return result, checkpoints


@pytest.mark.parametrize("name", CASES)
def test_a_round_in_flight_is_saved_as_it_is(name: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        case = CASES[name]
        expected, checkpoints = run(group, case, seed=0, first=0)
        has_flights = False
        for place, file in checkpoints.items():
            saved = torch.load(io.BytesIO(file), weights_only=True)
            has_flights |= bool(saved["model"]._metadata[""]["gossip_state"].get("flights"))
            found, again = run(group, case, seed=5, first=place, saved=saved)
            assert torch.equal(found, expected), place
            assert torch.load(io.BytesIO(again[place]), weights_only=True)["model"].keys() == saved["model"].keys()
        assert has_flights, "a checkpoint was saved with a round in flight"

    run_ranks(2, body)


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_changes_no_bit_of_the_run(name: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        expected, _ = run(group, CASES[name], seed=0, first=0)
        model = net(0)
        wrapper, optimizer = GossipDataParallel(model, process_group=group, **CASES[name]), sgd(model)
        for step in range(LAST):
            train_step(wrapper, optimizer, group.rank(), step)
            if "tokens" in str(CASES[name]):
                wrapper.count_tokens(1 + (group.rank() + 2 * step) % 5)
        assert torch.equal(flatten(model), expected)
        wrapper.close()

    run_ranks(2, body)


@dataclass(frozen=True)
class KeepsTensor(OuterMethod):
    """Local SGD whose round keeps a tensor, outside the memory, until the reply comes."""

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        sent = m.scratch().set_(v.x)
        before = v.x.parts[0].clone()
        yield Average(sent)
        v.x.add_(sent).sub_(Vector([before]))


def test_a_round_that_keeps_a_tensor_of_its_own_is_applied_before_a_save() -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = GossipDataParallel(mlp(), process_group=group, algorithm=KeepsTensor(4, delay=3))
        optimizer = sgd(wrapper)
        for step in range(6):
            train_step(wrapper, optimizer, group.rank(), step)
        assert engine_of(wrapper).is_in_flight
        state = wrapper.state_dict()
        assert not engine_of(wrapper).is_in_flight
        assert "flights" not in state._metadata[""]["gossip_state"]
        wrapper.close()


def checkpoint_of(wrapper: GossipDataParallel) -> Any:
    """The state dict of a wrapper, as a file has it."""
    file = io.BytesIO()
    torch.save(wrapper.state_dict(), file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def has_flights(state_dict: Any) -> bool:
    return "flights" in state_dict._metadata[""]["gossip_state"]


def trained(group: dist.ProcessGroup, num_steps: int, module: nn.Module, **options: Any) -> GossipDataParallel:
    """A wrapper after steps."""
    wrapper = GossipDataParallel(module, process_group=group, **options)
    optimizer = sgd(wrapper.module)
    for step in range(num_steps):
        train_step(wrapper, optimizer, group.rank(), step)
    return wrapper


def test_a_round_under_training_is_applied_in_a_run_without_overlap() -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = trained(group, 5, mlp(0), overlap=True)
        saved = checkpoint_of(wrapper)
        assert has_flights(saved)
        wrapper.settle()
        expected = flatten(wrapper.module).clone()
        wrapper.close()
        resumed = GossipDataParallel(mlp(5), process_group=group)
        resumed.load_state_dict(saved)
        assert not torch.equal(flatten(resumed.module), expected), "the round is in flight"
        assert not has_flights(checkpoint_of(resumed)), "a state of a run without overlap has no such round"
        assert torch.equal(flatten(resumed.module), expected)
        resumed.load_state_dict(saved)
        train_step(resumed, sgd(resumed.module), group.rank(), 5)
        assert not resumed._local.engine.is_in_flight
        resumed.close()

    run_ranks(2, body)


OTHER_SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no delay": ({"algorithm": LocalSGD(4, delay=3)}, {"algorithm": LocalSGD(4)}),
    "overlap": ({"algorithm": SlowMo(4, delay=3)}, {"algorithm": SlowMo(4), "overlap": True}),
    "a compressor": (
        {"algorithm": DiLoCo(4, delay=3)},
        {"algorithm": DiLoCo(4, delay=3, compressor=QSGD(4, bucket_size=8, unbiased=True))},
    ),
    "no compressor": (
        {"algorithm": DiLoCo(4, delay=3, compressor=QSGD(4, bucket_size=8, unbiased=True))},
        {"algorithm": DiLoCo(4, delay=3)},
    ),
}


@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_a_round_of_other_settings_is_left_out_with_a_warning(name: str) -> None:
    before, after = OTHER_SETTINGS[name]

    def body(group: dist.ProcessGroup) -> None:
        wrapper = trained(group, 5, mlp(0), **before)
        saved = checkpoint_of(wrapper)
        wrapper.close()
        assert has_flights(saved)
        resumed = GossipDataParallel(mlp(5), process_group=group, **after)
        with pytest.warns(UserWarning, match=r"got a checkpoint with a round in flight of .*: the round is left out"):
            resumed.load_state_dict(saved)
        optimizer = sgd(resumed.module)
        for step in range(5, 11):
            train_step(resumed, optimizer, group.rank(), step)
        resumed.close()

    with warnings.catch_warnings():  # which all threads share
        warnings.simplefilter("always")
        run_ranks(1, body)


@pytest.mark.parametrize("options", [{"overlap": True}, {"algorithm": LocalSGD(4, delay=3)}])
@pytest.mark.parametrize("change", ["other tensors", "other dtypes"])
def test_a_round_in_flight_of_other_tensors_is_refused_before_anything_changes(
    options: dict[str, Any], change: str
) -> None:
    def module(seed: int, *, is_saved: bool) -> nn.Module:
        found = fill_(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)), seed)
        if change == "other dtypes":  # of one size
            return found.to(torch.bfloat16 if is_saved else torch.float16)
        found.get_submodule("0" if is_saved else "1").requires_grad_(False)
        return found

    def body(group: dist.ProcessGroup) -> None:
        wrapper = trained(group, 5, module(0, is_saved=True), **options)
        saved = checkpoint_of(wrapper)
        wrapper.close()
        assert has_flights(saved)
        resumed = GossipDataParallel(module(5, is_saved=False), process_group=group, **options)
        before = flatten(resumed.module).clone()
        with pytest.raises(ValueError, match=r"got a checkpoint with a round in flight that has '.*' where this model"):
            resumed.load_state_dict(saved)
        assert torch.equal(flatten(resumed.module), before)
        assert not resumed._local.engine.is_in_flight
        resumed.close()

    run_ranks(2, body)


def test_a_round_in_flight_is_applied_before_a_checkpoint_with_more_trained_tensors() -> None:
    def body(group: dist.ProcessGroup) -> None:
        module = mlp(0)
        module.get_submodule("0").requires_grad_(False)
        wrapper = trained(group, 5, module, overlap=True)
        assert has_flights(checkpoint_of(wrapper))
        module.get_submodule("0").requires_grad_(True)
        saved = checkpoint_of(wrapper)
        assert not has_flights(saved)
        wrapper.close()
        resumed = GossipDataParallel(mlp(5), process_group=group, overlap=True)
        resumed.load_state_dict(saved)
        optimizer = sgd(resumed.module)
        for step in range(5, 8):
            train_step(resumed, optimizer, group.rank(), step)
        resumed.close()

    run_ranks(2, body)


@pytest.mark.parametrize("name", ["SlowMo", "streaming", "GASLoC", "host memory"])
@pytest.mark.parametrize("is_closed", [False, True])
def test_a_round_of_a_checkpoint_is_applied_before_any_step(name: str, is_closed: bool) -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = trained(group, 5, net(0), **CASES[name])
        saved = checkpoint_of(wrapper)
        assert has_flights(saved)
        wrapper.eval()
        expected = flatten(wrapper.module).clone()
        wrapper.close()
        resumed = GossipDataParallel(net(5), process_group=group, **CASES[name])
        resumed.load_state_dict(saved)
        if not is_closed:
            resumed.eval()
            assert torch.equal(flatten(resumed.module), expected)
        resumed.close()
        assert torch.equal(flatten(resumed.module), expected)

    run_ranks(2, body)


def test_a_membership_leaves_out_a_round_in_flight_with_a_warning() -> None:
    wrapper = trained(solo_group(), 5, mlp(0), overlap=True)
    saved = checkpoint_of(wrapper)
    wrapper.close()
    assert has_flights(saved)
    membership = Membership(dist.HashStore(), min_workers=1, host="127.0.0.1")
    elastic = GossipDataParallel(mlp(5), membership=membership, overlap=True)
    with pytest.warns(UserWarning, match=r"a round in flight of overlap=True, expected none for a membership"):
        elastic.load_state_dict(saved)
    optimizer = sgd(elastic.module)
    for step in membership.steps(3):
        train_step(elastic, optimizer, 0, step)
    elastic.close()
