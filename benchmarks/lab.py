"""Time of a worker and step in the Lab: 64 workers of a small transformer on one core, at once and one after another.

    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.lab
    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.lab --output benchmarks/results/lab.csv

Times are seconds of the processor, so that other processes on the machine do not count.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from benchmarks.record import write_rows
from gossip_modules.lab import Compute, LabPlan, LabTask, Network, Setting
from gossip_modules.lab.comparison import LabTraining

LENGTH, NUM_WORDS, WIDTH, NUM_WARM = 32, 64, 32, 2


class Transformer(nn.Module):
    """A decoder of two layers, 33,000 parameters with its embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(NUM_WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True) for _ in range(2)]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, NUM_WORDS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, words: Tensor) -> Tensor:
        """Return the scores of the next words."""
        x = self.embedding(words) + self.places.weight
        for layer in self.layers:
            x = layer(x, self.mask)
        return self.head(x)


def loss(model: nn.Module, words: Tensor) -> Tensor:
    """Return the cross-entropy of the next words."""
    return nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def measure(by: str, num_workers: int, num_steps: int) -> dict[str, Any]:
    """Return a row: milliseconds of a worker and step, by vmap or a loop."""
    task = LabTask(
        Transformer,
        loss,
        lambda worker, step, generator: torch.randint(NUM_WORDS, (8, LENGTH + 1), generator=generator),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )
    setting = Setting(num_workers, None, Compute(0.1), Network("1 Gbit/s"))
    training, begin = LabTraining(LabPlan.of("sgp"), setting, task, by=by), 0.0
    for step, _ in enumerate(training.run(NUM_WARM + num_steps)):
        begin = time.process_time() if step == NUM_WARM else begin
    milliseconds = 1e3 * (time.process_time() - begin) / num_steps / num_workers
    row = {"by": training.models.by, "workers": num_workers, "parameters": training.models.x.shape[1]}
    return {**row, "steps": num_steps, "milliseconds": round(milliseconds, 2)}


def main() -> None:
    """Measure both ways, print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--output", type=Path, help="a CSV file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(by, arguments.workers, arguments.steps) for by in ("vmap", "loop")]
    print(pd.DataFrame(rows).to_string(index=False))
    if arguments.output:
        write_rows(arguments.output, rows, seed=0)


if __name__ == "__main__":
    main()
