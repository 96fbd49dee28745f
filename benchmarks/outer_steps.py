"""What outer steps add to training: the mean step with them beside the step of a rank that trains alone.

    OMP_NUM_THREADS=1 python -m benchmarks.outer_steps --cycles 12 --output benchmarks/results/outer_steps.csv

Ranks are processes on one machine, joined by Gloo over loopback; each method trains a ResNet-18 (11.2 M parameters) of
its own. Methods take turns of H steps, so that each turn has the outer step of one period, in an order that is shuffled
in every cycle, alike on all ranks. "all_reduce" trains alone, and calls `dist.all_reduce` for as many floats as the
model has once a turn: what the messages of an exact average cost by themselves. The time of a turn is that of its
slowest rank. A row has the medians over cycles of the mean step and of its ratio to the turn without communication of
the same cycle, with the quartiles of the ratio.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.record import append_rows
from benchmarks.step_time import make_model
from gossip_modules import DiLoCo, EagerDiLoCo, GossipDataParallel, NoLoCo, Schedule, SparseLoCo, StreamingDiLoCo
from gossip_modules.extend import Algorithm

ALONE = "alone"
ALL_REDUCE = "all_reduce"  # training alone, and an all-reduce of a vector of the model's size
SEED = 0
MIN_CYCLES = 3


def methods(every: int) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """What is compared, by name: each wraps a model."""

    def by(algorithm: Algorithm) -> Callable[[nn.Module], nn.Module]:
        return lambda model: GossipDataParallel(model, algorithm=algorithm)

    def fused_sgd(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        """DiLoCo's own outer optimizer, which reads and writes its vectors once instead of once for each operation."""
        return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True, fused=True)

    average = Schedule(gossip_every=every, average_every=1)
    return {
        ALONE: lambda model: model,
        "localsgd": lambda model: GossipDataParallel(model, schedule=average),
        "diloco": by(DiLoCo(every)),
        "diloco-fused": by(DiLoCo(every, optimizer=fused_sgd)),
        "streamingdiloco": by(StreamingDiLoCo(every, fragments=2, delay=1)),
        "eagerdiloco": by(EagerDiLoCo(every)),
        "sparseloco": by(SparseLoCo(every)),
        "noloco": by(NoLoCo(every)),
    }


def turns(
    wrap: Callable[[nn.Module], nn.Module], every: int, batch: int, *, has_all_reduce: bool = False
) -> Callable[[], float]:
    """A function that trains for H steps; returns the seconds of the slowest rank."""
    model = wrap(make_model(torch.device("cpu")))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    vector = torch.zeros(sum(own.numel() for own in model.parameters())) if has_all_reduce else None
    generator = torch.Generator().manual_seed(SEED + dist.get_rank())
    x, y = torch.randn(batch, 3, 32, 32, generator=generator), torch.randint(10, (batch,), generator=generator)

    def turn() -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(every):
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if vector is not None:
            dist.all_reduce(vector)
        seconds = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)

    return turn


def summary(times: Mapping[str, Sequence[float]], every: int) -> list[dict[str, Any]]:
    """A row for each method.

    Args:
        times: of each method, seconds of a turn in each cycle.
        every: steps of a turn.
    """
    rows = []
    for name, seconds in times.items():
        ratios = [own / alone for own, alone in zip(seconds, times[ALONE], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        figures = {"ratio": median, "ratio_low": low, "ratio_high": high}
        step = statistics.median(seconds) / every
        row = {"method": name, "sync_every": every, "cycles": len(seconds), "step_seconds": round(step, 5)}
        rows.append(row | {key: round(value, 4) for key, value in figures.items()})
    return rows


def worker(rank: int, options: argparse.Namespace, folder: Path) -> None:
    """One rank; rank 0 leaves the rows in the folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=options.ranks)
    chosen = {name: wrap for name, wrap in methods(options.every).items() if name in (ALONE, *options.methods)}
    runs = {name: turns(wrap, options.every, options.batch) for name, wrap in chosen.items()}
    runs[ALL_REDUCE] = turns(chosen[ALONE], options.every, options.batch, has_all_reduce=True)
    order, shuffler = list(runs), random.Random(SEED)
    times: dict[str, list[float]] = {name: [] for name in runs}
    start, is_over = time.perf_counter(), torch.zeros(1)
    for cycle in range(options.cycles + 1):
        is_over.fill_(cycle > MIN_CYCLES and time.perf_counter() - start > options.seconds)
        dist.broadcast(is_over, 0)
        if is_over:
            break
        shuffler.shuffle(order)
        for name in order:
            seconds = runs[name]()
            if cycle:  # the first has allocations, and no outer step before its first forward
                times[name].append(seconds)
    if rank == 0:
        rows = [row | {"ranks": options.ranks, "batch": options.batch} for row in summary(times, options.every)]
        (folder / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--every", type=int, default=4, help="H, steps from one outer step to the next")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=600, help="no new cycle after so long, and a few cycles")
    parser.add_argument("--methods", nargs="*", choices=list(methods(4)), default=list(methods(4)))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (options, Path(folder)), nprocs=options.ranks)
        rows = json.loads((Path(folder) / "rows.json").read_text())
    for row in rows:
        print(row)
    if options.output is not None:
        append_rows(options.output, rows, seed=SEED)


if __name__ == "__main__":
    main()
