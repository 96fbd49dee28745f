"""Learning rates that are tried: the same grid for every method, and on while the best is at an end of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def next_rate(done: Mapping[float, float], rates: Sequence[float], most_extra: int = 3) -> float | None:
    """The learning rate to try next; None: enough were tried.

    After all of `rates` that is a third of the best, or three times of it, while no lower or no higher one was tried.

    Args:
        done: how good the rates that were tried are; higher is better.
        rates: the grid.
        most_extra: rates beside the grid at most.
    """
    if rest := [rate for rate in rates if rate not in done]:
        return rest[0]
    best = max(done, key=lambda rate: done[rate])
    if len(done) >= len(rates) + most_extra or best not in (min(done), max(done)):
        return None
    return rounded(best / 3 if best == min(done) else best * 3)


def rounded(rate: float) -> float:
    """With three digits, as it is written and read again."""
    return float(f"{rate:.3g}")
