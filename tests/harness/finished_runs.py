"""Folders as finished runs leave them, small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

IMAGE_METRICS = {"own_test_accuracy_percent": [90.0, None, 98.0, 100.0]} | {
    "averaged_test_accuracy_percent": [91.0, None, 99.0, 100.0]
}
TEXT_METRICS = {
    "own_test_nll": [4.0, None, 2.0, 1.5],
    "averaged_test_nll": [3.5, None, 1.5, 1.0],
    "averaged_test_bleu": [1.0, None, 20.0, 30.0],
}


def rank_table(
    rank: int, *, distance: float = 0.1, steps_per_epoch: int = 10, metrics: dict[str, list[float | None]] | None = None
) -> pd.DataFrame:
    """Four epochs of a rank, validated after the first, third and fourth; rank r begins r seconds late."""
    epochs = range(1, 5)
    return pd.DataFrame(
        {
            "epoch": epochs,
            "step": [steps_per_epoch * epoch for epoch in epochs],
            "own_steps": [steps_per_epoch * epoch for epoch in epochs],
            "time_seconds": [2.0 * epoch + rank for epoch in epochs],
            "loss": [1.0 / epoch for epoch in epochs],
            "consensus_distance": [distance, None, distance / 2, distance / 4],
            "bytes_sent": [1e6 * epoch for epoch in epochs],
            **(IMAGE_METRICS if metrics is None else metrics),
        }
    )


def write_run(folder: Path, *, num_ranks: int = 2, recipe: str = "sgp", **table: Any) -> Path:
    """Tables and summary.json of a run; `table` goes to `rank_table`."""
    folder.mkdir(parents=True)
    tables = [rank_table(rank, **table) for rank in range(num_ranks)]
    for rank, rows in enumerate(tables):
        rows.to_csv(folder / f"rank_{rank:04d}.csv", index=False)
    summary = {
        "averaged_test": {"accuracy_percent": 100.0},
        "score": "accuracy_percent",
        "consensus_distance": 0.025,
        "world_size": num_ranks,
        "ranks": [
            {"own_test_accuracy_percent": 100.0, "num_steps": 40, "bytes_sent": 4e6}
            | {"time_seconds": float(rows["time_seconds"].iloc[-1])}
            for rows in tables
        ],
        "config": {"recipe": recipe, "seed": 1, "graph": "auto", "peers_per_itr": "1", "nprocs_per_node": 1},
    }
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder
