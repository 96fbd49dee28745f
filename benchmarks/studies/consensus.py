"""Agreement without training: rounds and bits of compressed gossip on a ring of 8, and A2CiD2 on cycles.

    python -m benchmarks.studies consensus_codes --output benchmarks/results/consensus_codes.csv
    python -m benchmarks.studies power_iterations --output benchmarks/results/power_iterations.csv
    python -m benchmarks.studies pairwise --output benchmarks/results/pairwise.csv
    python -m benchmarks.studies matcha_rho --output benchmarks/results/matcha_rho.csv

The first is the experiment of `train.consensus` with matrices of normal numbers. Each code with a step size to tune
tries four, evenly in the logarithm, with the first seed; the other seeds take the best one. The second has PowerGossip
with several ranks and power iterations in a round, in the same experiment. In the third pairs of neighbours average at
random times, each link at the rate 1/2, so that a worker has one exchange in a unit of time; the rates of A2CiD2 are
those of the library. The fourth has the convergence rate rho of MATCHA's plans on its six published graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.studies.computed import Cell, Computed
from gossip_modules.matcha import MatchaGraph, select_graph
from gossip_modules.mixing_manager import best_step_size
from gossip_modules.mixing_manager.momentum_rates import MomentumRates
from train.consensus import Experiment, ring, run
from train.consensus_experiment.data import make_matrices
from train.consensus_experiment.methods import VARIANTS, Variant

SEEDS = (1, 2, 3)
TARGET, MOST_ROUNDS, RING = 0.01, 800, 8
CODES = (
    *("plain", "bfloat16", "power-r1-i1", "power-r1-i2", "power-r2-i1", "power-r1-i1-cold", "moniqua-8"),
    *("choco-sign", "choco-topk", "choco-randomk", "choco-qsgd", "deepsqueeze-sign", "moniqua-4", "moniqua-2"),
)
"""Names of `train.consensus`."""


def agreement(variant: Variant, step_size: float, seed: int, *, rounds: int = MOST_ROUNDS) -> dict[str, Any]:
    """Return the rounds and megabits until the error is at most TARGET; NaN: it is not after `rounds`."""
    matrices = make_matrices("random", num_workers=RING, seed=seed, data_dir=Path("data"))
    points = run(variant, step_size, matrices, steps=rounds, seed=seed)
    first = next((point for point in points if point["error"] <= TARGET), None)
    return {
        "rounds": math.nan if first is None else first["step"],
        "megabits": math.nan if first is None else round(first["megabits"], 4),
        "last_error": float(f"{points[-1]['error']:.3g}"),
        "diverged": points[-1]["diverged"],
    }


def code_cells(rows: Callable[[], Any]) -> Iterator[Cell]:
    """Yield a cell for each code and step size with the first seed, then for the best one with the others."""
    best, experiment = best_step_size(ring(RING)), Experiment()
    for name in CODES:
        for step_size in experiment.step_sizes_of(name, round(best, 6)):
            key = {"method": name, "step_size": step_size, "run_seed": SEEDS[0]}
            yield key, partial(agreement, VARIANTS[name], step_size, SEEDS[0])
    for seed in SEEDS[1:]:
        for name in CODES:
            step_size = best_step(rows(), name)
            key = {"method": name, "step_size": step_size, "run_seed": seed}
            yield key, partial(agreement, VARIANTS[name], step_size, seed)


def best_step(rows: Any, name: str) -> float:
    """Return the step size with the fewest rounds to the target with the first seed, or else with the least error."""
    own = rows[(rows["method"] == name) & (rows["run_seed"] == SEEDS[0])]
    order = own.sort_values(["rounds", "last_error"], na_position="last")
    return float(order["step_size"].iloc[0])


# PowerGossip's power iterations.

FACTORS = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (1, 32), (2, 16), (4, 8), (8, 4))
"""Ranks, and power iterations in a round. From (1, 32) on all send messages of equal size."""


def power_cells(rows: Callable[[], Any]) -> Iterator[Cell]:
    """Yield a cell for each rank, number of iterations and seed, at the best step size of plain gossip."""
    step_size = round(best_step_size(ring(RING)), 6)
    for seed in SEEDS:
        for rank, iterations in FACTORS:
            variant = Variant("powergossip", {"rank": rank, "num_iterations": iterations})
            key = {"rank": rank, "iterations": iterations, "run_seed": seed}
            yield key, partial(_power_row, variant, step_size, seed, MOST_ROUNDS // iterations)


def _power_row(variant: Variant, step_size: float, seed: int, rounds: int) -> Mapping[str, Any]:
    found = agreement(variant, step_size, seed, rounds=rounds)
    return {"step_size": step_size, **{name: found[name] for name in ("rounds", "megabits", "last_error")}}


# Pairs at random times.

CYCLES = {8: (15,), 16: (60,), 32: (60, 120, 240)}
"""The times at which disagreement is measured, by the number of workers."""
AGREED, LEAST, DT = 1e-3, 1e-12, 0.05
"""The disagreement whose time is looked for, the one at which the integration ends, and its steps of time."""
NUMBERS = 64
"""The numbers of a worker's vector."""


def cycle_rates(num_workers: int) -> torch.Tensor:
    """Return the rates of exchanges on a cycle, 1/2 for each link, float64 [n, n]."""
    rates = torch.zeros(num_workers, num_workers, dtype=torch.float64)
    for i in range(num_workers):
        j = (i + 1) % num_workers
        rates[i, j] = rates[j, i] = 0.5
    return rates


def disagreement(num_workers: int, seconds: float, *, has_momentum: bool, seed: int) -> float:
    """Return the mean square distance from the mean at a time, relative to the start.

    Args:
        num_workers: of a cycle.
        seconds: the time, in which each worker has as many exchanges on average.
        has_momentum: whether the momentum of A2CiD2 runs.
        seed: of the vectors and of the exchanges, which are equal with and without momentum.
    """
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((num_workers, NUMBERS))
    x -= x.mean(0)
    start, y = float((x**2).mean()), x.copy()
    rates = MomentumRates.of(cycle_rates(num_workers))
    alpha, eta = (rates.alpha, rates.eta) if has_momentum else (0.5, 0.0)
    last, links = np.zeros(num_workers), num_workers / 2
    now = draw.exponential(1 / links)
    while now < seconds:
        i = int(draw.integers(num_workers))
        pair = [i, (i + 1) % num_workers]
        _mix(x, y, pair, now - last[pair], eta)
        last[pair] = now
        half = (x[pair[1]] - x[pair[0]]) / 2
        x[pair] += np.stack([half, -half])
        y[pair] += 2 * alpha * np.stack([half, -half])
        now += draw.exponential(1 / links)
    _mix(x, y, list(range(num_workers)), seconds - last, eta)
    return float((x**2).mean()) / start


def _mix(x: np.ndarray, y: np.ndarray, ranks: list[int], since: np.ndarray, eta: float) -> None:
    """Let the two models of some workers approach each other for the time since their last exchange."""
    moved = (1 - np.exp(-2 * eta * since))[:, None] / 2 * (y[ranks] - x[ranks])
    x[ranks] += moved
    y[ranks] -= moved


@lru_cache
def law(num_workers: int, *, has_momentum: bool) -> np.ndarray:
    """Return the expected disagreement at the times 0, 1, ... until it is LEAST, by the equation of second moments.

    With z = (x, y) and an exchange of a link as I - u v^T, the second moments M = E[z z^T] follow
    M' = A M + M A^T + 1/2 sum over links of (I - u v^T) M (I - v u^T) - M, where A lets x and y approach each other.
    """
    n, rates = num_workers, MomentumRates.of(cycle_rates(num_workers))
    alpha, eta = (rates.alpha, rates.eta) if has_momentum else (0.5, 0.0)
    eye = np.eye(n)
    links = eye - np.roll(eye, 1, axis=0)
    flow = eta * np.block([[-eye, eye], [eye, -eye]])
    u, v = np.vstack([links / 2, alpha * links]), np.vstack([links, 0 * links])

    def slope(m: np.ndarray) -> np.ndarray:
        moved = m @ v
        change = flow @ m - u @ moved.T / 2
        return change + change.T + (u * (v * moved).sum(0)) @ u.T / 2

    centred = eye - 1 / n
    m, found = np.block([[centred, centred], [centred, centred]]), [1.0]
    while found[-1] > LEAST:
        for _ in range(round(1 / DT)):
            a = slope(m)
            b = slope(m + DT / 2 * a)
            c = slope(m + DT / 2 * b)
            m = m + DT / 6 * (a + 2 * b + 2 * c + slope(m + DT * c))
        found.append(float(np.trace(m[:n, :n])) / (n - 1))
    return np.array(found)


def seconds_to_agree(num_workers: int, *, has_momentum: bool) -> float:
    """Return the time until the expected disagreement is AGREED, between whole times along a line in the logarithm."""
    found = law(num_workers, has_momentum=has_momentum)
    k = int(np.argmax(found <= AGREED))
    logs = np.log(found[: k + 1])
    return float(k - 1 + (logs[k - 1] - math.log(AGREED)) / (logs[k - 1] - logs[k]))


def pair_cells(rows: Callable[[], Any]) -> Iterator[Cell]:
    """Yield a cell for each cycle, time, method and seed."""
    for seed in SEEDS:
        for workers, times in CYCLES.items():
            for seconds in times:
                for method, has_momentum in (("AD-PSGD", False), ("A2CiD2", True)):
                    key = {"method": method, "workers": workers, "exchanges": seconds, "run_seed": seed}
                    yield key, partial(_pair_row, workers, seconds, has_momentum, seed)


def _pair_row(workers: int, seconds: int, has_momentum: bool, seed: int) -> Mapping[str, Any]:
    runs = [disagreement(workers, seconds, has_momentum=has_momentum, seed=10 * seed + i) for i in range(10)]
    return {
        "disagreement": float(f"{np.mean(runs):.4g}"),
        "runs": len(runs),
        "law": float(f"{law(workers, has_momentum=has_momentum)[seconds]:.4g}"),
        "exchanges_to_0.001": round(seconds_to_agree(workers, has_momentum=has_momentum), 2),
    }


# MATCHA's plans.

BUDGETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def rho_cells(rows: Callable[[], Any]) -> Iterator[Cell]:
    """Yield a cell for each published graph and budget."""
    for index in range(6):
        for budget in BUDGETS:
            yield {"graph": index, "budget": budget}, partial(_rho_row, index, budget)


def _rho_row(index: int, budget: float) -> Mapping[str, Any]:
    graph = MatchaGraph(select_graph(index), budget=budget)
    return {"workers": graph.world_size, "rho": round(graph.rho, 5)}


CONSENSUS: Mapping[str, Computed] = {
    "consensus_codes": Computed(
        code_cells, ("method", "step_size", "run_seed", "rounds", "megabits", "last_error", "diverged")
    ),
    "power_iterations": Computed(
        power_cells, ("rank", "iterations", "run_seed", "step_size", "rounds", "megabits", "last_error")
    ),
    "pairwise": Computed(
        pair_cells,
        ("method", "workers", "exchanges", "run_seed", "disagreement", "runs", "law", "exchanges_to_0.001"),
    ),
    "matcha_rho": Computed(rho_cells, ("graph", "budget", "workers", "rho")),
}
"""The studies by name."""
