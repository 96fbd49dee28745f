"""PowerGossip of all n ranks at once: power iteration on the differences over all links of a round."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..compression.orthonormal import orthonormalize
from ..mixing_manager.base import MixingManager
from ..mixing_manager.step_size import best_step_size
from ..rounds.rows import Indices, Rows
from .delays import LinkModel, MessageCost
from .gossip import Rule

MATRIX_SIDE = 512
"""Rows and columns of the matrices that a model is taken to be made of: rank 1 sends 1/512 of it."""
_MAX_DENSE_RANKS = 512  # above, no n x n matrix is made to find the best step size
_ENCODE_PASSES, _DECODE_PASSES = 2.0, 3.0  # over the model, per link


class PowerGossipRule(Rule):
    """See `PowerGossip`: per link X_i += step_size W_ij D̂, D̂ the projection of X_j - X_i on the last factor.

    Links keep their factors for when they come around, and count their own iterations, so the graph may change as
    long as it is undirected. Its random factors are others than those of training: they matter in the first iteration
    of a link only.

    Args:
        shape: (rows, columns) of the matrix that the d parameters of the problem are.
        rank: of the estimate of a difference.
        num_iterations: power iterations of a round.
        step_size: of consensus.
        seed: of the first factors.
    """

    def __init__(
        self, shape: tuple[int, int], *, rank: int = 1, num_iterations: int = 1, step_size: float = 1.0, seed: int = 0
    ) -> None:
        self.shape, self.rank, self.num_iterations, self.step_size = shape, min(rank, *shape), num_iterations, step_size
        self._generator = torch.Generator().manual_seed(seed)
        self._numbers: dict[tuple[int, int], int] = {}  # of links
        self._iterations = np.zeros(0, dtype=np.int64)
        self._factors = [torch.empty(0, side, self.rank, dtype=torch.float64, device="cpu") for side in shape]

    def correction(self, x: Tensor, round_: Rows, t: int) -> Tensor:
        """See `Rule`."""
        matrices = x.view(-1, *self.shape)
        lows, places = np.nonzero(round_.is_peer & (round_.peers > np.arange(len(x))[:, None]))
        highs = round_.peers[lows, places]
        links = self._links(lows, highs)
        weights = torch.from_numpy(round_.weights[lows, places] * self.step_size).to(x.dtype)[:, None, None]
        low, high = torch.from_numpy(lows), torch.from_numpy(highs)
        result = torch.zeros_like(matrices)
        for iteration in range(self.num_iterations):
            now = matrices + result if iteration else matrices
            move = self._estimates(links, now.index_select(0, high).sub_(now.index_select(0, low))).mul_(weights)
            result.index_add_(0, low, move).index_add_(0, high, move, alpha=-1.0)
        return result.view_as(x)

    def _estimates(self, links: Indices, differences: Tensor) -> Tensor:
        """D̂ of each link, by one more iteration: like `differences`, [links, rows, columns]."""
        sides = self._iterations[links] % 2
        self._iterations[links] += 1
        if sides.size and (sides == sides[0]).all():
            return self._iterate(torch.from_numpy(links), differences, int(sides[0]))
        estimates = torch.empty_like(differences)
        for side in (0, 1):
            chosen = torch.from_numpy(np.flatnonzero(sides == side))
            estimates[chosen] = self._iterate(torch.from_numpy(links)[chosen], differences[chosen], side)
        return estimates

    def _iterate(self, links: Tensor, differences: Tensor, side: int) -> Tensor:
        """Half a power iteration of each link, which computes its new factor on that side."""
        old = self._factors[1 - side].index_select(0, links)
        draw = torch.randn(old.shape, generator=self._generator, dtype=torch.float64, device="cpu")
        basis = orthonormalize(old, draw).to(differences.dtype)
        factor = (differences.mT if side else differences) @ basis
        self._factors[side].index_copy_(0, links, factor.double())
        return basis @ factor.mT if side else factor @ basis.mT

    def _links(self, lows: Indices, highs: Indices) -> Indices:
        """The number of each link; new ones get the next, and factors that are zero."""
        pairs = zip(lows.tolist(), highs.tolist(), strict=True)
        numbers = np.array([self._numbers.setdefault(pair, len(self._numbers)) for pair in pairs], dtype=np.int64)
        num_new = len(self._numbers) - len(self._iterations)
        if num_new:
            self._iterations = np.concatenate([self._iterations, np.zeros(num_new, dtype=np.int64)])
            self._factors = [torch.cat([f, f.new_zeros(num_new, *f.shape[1:])]) for f in self._factors]
        return numbers


def power_message(num_parameters: int, links: LinkModel, *, rank: int = 1) -> MessageCost:
    """What one power iteration of one link sends of so many float32 parameters, in matrices of `MATRIX_SIDE`."""
    one_pass = links.memory_seconds(4 * num_parameters)
    num_bytes = 4 * num_parameters * min(1.0, rank / MATRIX_SIDE)
    return MessageCost(num_bytes, encode_seconds=_ENCODE_PASSES * one_pass, decode_seconds=_DECODE_PASSES * one_pass)


def power_step_size(mixing: MixingManager) -> float:
    """As `PowerGossip` chooses it on a static graph; 1 on others, and in worlds of more than 512 ranks."""
    is_dense = mixing.period == 1 and mixing.graph.world_size <= _MAX_DENSE_RANKS
    return best_step_size(mixing) if is_dense else 1.0
