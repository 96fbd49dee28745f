"""Cases of tests that take several kinds of values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def each_once(*kinds: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases in which each value of each kind occurs: as many as the longest kind has, where a product is not needed."""
    return [tuple(values[k % len(values)] for values in kinds) for k in range(max(map(len, kinds)))]
