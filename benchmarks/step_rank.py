"""One rank of `benchmarks.step_time`: takes steps when it is told to, with the gossip_modules that PYTHONPATH names.

    python step_rank.py RANK WORLD_SIZE STORE_FILE MODEL

Reads lines "METHOD STEPS" from standard input. Rank 0 answers each with the wall time of a step on the slowest rank and
the mean CPU time of a step over all ranks, in milliseconds. It runs with the library of earlier commits as well.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn

from benchmarks.by_hand import PlainLoop
from benchmarks.contenders import CONTENDERS
from gossip_modules import GroupAverageDataParallel


def make_model(name: str) -> tuple[nn.Module, Tensor]:
    """A model and its batch, by a name of `benchmarks.step_time.STEPS`."""
    torch.manual_seed(0)
    if name in ("resnet18", "resnet18-16"):
        num_images = 2 if name == "resnet18" else 16
        return torchvision.models.resnet18(num_classes=10), torch.randn(num_images, 3, 32, 32)
    width, depth = {"mlp": (64, 6), "tensors": (4, 500), "wide": (1536, 4)}[name]
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(4, width)


def main() -> None:
    """Answer until standard input ends."""
    rank, size, store, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    loops: dict[str, PlainLoop] = {}
    inputs = make_model(name)[1]

    def loss(model: nn.Module) -> Tensor:
        return model(inputs).square().mean()

    for line in sys.stdin:
        method, count = line.split()
        loop = loops.get(method) or loops.setdefault(method, CONTENDERS[method](make_model(name)[0]))
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(int(count)):
            loop.step(loss)
        if isinstance(loop.model, GroupAverageDataParallel):  # ranks may be in different rounds
            loop.model.settle()
        slowest, used = torch.tensor(time.perf_counter() - wall), torch.tensor(time.process_time() - cpu)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dist.all_reduce(used)
        if rank == 0:
            print(*(1000 * x.item() / int(count) for x in (slowest, used / size)), flush=True)
    for loop in loops.values():
        loop.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
