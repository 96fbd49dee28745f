"""Methods of benchmarks/accuracy_bytes.py, with the learning rates published for them; see there for the sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BASELINE = "dpsgd"
LR = 0.1 / 4  # the published base, for 256 images per step instead of 1,024


@dataclass(frozen=True)
class PublishedMethod:
    """A row of the table: its name there, and how its runs differ from others."""

    title: str
    options: Mapping[str, Any]


PUBLISHED_METHODS: Mapping[str, PublishedMethod] = {
    "ar": PublishedMethod("AllReduce", {"recipe": "ar", "lr": 11.3 * LR}),
    "dpsgd": PublishedMethod("D-PSGD", {"recipe": "dpsgd", "lr": 11.3 * LR, "graph": "ring", "peers_per_itr": "2"}),
    "matcha-1.0": PublishedMethod(
        "MATCHA, budget 1", {"recipe": "matcha", "lr": 11.3 * LR, "graph": "ring", "algorithm": "MATCHA(budget=1.0)"}
    ),
    "matcha-0.5": PublishedMethod("MATCHA, budget 0.5", {"recipe": "matcha", "lr": 11.3 * LR, "graph": "ring"}),
    "matcha-0.1": PublishedMethod(
        "MATCHA, budget 0.1", {"recipe": "matcha", "lr": 11.3 * LR, "graph": "ring", "algorithm": "MATCHA(budget=0.1)"}
    ),
    "choco-sign": PublishedMethod("CHOCO, signs", {"recipe": "choco", "lr": 16 * LR}),
    "choco-topk": PublishedMethod(
        "CHOCO, top 1 %", {"recipe": "choco", "lr": 11.3 * LR, "algorithm": "Choco(TopK(0.01), step_size=0.0375)"}
    ),
    "deepsqueeze-sign": PublishedMethod("DeepSqueeze, signs", {"recipe": "deepsqueeze", "lr": 4.8 * LR}),
    "powergossip-1": PublishedMethod("PowerGossip, 1 iteration", {"recipe": "powergossip", "lr": 11.3 * LR}),
    "powergossip-2": PublishedMethod(
        "PowerGossip, 2 iterations",
        {"recipe": "powergossip", "lr": 11.3 * LR, "algorithm": "PowerGossip(num_iterations=2)"},
    ),
    "moniqua-8": PublishedMethod("Moniqua, 8 bits", {"recipe": "moniqua", "lr": 11.3 * LR}),
    "dpsgd-bfloat16": PublishedMethod(
        "D-PSGD, bfloat16 wire",
        {"recipe": "dpsgd", "lr": 11.3 * LR, "graph": "ring", "peers_per_itr": "2", "wire_dtype": "bfloat16"},
    ),
}
OPTIONAL = ("matcha-1.0", "moniqua-8", "dpsgd-bfloat16")
