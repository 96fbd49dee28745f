"""Learning a language model of bytes: a small decoder, the sequences of each rank, and the validation loss."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.cluster.workload.task import LearningTask, Score
from train.tasks.byte_tokenizer import PAD, SMALLEST_VOCABULARY, SPECIAL_TOKENS
from train.tasks.language_model.models import GptLanguageModel, GptSize
from train.tasks.language_model.packed_text import PackedText

SPLITS = ("train", "validation")
DECODER = GptSize(num_layers=2, width=64, num_heads=4)
LENGTH = 64
"""Tokens of a sequence."""
NUM_EVALUATED = 512
"""Sequences, evenly spaced over the validation text."""
_EVALUATED_AT_ONCE = 32


class ClusterText(LearningTask):
    """The next byte of text, by a decoder of two layers; the loss on the validation text.

    Args:
        folder: of what `encode` of text.py has written.
    """

    score = Score(
        "validation loss", "nats per byte", is_lower_better=True, scale=1.0, of_a_guess=math.log(256), of_perfection=0.0
    )
    items = f"sequences of {LENGTH} bytes"
    num_parameters = 120_768
    warm_up_share = 0.1

    def __init__(self, folder: Path) -> None:
        # Of the text only the tokens are read here.
        self._train, self._validation = (
            PackedText(np.load(folder / f"{split}.npy", mmap_mode="r"), num_bytes=0) for split in SPLITS
        )

    @property
    def sizes(self) -> tuple[int, int]:
        """See `LearningTask`."""
        return self._train.num_sequences(LENGTH), len(self._starts())

    def _starts(self) -> np.ndarray:
        """Where the sequences of the validation text begin; none has a token of another, but one after the last."""
        starts = LENGTH * np.arange(self._validation.num_sequences(LENGTH))
        return starts[np.unique(np.linspace(0, len(starts) - 1, min(NUM_EVALUATED, len(starts)), dtype=int))]

    def network(self, seed: int) -> nn.Module:
        """See `LearningTask`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return GptLanguageModel(DECODER, num_tokens=SMALLEST_VOCABULARY, max_length=LENGTH, dropout=0.0)

    def optimizer(self, parameters: list[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
        """See `LearningTask`: AdamW, as language models are trained with it."""
        return torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True)

    def batches(self, rank: int, world_size: int, *, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """See `LearningTask`; every epoch cuts the text elsewhere."""
        num_sequences = self._train.num_sequences(LENGTH)
        if num_sequences // world_size < size:
            raise ValueError(
                f"got {num_sequences} {self.items} for {world_size} ranks, expected at least {size} for each"
            )
        epoch = 0
        while True:
            generator = np.random.default_rng([seed, epoch])
            offset = generator.integers(LENGTH)
            own = generator.permutation(num_sequences)[rank::world_size][: num_sequences // world_size // size * size]
            for chosen in own.reshape(-1, size):
                batch = self._train.sequences(offset + LENGTH * chosen, LENGTH)
                yield batch.inputs[0], batch.targets
            epoch += 1

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `LearningTask`: the mean cross-entropy of the tokens, in nats."""
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=PAD)

    def evaluate(self, model: nn.Module, rank: int, world_size: int) -> tuple[float, int]:
        """See `LearningTask`: the nats of all tokens, those of the ends of files too, and how many tokens are bytes."""
        starts = self._starts()[rank::world_size]
        nats, num_bytes = 0.0, 0
        for first in range(0, len(starts), _EVALUATED_AT_ONCE):
            batch = self._validation.sequences(starts[first : first + _EVALUATED_AT_ONCE], LENGTH)
            logits = model(batch.inputs[0]).flatten(0, 1)
            nats += F.cross_entropy(logits, batch.targets.flatten(), ignore_index=PAD, reduction="sum").item()
            num_bytes += int((batch.targets >= len(SPECIAL_TOKENS)).sum())
        return nats, num_bytes
