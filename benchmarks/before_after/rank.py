"""One rank of one side: takes steps when it is told to, with whichever gossip_modules PYTHONPATH names first.

    python rank.py RANK WORLD_SIZE STORE_FILE MODEL

Reads lines "METHOD STEPS" from standard input. Rank 0 answers each with the milliseconds per step of the slowest rank.
It uses only what both sides have: public names of gossip_modules, and no other module of this project.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn

import gossip_modules as gm


def by(algorithm: Any) -> Callable[[nn.Module], Any]:
    """Wraps a module for an algorithm, of which version 0.1 said `gossiper`."""
    argument = "algorithm" if "algorithm" in inspect.signature(gm.GossipDataParallel).parameters else "gossiper"
    return lambda module: gm.GossipDataParallel(module, **{argument: algorithm})


COMPARED_METHODS: dict[str, Callable[[nn.Module], Any]] = {
    "ar": gm.AllReduceDataParallel,
    "dpsgd": lambda module: gm.GossipDataParallel(module, push_sum=False),
    "sgp": gm.GossipDataParallel,
    "osgp": lambda module: gm.GossipDataParallel(module, overlap=True),
    "choco": by(gm.Choco(gm.TopK(0.01), step_size=0.04)),
    "powergossip": by(gm.PowerGossip()),
    "adpsgd": gm.BilatGossipDataParallel,
    "wagma": gm.GroupAverageDataParallel,
}


def make_model(name: str) -> tuple[nn.Module, Tensor]:
    """A model and its batch: "resnet18" is mostly compute, "mlp" mostly what surrounds a round."""
    torch.manual_seed(0)
    if name == "resnet18":
        return torchvision.models.resnet18(num_classes=10), torch.randn(2, 3, 32, 32)
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(4, 64)


class TimedTraining:
    """Training by a method, with a model of its own."""

    def __init__(self, method: str, model: str) -> None:
        module, self.inputs = make_model(model)
        self.wrapper = COMPARED_METHODS[method](module)
        self.optimizer = torch.optim.SGD(self.wrapper.parameters(), lr=1e-4, momentum=0.9)
        # Ranks of WAGMA may be in different rounds after equally many steps; the others have nothing to settle.
        self.must_settle = method == "wagma"

    def steps(self, count: int) -> None:
        """So many steps."""
        for _ in range(count):
            loss = self.wrapper(self.inputs).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        if self.must_settle:
            self.wrapper.settle()


def main() -> None:
    """Answer until standard input ends."""
    rank, size, store, model = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    trainings: dict[str, TimedTraining] = {}
    for line in sys.stdin:
        method, count = line.split()
        if method not in trainings:
            trainings[method] = TimedTraining(method, model)
        dist.barrier()
        start = time.perf_counter()
        trainings[method].steps(int(count))
        milliseconds = torch.tensor((time.perf_counter() - start) * 1000 / int(count))
        dist.all_reduce(milliseconds, op=dist.ReduceOp.MAX)
        if rank == 0:
            print(milliseconds.item(), flush=True)
    for training in trainings.values():
        training.wrapper.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
