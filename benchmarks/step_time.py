"""Seconds per training step and per round, side by side in one run.

    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.step_time                       # 4 Gloo ranks on the CPU
    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.step_time --device cuda --ranks 2  # on one card, over Gloo

Every method trains its own ResNet-18 (11.2 M parameters, 32x32 images) in the same processes. They take turns, a few
steps each, for many cycles, so that all see the same noise. A turn's time is that of its slowest rank; printed are
the median over cycles, the quartiles, and the median ratio to the hand-written loop of the same kind, taken cycle by
cycle. The order is shuffled in every cycle, in the same way on all ranks.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchvision
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, Python looks beside this file only

from benchmarks.contenders import CONTENDERS, Contender, tensor_bytes
from gossip_modules import RingGraph, connect
from gossip_modules.extend import FlatVector, PushPull
from gossip_modules.mixing_manager import UniformMixing

MEGABYTE = 1e6


def make_model(device: torch.device) -> torch.nn.Module:
    """ResNet-18 for ten classes: 11.2 M parameters in 62 tensors and 40 floating-point buffers."""
    torch.manual_seed(0)
    return torchvision.models.resnet18(num_classes=10).to(device)


class RoundBench:
    """Single operations on as many bytes as the model has: the limit, and what a round of ours adds to it."""

    def __init__(self, num_elements: int, device: torch.device, timeout: timedelta) -> None:
        self.device = device
        self.x = torch.randn(num_elements, device=device)
        self.inbox = torch.empty_like(self.x)
        n, rank = dist.get_world_size(), dist.get_rank()
        self.source, self.target = (rank - 1) % n, (rank + 1) % n
        self.vector = FlatVector.over(self.x.clone())
        self.gossiper = PushPull()
        transport = connect(None, module_device=device, comm_device="cpu", timeout=timeout)
        self.gossiper.bind(UniformMixing(RingGraph(n)), transport)
        self.t = 0
        self.operations: dict[str, Callable[[], None]] = {"one pass over memory (lerp_)": self.one_pass}
        if device.type == "cpu":
            self.operations["raw ring send/recv"] = self.raw_exchange
            self.operations["raw ring send/recv, then one pass"] = self.exchange_and_pass
        self.operations["synchronous round"] = self.round

    def raw_exchange(self) -> None:
        """The model's bytes to the right, the left one's in."""
        receive, send = dist.irecv(self.inbox, self.source), dist.isend(self.x, self.target)
        for work in (receive, send):
            assert work is not None
            work.wait()

    def one_pass(self) -> None:
        """Read two vectors, write one."""
        self.x.lerp_(self.inbox, 0.5)

    def exchange_and_pass(self) -> None:
        """What a round cannot do without."""
        self.raw_exchange()
        self.one_pass()

    def round(self) -> None:
        """Our round, alone."""
        self.gossiper.mix(self.vector, self.t)
        self.t += 1


def timed(turn: Callable[[], None], repeats: int, device: torch.device) -> float:
    """Milliseconds per call on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        turn()
    if device.type == "cuda":
        torch.cuda.synchronize()
    elapsed = torch.tensor([(time.perf_counter() - start) * 1000 / repeats])
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return elapsed.item()


def worker(rank: int, options: argparse.Namespace, rendezvous: str) -> None:
    """One rank of the benchmark."""
    torch.set_num_threads(1)
    device = torch.device(options.device)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=options.ranks)
    num_bytes = sum(t.numel() * t.element_size() for t in make_model(device).parameters())
    x = torch.randn(options.batch_size, 3, 32, 32, device=device)
    y = torch.randint(10, (options.batch_size,), device=device)

    def loss(model: torch.nn.Module) -> torch.Tensor:
        return cross_entropy(model(x), y)

    contenders: dict[str, Contender] = {}
    memory: dict[str, float] = {}
    for name in options.methods or CONTENDERS:
        before = tensor_bytes()
        contender = contenders[name] = CONTENDERS[name](make_model(device))
        for _ in range(3):
            contender.step(loss)
        gc.collect()
        if not name.startswith(("DDP", "Decent-DP")):  # their buckets are in C++, out of sight of tensor_bytes
            memory[name] = (tensor_bytes() - before) / num_bytes
    floor = memory.get("local step, no communication", float("nan"))
    rounds = RoundBench(num_bytes // 4, device, timedelta(minutes=5))

    turns: dict[str, Callable[[], None]] = dict(rounds.operations)
    for name, contender in contenders.items():
        turns[name] = lambda contender=contender: contender.step(loss)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in turns}
    order = random.Random(0)
    for cycle in range(options.cycles + 1):
        names = list(turns)
        order.shuffle(names)
        for name in names:
            elapsed = timed(turns[name], options.steps, device)
            if cycle:  # the first cycle warms up
                times[name].append(elapsed)
    if rank == 0:
        report(options, num_bytes, times, {name: value - floor for name, value in memory.items()})
    for contender in contenders.values():
        contender.close()
    dist.destroy_process_group()


def ratio(times: dict[str, list[float]], name: str, base: str) -> str:
    """Median over cycles of the ratio within a cycle."""
    if name not in times or base not in times:
        return "-"
    return f"{statistics.median(a / b for a, b in zip(times[name], times[base], strict=True)):.3f}"


def report(
    options: argparse.Namespace, num_bytes: int, times: dict[str, list[float]], memory: dict[str, float]
) -> None:
    """Print the tables."""
    print(
        f"{options.ranks} Gloo ranks, {options.device}, ResNet-18 with {num_bytes / MEGABYTE:.1f} MB of parameters, "
        f"batch {options.batch_size} per rank, {options.cycles} cycles of {options.steps} steps, "
        f"torch {torch.__version__}, {os.cpu_count()} cores ({platform.machine()})\n"
    )
    print(f"{'':36}{'median ms':>10}{'quartiles':>16}{'memory, models':>16}")
    for name, values in times.items():
        low, _, high = statistics.quantiles(values, n=4)
        extra = f"{memory[name]:+.2f}" if name in memory else ""
        print(f"{name:36}{statistics.median(values):10.1f}{f'{low:.1f}-{high:.1f}':>16}{extra:>16}")
    print()
    ours, overlapped = "GossipDataParallel", "GossipDataParallel(overlap=True)"
    for name, base in (
        ("synchronous round", "raw ring send/recv, then one pass"),
        (ours, "hand-written, blocking"),
        (overlapped, "hand-written, overlapped"),
        (ours, "DDP"),
        (ours, "DDP, gradient_as_bucket_view"),
        (ours, "Decent-DP"),
        (overlapped, "DDP"),
        (overlapped, "DDP, gradient_as_bucket_view"),
        (overlapped, "Decent-DP"),
    ):
        print(f"{name} / {base}: {ratio(times, name, base)}")


def main() -> None:
    """Parse options, start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch-size", type=int, default=4, help="images per rank and step")
    parser.add_argument("--cycles", type=int, default=30)
    parser.add_argument("--steps", type=int, default=5, help="steps per turn")
    parser.add_argument("--methods", nargs="*", choices=list(CONTENDERS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(options, str(Path(folder) / "store")), nprocs=options.ranks)


if __name__ == "__main__":
    main()
