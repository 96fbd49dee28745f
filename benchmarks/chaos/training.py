"""What a worker of the soak does: it trains a small network, and writes a line of JSON for each step."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.elastic.methods import METHODS
from gossip_modules import Membership
from gossip_modules.testing import Worker
from gossip_modules.wrappers.base import GossipWrapper

NUM_INPUTS, NUM_CLASSES = 20, 10
LEARNING_RATE = 0.05
"""Of as many workers as begin."""
RESOURCES_EVERY = 10
"""Steps between two looks at threads, descriptors and memory."""
_TEST_SEED = 10**9


@dataclass(frozen=True)
class SoakTraining:
    """The task of all workers; picklable, as processes get it.

    Args:
        method: of METHODS.
        folder: for the lines, a file per worker, and for `last`, a file with the step that training ends before.
        num_workers: that begin.
        step_ms: that each step sleeps, since all workers share the cores of one machine.
        seed: of the network, the data and what is to be learnt.
        min_deadline: of the membership, in seconds.
        end_steps: without faults, in which the learning rate falls to zero.
    """

    method: str
    folder: str
    num_workers: int
    step_ms: float
    seed: int
    min_deadline: float
    end_steps: int = 1500

    def __call__(self, worker: Worker) -> dict[str, float]:
        """The life of one worker; its accuracy, and the number of steps of the job."""
        torch.set_num_threads(1)
        logging.basicConfig(format=f"%(asctime)s worker {worker.rank}: %(message)s")
        torch.manual_seed(self.seed)
        membership = worker.membership(min_workers=self.num_workers, min_deadline=self.min_deadline, timeout=60)
        net = nn.Sequential(nn.Linear(NUM_INPUTS, 64), nn.ReLU(), nn.Linear(64, NUM_CLASSES))
        model = METHODS[self.method](net, membership=membership)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
        membership.track(optimizer=optimizer)
        end = Path(self.folder) / "last"
        last = -1
        with (Path(self.folder) / f"{worker.rank}.jsonl").open("w") as file:
            begins = time.perf_counter()
            for step in membership.steps(1 << 60):
                if last < 0 and end.exists():
                    last = int(end.read_text())
                if 0 <= last <= step:
                    break
                x, y = self.batch(16, seed=100 * step + membership.rank)
                loss = cross_entropy(model(x), y)
                line = _line(membership, model, step)
                optimizer.param_groups[0]["lr"] = self.rate(step, last=last, num_workers=membership.world_size)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(self.step_ms / 1000)
                now = time.perf_counter()
                line |= {"at": time.time(), "ms": 1000 * (now - begins)}
                begins = now
                file.write(json.dumps(line) + "\n")
                file.flush()
            accuracy = self._accuracy(model)
        model.close()
        return {"accuracy": accuracy, "steps": step}

    def rate(self, step: int, *, last: int, num_workers: int) -> float:
        """The learning rate: proportional to the number of workers, and in the last `end_steps` falling to zero.

        At a constant one, accuracy at the end is that of the noise of the last few hundred steps, of which fewer
        workers have more: 96.4 % with 8 workers, 94.7 with 5 and 86.6 with 2, if all average exactly and nobody dies.
        """
        left = 1.0 if last < 0 else min((last - step) / self.end_steps, 1.0)
        return LEARNING_RATE * num_workers / self.num_workers * left

    def batch(self, size: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random inputs, float32 [size, NUM_INPUTS], and the class that a fixed random network gives them, [size]."""
        x = torch.randn(size, NUM_INPUTS, generator=torch.Generator().manual_seed(seed))
        generator = torch.Generator().manual_seed(self.seed)
        hidden = torch.randn(NUM_INPUTS, 16, generator=generator)
        out = torch.randn(16, NUM_CLASSES, generator=generator)
        return x, ((x @ hidden).relu() @ out).argmax(dim=1)

    @torch.no_grad()
    def _accuracy(self, model: nn.Module) -> float:
        """Of this worker's model on 20,000 inputs that are in no batch, in percent."""
        model.eval()
        x, y = self.batch(20_000, seed=_TEST_SEED)
        return 100 * (model(x).argmax(dim=1) == y).double().mean().item()


def _line(membership: Membership, model: GossipWrapper, step: int) -> dict[str, Any]:
    """What is known after the round of a step."""
    line = {
        "step": step,
        "number": membership.number,
        "generation": membership.generation,
        "members": membership.members,
        "weight": model._buffer.vector.push_sum_weight.item(),
        # While somebody joins or is lost, the sum of the weights changes by what is given to it, or held by it.
        "changes": len(membership._roster.joiners) + len(membership.lost) + (membership._roster.forming is not None),
    }
    if step % RESOURCES_EVERY == 0:
        status = dict(row.split(":", 1) for row in Path("/proc/self/status").read_text().splitlines() if ":" in row)
        line |= {
            "threads": int(status["Threads"]),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "megabytes": int(status["VmRSS"].split()[0]) / 1024,
        }
    return line
