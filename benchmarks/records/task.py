"""The task of all tracks: predict the next byte of a text of ten parts that this folder has."""

from __future__ import annotations

import functools
import lzma
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

TEXT = Path(__file__).with_name("text.xz")
NUM_PARTS, PART_BYTES, BLOCK_BYTES, BLOCKS_PER_TURN = 10, 1 << 16, 1 << 11, 16
SPLITS = {"validation": 7, "test": 15}
"""The block of each turn of sixteen that belongs to a split; the other fourteen are for training."""
CONTEXT, BATCH, NUM_MEASURED = 6, 64, 8_000


class NextByte(nn.Module):
    """A perceptron of 27,000 parameters: the scores of the next byte from the last six."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, 16)
        self.layers = nn.Sequential(nn.Linear(16 * CONTEXT, 64), nn.Tanh(), nn.Linear(64, 256))

    def forward(self, context: Tensor) -> Tensor:
        """Return the scores [N, 256] from bytes [N, context]."""
        return self.layers(self.bytes(context).flatten(-2))


def loss(model: nn.Module, words: Tensor) -> Tensor:
    """Return the cross-entropy of the last byte of each row, in nats."""
    return F.cross_entropy(model(words[..., :CONTEXT]), words[..., CONTEXT])


@functools.cache
def parts() -> Tensor:
    """Return the text as int64 [parts, blocks, bytes]."""
    text = np.frombuffer(lzma.decompress(TEXT.read_bytes()), np.uint8)
    return torch.from_numpy(text.astype(np.int64)).view(NUM_PARTS, -1, BLOCK_BYTES)


@functools.cache
def split(name: str) -> Tensor:
    """Return the text of a split, or of "train": int64 [parts, bytes]."""
    places = np.arange(PART_BYTES // BLOCK_BYTES) % BLOCKS_PER_TURN
    held = np.isin(places, list(SPLITS.values())) if name == "train" else places != SPLITS[name]
    return parts()[:, ~held].flatten(1)


def bits_per_byte(name: str) -> Callable[[nn.Module], float]:
    """Return a measurement of a model on bytes of a split, evenly spaced."""
    text = split(name).flatten().unfold(0, CONTEXT + 1, 1)
    words = text[torch.linspace(0, len(text) - 1, NUM_MEASURED).long()]
    return lambda model: float(loss(model, words)) / math.log(2)


def batches(num_workers: int, alpha: float) -> Callable[[int, int, torch.Generator], Tensor]:
    """Return a maker of batches of random places of the training text.

    Args:
        num_workers: n. A worker that joins later has the shares of worker modulo n.
        alpha: the shares of the parts in the data of a worker are drawn from Dirichlet(alpha); inf: equal shares.
    """
    shares = np.full((num_workers, NUM_PARTS), 1 / NUM_PARTS)
    if math.isfinite(alpha):
        shares = np.random.default_rng(0).dirichlet([alpha] * NUM_PARTS, num_workers)
    weights, text = torch.from_numpy(shares), split("train")

    def batch(worker: int, step: int, generator: torch.Generator) -> Tensor:
        part = torch.multinomial(weights[worker % num_workers], BATCH, replacement=True, generator=generator)
        start = torch.randint(text.shape[1] - CONTEXT, (BATCH, 1), generator=generator)
        return text[part[:, None], start + torch.arange(CONTEXT + 1)]

    return batch
