"""What the messages of an algorithm cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..algorithms.moniqua import Moniqua
from ..algorithms.power_gossip import PowerGossip
from ..compression.compressor import Cast
from ..compression.quantizer import QSGD, SignNorm
from ..compression.sparsifier import RandomK, TopK
from ..graph_manager import RingGraph
from ..mixing_manager.base import MetropolisHastingsMixing
from ..rounds.algorithm import Algorithm
from ..rounds.periodic import Periodic
from ..rounds.stacked import Stacked
from .delays import MessageCost, Network

CODE_PASSES: Mapping[type[Any], tuple[float, float]] = {
    Cast: (1.5, 2.5),
    SignNorm: (5.0, 3.5),
    QSGD: (10.5, 3.0),
    TopK: (6.0, 1.0),
    RandomK: (0.3, 0.8),
    Moniqua: (0.0, 4.0),
    PowerGossip: (-1.0, 3.0),  # a rank does not hear itself
}
"""Encoding and decoding, in the time of a pass over the model: measured, see benchmarks/compression.py."""
UNKNOWN_PASSES = (10.0, 4.0)
_MEMORY_PASSES = 3.0  # of error feedback or public copies, beside the code itself
_MAX_PERIOD = 100_000  # steps in which a round is looked for
_SIDE = 512
"""Rows and columns of the matrices that a model is taken to be made of: PowerGossip of rank 1 sends 1/512 of it."""


def message_of(algorithm: Algorithm, num_parameters: float, network: Network) -> MessageCost:
    """What a message of an algorithm takes.

    Encoding and decoding take the measured time of the compressor, or of the algorithm itself; the time of a slow code
    where neither was measured.

    Args:
        algorithm: of any kind.
        num_parameters: of the real model, float32.
        network: tells how long a pass over the model takes.
    """
    code, passes = vars(algorithm).get("compressor"), _MEMORY_PASSES
    if code is not None:
        num_bytes = code.num_bytes(int(num_parameters), torch.float32)
    else:
        num_bytes, passes = _measured_bytes(algorithm) * num_parameters, 0.0
        if num_bytes == 4 * num_parameters:
            return network.plain_message(num_bytes)
    kinds = type(getattr(algorithm, "compressor", None)), type(algorithm)
    encode, decode = next((CODE_PASSES[kind] for kind in kinds if kind in CODE_PASSES), UNKNOWN_PASSES)
    one_pass = network.links.memory_seconds(4 * num_parameters)
    # A rank hears itself as well.
    return MessageCost(num_bytes, (encode + decode + passes) * one_pass, decode * one_pass)


def _measured_bytes(algorithm: Algorithm) -> float:
    """Bytes for each parameter, measured on a float32 matrix of 512 x 512; an outer method sends its vector."""
    if isinstance(algorithm, Periodic):
        return 4.0
    driver = Stacked(algorithm, MetropolisHastingsMixing(RingGraph(2)), shape=(_SIDE, _SIDE))
    sample = torch.randn(1, _SIDE**2, generator=torch.Generator().manual_seed(0), device="cpu").repeat(2, 1)
    answered = driver.step(sample, next(filter(algorithm.is_due, range(_MAX_PERIOD)), 0))
    return driver.sent_bytes / max(len(answered), 1) / _SIDE**2
