"""Whether a rank could estimate the second moments of all-reduce of more ranks than GossipAdamW does.

    OMP_NUM_THREADS=1 python -m benchmarks.second_moments

The elements of one rank have gradients with noise of variance 1, independent in each element, step and rank. Four laws
estimate the second moment of all-reduce from the rank's own gradients: that of `GossipAdamW`, two with a slower average
of the gradient, and one that gives v' a negative weight. Steps are those of `GossipAdamW`, m' over the root of the
estimate, up to its bound. The second moment and the mean step along the gradient are divided by those of AdamW under
all-reduce, which has the mean of the same gradients. Only this mean of the other ranks' noise is drawn.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.record import RESULTS, write_rows
from gossip_modules.optim.gossip_adamw import noise_share

B1, B2, EPS = 0.9, 0.95, 1e-8
B3 = 0.98
"""Of the slower average."""
BOUND = (1 - B1) / math.sqrt((1 - B2) * (1 - B1**2 / B2))
CORRELATION = 30
"""Steps until the correlation of a moving gradient has fallen to 1 / e."""
GRADIENTS = (("constant", 0.1), ("moving", 0.1), ("moving", 0.3))
"""Kinds and root mean squares."""
RANKS = (2, 8, 19, 32, 64)
MEASURED = range(310, 401, 10)
"""The steps whose figures are averaged."""


class MovingAverage:
    """An exponential average without the bias towards 0."""

    def __init__(self, beta: float) -> None:
        self.beta, self.value, self.weight = beta, torch.zeros(()), 0.0

    def __call__(self, new: Tensor) -> Tensor:
        """Take in a value; the average."""
        self.value = self.beta * self.value + (1 - self.beta) * new
        self.weight = self.beta * self.weight + 1 - self.beta
        return self.value / self.weight


Law = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""From the step, the gradient, m' and v' to the estimate u."""


def mixed(v: Tensor, s: Tensor, kept: float, share: float) -> Tensor:
    """a^2 + share b^2, from v = a^2 + b^2 and s = a^2 + kept b^2."""
    return ((share - kept) * v + (1 - share) * s) / (1 - kept)


def laws(ranks: int) -> dict[str, Law]:
    """The four laws, by name."""

    def built() -> Law:
        squares = MovingAverage(B2)

        def law(t: int, _: Tensor, m: Tensor, v: Tensor) -> Tensor:
            kept = noise_share(t, B1, B2)
            return mixed(v, squares(m**2), kept, max(1 / ranks, kept))

        return law

    def slower(b4: float) -> Law:
        slow, squares = MovingAverage(B3), MovingAverage(b4)

        def law(t: int, g: Tensor, _: Tensor, v: Tensor) -> Tensor:
            kept = noise_share(t, B3, b4)
            return mixed(v, squares(slow(g) ** 2), kept, max(1 / ranks, kept))

        return law

    def negative() -> Law:
        squares = MovingAverage(B2)

        def law(t: int, _: Tensor, m: Tensor, v: Tensor) -> Tensor:
            s = squares(m**2)
            return torch.maximum(mixed(v, s, noise_share(t, B1, B2), 1 / ranks), s / 4)

        return law

    return {
        "GossipAdamW": built(),
        "slower average, b4 = 0.95": slower(0.95),
        "slower average, b4 = 0.99": slower(0.99),
        "r = 1 / n, u at least s' / 4": negative(),
    }


def gradients(kind: str, rms: float, elements: int, random: torch.Generator) -> Iterator[Tensor]:
    """Yield the gradient without noise: constant, or an Ornstein-Uhlenbeck process in each element."""
    if kind == "constant":
        while True:
            yield torch.full((elements,), rms, dtype=torch.float64)
    kept = math.exp(-1 / CORRELATION)
    a = rms * normal(elements, random)
    while True:
        yield a
        a = kept * a + math.sqrt(1 - kept**2) * rms * normal(elements, random)


def normal(elements: int, random: torch.Generator) -> Tensor:
    """Independent numbers of mean 0 and variance 1."""
    return torch.randn(elements, dtype=torch.float64, generator=random)


def simulate(ranks: int, kind: str, rms: float, *, elements: int, seed: int) -> list[dict[str, object]]:
    """A row for each law, with the same gradients."""
    random = torch.Generator().manual_seed(seed)
    m_of, v_of, m_all, v_all = MovingAverage(B1), MovingAverage(B2), MovingAverage(B1), MovingAverage(B2)
    estimates, sums = laws(ranks), defaultdict[str, Tensor](lambda: torch.zeros(3, dtype=torch.float64))
    for t, a in zip(range(1, MEASURED[-1] + 1), gradients(kind, rms, elements, random), strict=False):
        own = normal(elements, random)
        g, mean = a + own, a + (own + math.sqrt(ranks - 1) * normal(elements, random)) / ranks
        m, v = m_of(g), v_of(g**2)
        found = {name: (m, law(t, g, m, v)) for name, law in estimates.items()}
        found["all-reduce"] = (m_all(mean), v_all(mean**2))
        if t in MEASURED:
            for name, (first, u) in found.items():
                step = first / (u.sqrt() + EPS)
                at_bound = (step.abs() >= BOUND).double().mean()
                sums[name] += torch.stack((u.mean(), (a * step.clamp(-BOUND, BOUND)).mean(), at_bound))
    case = {"ranks": ranks, "gradient": kind, "rms": rms, "elements": elements}
    rows = []
    for name in estimates:
        second, along, _ = (sums[name] / sums["all-reduce"]).tolist()
        bound = sums[name][2].item() / len(MEASURED)
        figures = {"second_moment": second, "step": along, "at_bound": bound}
        rows.append({"law": name, **case, **{key: round(value, 4) for key, value in figures.items()}})
    return rows


def main() -> None:
    """Simulate, print, and write the CSV file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "second_moments.csv")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for kind, rms in GRADIENTS:
        for ranks in RANKS:
            rows += simulate(ranks, kind, rms, elements=options.elements, seed=options.seed)
            print(*(list(row.values()) for row in rows[-4:]), sep="\n", flush=True)
    write_rows(options.output, rows, seed=options.seed)


if __name__ == "__main__":
    main()
