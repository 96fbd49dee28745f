"""Forwards under a transform, a trace or an export: they compute what the plain module does, and mix nothing."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import gossip_modules as gm
from tests.harness.ranks import run_ranks, solo_group

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
WRAPPERS: list[Any] = [gm.GossipDataParallel, gm.gossip, gm.BilatGossipDataParallel]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def squares(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    return y.square().sum()


def samples(model: nn.Module) -> list[Tensor]:
    """The gradient of each sample, as for differential privacy."""

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = functional_call(model, values, (x[None],))
        return y.square().sum()

    gradients: dict[str, Tensor] = vmap(grad(loss), in_dims=(None, 0))(parameters(model), X)
    return [*gradients.values()]


def in_fake_mode(model: nn.Module) -> list[int]:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return list(model(mode.from_tensor(X)).shape)


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda model: grad(lambda x: squares(model, x))(X),
    "jacrev": lambda model: jacrev(model)(X),
    "jacfwd": lambda model: jacfwd(model)(X),
    "hessian": lambda model: hessian(lambda x: squares(model, x))(X),
    "vjp": lambda model: vjp(model, X)[0],
    "jvp": lambda model: jvp(model, (X,), (X,))[1],
    "vmap": lambda model: vmap(model)(X),
    "vmap of grad": lambda model: vmap(grad(lambda x: squares(model, x)))(X),
    "jacrev over parameters": lambda model: [
        *jacrev(lambda values: functional_call(model, values, (X,)))(parameters(model)).values()
    ],
    "samples": samples,
    "jit.trace": lambda model: torch.jit.trace(model, X)(X),
    "make_fx": lambda model: make_fx(model)(X)(X),
    "FakeTensorMode": in_fake_mode,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_transformed_forward_is_that_of_the_plain_module(wrap: Any, name: str) -> None:
    expected = TRANSFORMS[name](net())
    model = wrap(net(), process_group=solo_group())
    before = copy.deepcopy(parameters(model))
    torch.testing.assert_close(TRANSFORMS[name](model), expected)
    assert model.comm_stats()["num_rounds"] == 0
    assert all(torch.equal(value, before[key]) for key, value in parameters(model).items())
    model.close()


def test_one_rank_may_transform_alone() -> None:
    """The rounds of all ranks stay in step, which they would not if a transformed forward were one."""

    def body(group: dist.ProcessGroup) -> tuple[float, Tensor]:
        linear = nn.Linear(3, 1)
        model = gm.GossipDataParallel(linear, process_group=group)
        for _ in range(2):
            if group.rank() == 0:
                vmap(grad(lambda x: model(x).sum()))(X)
            model(X).sum().backward()
        stats = model.comm_stats()
        model.close()
        return stats["num_rounds"], linear.weight.detach()

    (first, own), (second, other) = run_ranks(2, body)
    assert first == second == 2
    assert torch.equal(own, other)


def test_a_mode_that_watches_a_step_leaves_it_a_step() -> None:
    model = gm.GossipDataParallel(nn.Linear(3, 1), process_group=solo_group())
    with FlopCounterMode(display=False) as counter:
        model(X).sum().backward()
    assert counter.get_total_flops() > 0
    assert model.comm_stats()["num_rounds"] == 1
    model.close()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_an_export_is_that_of_the_plain_module(wrap: Any, strict: bool) -> None:
    model = wrap(net(), process_group=solo_group())
    exported = torch.export.export(model, (X,), strict=strict)
    assert torch.equal(exported.module()(X), net()(X))
    assert model.comm_stats()["num_rounds"] == 0
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")  # what was true in the export is not so here
    for _ in range(2):
        compiled(X).sum().backward()
    if wrap is not gm.BilatGossipDataParallel:
        assert model.comm_stats()["num_rounds"] == 2
    model.close()


@pytest.mark.skipif("reason" not in inspect.signature(torch.compiler.disable).parameters, reason="torch says no reason")
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_training_forward_is_in_no_graph(wrap: Any) -> None:
    model = wrap(net(), process_group=solo_group())
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"compile without fullgraph=True, or compile the module"):
        torch.compile(model, backend="eager", fullgraph=True)(X)
    torch._dynamo.reset()
    model.close()


def test_the_module_inside_may_be_in_one_graph() -> None:
    compiled: Any = torch.compile(net(), backend="eager", fullgraph=True)
    inner = gm.GossipDataParallel(compiled, process_group=solo_group())
    inner(X).sum().backward()
    inner.close()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_scripting_is_refused_with_the_remedy(wrap: Any) -> None:
    model = wrap(net(), process_group=solo_group())
    for outer in (model, nn.Sequential(model)):
        with pytest.raises(TypeError, match=r"to script, expected the plain module: TorchScript compiles no communica"):
            torch.jit.script(outer)
    model.close()


def test_symbolic_tracing_is_refused_with_the_remedy() -> None:
    model = gm.GossipDataParallel(net(), process_group=solo_group())
    with pytest.raises(TypeError, match=r"got a GossipDataParallel to trace .*; use torch.fx.symbolic_trace\(model"):
        torch.fx.symbolic_trace(model)
    assert model.comm_stats()["num_rounds"] == 0
    model.close()
