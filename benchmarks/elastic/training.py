"""What each worker of a job does: it trains a small network, and writes a line of JSON for each step."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.elastic.methods import METHODS
from gossip_modules import Membership
from gossip_modules.testing import Worker
from gossip_modules.wrappers.base import GossipWrapper

RESOURCES_EVERY = 10
"""Steps between two looks at threads, descriptors and memory."""
LAST = "last"
"""The file of a job that has the step before which training ends."""
_TEST_SEED = 10**9

Say: TypeAlias = Callable[..., None]
"""Writes a line: the kind of event, and values by name."""


@dataclass(frozen=True)
class Training:
    """The task of all workers of a job; picklable, as processes get it.

    Args:
        method: a name in METHODS.
        num_workers: the number of workers that begin.
        step_ms: milliseconds that each step sleeps in place of computation: workers share the cores of one machine.
        seed: of the network, the data and the function that is learnt.
        min_deadline: see `Membership`, in seconds.
        end_steps: steps at the end, in which the learning rate falls to zero.
        layers: numbers of inputs, hidden units and classes.
        learning_rate: of as many workers as begin.
        folder: of the lines, a file for each worker, and of `LAST`.
    """

    method: str
    num_workers: int
    step_ms: float
    seed: int
    min_deadline: float = 5.0
    end_steps: int = 1500
    layers: tuple[int, int, int] = (20, 64, 10)
    learning_rate: float = 0.05
    folder: str = ""

    def __call__(self, worker: Worker) -> dict[str, float]:
        """Train as one worker; its accuracy, and the number of steps of the job."""
        with self.lines(worker.rank) as say:
            membership = worker.membership(min_workers=self.num_workers, min_deadline=self.min_deadline, timeout=60)
            model = METHODS[self.method](self.make_model(), membership=membership)
            optimizer = self.make_optimizer(model)
            membership.track(optimizer=optimizer)
            membership.on_change(lambda change: say("change"))
            say("ready")
            begins = time.perf_counter()
            for step in membership.steps(1 << 60):
                last = self.last_step()
                if 0 <= last <= step:
                    break
                loss = self.loss(model, seed=100 * step + membership.rank)
                line = _line(membership, model, step)  # of the round that the forward has begun with
                optimizer.param_groups[0]["lr"] = self.rate(step, last=last, num_workers=membership.world_size)
                self.finish_step(loss, optimizer)
                begins, started = time.perf_counter(), begins
                say("step", **line, ms=1000 * (begins - started))
            accuracy = self._accuracy(model)
        model.close()
        return {"accuracy": accuracy, "steps": step}

    @contextmanager
    def lines(self, rank: int) -> Iterator[Say]:
        """Set up the process of a worker; gives the function that writes its lines."""
        torch.set_num_threads(1)
        torch.manual_seed(self.seed)
        logging.basicConfig(format=f"%(asctime)s worker {rank}: %(message)s")
        with (Path(self.folder) / f"{rank}.jsonl").open("w") as file:

            def say(event: str, **values: Any) -> None:
                file.write(json.dumps({"event": event, "at": time.time(), **values}) + "\n")
                file.flush()

            try:
                yield say
            except Exception:
                say("failed")
                raise

    def make_model(self) -> nn.Module:
        """A network with one hidden layer."""
        num_inputs, width, num_classes = self.layers
        return nn.Sequential(nn.Linear(num_inputs, width), nn.ReLU(), nn.Linear(width, num_classes))

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate, momentum=0.9)

    def loss(self, model: nn.Module, *, seed: int) -> Tensor:
        """The cross-entropy of a batch."""
        x, y = self.batch(16, seed=seed)
        return cross_entropy(model(x), y)

    def finish_step(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """The rest of a step after its forward."""
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(self.step_ms / 1000)

    def last_step(self) -> int:
        """The step before which training ends; -1: not known yet."""
        path = Path(self.folder) / LAST
        return int(path.read_text()) if path.exists() else -1

    def rate(self, step: int, *, last: int, num_workers: int) -> float:
        """The learning rate: proportional to the number of workers, and in the last `end_steps` falling to zero.

        At a constant one, accuracy at the end is that of the noise of the last few hundred steps, of which fewer
        workers have more: 96.4 % with 8 workers, 94.7 with 5 and 86.6 with 2, if all average exactly and nobody dies.
        """
        left = 1.0 if last < 0 else min((last - step) / self.end_steps, 1.0)
        return self.learning_rate * num_workers / self.num_workers * left

    def batch(self, size: int, *, seed: int) -> tuple[Tensor, Tensor]:
        """Random inputs, float32 [size, inputs], and the class that a fixed random network gives them, [size]."""
        num_inputs, _, num_classes = self.layers
        x = torch.randn(size, num_inputs, generator=torch.Generator().manual_seed(seed))
        generator = torch.Generator().manual_seed(self.seed)
        hidden = torch.randn(num_inputs, 16, generator=generator)
        out = torch.randn(16, num_classes, generator=generator)
        return x, ((x @ hidden).relu() @ out).argmax(dim=1)

    @torch.no_grad()
    def _accuracy(self, model: nn.Module) -> float:
        """Of this worker's model on 20,000 inputs that are in no batch, in percent."""
        model.eval()
        x, y = self.batch(20_000, seed=_TEST_SEED)
        return 100 * (model(x).argmax(dim=1) == y).double().mean().item()


def _line(membership: Membership, model: GossipWrapper, step: int) -> dict[str, Any]:
    """What is known after the round of a step."""
    roster = membership.worker.roster
    line = {
        "step": step,
        "number": membership.number,
        "rank": membership.rank,
        "generation": membership.generation,
        "members": membership.members,
        "weight": model._local.buffer.vector.push_sum_weight.item(),
        # While somebody joins or is lost, the sum of the weights changes by what is given to it, or held by it.
        "changes": len(roster.joiners) + len(membership.lost) + (roster.forming is not None),
    }
    if step % RESOURCES_EVERY == 0:
        status = dict(row.split(":", 1) for row in Path("/proc/self/status").read_text().splitlines() if ":" in row)
        line |= {
            "threads": int(status["Threads"]),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "megabytes": int(status["VmRSS"].split()[0]) / 1024,
            "deadline": membership.stats()["deadline"],
        }
    return line
