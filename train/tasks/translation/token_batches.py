"""TokenBatches: pairs of about equal length, as many at once as a number of tokens allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from train.tasks.base import MicroBatch
from train.tasks.byte_tokenizer import PAD, START
from train.tasks.translation.token_sequences import TokenizedText

# First word of the seed, next to those of train/tasks/images/data.py and gossip_modules/partitions.py.
BATCH_STREAM = 4
BUCKET_WIDTH = 4
"""Tokens that the lengths of one bucket differ by at most, less one."""


@dataclass(frozen=True)
class TokenBatches:
    """The batches of a rank: pure functions of (seed, epoch, rank, step), as many on every rank and in every epoch.

    [Note: the same bounds in every epoch]
    Lengths are rounded up to buckets, and pairs are sorted by bucket, at random within it. A batch ends where the next
    pair would make it too large. So its bounds follow from the buckets alone: they are the same in every epoch, and so
    is their number, while every epoch puts other pairs together.

    Args:
        text: to learn from.
        max_tokens: the most tokens of a batch, padding included, of that side which has more.
        accumulation_steps: batches of one optimizer step.
        rank: rank of this process.
        world_size: number of ranks.
        seed: the same on every rank.

    Raises:
        ValueError: a sentence is longer than a batch, or there are too few batches for one step.
    """

    text: TokenizedText
    max_tokens: int
    accumulation_steps: int
    rank: int
    world_size: int
    seed: int

    def __post_init__(self) -> None:
        longest = int(self._sizes.max(initial=0))
        if longest > self.max_tokens:
            raise ValueError(
                f"got max_tokens={self.max_tokens} and a sentence of up to {longest} tokens, expected room "
                "for it; raise --max-tokens or lower --max-length"
            )
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"got {len(self.text)} training pairs, {len(self._bounds) - 1} batches of {self.max_tokens} tokens, "
                f"expected at least {self.world_size * self.accumulation_steps}: one for each of {self.world_size} "
                f"ranks and {self.accumulation_steps} accumulation steps; lower --max-tokens or --accumulation-steps"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of each rank; the batches that are left over change from epoch to epoch."""
        return (len(self._bounds) - 1) // (self.world_size * self.accumulation_steps)

    def train_stream(self, first_step: int, stride: int = 1) -> Iterator[Sequence[MicroBatch]]:
        """What this rank's optimizer steps read, without end, at every `stride`-th one from `first_step` on."""
        while True:
            epoch, step = divmod(first_step, self.steps_per_epoch)
            for parts in self.plan(epoch)[step::stride]:
                yield [micro_batch(self.text, indices) for indices in parts]
                first_step += stride

    def plan(self, epoch: int) -> list[list[np.ndarray]]:
        """Which pairs this rank reads in `epoch`: by step and micro-batch, their indices, int64."""
        generator = np.random.default_rng([BATCH_STREAM, self.seed, epoch])
        order = self._sorted(generator.permutation(len(self.text)))
        batches = generator.permutation(len(self._bounds) - 1)
        per_step = self.world_size * self.accumulation_steps
        steps = batches[: self.steps_per_epoch * per_step].reshape(-1, self.world_size, self.accumulation_steps)
        return [[order[self._bounds[i] : self._bounds[i + 1]] for i in parts] for parts in steps[:, self.rank].tolist()]

    @cached_property
    def _buckets(self) -> np.ndarray:
        """Lengths of both sides, rounded up, int64 [2, N]."""
        lengths = np.stack([self.text.sources.lengths, self.text.targets.lengths])
        return -(-lengths // BUCKET_WIDTH) * BUCKET_WIDTH

    @cached_property
    def _sizes(self) -> np.ndarray:
        """What each pair takes of a batch as long as itself, int64 [N]."""
        return self._buckets.max(0)

    def _sorted(self, ties: np.ndarray) -> np.ndarray:
        return np.lexsort((ties, *self._buckets, self._sizes))

    @cached_property
    def _bounds(self) -> list[int]:
        """Where batches begin and end in the sorted pairs."""
        return bounds_of_batches(np.sort(self._sizes), self.max_tokens)


def bounds_of_batches(sizes: np.ndarray, max_tokens: int) -> list[int]:
    """Cut sorted pairs into batches: batch k is the pairs from bounds[k] to bounds[k + 1], as many as fit.

    Args:
        sizes: tokens that a pair takes, ascending, int64 [N]; all pairs of a batch take as many as its last one.
        max_tokens: the most tokens of a batch; no size is larger.
    """
    bounds = [0]
    while bounds[-1] < len(sizes):
        start = bounds[-1]
        window = sizes[start : start + max_tokens // sizes[start]]
        fits = window * np.arange(1, len(window) + 1) <= max_tokens
        bounds.append(start + int(fits.sum()))
    return bounds


def micro_batch(text: TokenizedText, indices: np.ndarray) -> MicroBatch:
    """The pairs at `indices` as a Translator takes them.

    Args:
        text: that they are from.
        indices: int64 [B].

    Returns:
        Inputs: source tokens, int64 [B, S]; which of them are no padding, bool [B, S]; what the decoder reads, START
        and the target without its last token, int64 [B, T]. Targets: int64 [B, T], padded with PAD. Items: targets
        that are no padding. On the CPU, pinned where there is a GPU.
    """
    sources, targets = text.sources.padded(indices), text.targets.padded(indices)
    decoder_inputs = targets.roll(1, dims=1)
    decoder_inputs[:, 0] = START
    tensors = [sources, sources != PAD, decoder_inputs, targets]
    if torch.cuda.is_available():
        tensors = [tensor.pin_memory() for tensor in tensors]
    return MicroBatch(tuple(tensors[:3]), tensors[3], num_items=int(text.targets.lengths[indices].sum()))


def by_length(sizes: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """Sequences of about equal length together, for reading all of them once, in whatever order.

    Args:
        sizes: tokens of each, int64 [N].
        max_tokens: the most tokens of a batch, padding included; a longer sequence is a batch by itself.

    Returns:
        Batches of places in `sizes`, int64.
    """
    order = np.argsort(sizes, kind="stable")
    bounds = bounds_of_batches(sizes[order], max(max_tokens, int(sizes.max(initial=0))))
    return [order[start:end] for start, end in pairwise(bounds)]
