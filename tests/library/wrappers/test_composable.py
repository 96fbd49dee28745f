"""gossip(module): the arithmetic of GossipDataParallel, with the names and the class of the bare model."""

from __future__ import annotations

import copy
import inspect
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import BilatGossipDataParallel, GossipDataParallel
from gossip_modules.wrappers.composable import GossipModule, gossip
from tests.harness.problems import batch, mlp, net, sgd
from tests.harness.ranks import run_ranks, solo_group
from tests.harness.reference import flatten
from tests.library.wrappers.wrapping import irregular


def steps(model: Any, rank: int, num_steps: int, parameters: nn.Module) -> None:
    """A plain training loop, with two micro-batches per step."""
    optimizer = sgd(parameters)
    for step in range(num_steps):
        x, y = batch(rank, step)
        with model.no_sync():
            nn.functional.mse_loss(model(x), y).backward()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("options", [{}, {"graph": irregular()}, {"push_sum": False}, {"overlap": True}], ids=str)
def test_it_trains_bit_for_bit_as_the_wrapper(options: dict[str, Any]) -> None:
    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor, dict[str, float], dict[str, float]]:
        wrapped, bare = net(group.rank()), net(group.rank())
        wrapper = GossipDataParallel(wrapped, process_group=group, init_sync=False, **options)
        steps(wrapper, group.rank(), 5, wrapped)
        wrapper.close()
        model = gossip(bare, process_group=group, init_sync=False, **options)
        assert model is bare
        steps(model, group.rank(), 5, model)
        model.close()
        return flatten(wrapped), flatten(bare), wrapper.comm_stats(), model.comm_stats()

    for expected, found, expected_stats, found_stats in run_ranks(3, body):
        assert torch.equal(found, expected)
        for name in ("bytes_sent", "num_rounds"):
            assert found_stats[name] == expected_stats[name]


def test_the_module_keeps_its_class_and_its_names() -> None:
    plain = mlp()
    names, keys = [name for name, _ in plain.named_parameters()], list(plain.state_dict())
    model = gossip(plain, process_group=solo_group())
    assert isinstance(model, GossipModule)
    assert isinstance(model, type(mlp()))
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == keys
    mlp().load_state_dict(model.state_dict())  # a plain model takes it
    model.close()


class Saving(nn.Linear):
    """As a tool does that notes the class of a model beside its weights."""

    class Inner(nn.Linear):
        """A class in a class."""

    def save(self) -> tuple[Any, ...]:
        """All that names a class."""
        kinds = (type(self), self.__class__)
        return (
            *((kind.__name__, kind.__qualname__, kind.__module__, kind.__doc__) for kind in kinds),
            self.__class__ is Saving,
            repr(self),
            repr(type(self)),
            self._get_name(),
        )


def test_tools_that_go_by_the_class_find_the_plain_one() -> None:
    expected = Saving(2, 1).save()
    model: Any = gossip(Saving(2, 1), process_group=solo_group())
    assert model.save() == expected
    with model.averaged() as averaged:
        assert averaged.save() == expected
    twin = copy.deepcopy(model)
    assert twin.save() == expected
    assert isinstance(twin, GossipModule)
    assert pickle.dumps(model.__class__) == pickle.dumps(Saving)  # by name
    assert inspect.getsource(type(model)) == inspect.getsource(Saving)
    for each in (twin, model):
        each.close()
    model = gossip(Saving.Inner(2, 1), process_group=solo_group())
    assert type(model).__qualname__ == Saving.Inner.__qualname__
    model.close()


def test_a_module_that_gets_another_class_goes_on_gossiping() -> None:
    model = gossip(Saving(2, 1), process_group=solo_group())
    nn.utils.parametrizations.weight_norm(model)  # it makes a class of model.__class__, and sets it
    assert model.__class__.__name__ == "ParametrizedSaving"
    assert isinstance(model, GossipModule)
    model.close()
    wrapper = GossipDataParallel(model, process_group=solo_group())
    assert type(model) is model.__class__
    assert type(model).__name__ == "ParametrizedSaving"
    wrapper.close()


@pytest.mark.e2e
def test_transformers_saves_the_name_of_the_model(tmp_path: Path) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    model = gossip(GPT2LMHeadModel(config), process_group=solo_group())
    assert model.__class__ is MODEL_FOR_CAUSAL_LM_MAPPING[GPT2Config]
    with model.averaged():
        model.save_pretrained(tmp_path)
    model.close()
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]


def test_a_part_of_a_container_is_plain() -> None:
    model = gossip(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), process_group=solo_group())
    assert isinstance(model, nn.Sequential)
    assert type(model[:1]) is nn.Sequential
    model.close()


def test_a_checkpoint_continues_bit_for_bit() -> None:
    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"process_group": group, "init_sync": False, "graph": irregular()}
        whole, first = (gossip(net(group.rank()), **options) for _ in range(2))
        steps(whole, group.rank(), 3, whole)
        steps(first, group.rank(), 3, first)
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        first.close()
        second = gossip(net(17), **options)
        second.load_state_dict(torch.load(file, weights_only=True))
        assert second.state_dict()._metadata[""]["gossip_state"]["engine"]["t"] == 3
        for model in (whole, second):
            steps(model, group.rank(), 3, model)
            model.close()
        return flatten(whole), flatten(second)

    for expected, found in run_ranks(3, body):
        assert torch.equal(found, expected)


def test_a_plain_checkpoint_starts_anew_with_a_warning() -> None:
    model = gossip(mlp(), process_group=solo_group())
    with pytest.warns(UserWarning, match="the state dict holds no gossip state"):
        model.load_state_dict(dict(mlp().state_dict()))
    model.close()


def test_a_copy_gossips_by_itself() -> None:
    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
        model = gossip(mlp(group.rank()), process_group=group, init_sync=False)
        twin: Any = copy.deepcopy(model)
        assert twin._gossip.module is twin
        before = flatten(model)
        steps(twin, group.rank(), 4, twin)
        assert torch.equal(flatten(model), before)
        steps(model, group.rank(), 4, model)
        for each in (twin, model):
            each.close()
        return before, flatten(model), flatten(twin)

    for before, own, twins in run_ranks(2, body):
        assert torch.equal(own, twins)
        assert not torch.equal(own, before)


class MakesItsCopies(nn.Module):
    """A module whose class says how it is copied."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The linear layer."""
        y: Tensor = self.linear(x)
        return y

    def __reduce__(self) -> Any:
        return _copied, (self.linear.in_features, dict(self.linear.state_dict()))


def _copied(width: int, state: dict[str, Tensor]) -> MakesItsCopies:
    module = MakesItsCopies(width)
    module.linear.load_state_dict(state)
    return module


def test_a_copy_that_the_class_makes_is_plain() -> None:
    model = gossip(MakesItsCopies(3), process_group=solo_group())
    twin = copy.deepcopy(model)
    assert type(twin) is MakesItsCopies
    assert torch.equal(flatten(twin), flatten(model))
    assert twin(torch.ones(1, 3)).shape == (1, 3)
    model.close()


def test_averages_and_modes_of_the_wrapper() -> None:
    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor, float, dict[str, Tensor]]:
        model = gossip(mlp(group.rank()), process_group=group, init_sync=False)
        start = flatten(model)
        distance = model.consensus_distance()
        with model.averaged() as averaged:
            assert averaged is model
            mean = flatten(model)
        assert torch.equal(flatten(model), start)
        state = model.averaged_state_dict()
        assert model.eval() is model
        model.double()
        model(torch.ones(1, 3, dtype=torch.float64))
        assert model.comm_stats()["num_rounds"] == 0
        model.settle()
        model.average_()
        model.flush()
        model.close()
        model.close()
        return start, mean, distance, state

    starts, means, distances, states = zip(*run_ranks(2, body), strict=True)
    mean = torch.stack(starts).mean(0)
    for rank in range(2):
        torch.testing.assert_close(means[rank], mean)
        assert distances[rank] == pytest.approx(float((starts[0] - mean).norm()), rel=1e-5)
    plain = mlp(5)
    plain.load_state_dict(states[0])
    torch.testing.assert_close(flatten(plain), mean)
    assert states[1] == {}


@pytest.mark.parametrize("change", [nn.Module.eval, nn.Module.double])
def test_modes_and_casts_apply_the_correction_in_flight(change: Callable[[nn.Module], nn.Module]) -> None:
    """`nn.Module` has no hook for them, so the class of the module has them: see docs/decisions/wrappers.md."""

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        model = gossip(mlp(group.rank()), process_group=group, init_sync=False, overlap=True)
        steps(model, group.rank(), 3, model)
        before = flatten(model)
        change(model)
        after = flatten(model)
        model.flush()
        assert torch.equal(flatten(model), after)
        model.close()
        return before, after

    (before, after), (other_before, other_after) = run_ranks(2, body)
    assert not torch.equal(before, after.to(before.dtype))
    torch.testing.assert_close((after + other_after).to(before.dtype), before + other_before)


class Closing(nn.Linear):
    def close(self) -> None:
        """A method of the user's own."""


def test_options_that_cannot_work_are_refused() -> None:
    group = solo_group()
    with pytest.raises(ValueError, match=r"got a Closing that has close of its own.*use GossipDataParallel"):
        gossip(Closing(2, 1), process_group=group)
    with pytest.raises(ValueError, match=r"got nprocs_per_node=2 for gossip\(\), expected 1.*use GossipDataParallel"):
        gossip(mlp(), nprocs_per_node=2)
    with pytest.raises(ValueError, match=r"got <class.*in gossip\(\), expected a torch.nn.Module"):
        gossip(nn.Linear)  # type: ignore[arg-type]
    model = gossip(mlp(), process_group=group)
    for wrap in (gossip, GossipDataParallel, BilatGossipDataParallel):
        with pytest.raises(ValueError, match=r"that is a Sequential, which gossip\(\) made"):
            wrap(model, process_group=group)
    model.close()


class Sealed(nn.Linear):
    """A class without subclasses."""

    def __init_subclass__(cls) -> None:
        raise TypeError("Sealed is final")


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Sealed, r"got a Sealed, of which gossip\(\) can make no subclass: Sealed is final; .*GossipDataParallel"),
        (lambda *sizes: torch.jit.script(nn.Linear(*sizes)), r"got a torch.jit.ScriptModule, expected a module of Pyt"),
        (
            lambda *sizes: nn.Sequential(torch.jit.trace(nn.Linear(*sizes), torch.ones(1, sizes[0]))),
            r"got '0', a torch.jit.ScriptModule, expected a module of Python",
        ),
    ],
)
def test_a_module_that_cannot_be_changed_is_refused_before_it_is(make: Callable[..., nn.Module], message: str) -> None:
    module = make(2, 1)
    plain, storages = type(module), [parameter.data_ptr() for parameter in module.parameters()]
    with pytest.raises(ValueError, match=message):
        gossip(module, process_group=solo_group())
    assert type(module) is plain
    assert [parameter.data_ptr() for parameter in module.parameters()] == storages
    assert module(torch.ones(1, 2)).shape == (1, 1)


class Direct(nn.Linear):
    """Computes without the hooks of nn.Module."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)


def test_a_class_that_may_run_no_hooks_is_told_so() -> None:
    with pytest.warns(UserWarning, match=r"got a Direct that has a __call__ of its own, .*use GossipDataParallel"):
        gossip(Direct(2, 2), process_group=solo_group()).close()
