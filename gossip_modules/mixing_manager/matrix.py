"""Mixing weights given as matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..graph_manager.base import GraphManager
from .base import MixingManager, MixingWeights

MatrixLike: TypeAlias = Any  # Tensor, ndarray or nested sequences of numbers, [n, n]

_TOLERANCE = 1e-6  # of row and column sums, so that float32 matrices are accepted
_SYMMETRY = 1e-12  # tolerance of W[i, j] = W[j, i]; the difference is lost from the mean in each round
_MAX_MATRICES = 2**16  # longer schedules should be computed by a MixingManager, not stored


class MatrixMixing(MixingManager):
    """Weights given as a matrix W on the edges of the graph, row- or column-stochastic.

    Weights may be negative or zero. W is used as it is, so give it in float64: if the sums of columns are off by 1e-8,
    that share of the total is lost in each round.

    Args:
        graph: the graph; W(t) may differ from zero on its edges in round t and on the diagonal only.
        W: one matrix [n, n] for a static graph; or a sequence of matrices, used in turn; or a function of the round t,
            called once for each of `graph.distinct_rounds()`, so that W(t) repeats when the edges do. Copied.

    Raises:
        ValueError: W has another shape, is not finite, has weights beside the edges of the graph, or is neither row-
            nor column-stochastic.

    >>> from gossip_modules.graph_manager import RingGraph
    >>> MatrixMixing(RingGraph(2), [[0.75, 0.25], [0.25, 0.75]]).spectral_gap()
    0.5
    """

    def __init__(self, graph: GraphManager, W: MatrixLike | Sequence[MatrixLike] | Callable[[int], MatrixLike]) -> None:
        super().__init__(graph)
        if callable(W):
            self._period = graph.period
            self._matrices = {t: self._as_matrices(W(t))[0] for t in self._limited(graph.distinct_rounds())}
        else:
            matrices = self._as_matrices(W)
            if graph.is_dynamic and (len(matrices) == 1 or graph.period == 0):
                raise ValueError(
                    f"MatrixMixing: got a W of {len(matrices)} matrices for {graph!r} of period {graph.period}, "
                    f"expected a static graph, or more matrices and a period above 0. Give a function of the round t."
                )
            self._period = math.lcm(len(matrices), graph.period)
            self._matrices = {t: matrices[t % len(matrices)] for t in self._limited(range(self._period))}
        for t, matrix in self._matrices.items():
            self._check_edges(matrix, t)
        bad_rows, bad_columns = self._off_sums(dim=1), self._off_sums(dim=0)
        if bad_rows and bad_columns:
            raise ValueError(
                f"MatrixMixing: got a W where {bad_rows} and {bad_columns}, expected all rows or all columns to sum to "
                f"1 within {_TOLERANCE} in every round. Divide: W / W.sum(0) for columns (push-sum), "
                f"W / W.sum(1)[:, None] for rows."
            )
        self.is_row_stochastic, self.is_column_stochastic = not bad_rows, not bad_columns
        self.is_symmetric = all(
            torch.allclose(matrix, matrix.T, rtol=0, atol=_SYMMETRY) for matrix in self._matrices.values()
        )

    def weights(self, rank: int, t: int) -> MixingWeights:
        in_peers = self.graph.in_peers(rank, t)  # first: it checks rank and t
        row = self._matrices[self._canonical_round(t)][rank]
        return MixingWeights(own=float(row[rank]), inp={j: float(row[j]) for j in in_peers})

    def matrix(self, t: int) -> Tensor:
        return self._matrices[self._canonical_round(t)].clone()

    @property
    def period(self) -> int:
        return self._period

    def __repr__(self) -> str:
        content = b"".join(f"round {t}:".encode() + matrix.numpy().tobytes() for t, matrix in self._matrices.items())
        return f"MatrixMixing({self.graph!r}, period={self._period}, W_sha256={sha256(content).hexdigest()})"

    def _canonical_round(self, t: int) -> int:
        return t % self._period if self._period else self.graph.canonical_round(t)

    def _limited(self, rounds: Iterable[int]) -> list[int]:
        first = list(islice(rounds, _MAX_MATRICES + 1))
        if len(first) > _MAX_MATRICES:
            raise ValueError(
                f"MatrixMixing: got a schedule of more than {_MAX_MATRICES} matrices for {self.graph!r}, expected "
                f"fewer. Derive from MixingManager: its weights() need no matrices."
            )
        return first

    def _as_matrices(self, W: MatrixLike) -> Tensor:
        """W as float64 [number of matrices, n, n], a copy."""
        n = self.graph.world_size
        try:
            matrices = _as_tensor(W).clone()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"MatrixMixing: got a W that is no matrix ({error}), expected numbers [{n}, {n}]. Give a float64 "
                f"tensor, an array or a list of rows."
            ) from error
        matrices = matrices if matrices.ndim == 3 else matrices[None]
        if matrices.shape[1:] != (n, n) or len(matrices) == 0:
            raise ValueError(
                f"MatrixMixing: got a W of shape {list(matrices.shape)}, expected [{n}, {n}] or a sequence of these. "
                f"Give a row and a column for each rank of {self.graph!r}."
            )
        if not matrices.isfinite().all():
            raise ValueError(
                "MatrixMixing: got a W with NaN or infinite entries, expected finite weights. Check how W was made."
            )
        return matrices

    def _check_edges(self, matrix: Tensor, t: int) -> None:
        off = matrix != 0
        for rank in range(self.graph.world_size):
            off[rank, [rank, *self.graph.in_peers(rank, t)]] = False
        if off.any():
            i, j = off.nonzero()[0].tolist()
            raise ValueError(
                f"MatrixMixing: got {int(off.sum())} weights off the edges of the graph in round {t}, first "
                f"W[{i}, {j}] = {float(matrix[i, j])}, expected 0: rank {j} does not send to rank {i} there. Add the "
                f"edge to the graph, or transpose W if its rows are senders."
            )

    def _off_sums(self, dim: int) -> str:
        """Return a text about the first row (dim 1) or column (dim 0) with another sum than 1; empty: all are 1."""
        kind = "row" if dim else "column"
        for t, matrix in self._matrices.items():
            sums = matrix.sum(dim)
            bad = ((sums - 1).abs() > _TOLERANCE).nonzero().flatten().tolist()
            if bad:
                return f"{kind} {bad[0]} of round {t} sums to {float(sums[bad[0]]):.9g} ({len(bad)} {kind}s are off)"
        return ""


def _as_tensor(numbers: MatrixLike) -> Tensor:
    """Nested sequences of numbers, arrays and tensors as one float64 tensor on the CPU."""
    if isinstance(numbers, Tensor):
        return numbers.detach().to("cpu", torch.float64)
    if isinstance(numbers, list | tuple) and any(isinstance(item, list | tuple | Tensor) for item in numbers):
        return torch.stack([_as_tensor(item) for item in numbers])
    # Converted by numpy, since torch would read Python floats as float32.
    return torch.from_numpy(np.array(numbers, dtype=np.float64))
