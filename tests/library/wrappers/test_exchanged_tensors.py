"""The exchanged tensors change during training: on all ranks alike, or with an error that names the tensor."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from gossip_modules import (
    D2,
    Choco,
    DiLoCo,
    GossipDataParallel,
    PowerGossip,
    RelaySGD,
    RingGraph,
    Schedule,
    SignNorm,
    SlowMo,
    StreamingDiLoCo,
)
from tests.harness.progress import step_of, weight_of
from tests.harness.ranks import run_ranks, solo_group

METHODS: dict[str, Callable[[], dict[str, Any]]] = {
    "SGP": dict,
    "Overlap SGP, stale": lambda: {"overlap": True, "max_staleness": 1},
    "push-sum": lambda: {"graph": RingGraph(4), "mixing": None},
    "Local SGD": lambda: {"schedule": Schedule(gossip_every=4, average_every=1)},
    "D-PSGD": lambda: {"push_sum": False, "graph": "ring"},
    "Choco": lambda: {"algorithm": Choco(SignNorm(), step_size=0.3)},
    "PowerGossip, overlap": lambda: {"algorithm": PowerGossip(), "overlap": True},
    "RelaySGD": lambda: {"algorithm": RelaySGD()},
    "D2": lambda: {"algorithm": D2()},
    "DiLoCo": lambda: {"algorithm": DiLoCo(sync_every=3)},
    "StreamingDiLoCo": lambda: {"algorithm": StreamingDiLoCo(sync_every=4, fragments=2, delay=1)},
    "SlowMo": lambda: {"algorithm": SlowMo(sync_every=3)},
}
ANY_METHOD = pytest.mark.parametrize("method", METHODS)
STARTS_ANEW = pytest.mark.filterwarnings("ignore:.*other tensors", "ignore:.*saves nothing", "ignore:.*dimension")
N = 4


def layers(num_layers: int = 3, size: int = 3) -> nn.Sequential:
    """Layers of equal shapes, with other values in each."""
    model = nn.Sequential(*(nn.Linear(size, size) for _ in range(num_layers)))
    with torch.no_grad():
        for k, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(k)
            parameter.copy_(torch.randn(parameter.shape, generator=generator).div_(size))
    return model.double()


class Trainer:
    """A rank that trains `layers` on data of its own."""

    def __init__(self, group: dist.ProcessGroup, model: nn.Module, **options: Any) -> None:
        self.model = model
        self.wrapper = GossipDataParallel(model, process_group=group, **{"timeout": 20.0, **options})
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self._generator = torch.Generator().manual_seed(group.rank())
        self._size = next(iter(model.parameters())).shape[1]

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            x = torch.randn(4, self._size, generator=self._generator, dtype=torch.float64)
            self.optimizer.zero_grad()
            (self.wrapper(x) - x.roll(1, 1)).square().mean().backward()
            self.optimizer.step()


def flat(module: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach().clone()


# Ranks that change differently.


def replace(model: nn.Sequential, layer: nn.Module) -> object:
    model[1] = layer
    return model


CHANGES: dict[str, Callable[[nn.Sequential, int], object]] = {
    "one rank freezes a layer": lambda model, rank: rank or model[1].requires_grad_(False),
    "each rank freezes another layer": lambda model, rank: model[rank % 2].requires_grad_(False),
    "one rank freezes a bias": lambda model, rank: rank or model[1].bias.requires_grad_(False),
    "one rank adds a layer": lambda model, rank: rank or model.append(nn.Linear(3, 3).double()),
    "one rank replaces a layer": lambda model, rank: rank or replace(model, nn.Linear(3, 3, bias=False).double()),
    "one rank converts a layer": lambda model, rank: rank or (model[1].float() and model[1].requires_grad_(True)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_ranks_that_change_differently_are_named_with_the_first_tensor(change: str) -> None:
    """By all ranks, and before any message of other tensors was sent."""
    errors: dict[int, str] = {}
    values: dict[int, list[Tensor]] = {}

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        trainer = Trainer(group, layers())
        trainer.step(2)
        trainer.wrapper.flush()
        CHANGES[change](trainer.model, rank)  # type: ignore[arg-type]
        before = [x.detach().clone() for x in trainer.model.parameters()]
        with pytest.raises(ValueError, match=r"tensors any more|do not agree") as raised:
            trainer.step(2)
        errors[rank] = str(raised.value)
        values[rank] = [before[0], next(iter(trainer.model.parameters())).detach().clone()]

    run_ranks(2, body)
    for text in errors.values():
        assert "rank 0" in text
        assert "rank 1" in text
        assert any(name in text for name in ("'1.", " 1.", "'0.", " 0.", "'3.", " 3.")), text
        assert "on all ranks at the same step" in text
    assert len(errors) == 2


@STARTS_ANEW
@ANY_METHOD
def test_a_rank_that_freezes_alone_is_named_under_any_method(method: str) -> None:
    errors: dict[int, Exception] = {}
    all_raised = threading.Barrier(N, timeout=15)

    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, layers(), **METHODS[method]())
        trainer.step(1)
        if group.rank() == 1:
            trainer.model[1].requires_grad_(False)  # type: ignore[index]
        try:
            trainer.step(9)
        except (ValueError, RuntimeError, OSError) as error:
            errors[group.rank()] = error
        all_raised.wait()

    run_ranks(N, body)
    assert sorted(errors) == list(range(N))
    for error in errors.values():
        assert isinstance(error, ValueError), error
        assert "1.weight" in str(error)
        assert "rank 1 has '1.weight (3, 3) torch.float64, frozen'" in str(error)


class Growing(nn.Module):
    """A buffer that grows with the batch."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("cache", torch.zeros(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > len(self.cache):
            self.cache = torch.zeros(len(x), 2)
        result: Tensor = self.linear(x) + self.cache[: len(x)]
        return result


@pytest.mark.parametrize("travels", [True, False])
@pytest.mark.parametrize("ranks", [(0,), (0, 1)], ids=["one rank", "both, to other sizes"])
def test_a_buffer_of_another_size_is_named(ranks: tuple[int, ...], travels: bool) -> None:
    def body(group: dist.ProcessGroup) -> None:
        buffers: Any = ["cache"] if travels else True
        wrapper = GossipDataParallel(Growing(), process_group=group, gossip_buffers=buffers, timeout=20)
        wrapper(torch.zeros(1, 2)).sum().backward()
        size = 2 + group.rank() if group.rank() in ranks else 1
        message = r"cache \(.*, 2\) torch.float32.* persistent=False\), or with gossip_buffers=False"
        wrapper(torch.zeros(size, 2)).sum().backward()
        with pytest.raises(ValueError, match=message):
            wrapper(torch.zeros(size, 2))

    run_ranks(2, body)


@pytest.mark.parametrize("travels", [True, False])
def test_a_buffer_that_grows_alike_goes_on_gossiping(travels: bool) -> None:
    def body(group: dist.ProcessGroup) -> Tensor:
        buffers: Any = ["cache"] if travels else True
        wrapper = GossipDataParallel(Growing(), process_group=group, gossip_buffers=buffers, timeout=20)
        for size in range(1, 5):
            wrapper(torch.zeros(size, 2)).sum().backward()
        wrapper.module.get_buffer("cache").fill_(float(group.rank()))
        wrapper(torch.zeros(1, 2)).sum().backward()
        wrapper.close()
        return wrapper.module.get_buffer("cache").clone()

    for rank, cache in enumerate(run_ranks(2, body)):
        torch.testing.assert_close(cache, torch.full((4, 2), 0.5 if travels else float(rank)))


def test_settling_with_other_tensors_on_one_rank_is_the_same_error() -> None:
    def body(group: dist.ProcessGroup) -> None:
        trainer = Trainer(group, layers())
        trainer.step()
        if group.rank() == 0:
            trainer.model.append(nn.Linear(3, 3).double())  # type: ignore[operator]
        with pytest.raises(ValueError, match=r"rank 0 has .*'3\.weight.*' where|where rank 0 has '3\.weight"):
            trainer.wrapper.average_()

    run_ranks(2, body)


# Tensors that leave.


@STARTS_ANEW
@ANY_METHOD
def test_tensors_that_are_frozen_on_all_ranks_are_averaged_exactly(method: str) -> None:
    def body(group: dist.ProcessGroup) -> tuple[list[Tensor], Tensor, Tensor]:
        trainer = Trainer(group, layers(), **METHODS[method]())
        trainer.step(5)
        trainer.model[0].requires_grad_(False)  # type: ignore[index]
        seen = []
        for _ in range(8):
            trainer.step()
            seen.append(flat(trainer.model[0]))  # type: ignore[index]
        state = trainer.wrapper.averaged_state_dict(rank0_only=False)
        trainer.wrapper.close()
        return seen, state["0.weight"], flat(trainer.model[0])  # type: ignore[index]

    results = run_ranks(N, body)
    for seen, saved, end in results:
        assert torch.equal(seen[-1], results[0][0][-1])
        assert torch.equal(saved, results[0][1])
        assert torch.equal(end, seen[-1])


@STARTS_ANEW
@pytest.mark.parametrize("method", ["SGP", "Local SGD", "DiLoCo"])
@pytest.mark.parametrize("first", ["wrap", "freeze"])
def test_a_resumed_run_averages_tensors_that_were_frozen_before_its_checkpoint(method: str, first: str) -> None:
    """Also where the layer was frozen before the model was wrapped, as scripts do that freeze it from some step on."""

    def body(group: dist.ProcessGroup) -> list[Tensor]:
        trainer = Trainer(group, layers(), **METHODS[method]())
        trainer.step(5)
        trainer.model[0].requires_grad_(False)  # type: ignore[index]
        trainer.step()
        state, steps = copy.deepcopy(trainer.wrapper.state_dict()), trainer._generator.get_state()
        own = flat(trainer.model[0])  # type: ignore[index]
        trainer.step(8)
        trainer.wrapper.close()
        model = layers()
        if first == "freeze":
            model[0].requires_grad_(False)
        resumed = Trainer(group, model, **METHODS[method]())
        model[0].requires_grad_(False)
        resumed.wrapper.load_state_dict(state)
        resumed._generator.set_state(steps)
        resumed.step(8)
        resumed.wrapper.close()
        assert torch.equal(flat(model), flat(trainer.model))
        return [own, flat(model[0])]

    (own, end), (other, same) = run_ranks(2, body)
    assert torch.equal(own, other) is (method == "SGP")  # on two ranks a round makes models equal
    assert torch.equal(end, same)


def test_tensors_that_leave_have_the_average_of_push_sum() -> None:
    """Weights are not one, and the sum of x over ranks is kept."""

    def body(group: dist.ProcessGroup) -> tuple[Tensor, float, Tensor]:
        trainer = Trainer(group, layers(), graph=_star(N))
        trainer.step(4)
        trainer.model[0].requires_grad_(False)  # type: ignore[index]
        trainer.step(1)
        weight = weight_of(trainer.wrapper)
        before = flat(trainer.model[0]) * weight  # type: ignore[index]
        trainer.step(1)
        after = flat(trainer.model[0])  # type: ignore[index]
        trainer.wrapper.close()
        return before, weight, after

    results = run_ranks(N, body)
    mean = torch.stack([x for x, _, _ in results]).sum(0) / sum(w for _, w, _ in results)
    assert any(abs(w - 1) > 0.1 for _, w, _ in results)
    for _, _, after in results:
        torch.testing.assert_close(after, mean)


def _star(n: int) -> nx.DiGraph:
    """A ring of which one rank sends to all others too: no weights on it are doubly stochastic."""
    return nx.DiGraph([(0, k) for k in range(1, n)] + [(k, (k + 1) % n) for k in range(n)])


def test_a_measurement_lets_nothing_leave() -> None:
    """What is frozen, but was trained since the last round, belongs to the average; training goes on as without it."""

    def body(group: dist.ProcessGroup, measures: bool) -> tuple[Tensor, float, float]:
        trainer = Trainer(group, layers(), schedule=Schedule(gossip_every=8))
        trainer.step(3)
        trainer.model[0].requires_grad_(False)  # type: ignore[index]
        trainer.step()
        distance = trainer.wrapper.consensus_distance() if measures else 0.0
        own = float(flat(trainer.model[0]).sum())  # type: ignore[index]
        trainer.step(3)
        trainer.wrapper.close()
        return flat(trainer.model), distance, own

    with_it, without = (run_ranks(2, lambda group, m=m: body(group, m)) for m in (True, False))  # type: ignore[misc]
    for (model, distance, own), (other, _, own_other) in zip(with_it, without, strict=True):
        assert torch.equal(model, other)
        assert own == own_other
        assert distance > 0
    assert with_it[0][2] != with_it[1][2]


# Parts that are trained in turn.


@STARTS_ANEW
@pytest.mark.parametrize(
    "options",
    [{"schedule": 2}, {}, {"overlap": True}, {"algorithm": DiLoCo(sync_every=4)}, {"algorithm": SlowMo(4)}],
    ids=str,
)
def test_halves_that_are_trained_in_turn_travel_as_one_model(options: dict[str, Any]) -> None:
    """Bit for bit as where both are in the vector all the time, and only one has a gradient."""

    def body(group: dist.ProcessGroup, freezes: bool) -> tuple[Tensor, float]:
        trainer = Trainer(group, layers(2), **options)
        for step in range(16):
            for k, layer in enumerate(trainer.model.children()):
                if freezes:
                    layer.requires_grad_(k == step % 2)
            x = torch.randn(4, 3, generator=trainer._generator, dtype=torch.float64)
            trainer.optimizer.zero_grad()
            trainer.wrapper(x).square().mean().backward()
            if not freezes:
                for parameter in trainer.model[1 - step % 2].parameters():  # type: ignore[index]
                    parameter.grad = None
            trainer.optimizer.step()
        sent = trainer.wrapper.comm_stats()["num_rounds"]
        trainer.wrapper.close()
        return flat(trainer.model), sent

    for (model, rounds), (other, expected) in zip(
        run_ranks(2, lambda group: body(group, True)), run_ranks(2, lambda group: body(group, False)), strict=True
    ):
        torch.testing.assert_close(model, other, rtol=0, atol=1e-12)
        assert rounds == expected


# Tensors that are lent for one forward.

LENDERS: dict[str, Callable[[nn.Module, nn.Module], dict[str, Tensor]]] = {
    "tensors": lambda wrapper, other: {name: x + 1.0 for name, x in wrapper.named_parameters()},
    "leaves": lambda wrapper, other: {name: x.detach() + 1.0 for name, x in wrapper.named_parameters()},
    "parameters": lambda wrapper, other: {f"module.{name}": x for name, x in other.named_parameters()},
}


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"algorithm": DiLoCo(sync_every=2)}], ids=str)
@pytest.mark.parametrize("lender", LENDERS)
def test_a_functional_call_starts_no_round_and_mixes_nothing(lender: str, options: dict[str, Any]) -> None:
    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        model, other = layers(2), layers(2)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(rank + 1.0)
        trainer = Trainer(group, model, **options)
        trainer.step(2)
        lent = LENDERS[lender](trainer.wrapper, other)
        before = [x.detach().clone() for x in lent.values()]
        own, rounds = flat(model), step_of(trainer.wrapper)
        x = torch.ones(1, 3, dtype=torch.float64)
        result = functional_call(trainer.wrapper, lent, (x,))
        if result.requires_grad:
            result.sum().backward()
        for k in range(2):
            x = x @ before[2 * k].t() + before[2 * k + 1]
        torch.testing.assert_close(result.detach(), x, rtol=0, atol=1e-12)
        assert all(torch.equal(x.detach(), y) for x, y in zip(lent.values(), before, strict=True))
        assert torch.equal(flat(model), own)
        assert step_of(trainer.wrapper) == rounds
        trainer.step(4)
        trainer.wrapper.average_()
        trainer.wrapper.close()

    run_ranks(2, body)


def test_a_jacobian_over_parameters_mixes_nothing() -> None:
    model = layers(1)
    wrapper = GossipDataParallel(model, process_group=solo_group())
    x = torch.ones(1, 3, dtype=torch.float64)
    wrapper(x).sum().backward()
    parameters = {name: p.detach() for name, p in wrapper.named_parameters()}
    jacobian = jacrev(lambda values: functional_call(wrapper, values, (x,)))(parameters)
    torch.testing.assert_close(jacobian["module.0.bias"][0], torch.eye(3, dtype=torch.float64))
    assert step_of(wrapper) == 1
    wrapper.close()
