"""What several tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log2

from gossip_modules.graph_manager import (
    CompleteGraph,
    DynamicBipartiteExponentialGraph,
    DynamicBipartiteLinearGraph,
    DynamicDirectedExponentialGraph,
    DynamicDirectedLinearGraph,
    HypercubeGraph,
    NPeerDynamicDirectedExponentialGraph,
    RingGraph,
    ShiftGraph,
    TorusGraph,
)


def naive_row(distances: Sequence[int], n: int) -> list[int]:
    """The row of rank 0, the long way round."""
    row: list[int] = []
    for distance in distances:
        peer = distance % n
        if peer != 0 and peer not in row:
            row.append(peer)
    return row


def exponents(n: int) -> range:
    return range(round(log2(n)) + 2)


def both(distances: Sequence[int]) -> list[int]:
    return [signed for distance in distances for signed in (distance, -distance)]


def torus_sides(n: int) -> tuple[int, int]:
    return max(((r, n // r) for r in range(1, n + 1) if n % r == 0 and r * r <= n), key=lambda sides: sides[0])


def naive_torus_row(n: int) -> list[int]:
    rows, columns = torus_sides(n)
    return naive_row([1 % columns, columns - 1, columns if rows > 1 else 0, (rows - 1) * columns], n)


# Per class: for which n it exists, and the row of an active rank 0 by the definition.
SHIFT_GRAPHS: dict[type[ShiftGraph], tuple[Callable[[int], bool], Callable[[int, int], list[int]]]] = {
    DynamicDirectedExponentialGraph: (
        lambda n: True,
        lambda n, p: naive_row(both([2**i for i in exponents(n) if 2**i <= n - 1]), n),
    ),
    NPeerDynamicDirectedExponentialGraph: (
        lambda n: True,
        lambda n, p: naive_row(
            [j * (p + 1) ** i for i in exponents(n) if (p + 1) ** i <= n - 1 for j in range(1, p + 1)], n
        ),
    ),
    DynamicBipartiteExponentialGraph: (
        lambda n: n == 1 or n % 2 == 0,
        lambda n, p: naive_row(both([1, *(1 + 2**i for i in exponents(n) if i >= 1 and 2**i <= n - 1)]), n),
    ),
    DynamicDirectedLinearGraph: (lambda n: True, lambda n, p: naive_row(both(range(1, n, 2)), n)),
    DynamicBipartiteLinearGraph: (
        lambda n: n == 1 or n % 2 == 0,
        lambda n, p: naive_row(both(range(1, n, 2)), n),
    ),
    RingGraph: (lambda n: True, lambda n, p: naive_row([1, -1], n)),
    TorusGraph: (lambda n: n <= 3 or torus_sides(n)[0] > 1, lambda n, p: naive_torus_row(n)),
    HypercubeGraph: (lambda n: n in (1, 2, 4, 8, 16), lambda n, p: [2**i for i in exponents(n) if 2**i < n]),
    CompleteGraph: (lambda n: True, lambda n, p: list(range(1, n))),
}
