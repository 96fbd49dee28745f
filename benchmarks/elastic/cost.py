"""What a membership costs where nobody dies: steps with and without one, which take turns in the same processes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.elastic.methods import METHODS
from benchmarks.elastic.worker import make_model, say
from gossip_modules import Membership

STEPS = 10  # of a turn


def run(rank: int, num_workers: int, address: str, method: str, width: int, step_ms: float, turns: int) -> None:
    """One worker: rank 0 prints the milliseconds of a step, of the slowest worker, for each turn."""
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("plain", store), rank=rank, world_size=num_workers)
    plain = METHODS[method](make_model(width, 0))
    membership = Membership(address, min_workers=num_workers, min_deadline=10.0)
    elastic = METHODS[method](make_model(width, 0), membership=membership)
    wrappers = {"plain": plain, "elastic": elastic}
    optimizers = {name: torch.optim.SGD(wrapper.parameters(), lr=1 / width) for name, wrapper in wrappers.items()}
    x = torch.randn(32, 64)
    times: dict[str, list[float]] = {"plain": [], "elastic": []}
    for turn in range(turns + 3):
        for name in sorted(wrappers, reverse=turn % 2 == 0):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                loss = wrappers[name](x).pow(2).mean()
                optimizers[name].zero_grad()
                loss.backward()
                optimizers[name].step()
                time.sleep(step_ms / 1000)
            slowest = torch.tensor(1000 * (time.perf_counter() - start) / STEPS)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn >= 3:
                times[name].append(slowest.item())
    start, used = time.perf_counter(), time.process_time()
    time.sleep(3.0)
    background = (time.process_time() - used) / (time.perf_counter() - start)
    if rank == 0:
        say(**times, background=background)
    dist.barrier()
    elastic.close()
    plain.close()
    dist.destroy_process_group()


def measure(method: str, *, address: str, num_workers: int, width: int, step_ms: float, turns: int) -> dict[str, Any]:
    """One row. step_ms: of computation, which is slept."""
    command = [sys.executable, "-m", "benchmarks.elastic", "cost-worker"]
    places = [[rank, num_workers, address, method, width, step_ms, turns] for rank in range(num_workers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([*command, json.dumps(place)], stdout=subprocess.PIPE, text=True, env=environment)
        for place in places
    ]
    outputs = [process.communicate(timeout=500)[0] for process in processes]
    result = json.loads(outputs[0])
    ratios = [elastic / plain for elastic, plain in zip(result["elastic"], result["plain"], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "method": method,
        "num_workers": num_workers,
        "num_parameters": sum(x.numel() for x in make_model(width, 0).parameters()),
        "slept_ms": step_ms,
        "turns": turns,
        "plain_ms": round(statistics.median(result["plain"]), 3),
        "elastic_ms": round(statistics.median(result["elastic"]), 3),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quarter": round(quartiles[0], 4),
        "ratio_three_quarters": round(quartiles[2], 4),
        "background_percent": round(100 * result["background"], 2),
    }
