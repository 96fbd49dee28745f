"""What `Membership` is given: checks."""

from __future__ import annotations


def check_numbers(min_workers: int, max_workers: int, interval: float, min_deadline: float) -> None:
    """Raise ValueError for numbers of workers, or seconds between heartbeats, that do not fit."""
    if not isinstance(min_workers, int) or isinstance(min_workers, bool) or min_workers < 1:
        raise ValueError(f"got min_workers={min_workers!r}, expected a whole number of at least 1")
    if max_workers and not (isinstance(max_workers, int) and max_workers >= min_workers):
        raise ValueError(
            f"got max_workers={max_workers!r} and min_workers={min_workers}, expected a whole number that is no "
            "smaller, or 0 for any number"
        )
    if interval <= 0 or min_deadline < 2 * interval:
        raise ValueError(
            f"got interval={interval!r} and min_deadline={min_deadline!r}, expected seconds, the second at least "
            "twice the first"
        )
