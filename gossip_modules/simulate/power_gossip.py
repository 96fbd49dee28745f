"""What PowerGossip costs, and its step size where the graph is large."""

from __future__ import annotations

from ..mixing_manager.base import MixingManager
from ..mixing_manager.step_size import best_step_size
from .delays import LinkModel, MessageCost

MATRIX_SIDE = 512
"""Rows and columns of the matrices that a model is taken to be made of: rank 1 sends 1/512 of it."""
_MAX_DENSE_RANKS = 512  # above, no n x n matrix is made to find the best step size
_ENCODE_PASSES, _DECODE_PASSES = 2.0, 3.0  # over the model, per link


def power_message(num_parameters: int, links: LinkModel, *, rank: int = 1) -> MessageCost:
    """What one power iteration of one link sends of so many float32 parameters, in matrices of `MATRIX_SIDE`."""
    one_pass = links.memory_seconds(4 * num_parameters)
    num_bytes = 4 * num_parameters * min(1.0, rank / MATRIX_SIDE)
    return MessageCost(num_bytes, encode_seconds=_ENCODE_PASSES * one_pass, decode_seconds=_DECODE_PASSES * one_pass)


def power_step_size(mixing: MixingManager) -> float:
    """As `PowerGossip` chooses it on a static graph; 1 on others, and in worlds of more than 512 ranks."""
    is_dense = mixing.period == 1 and mixing.graph.world_size <= _MAX_DENSE_RANKS
    return best_step_size(mixing) if is_dense else 1.0
