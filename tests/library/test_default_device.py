"""`torch.set_default_device` is for the modules that a user makes: what the library keeps is not on that device."""

from __future__ import annotations

import ast
import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._device import _device_constructors

from gossip_modules import (
    D2,
    AllReduceDataParallel,
    BilatGossipDataParallel,
    Choco,
    DiLoCo,
    GossipDataParallel,
    GradientTracking,
    GroupAverageDataParallel,
    Membership,
    NoLoCo,
    PowerGossip,
    QGDSGDm,
    RelaySGD,
    Schedule,
    TopK,
    gossip,
)
from gossip_modules.compression import BlockFloat
from gossip_modules.extend import GossipWrapper
from tests.harness.problems import fill_
from tests.harness.ranks import run_ranks
from tests.library.dpwa.workers import introduce, wrap
from tests.library.test_layers import ROOT

Make = Callable[..., Any]

FACTORIES = {constructor.__name__ for constructor in _device_constructors()} | {"normal"}


def without_device(source: str) -> Iterator[int]:
    """The lines of calls such as `torch.zeros(2)`, whose tensor would be on the default device."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES:
            names_device = any(keyword.arg in ("device", None) for keyword in node.keywords)
            if ast.unparse(node.func.value) in ("torch", "torch.fft") and not names_device:
                yield node.lineno


def test_such_calls_are_found() -> None:
    assert list(without_device("x = 1\ny = torch.zeros(2)\nz = torch.zeros(2, device='cpu')\ntorch.tensor([1])")) == [
        2,
        4,
    ]
    assert list(without_device("x.zeros(2)\nnumpy.ones(2)\ntorch.zeros_like(x)\ntorch.ones(2, **options)")) == []


@pytest.mark.parametrize("package", ["gossip_modules", "train"])
def test_every_tensor_is_made_on_a_device_that_is_named(package: str) -> None:
    paths = sorted((ROOT / package).rglob("*.py"))
    assert len(paths) > 10
    found = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in without_device(path.read_text())]
    assert found == []


FAMILIES: dict[str, tuple[Make, Callable[[], dict[str, Any]]]] = {
    "SGP": (GossipDataParallel, dict),
    "overlapped": (GossipDataParallel, lambda: {"overlap": True, "max_staleness": 1}),
    "D-PSGD, narrow": (GossipDataParallel, lambda: {"push_sum": False, "wire_dtype": torch.bfloat16}),
    "Gossip-PGA": (GossipDataParallel, lambda: {"schedule": Schedule(average_every=2)}),
    "CHOCO": (GossipDataParallel, lambda: {"algorithm": Choco(TopK(0.5), step_size=0.3)}),
    "RelaySGD": (GossipDataParallel, lambda: {"algorithm": RelaySGD()}),
    "PowerGossip": (GossipDataParallel, lambda: {"algorithm": PowerGossip()}),
    "DiLoCo": (GossipDataParallel, lambda: {"algorithm": DiLoCo(sync_every=2)}),
    "DiLoCo, codes in two phases": (
        GossipDataParallel,
        lambda: {"algorithm": DiLoCo(sync_every=2, compressor=BlockFloat(8, 8), collective="all_reduce")},
    ),
    "NoLoCo": (GossipDataParallel, lambda: {"algorithm": NoLoCo(sync_every=2)}),
    "D2": (GossipDataParallel, lambda: {"algorithm": D2()}),
    "gradient tracking": (GossipDataParallel, lambda: {"algorithm": GradientTracking()}),
    "QG-DSGDm": (GossipDataParallel, lambda: {"algorithm": QGDSGDm()}),
    "in place": (gossip, dict),
    "AD-PSGD": (BilatGossipDataParallel, dict),
    "WAGMA": (GroupAverageDataParallel, dict),
    "blocking WAGMA": (GroupAverageDataParallel, lambda: {"wait_avoiding": False, "sync_period": 2}),
    "AR": (AllReduceDataParallel, dict),
}


@pytest.mark.parametrize(("make", "options"), FAMILIES.values(), ids=FAMILIES)
def test_rounds_averages_and_checkpoints_under_another_default_device(
    make: Make, options: Callable[[], dict[str, Any]]
) -> None:
    def body(group: dist.ProcessGroup) -> dict[str, Tensor]:
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(group.rank()))
        with torch.device("meta"):  # of this thread, as torch.set_default_device is
            wrapper = make(module, process_group=group, **options())
            optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1, momentum=0.9)
            for _ in range(4):
                optimizer.zero_grad()
                wrapper(inputs).square().mean().backward()
                optimizer.step()
            if make is not gossip:
                wrapper.average_optimizer_state(optimizer)
            assert wrapper.consensus_distance() >= 0
            wrapper.settle()
            file = io.BytesIO()
            torch.save(wrapper.state_dict(), file)
            wrapper.load_state_dict(torch.load(io.BytesIO(file.getvalue()), map_location="cpu", weights_only=True))
            if isinstance(wrapper, GossipWrapper):
                wrapper.set_extra_state(None)
            wrapper(inputs).square().mean().backward()
            wrapper.settle()
            state: dict[str, Tensor] = wrapper.averaged_state_dict(rank0_only=False)
            wrapper.average_()
            wrapper.close()
        return state

    first, second = run_ranks(2, body)
    for name, value in first.items():
        assert value.device.type == "cpu"
        torch.testing.assert_close(second[name], value)


def test_dpwa_under_another_default_device() -> None:
    with contextlib.ExitStack() as workers:
        models = [wrap(workers, f"w{rank}", fill_(nn.Linear(3, 2), rank)) for rank in range(2)]
        introduce(*((f"w{rank}", model) for rank, model in enumerate(models)))
        x = torch.ones(4, 3)
        workers.enter_context(torch.device("meta"))
        while models[0].comm_stats()["num_rounds"] == 0:
            for model in models:
                model.report_loss(1.0)
                model(x).sum().backward()
        state = models[0].state_dict()
        assert {value.device.type for value in state.values()} == {"cpu"}
        models[0].load_state_dict(state)


def test_a_membership_under_another_default_device() -> None:
    module, x = fill_(nn.Linear(3, 2), 0), torch.ones(4, 3)
    with torch.device("meta"):
        membership = Membership(dist.HashStore(), min_workers=1, timeout=20.0)
        model = GossipDataParallel(module, membership=membership)
        for _ in membership.steps(3):
            model(x).sum().backward()
        model.average_()
        model.close()
    assert module.weight.device.type == "cpu"
