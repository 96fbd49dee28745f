"""The arguments of the wrappers as a user gives them."""

from __future__ import annotations


def check_overlap(overlap: bool, max_staleness: int) -> None:
    """Raise ValueError where rounds are to be late that do not overlap with training."""
    if max_staleness < 0 or (max_staleness > 0 and not overlap):
        raise ValueError(
            f"got max_staleness={max_staleness} with overlap={overlap}, expected max_staleness >= 0, and 0 without "
            "overlap; pass overlap=True to let rounds be late"
        )
