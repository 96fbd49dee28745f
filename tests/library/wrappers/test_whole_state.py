"""State dicts in the hands of other tools: torch.distributed.checkpoint, and whatever keeps tensors by name."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from gossip_modules import (
    D2,
    AllReduceDataParallel,
    BilatGossipDataParallel,
    DiLoCo,
    GossipDataParallel,
    GroupAverageDataParallel,
    gossip,
)
from gossip_modules.wrappers.state import WholeState, belongs_to, fingerprint, place_of, place_tensor
from tests.harness.problems import loss_of, mlp, net, train_step
from tests.harness.ranks import run_ranks, solo_group
from tests.harness.reference import flatten

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized",
    "ignore:TypedStorage is deprecated",  # torch 2.7, of itself
)
_dcp_lock = threading.Lock()  # ranks are threads here, and it has state of its own in modules


def recipe_key(group: dist.ProcessGroup) -> str:
    return f"rank {group.rank()} of {group.size()}"


def test_the_state_of_a_method_is_one_value_that_reads_like_a_dict() -> None:
    wrapper = GossipDataParallel(mlp(), process_group=solo_group(), algorithm=D2())
    state = wrapper.get_extra_state()
    engine = state["engine"]
    assert engine["t"] == engine.get("t") == 0
    assert engine.get("other", 1) == 1
    assert "t" in engine
    assert len(engine) == len(list(engine)) == len({**engine}) == len(engine.values())
    assert engine == dict(engine.items()) == wrapper.get_extra_state()["engine"]
    assert repr(engine) == repr(dict(engine))
    for step in range(2):
        loss_of(wrapper, 0, step)
    copied = copy.deepcopy(wrapper.get_extra_state())
    assert isinstance(copied["engine"], WholeState), "which asynchronous saves take"
    file = io.BytesIO()
    torch.save(wrapper.get_extra_state(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded["engine"]) is OrderedDict, "nothing of ours is in the file"
    wrapper.set_extra_state(None)
    wrapper.set_extra_state(loaded)
    assert str(wrapper.get_extra_state()) == str(copied)
    wrapper.close()


# Whose it is.


WRAPPERS: list[Callable[..., Any]] = [
    GossipDataParallel,
    BilatGossipDataParallel,
    GroupAverageDataParallel,
    gossip,
]


@pytest.mark.filterwarnings("ignore:the state dict holds no gossip state")
@pytest.mark.parametrize("make", WRAPPERS)
def test_tensors_of_another_rank_are_refused_by_their_keys_alone(make: Callable[..., Any]) -> None:
    """By any tool that keeps tensors and no metadata; those of the rank itself load."""
    files: list[dict[str, torch.Tensor]] = [{}, {}]

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        model = make(mlp(rank), process_group=group, init_sync=False)
        files[rank] = {name: x.clone() for name, x in model.state_dict().items()}
        assert place_of(files[rank]["_extra_state"]) == {"rank": rank, "world_size": 2}
        before = flatten(model)
        model.consensus_distance()  # both have saved
        with pytest.raises(
            ValueError, match=rf"got the state of rank {1 - rank} of 2, expected that of rank {rank} of"
        ):
            model.load_state_dict(files[1 - rank])
        assert torch.equal(flatten(model), before), "nothing was changed"
        model.load_state_dict(files[rank])
        model.load_state_dict(model.state_dict())
        assert "_extra_state" not in model.averaged_state_dict(rank0_only=False)
        model.settle()
        model.close()

    run_ranks(2, body)


def test_a_checkpoint_that_torch_distributed_checkpoint_has_mixed_is_refused(tmp_path: Path) -> None:
    """It takes each tensor from one rank, and loads into the tensors of the model."""

    def body(group: dist.ProcessGroup) -> None:
        wrapper = GossipDataParallel(mlp(group.rank()), process_group=group, init_sync=False)
        if group.rank() == 1:
            with _dcp_lock:
                dcp.save(wrapper.state_dict(), checkpoint_id=tmp_path, no_dist=True)
        wrapper.consensus_distance()  # it has saved
        state = wrapper.state_dict()
        with _dcp_lock:
            dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
        if group.rank() == 1:
            wrapper.load_state_dict(state)
        else:
            with pytest.raises(ValueError, match=r"got the state of rank 1 of 2, .* Save and load model.checkpoint"):
                wrapper.load_state_dict(state)
        wrapper.close()

    run_ranks(2, body)


def test_keys_cut_to_those_of_the_module_load_into_it_alone() -> None:
    states: list[dict[str, Any]] = [{}, {}]

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        wrapper = GossipDataParallel(mlp(rank), process_group=group, init_sync=False)
        states[rank] = {name.removeprefix("module."): x.clone() for name, x in wrapper.state_dict().items()}
        wrapper.consensus_distance()
        wrapper.module.load_state_dict(states[rank])
        with pytest.raises(ValueError, match=r"got the state of rank \d of 2, expected that of rank \d of 2"):
            wrapper.module.load_state_dict(states[1 - rank])
        copied = copy.deepcopy(wrapper.module)
        copied.load_state_dict(states[rank])
        wrapper.close()
        assert b"gossip_modules" not in pickle.dumps(copied), "a module needs this library no more than before"
        pickle.loads(pickle.dumps(copied)).load_state_dict(mlp(3).state_dict())  # noqa: S301

    run_ranks(2, body)


def test_a_state_dict_without_the_key_still_loads() -> None:
    """Of an older version, or of DistributedDataParallel."""

    def body(group: dist.ProcessGroup) -> None:
        wrapper, other = (GossipDataParallel(net(k), process_group=group) for k in range(2))
        for step in range(2):
            loss_of(wrapper, group.rank(), step)
        state = wrapper.state_dict()
        del state["_extra_state"]
        other.load_state_dict(state)
        assert other.get_extra_state() == wrapper.get_extra_state()
        for each in (wrapper, other):
            each.close()

    run_ranks(2, body)


class Counting(nn.Linear):
    """A module with extra state of its own."""

    number = 3

    def get_extra_state(self) -> int:
        """The number."""
        return self.number

    def set_extra_state(self, state: int) -> None:
        """Take the number."""
        self.number = state


def test_the_extra_state_of_a_module_is_left_alone() -> None:
    def body(group: dist.ProcessGroup) -> None:
        for wrap in (GossipDataParallel, gossip):
            first, second = Counting(2, 1), Counting(2, 1)
            second.number = 4
            one, two = wrap(first, process_group=group), wrap(second, process_group=group)
            two.load_state_dict(one.state_dict())
            assert second.number == 3
            first.number = 5
            second.load_state_dict(first.state_dict())
            assert second.number == 5
            one.close()
            two.close()

    run_ranks(2, body)


def test_a_place_is_two_numbers() -> None:
    tensor = place_tensor(1023, 4096)
    assert tensor.shape == (2,)
    assert place_of(tensor) == place_of(tensor[:1]) == {"rank": 1023, "world_size": 4096}


@pytest.mark.filterwarnings("ignore:the state dict holds no gossip state")
@pytest.mark.parametrize("wrap", [GossipDataParallel, gossip])
@pytest.mark.parametrize("has_outer", [False, True])
def test_tensors_of_other_ranks_beside_the_place_of_this_one_are_refused(wrap: Any, has_outer: bool) -> None:
    """By whatever tool; not those of which the user has left some out, or the place."""

    def body(group: dist.ProcessGroup) -> None:
        model = wrap(mlp(group.rank()), process_group=group, init_sync=False)
        outer = nn.Sequential(model) if has_outer else model
        before = flatten(model)
        state = outer.state_dict()
        name = next(name for name in state if name.endswith("2.bias"))
        mixed = {**state, name: torch.zeros(2, dtype=torch.float64)}
        message = rf"of rank {group.rank()} of 2 with other tensors than .* load model.checkpoint.* remove the key '"
        with pytest.raises(ValueError, match=message):
            outer.load_state_dict(mixed)
        inner = model.module if wrap is GossipDataParallel else model
        with pytest.raises(ValueError, match=message):
            inner.load_state_dict({key[2 * has_outer :].removeprefix("module."): x for key, x in mixed.items()})
        assert torch.equal(flatten(model), before), "nothing was changed"
        outer.load_state_dict({key: x for key, x in mixed.items() if key != name}, strict=False)
        outer.load_state_dict({key: x for key, x in mixed.items() if not key.endswith("_extra_state")})
        assert not inner.get_parameter("2.bias").any()
        model.close()

    run_ranks(2, body)


@pytest.mark.parametrize("wrap", [GossipDataParallel, AllReduceDataParallel])
def test_an_empty_state_dict_is_refused_with_the_remedy(wrap: Any) -> None:
    """As torch.distributed.checkpoint.state_dict gives it to all ranks but one, with `broadcast_from_rank0`."""
    message = r"got an empty state dict to load into a \w+, .* broadcast_from_rank0=True, give it wrapper.module"
    run_ranks(1, lambda group: _load_nothing(wrap(mlp(), process_group=group), message))


def _load_nothing(wrapper: nn.Module, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        wrapper.load_state_dict({})


def test_a_fingerprint_depends_on_names_and_numbers() -> None:
    x = torch.linspace(0, 1, 5000).view(50, 100)
    number = fingerprint({"x": x, "y": 3})
    assert number == fingerprint({"y": 4, "x": x.clone()}) < 2**63
    for other in ({"x": x}, {"x": x.double(), "y": 3}, {"x": x.T, "y": 3}, {"x": x + 1, "y": 3}):
        assert number != fingerprint(other)
    assert number >> 32 == fingerprint({"x": x + 1, "y": 3}) >> 32


def test_a_place_knows_its_state() -> None:
    state = {"engine": {"t": 3, "q": torch.zeros(2, 3), "rates": [0.1, None]}, "is_due": True}
    tensor = place_tensor(2**21 - 1, 2**21 - 1, state)
    assert place_of(tensor) == {"rank": 2**21 - 1, "world_size": 2**21 - 1}
    assert belongs_to(tensor, copy.deepcopy(state))
    assert belongs_to(tensor, {**state, "engine": WholeState(state["engine"])})  # type: ignore[arg-type]
    for other in ({"t": 4}, {"q": torch.zeros(3, 2)}, {"rates": [0.2, None]}, {"new": 1}):
        assert not belongs_to(tensor, {**state, "engine": {**state["engine"], **other}})  # type: ignore[dict-item]
    assert not belongs_to(tensor, None)


@pytest.mark.parametrize("wrap", [GossipDataParallel, gossip])
def test_tensors_that_a_tool_puts_beside_another_state_have_none(wrap: Any, tmp_path: Path) -> None:
    """A state dict of the new wrapper is filled, and keeps the metadata of the new wrapper."""

    def body(group: dist.ProcessGroup) -> None:
        folder, key = tmp_path / str(group.rank()), recipe_key(group)
        old = wrap(mlp(), process_group=group, algorithm=DiLoCo(sync_every=2))
        optimizer = torch.optim.SGD(old.parameters(), lr=0.1)
        for step in range(3):
            train_step(old, optimizer, group.rank(), step)
        new = wrap(mlp(), process_group=group, algorithm=DiLoCo(sync_every=2))
        with _dcp_lock:
            dcp.save({key: old.state_dict()}, checkpoint_id=folder, no_dist=True)
            state = {key: new.state_dict()}
            dcp.load(state, checkpoint_id=folder, no_dist=True)
            new.load_state_dict(state[key])
        new.load_state_dict(old.state_dict())  # these belong together: no warning
        old.close()
        new.close()

    with pytest.warns(UserWarning, match=r"holds no gossip state") as caught:
        run_ranks(2, body)
    assert sum("holds no gossip state" in str(warning.message) for warning in caught) == 2  # one for each rank
