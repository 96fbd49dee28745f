"""The bytes of `deltas=True` beside the plain bfloat16 wire, and the time of a step with each.

    OMP_NUM_THREADS=1 python -m benchmarks.deltas

Bytes: a small decoder is trained on Python's sources by one worker, then by four ranks on a ring with D-PSGD and AdamW,
at one rate for each row, with both wires. Both runs must end with equal parameters. The first steps are left out.

Time: two ranks train a perceptron of 9.5 million parameters at the same rates. A step with each wire takes turns, and a
figure is the median over steps of the slower rank. The processor time is that of the thread of a rank, from the forward
to the end of the optimizer step.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.record import RESULTS, write_rows
from benchmarks.studies.small_decoder import Text
from gossip_modules import GossipDataParallel, RingGraph
from gossip_modules.testing import run_ranks

RATES = (1e-3, 1e-4, 1e-5, 1e-6)
PRETRAINING, PRETRAINING_RATE = 400, 3e-3
RANKS, LAYERS, BATCH = 4, 16, 8
SKIPPED, COUNTED = 8, 16
"""Steps with the rate of a row: until the moments of AdamW are there, and of the figures."""
WIDE, DEPTH, ROWS, TIMED = 1378, 5, 64, 40
"""The perceptron: width and layers; rows of a batch, and steps."""
WIRES: tuple[bool, ...] = (False, True)


def pretrained(task: Text, *, steps: int) -> nn.Module:
    """Return the decoder after so many steps of one worker."""
    torch.manual_seed(0)
    model, generator = task.model(), torch.Generator().manual_seed(0)
    optimizer = task.optimizer(list(model.parameters()), PRETRAINING_RATE)
    for step in range(steps):
        optimizer.zero_grad()
        task.loss(model, task.batch(0, step, generator)).backward()
        optimizer.step()
    return model


def bytes_of(task: Text, start: nn.Module, rate: float, *, deltas: bool, seed: int) -> tuple[float, Tensor]:
    """Return the bytes of a message, the mean over ranks and steps, and the last parameters of all ranks."""

    def body(group: dist.ProcessGroup) -> tuple[float, Tensor]:
        model, generator = copy.deepcopy(start), torch.Generator().manual_seed(1000 * seed + group.rank())
        options: dict[str, Any] = {"graph": RingGraph(RANKS, peers_per_itr=2), "push_sum": False}
        wrapper = GossipDataParallel(model, wire_dtype=torch.bfloat16, deltas=deltas, process_group=group, **options)
        optimizer, before = task.optimizer(list(model.parameters()), rate), 0.0
        for step in range(SKIPPED + COUNTED):
            if step == SKIPPED:
                before = wrapper.comm_stats()["bytes_sent"]
            optimizer.zero_grad()
            task.loss(wrapper, task.batch(group.rank(), step, generator)).backward()
            optimizer.step()
        sent = wrapper.comm_stats()["bytes_sent"] - before
        wrapper.close()
        return sent / COUNTED / 2, torch.cat([p.detach().flatten() for p in model.parameters()])

    ranks = run_ranks(RANKS, body)
    return statistics.mean(sent for sent, _ in ranks), torch.stack([x for _, x in ranks])


def times_of(rate: float, *, width: int, steps: int) -> dict[str, float]:
    """Return the milliseconds of a step with each wire, and of its processor time."""

    def body(group: dist.ProcessGroup) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        loops = []
        for deltas in WIRES:
            torch.manual_seed(0)
            layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(width, width), nn.Tanh())]
            model = nn.Sequential(*layers)
            wrapper = GossipDataParallel(
                model, graph=RingGraph(2), push_sum=False, wire_dtype=torch.bfloat16, deltas=deltas, process_group=group
            )
            loops.append((wrapper, torch.optim.AdamW(model.parameters(), lr=rate), "deltas" if deltas else "plain"))
        generator = torch.Generator().manual_seed(group.rank())
        for _ in range(steps):
            x = torch.randn(ROWS, width, generator=generator)
            for wrapper, optimizer, name in loops:
                started = time.perf_counter(), time.thread_time()
                optimizer.zero_grad()
                (wrapper(x) - x.roll(1, 1)).square().mean().backward()
                optimizer.step()
                taken = time.perf_counter() - started[0], time.thread_time() - started[1]
                for kind, seconds in zip(("ms", "cpu_ms"), taken, strict=True):
                    found.setdefault(f"{name}_{kind}", []).append(1e3 * seconds)
        for wrapper, *_ in loops:
            wrapper.close()
        return found

    ranks = run_ranks(2, body)
    return {
        name: statistics.median(max(rank[name][step] for rank in ranks) for step in range(SKIPPED, steps))
        for name in ranks[0]
    }


def measure(
    rate: float, task: Text, start: nn.Module, *, width: int = WIDE, steps: int = TIMED, seed: int = 0
) -> dict[str, Any]:
    """Return the row of a rate."""
    (plain, x), (fewer, y) = (bytes_of(task, start, rate, deltas=deltas, seed=seed) for deltas in WIRES)
    assert torch.equal(x, y), "both wires give equal bits"
    times = times_of(rate, width=width, steps=steps)
    return {
        "rate": rate,
        "parameters": sum(p.numel() for p in start.parameters()),
        "plain_bytes": round(plain),
        "bytes": round(fewer),
        "times_fewer": round(plain / fewer, 2),
        **{name: round(value, 2) for name, value in times.items()},
        "ratio": round(times["deltas_ms"] / times["plain_ms"], 3),
        "cpu_ratio": round(times["deltas_cpu_ms"] / times["plain_cpu_ms"], 3),
    }


def main() -> None:
    """Measure, print, and write the CSV file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "deltas.csv")
    options = parser.parse_args()
    task = Text(BATCH, num_layers=LAYERS)
    start, rows = pretrained(task, steps=PRETRAINING), []
    for rate in RATES:
        rows.append(measure(rate, task, start, seed=options.seed))
        print(rows[-1], flush=True)
    write_rows(options.output, rows, seed=options.seed)


if __name__ == "__main__":
    main()
