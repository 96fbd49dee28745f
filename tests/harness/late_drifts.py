"""A dense oracle of DiLoCo on problem Q in which workers miss outer steps, in numpy, without the library."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.harness.quadratics import CURVATURES, LEARNING_RATE, MINIMA, START

Weight = Callable[[float, int], float]
WEIGHTS: Mapping[str | None, Weight] = {
    None: lambda tokens, steps: 1.0,
    "tokens": lambda tokens, steps: tokens**2 / steps,
    "num_tokens": lambda tokens, steps: tokens,
    "num_steps": lambda tokens, steps: float(steps),
}
"""The weight of a drift by its tokens and its steps, by the names of `DiLoCo(weighted_by=...)`."""


class Outcome(NamedTuple):
    """The anchor and the models after an outer step.

    Attributes:
        anchor: phi, the model of all workers that were in time.
        models: x of each worker, float64 [n].
    """

    anchor: float
    models: NDArray[np.float64]


def outer_steps(
    late: Mapping[int, Collection[int]],
    *,
    keeps: bool = True,
    weighted_by: str | None = None,
    tokens: Sequence[float] = (1.0,) * 5,
    num_outer_steps: int = 4,
    num_inner_steps: int = 5,
    lr: float = 0.7,
    momentum: float = 0.9,
) -> list[Outcome]:
    """The outcome of each outer step, of workers that all take equal numbers of inner steps.

    In outer step r, with C the workers that are in time, base_i the anchor from which worker i has started, and w_i the
    weight of the tokens and the steps since then:

        D   <- sum_{j in C} w_j (base_j - x_j) / sum_{j in C} w_j
        m   <- b m + D
        phi <- phi - c (D + b m)
        x_i, base_i <- phi, for i in C    # a late worker keeps its base and its model and trains on

    Args:
        late: the workers that miss an outer step, by the number of the step; the first one is 1.
        keeps: whether a late worker trains on; else its steps are thrown away, and it starts at the new anchor.
        weighted_by: a name of `WEIGHTS`.
        tokens: the tokens of an inner step of each worker.
        num_outer_steps: the number of outer steps.
        num_inner_steps: H, the number of inner steps between two outer steps.
        lr: c.
        momentum: b.
    """
    n, weight = len(tokens), WEIGHTS[weighted_by]
    curvatures, minima = np.array(CURVATURES[:n]), np.array(MINIMA[:n])
    x, base, steps = np.full(n, START), np.full(n, START), np.zeros(n, dtype=int)
    phi, m, outcomes = START, 0.0, []
    for r in range(1, num_outer_steps + 1):
        for _ in range(num_inner_steps):
            x = x - LEARNING_RATE * curvatures * (x - minima)
        steps += num_inner_steps
        in_time = [i for i in range(n) if i not in late.get(r, ())]
        w = np.array([weight(tokens[i] * int(steps[i]), int(steps[i])) for i in in_time])
        drift = float(w @ (base - x)[in_time] / w.sum())
        m = momentum * m + drift
        phi = phi - lr * (drift + momentum * m)
        starts = in_time if keeps else list(range(n))
        x[starts], base[starts], steps[starts] = phi, phi, 0
        outcomes.append(Outcome(phi, x.copy()))
    return outcomes
