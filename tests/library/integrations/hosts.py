"""What the tests of the hosts share: a model, data, the methods, and the loop of our own that a host must equal."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import DiLoCo, GossipDataParallel
from gossip_modules.wrappers.base import GossipWrapper
from tests.harness.processes import run_processes

METHODS: dict[str, Any] = {
    "SGP": {},
    "Overlap SGP": {"overlap": True},
    "PowerGossip": {"algorithm": "powergossip"},
    "DiLoCo": {"algorithm": DiLoCo(sync_every=2)},
}
RANKS, STEPS, ACCUMULATION, BATCH, RATE, MOMENTUM, NORM = 4, 4, 2, 4, 0.1, 0.9, 1.0


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip tests where one of these packages is not installed; it imports none, as that takes seconds."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}: see extras_require in setup.py")


def enter(rank: int, world_size: int) -> None:
    """Give this process the environment that torchrun gives, for hosts that ask for it."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), ACCELERATE_USE_CPU="true")
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")


class Model(nn.Module):
    """A small one.

    Attributes:
        dtypes: of the outputs of training forwards.
        evaluated: the parameters in the last forward in eval mode.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())  # ranks start apart; a wrapper begins with the model of rank 0
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.dtypes: set[torch.dtype] = set()
        self.evaluated: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """See torch."""
        y: Tensor = self.layers(x)
        if self.training:
            self.dtypes.add(y.dtype)
        else:
            self.evaluated = values(self)
        return y


def batches() -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of this rank."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    x = torch.randn(STEPS * ACCUMULATION, BATCH, 6, generator=generator)
    return [(inputs, inputs[:, :3].sum(1).abs().long() % 3) for inputs in x]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Of one micro-batch."""
    return nn.functional.cross_entropy(output, target)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all tests here."""
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)


def own_loop(options: dict[str, Any], *, clips: bool = True, is_bf16: bool = True) -> tuple[list[Tensor], list[Tensor]]:
    """The model of this rank, and the average, after the loop that a host must equal bit for bit."""
    model = GossipDataParallel(Model(), **options)
    optimizer = sgd(model)
    for k, (x, y) in enumerate(batches()):
        is_last = (k + 1) % ACCUMULATION == 0
        with contextlib.nullcontext() if is_last else model.no_sync():
            with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
                output = model(x)
            (loss_of(output.float(), y) / ACCUMULATION).backward()
        if is_last:
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
            optimizer.zero_grad()
    return ending(model)


def values(model: nn.Module) -> list[Tensor]:
    """Copies of the parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def ending(model: GossipWrapper) -> tuple[list[Tensor], list[Tensor]]:
    """The model of this rank and the average; closes the wrapper."""
    model.settle()
    own = values(model.module)
    with model.averaged():
        average = values(model.module)
    model.close()
    return own, average


def assert_equal(got: list[Tensor], expected: list[Tensor]) -> None:
    """Bit for bit."""
    assert len(got) == len(expected) > 0
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def run_bodies(*bodies: Callable[[int, str], None], ranks: int = RANKS) -> None:
    """Each body of a rank and a folder after the other, on all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        run_processes(ranks, _run_in_turn, bodies, folder, timeout=100)


def _run_in_turn(rank: int, bodies: tuple[Callable[[int, str], None], ...], folder: str) -> None:
    enter(rank, dist.get_world_size())
    for body in bodies:
        body(rank, f"{folder}/{body.__name__}")
        dist.barrier()
