"""examples/nano_gossip.py: its methods are the library's, to the bit, and it runs as it stands."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import BilatGossipDataParallel, Choco, DiLoCo, GossipDataParallel, TopK
from gossip_modules.graph_manager import RingGraph
from tests.end_to_end.test_examples import EXAMPLES, number
from tests.harness.ranks import run_ranks
from tests.harness.scripts import script_outputs

PATH = EXAMPLES["nano_gossip.py"]
NANO = runpy.run_path(str(PATH))
STEPS = 7
LIBRARY: dict[str, Callable[[int], dict[str, Any]]] = {
    "dpsgd": lambda size: {"graph": RingGraph(size, peers_per_itr=2), "push_sum": False},
    "sgp": lambda size: {},
    "osgp": lambda size: {"overlap": True},
    "diloco": lambda size: {"algorithm": DiLoCo(sync_every=3)},
    "choco": lambda size: {
        "algorithm": Choco(TopK(0.1), step_size=0.2),
        "graph": RingGraph(size, peers_per_itr=2),
        "push_sum": False,
    },
}


def net() -> nn.Module:
    """A network whose tensors fill whole blocks of the library's vector, so that all-reduces sum in one order."""
    model, generator = (
        nn.Sequential(nn.Linear(4, 16, bias=False), nn.Tanh(), nn.Linear(16, 16, bias=False)),
        torch.Generator(),
    )
    for p in model.parameters():
        p.data.normal_(generator=generator.manual_seed(0))
    return model


def train(
    model: nn.Module,
    rank: int,
    step: Callable[[], object],
    *,
    first: int = 0,
    before_forward: Callable[[], object] = lambda: None,
) -> None:
    """Each rank takes steps with data of its own."""
    for k in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(100 * k + rank)
        x, y = torch.randn(8, 4, generator=generator), torch.randint(16, (8,), generator=generator)
        before_forward()
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        step()


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("name", LIBRARY)
def test_a_method_is_the_librarys_to_the_bit(name: str, size: int) -> None:
    def library(group: dist.ProcessGroup) -> Tensor:
        inner = net()
        model = GossipDataParallel(inner, process_group=group, **LIBRARY[name](size))
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9)
        train(model, group.rank(), optimizer.step)
        model.flush()
        model.close()
        return vector(inner)

    def nano(group: dist.ProcessGroup) -> Tensor:
        inner = net()
        arguments = {"sync_every": 3} if name == "diloco" else {}
        method = NANO["METHODS"][name](inner, NANO["Network"](group), **arguments)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9)
        train(inner, group.rank(), lambda: method.step(optimizer), before_forward=method.before_forward)
        method.close()
        return vector(inner)

    expected, got = run_ranks(size, library), run_ranks(size, nano)
    assert not torch.equal(expected[0], expected[1]) or name == "diloco"
    assert torch.equal(torch.stack(got), torch.stack(expected))


def test_an_exchange_of_adpsgd_is_the_librarys_to_the_bit() -> None:
    """Two ranks with models of integers exchange until both have the average, which has no rounding error."""

    def settle(round_: Callable[[], object], group: dist.ProcessGroup) -> None:
        for active in (False, True, False):  # the passive rank shows its model before the active one asks
            if (group.rank() == 1) == active:
                round_()
            group.barrier().wait()

    def library(group: dist.ProcessGroup) -> Tensor:
        inner = net()
        model = BilatGossipDataParallel(inner, process_group=group)
        with torch.no_grad():
            for p in inner.parameters():
                p.copy_((8 * p).round() + 2 * group.rank())

        def round_() -> None:
            model(torch.zeros(1, 4)).sum().backward()
            model.flush()  # waits for the exchange that an active rank has asked for

        settle(round_, group)
        model.close()
        return vector(inner)

    def nano(group: dist.ProcessGroup) -> Tensor:
        inner = net()
        method = NANO["ADPSGD"](inner, NANO["Network"](group))
        method.x.mul_(8).round_().add_(2 * group.rank())
        settle(method.before_forward, group)
        method.close()
        return vector(inner)

    expected, got = run_ranks(2, library), run_ranks(2, nano)
    assert torch.equal(expected[0], (8 * vector(net())).round() + 1)
    assert torch.equal(torch.stack(got), torch.stack(expected))


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["sgp", "adpsgd"])
def test_it_runs_as_it_stands(name: str) -> None:
    first, *others = script_outputs(PATH, 4, name)
    assert number(r"average model ([\d.]+)%", first) > 95
    assert not any(others)


def test_it_is_short_and_needs_torch_only() -> None:
    lines = PATH.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 300
    imported = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert imported <= {"math", "sys", "threading", "torch"}
