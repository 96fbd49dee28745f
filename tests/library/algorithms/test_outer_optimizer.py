"""The outer optimizer of an anchor: which ones are refused, and what a checkpoint restores of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import DiLoCo, GASLoC, GossipDataParallel, SlowMo
from gossip_modules.extend import OuterMethod
from gossip_modules.flat.vector import SCRATCH_NUMEL
from gossip_modules.rounds import SGD
from gossip_modules.wrappers.choices import Choices
from tests.harness.problems import loss_of, mlp, sgd, train_step
from tests.harness.ranks import run_ranks, solo_group
from tests.library.rounds.memories import optimizer_of


def trained(outer: OuterMethod, num_steps: int = 5) -> GossipDataParallel:
    model = mlp()
    wrapper, optimizer = GossipDataParallel(model, process_group=solo_group(), algorithm=outer), sgd(model)
    for step in range(num_steps):
        train_step(wrapper, optimizer, 0, step)
    return wrapper


class Counting(torch.optim.SGD):
    """Counts its steps in its group, as optimizers without a schedule do, among what it was made with."""

    def __init__(self, parameters: Sequence[Tensor], *, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.param_groups[0]["count"] = 0

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["count"] += 1
        return super().step(closure)


def test_counts_in_the_groups_of_an_optimizer_go_on_and_its_rates_are_the_constructors() -> None:
    first = trained(DiLoCo(2, optimizer=lambda parameters: Counting(parameters, lr=0.1)), num_steps=5)
    assert optimizer_of(first).param_groups[0]["count"] == 2
    second = trained(DiLoCo(2, optimizer=lambda parameters: Counting(parameters, lr=0.3)), num_steps=0)
    second.load_state_dict(first.state_dict())
    loss_of(second, 0, 5)  # no outer step
    loss_of(second, 0, 6)
    group = optimizer_of(second).param_groups[0]
    assert (group["lr"], group["count"] >= 2) == (0.3, True)


@pytest.mark.parametrize(
    ("saved", "resumed", "rates"),
    [
        (DiLoCo(2), DiLoCo(2, lr=0.1, momentum=0.5), {"lr": 0.1, "momentum": 0.5}),
        (
            GASLoC(2, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1)),
            GASLoC(2, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.2)),
            {"lr": 0.2},
        ),
        (
            DiLoCo(2, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1)),
            DiLoCo(2, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.2)),
            {"lr": 0.2},
        ),
    ],
    ids=str,
)
def test_a_checkpoint_restores_the_state_and_no_rates(
    saved: OuterMethod, resumed: OuterMethod, rates: dict[str, float]
) -> None:
    first, second = trained(saved), trained(resumed, num_steps=0)
    second.load_state_dict(first.state_dict())
    loss_of(second, 0, 5)  # no outer step
    loss_of(second, 0, 6)
    group = optimizer_of(second).param_groups[0]
    assert {name: group[name] for name in rates} == rates
    names = [[*map(sorted, optimizer_of(wrapper).state_dict()["state"].values())] for wrapper in (first, second)]
    assert names[0] == names[1]
    for wrapper in (first, second):
        wrapper.close()


def test_the_state_of_another_optimizer_is_refused() -> None:
    adam = DiLoCo(2, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1))
    for saved, resumed, names in ((DiLoCo(2), adam, ("SGD", "Adam")), (adam, DiLoCo(2), ("Adam", "SGD"))):
        first, second = trained(saved, num_steps=6), trained(resumed, num_steps=0)
        second.load_state_dict(first.state_dict())
        message = (
            "got the state of the outer optimizer {}, expected the state of {}; wrap with the optimizer= of the saved"
        )
        with pytest.raises(ValueError, match=message.format(*names)):
            loss_of(second, 0, 6)
        first.close()
        second.close()


def needs_matrices() -> None:
    """As torch's Muon, which older versions have not."""
    raise ValueError("Muon only supports 2D parameters")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: None, "got None from the function that makes the outer optimizer, expected a torch.optim.Optimizer"),
        (
            lambda _: torch.optim.SGD(mlp().parameters(), lr=0.1),
            "got a SGD over other parameters as outer optimizer, expected one over those that the function is given",
        ),
        (
            lambda parameters: torch.optim.Muon(parameters) if hasattr(torch.optim, "Muon") else needs_matrices(),
            "got ValueError from the function that makes the outer optimizer: Muon only supports 2D parameters.*; "
            "expected an optimizer of the anchor, which is flat: one tensor of one dimension for each dtype of the "
            "model; pass one that works element by element, such as .*Adam",
        ),
        (torch.optim.LBFGS, "got LBFGS as outer optimizer, whose step needs a closure, expected one that steps on a"),
    ],
)
@pytest.mark.parametrize("method", [DiLoCo, GASLoC])
def test_an_optimizer_that_cannot_step_the_anchor_is_refused_when_the_model_is_wrapped(
    method: type[DiLoCo | GASLoC], make: Callable[[Sequence[Tensor]], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        trained(method(2, optimizer=make), num_steps=0)
    assert (caught.value.__cause__ is not None) == message.startswith("got ValueError")


@pytest.mark.parametrize(
    ("outers", "differing"),
    [
        (
            (
                DiLoCo(2, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
                DiLoCo(2, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1)),
            ),
            r"Adam \(.*expected .*SGD \(",
        ),
        (
            (
                DiLoCo(2, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
                DiLoCo(2, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.2)),
            ),
            " lr: 0.2 .*expected .* lr: 0.1 ",
        ),
        (
            (
                DiLoCo(2, optimizer=lambda parameters: torch.optim.SGD([{"params": [*parameters], "lr": 0.1}], lr=1.0)),
                DiLoCo(2, optimizer=lambda parameters: torch.optim.SGD([{"params": [*parameters], "lr": 0.2}], lr=1.0)),
            ),
            " lr: 0.2 .*expected .* lr: 0.1 ",
        ),
        ((SlowMo(2), SlowMo(2, inner_lr="optimizer")), "inner_lr=optimizer.*expected .*inner_lr=None"),
    ],
    ids=["kind", "rate", "rate of a group", "inner rate"],
)
def test_ranks_that_differ_in_the_outer_optimizer_are_told_so(
    outers: tuple[OuterMethod, OuterMethod], differing: str
) -> None:
    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match=rf"ranks do not agree with rank 0: .*{differing}"):
            GossipDataParallel(mlp(), process_group=group, algorithm=outers[group.rank()])

    run_ranks(2, body)


def test_groups_by_dtype_and_functions_among_settings_are_the_same_on_all_ranks() -> None:
    class WithFunction(torch.optim.SGD):
        def __init__(self, parameters: Sequence[Tensor]) -> None:
            first, second = parameters  # one for each dtype
            groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "lr": 0.1}]
            super().__init__(groups, lr=0.5)
            for group in self.param_groups:
                group["function"] = lambda: None  # another object on each rank

    class TwoDtypes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def forward(self) -> Tensor:
            return self.a.sum() + self.b.sum()

    def body(group: dist.ProcessGroup) -> Tensor:
        model = TwoDtypes()
        wrapper = GossipDataParallel(model, process_group=group, algorithm=DiLoCo(1, optimizer=WithFunction))
        inner = torch.optim.SGD(model.parameters(), lr=group.rank() + 1.0)
        for _ in range(2):
            wrapper().backward()
            inner.step()
        wrapper.flush()
        wrapper()  # an outer step
        wrapper.close()
        return torch.cat([model.a.detach().double(), model.b.detach()])

    for found in run_ranks(2, body):
        assert found[0] != found[2]  # each dtype at its rate
        assert torch.equal(found[:2], found[:1].expand(2))


def test_an_optimizer_is_no_function_that_makes_one() -> None:
    optimizer: Any = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    with pytest.raises(
        ValueError, match=r"(?s)DiLoCo: got optimizer=SGD .*, expected a function of parameters, such as"
    ):
        DiLoCo(optimizer=optimizer)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_default_optimizer_has_the_bits_and_the_state_of_torchs(dtype: torch.dtype, momentum: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(SCRATCH_NUMEL + 13, dtype=dtype)  # more than a chunk
    y = x.clone()
    ours = SGD([x], lr=0.7123, momentum=momentum)
    theirs = torch.optim.SGD([y], lr=0.7123, momentum=momentum, nesterov=momentum > 0)
    assert repr(ours) == repr(theirs)  # ranks compare it
    for step in range(4):
        if step == 2:
            state = copy.deepcopy(theirs.state_dict())
            ours = SGD([x], lr=0.7123, momentum=momentum)
            ours.load_state_dict(state)
        x.grad = torch.randn_like(x)
        y.grad = x.grad.clone()
        ours.step()
        theirs.step()
        assert torch.equal(x, y)


class TrustRatio(torch.optim.Optimizer):
    """Each step is as long as the vector, as in LARS."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step."""
        for x in self.param_groups[0]["params"]:
            x.sub_(x.grad, alpha=0.1 * float(x.norm() / x.grad.norm()))


BY_ELEMENT: list[Any] = [torch.optim.Rprop, torch.optim.AdamW]


@pytest.mark.parametrize("where", [{"nprocs_per_node": 2}, {"nprocs_per_node": 1, "is_sharded": True}], ids=str)
@pytest.mark.parametrize("method", [DiLoCo, GASLoC])
def test_an_outer_optimizer_with_norms_is_refused_where_processes_hold_shards(method: Any, where: Any) -> None:
    """A norm of the anchor would be another one in each shard."""
    for make in (TrustRatio, *BY_ELEMENT):
        choices = Choices(algorithm=method(4, optimizer=make))
        choices.check(overlap=False, init_sync=True, nprocs_per_node=1)
        if make in BY_ELEMENT:
            choices.check(overlap=False, init_sync=True, **where)
        else:
            with pytest.raises(
                ValueError, match=r"which steps an element in another way beside other .*; take `lambda"
            ):
                choices.check(overlap=False, init_sync=True, **where)
