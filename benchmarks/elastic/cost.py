"""What a membership costs where nobody dies: steps with and without one, which take turns in the same processes."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.elastic.methods import METHODS
from benchmarks.elastic.training import Training
from gossip_modules.testing import Chaos, Worker

STEPS = 10  # of a turn
_WARM_TURNS = 3


@dataclass(frozen=True)
class CostTraining(Training):
    """Turns of steps with a membership and without one.

    Args:
        turns: of each of them.
    """

    turns: int = 60

    def __call__(self, worker: Worker) -> dict[str, Any]:
        """The milliseconds of a step, of the slowest worker, for each turn; what the threads use while nothing runs."""
        torch.set_num_threads(1)
        host, _, port = worker.store.rpartition(":")
        store = dist.PrefixStore("plain", dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False))
        dist.init_process_group("gloo", store=store, rank=worker.rank, world_size=self.num_workers)
        torch.manual_seed(0)
        plain = METHODS[self.method](self.make_model())
        membership = worker.membership(min_workers=self.num_workers, min_deadline=self.min_deadline)
        elastic = METHODS[self.method](self.make_model(), membership=membership)
        wrappers = {"plain": plain, "elastic": elastic}
        optimizers = {name: self.make_optimizer(wrapper) for name, wrapper in wrappers.items()}
        times: dict[str, list[float]] = {name: [] for name in wrappers}
        for turn in range(_WARM_TURNS + self.turns):
            for name in sorted(wrappers, reverse=turn % 2 == 0):
                dist.barrier()
                start = time.perf_counter()
                for step in range(STEPS):
                    self.finish_step(self.loss(wrappers[name], seed=step), optimizers[name])
                slowest = torch.tensor(1000 * (time.perf_counter() - start) / STEPS)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                if turn >= _WARM_TURNS:
                    times[name].append(slowest.item())
        start, used = time.perf_counter(), time.process_time()
        time.sleep(3.0)
        background = (time.process_time() - used) / (time.perf_counter() - start)
        dist.barrier()
        elastic.close()
        plain.close()
        dist.destroy_process_group()
        return {**times, "background": background}


def measure(training: CostTraining) -> dict[str, Any]:
    """One row."""
    result = Chaos(backend="processes", seconds=500.0).run(training, training.num_workers)[0]
    ratios = [elastic / plain for elastic, plain in zip(result["elastic"], result["plain"], strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    return {
        "method": training.method,
        "num_workers": training.num_workers,
        "num_parameters": sum(x.numel() for x in training.make_model().parameters()),
        "slept_ms": training.step_ms,
        "turns": training.turns,
        "plain_ms": round(statistics.median(result["plain"]), 3),
        "elastic_ms": round(statistics.median(result["elastic"]), 3),
        "ratio": round(ratio, 4),
        "ratio_quarter": round(low, 4),
        "ratio_three_quarters": round(high, 4),
        "background_percent": round(100 * result["background"], 2),
    }
