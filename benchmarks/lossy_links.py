"""Running sums in datagrams beside SGP over TCP, on links that lose 20 % of their packets: as root, on emulated hosts.

    .venv/bin/python -m benchmarks.lossy_links --output benchmarks/results/lossy_links.csv   # 4 hosts, 3 repeats

Each rank is a host of its own, a network namespace behind a router in this process (`gossip_modules.testing`), which
drops packets and holds them back. In each repeat all trials run in a drawn order, in the same processes. A trial has
`--steps` steps of a wait and a round; there are no gradients, so the mean of the models must stay. SGP on a lossy line
has fewer steps, since each of them takes seconds. After the steps links lose nothing for 20 rounds, so that all shares
on their way come: then each model must be the mean of the first models.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch import nn

from benchmarks.record import append_rows
from gossip_modules import GossipDataParallel, RunningSums
from gossip_modules.testing.network import Condition, Router, enter_namespace

_PORT = 29_400
_NETMASK = "255.255.0.0"
_LIMIT = 600.0  # seconds, of a trial
_AFTERWARDS = 20  # rounds without losses
_PAUSE_SECONDS = 0.03  # between them
CUT_OFF = "lossy, one host cut off"


@dataclass(frozen=True)
class LossyTrial:
    """What the ranks run.

    Args:
        method: "running sums", or "SGP".
        line: the name of the condition of the links, one of `CONDITIONS`.
        num_steps: the number of steps.
        compute_ms: the wait of each step.
        num_parameters: of the model, float32.
        datagram_bytes: see `RunningSums`.
        seed: of the models.
    """

    method: str
    line: str
    num_steps: int
    compute_ms: float
    num_parameters: int
    datagram_bytes: int
    seed: int


@dataclass(frozen=True)
class LossyLinks:
    """The links, and what is measured on them."""

    hosts: int = 4
    """A rank each."""
    loss: float = 0.2
    """The share of packets that a lossy link loses."""
    jitter: float = 100.0
    """The largest delay of a packet on a lossy link, in ms: the sum of two even draws, 50 ms in the mean."""
    compute: float = 100.0
    """The wait of each step, in ms."""
    parameters: float = 25e3
    """Of the model, float32."""
    steps: int = 60
    """Of a trial."""
    slow_steps: int = 6
    """Of a trial of SGP on lossy links."""
    datagram_bytes: int = 1392
    """See `RunningSums`."""
    repeats: int = 3
    """Of each trial."""
    seed: int = 0
    """Of the models, of lost packets and of the order."""
    output: Path | None = None
    """CSV file to append to."""

    def main(self) -> None:
        """Measure, and print a line for each trial."""
        draw = random.Random(self.seed)
        end = 1 - (1 - self.loss) ** 0.5  # a packet passes two ends
        lossy = Condition(loss=end, jitter=self.jitter / 2e3)
        lines: dict[str, list[Condition]] = {
            "lossless": [Condition()] * self.hosts,
            "lossy": [lossy] * self.hosts,
            CUT_OFF: [*[lossy] * (self.hosts - 1), Condition(loss=1.0)],
        }
        methods = [("running sums", line) for line in lines] + [("SGP", "lossless"), ("SGP", "lossy")]
        with _hosts(self.hosts, self.seed) as (router, pipes):
            for repeat in range(self.repeats):
                for method, line in draw.sample(methods, len(methods)):
                    num_steps = self.slow_steps if (method, line) == ("SGP", "lossy") else self.steps
                    trial = LossyTrial(
                        method,
                        line,
                        num_steps,
                        self.compute,
                        int(self.parameters),
                        self.datagram_bytes,
                        self.seed + repeat,
                    )
                    row = {**_measured(router, pipes, lines[line], trial), "repeat": repeat}
                    print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
                    if self.output is not None:
                        setting = {"hosts": self.hosts, "loss": self.loss, "jitter_ms": self.jitter}
                        append_rows(self.output, [{**setting, **row}], seed=self.seed)


def _address(rank: int) -> str:
    return f"10.77.1.{rank + 1}"


@contextmanager
def _hosts(num_hosts: int, seed: int) -> Iterator[tuple[Router, list[Connection]]]:
    """The router, and a pipe to the process of each host."""
    context, router, pipes, processes = multiprocessing.get_context("spawn"), Router(seed), [], []
    try:
        for rank in range(num_hosts):
            own, other = context.Pipe()
            process = context.Process(target=_rank, args=(other, rank, num_hosts), daemon=True)
            process.start()
            other.close()
            pipes.append(own)
            processes.append(process)
            router.attach(_address(rank), reduction.recv_handle(own))
        for pipe in pipes:
            pipe.send(None)
        yield router, pipes
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(10.0)
            process.kill()
        router.close()


def _measured(
    router: Router, pipes: Sequence[Connection], line: Sequence[Condition], trial: LossyTrial
) -> dict[str, Any]:
    """The row of a trial."""
    _say(pipes, trial)
    _hear(pipes)  # all are wrapped
    for rank, condition in enumerate(line):
        router.set_condition(_address(rank), condition)
    _say(pipes, "begin")
    answers = _hear(pipes)
    for rank in range(len(line)):
        router.set_condition(_address(rank), Condition())
    _say(pipes, "end")
    found, *_ = _hear(pipes)
    connected = [answer for answer, condition in zip(answers, line, strict=True) if condition.loss < 1]
    totals = {
        name: int(sum(answer.get(name, 0) for answer in answers))
        for name in ("bytes_sent", "datagrams_sent", "datagrams_received", "datagrams_lost", "datagrams_late")
    }
    return {
        "method": trial.method,
        "line": trial.line,
        "compute_ms": trial.compute_ms,
        "num_parameters": trial.num_parameters,
        "num_steps": trial.num_steps,
        "datagram_bytes": trial.datagram_bytes if trial.method == "running sums" else "",
        "median_ms": round(statistics.median(ms for answer in connected for ms in answer["ms"]), 2),
        "mean_ms": round(max(statistics.fmean(answer["ms"]) for answer in connected), 2),
        "slowest_ms": round(max(ms for answer in connected for ms in answer["ms"]), 2),
        **{name: float(f"{value:.3g}") for name, value in found.items()},
        **totals,
        "load": round(os.getloadavg()[0], 1),
    }


def _say(pipes: Sequence[Connection], what: object) -> None:
    for pipe in pipes:
        pipe.send(what)


def _hear(pipes: Sequence[Connection]) -> list[dict[str, Any]]:
    found = []
    for rank, pipe in enumerate(pipes):
        if not pipe.poll(_LIMIT):
            raise TimeoutError(f"rank {rank} has not answered within {_LIMIT:.0f} s")
        found.append(pipe.recv())
    return found


# A rank.


def _rank(pipe: Connection, rank: int, world_size: int) -> None:
    """The body of the process of a host."""
    device = enter_namespace(_address(rank), _NETMASK)
    reduction.send_handle(pipe, device, os.getppid())
    os.close(device)
    pipe.recv()
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": _address(0), "GLOO_SOCKET_IFNAME": "gossip0"}
    os.environ["GOSSIP_JOB_KEY"] = "the key of the benchmark of lossy links"
    store = f"tcp://{_address(0)}:{_PORT}"
    dist.init_process_group("gloo", store, rank=rank, world_size=world_size, timeout=timedelta(seconds=_LIMIT))
    while True:
        try:
            trial = pipe.recv()
        except EOFError:
            return
        _run(pipe, rank, trial)


def _run(pipe: Connection, rank: int, trial: LossyTrial) -> None:
    module = nn.Linear(1, trial.num_parameters, bias=False)
    with torch.no_grad():
        module.weight.normal_(generator=torch.Generator().manual_seed(1000 * trial.seed + rank))
    algorithm = RunningSums(datagram_bytes=trial.datagram_bytes) if trial.method == "running sums" else None
    model = GossipDataParallel(module, algorithm=algorithm, init_sync=False, rounds="manual", timeout=_LIMIT)
    before = _models_of_all(module.weight)
    pipe.send({})
    pipe.recv()
    ms = []
    for _ in range(trial.num_steps):
        start = time.perf_counter()
        time.sleep(trial.compute_ms / 1e3)
        model.gossip_step()
        ms.append(1e3 * (time.perf_counter() - start))
    stats: Mapping[str, float] = model.comm_stats()
    own = module.weight.detach().clone()
    pipe.send({"ms": ms, **{name: value for name, value in stats.items() if "/" not in name}})
    pipe.recv()
    models, mean = _models_of_all(own), before.mean(0)
    for _ in range(_AFTERWARDS):
        time.sleep(_PAUSE_SECONDS)
        model.gossip_step()
    later = _models_of_all(module.weight)
    model.close()
    connected = models[:-1] if trial.line == CUT_OFF else models
    errors = {
        "mean_error": connected.mean(0) - mean,
        "spread": connected - connected.mean(0),
        "later_error": later - mean,
    }
    pipe.send({name: float(error.abs().max()) for name, error in errors.items()})


def _models_of_all(x: torch.Tensor) -> torch.Tensor:
    """The models of all ranks, float64 [number of ranks, number of parameters]."""
    rows = [torch.empty(x.numel(), dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, x.detach().double().flatten())
    return torch.stack(rows)


def main() -> None:
    """Run the command line."""
    tyro.cli(LossyLinks, description=__doc__).main()


if __name__ == "__main__":
    main()
