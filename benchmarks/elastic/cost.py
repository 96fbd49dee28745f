"""What a membership costs where nobody dies: processor time of steps with and without one, which take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.elastic.methods import METHODS
from benchmarks.elastic.training import Training
from gossip_modules.testing import Chaos, Worker

_WARM_TURNS = 3
_ELEMENTS = 400_000  # of a turn, over all its steps


@dataclass(frozen=True)
class CostTraining(Training):
    """Turns of steps with a membership and without one.

    The first `num_workers` processes have a membership, and the others have none: the threads of a membership run at
    all times, so its processor time is that of its processes in their own turns.

    Args:
        turns: of each of them.
    """

    turns: int = 60

    def __call__(self, worker: Worker) -> dict[str, Any]:
        """Milliseconds of a step for each turn; what the threads of this process use while nothing runs.

        Processor time is the mean over the workers of a side, wall time that of the slowest.
        """
        torch.set_num_threads(1)
        n, is_elastic = self.num_workers, worker.rank < self.num_workers
        host, _, port = worker.store.rpartition(":")
        store = dist.PrefixStore("plain", dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False))
        dist.init_process_group("gloo", store=store, rank=worker.rank, world_size=2 * n)
        group = dist.new_group(list(range(n, 2 * n)))
        torch.manual_seed(0)
        model = self.make_model()
        options: dict[str, Any] = {"process_group": group}
        if is_elastic:
            options = {"membership": worker.membership(min_workers=n, min_deadline=self.min_deadline)}
        wrapper = METHODS[self.method](model, **options)
        optimizer = self.make_optimizer(wrapper)
        num_steps = max(2, min(40, _ELEMENTS // sum(x.numel() for x in model.parameters())))

        def steps() -> None:
            for step in range(num_steps):
                self.finish_step(self.loss(wrapper, seed=step), optimizer)

        times: dict[str, list[tuple[float, float]]] = {"elastic": [], "plain": []}
        for turn in range(_WARM_TURNS + self.turns):
            for name in sorted(times, reverse=turn % 2 == 0):
                used = _used(steps if (name == "elastic") is is_elastic else None)
                if turn >= _WARM_TURNS:
                    times[name].append((1000 * used[0] / n / num_steps, 1000 * used[1] / num_steps))
        start, used_before = time.perf_counter(), time.process_time()
        time.sleep(3.0)
        background = (time.process_time() - used_before) / (time.perf_counter() - start)
        dist.barrier()
        wrapper.close()
        dist.destroy_process_group()
        return {**times, "background": background}


def _used(act: Callable[[], None] | None) -> tuple[float, float]:
    """Seconds of the processor on all processes that act, and of wall time on the slowest; collective."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    if act is not None:
        act()
    used = (time.process_time() - cpu, time.perf_counter() - wall) if act is not None else (0.0, 0.0)
    total, slowest = map(torch.tensor, used)
    dist.all_reduce(total)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return total.item(), slowest.item()


def measure(training: CostTraining) -> dict[str, Any]:
    """One row."""
    result = Chaos(backend="processes", seconds=600.0).run(training, 2 * training.num_workers)[0]
    (elastic, elastic_wall), (plain, plain_wall) = (zip(*result[name], strict=True) for name in ("elastic", "plain"))
    low, ratio, high = statistics.quantiles([own / other for own, other in zip(elastic, plain, strict=True)], n=4)
    figures = {
        "plain_cpu_ms": statistics.median(plain),
        "elastic_cpu_ms": statistics.median(elastic),
        "over_ms": statistics.median(own - other for own, other in zip(elastic, plain, strict=True)),
        "ratio": ratio,
        "ratio_quarter": low,
        "ratio_three_quarters": high,
        "plain_wall_ms": statistics.median(plain_wall),
        "elastic_wall_ms": statistics.median(elastic_wall),
        "background_percent": 100 * result["background"],
    }
    return {
        "method": training.method,
        "num_workers": training.num_workers,
        "num_parameters": sum(x.numel() for x in training.make_model().parameters()),
        "turns": training.turns,
        **{name: round(value, 4) for name, value in figures.items()},
    }
