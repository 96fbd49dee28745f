"""PackedText: a text as one long row of tokens, cut into sequences without padding; and the batches of a rank."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from typing_extensions import Self

from train.tasks.base import MicroBatch
from train.tasks.byte_tokenizer import END, PAD, ByteTokenizer
from train.tasks.language_model.text_folder import Passage, read

# First word of the seed, next to those of train/tasks/images and train/tasks/translation.
SEQUENCE_STREAM = 5


@dataclass(frozen=True)
class PackedText:
    """Files one after the other, END before the first and after each.

    Sequences run across the ends of files, so that no place of a batch is padding, and every token of a text but the
    first END is predicted once.

    Args:
        tokens: uint16, or int32 for more than 65536 tokens, [N].
        num_bytes: the number of bytes of the text, without the ends of files.
    """

    tokens: np.ndarray
    num_bytes: int

    @classmethod
    def of(cls, passages: Iterable[Passage], tokenizer: ByteTokenizer) -> Self:
        """Read and encode passages.

        Raises:
            ValueError: one is not UTF-8 text.
        """
        tokens, num_bytes = array("H" if tokenizer.num_tokens <= 1 << 16 else "i", [END]), 0
        for passage in passages:
            for piece in read(passage):
                num_bytes += len(piece.encode())
                tokens.extend(tokenizer.encode([piece])[0])
            tokens.append(END)
        return cls(np.frombuffer(tokens, dtype=np.uint16 if tokens.typecode == "H" else np.int32), num_bytes)

    @property
    def digest(self) -> str:
        """A short hash of all tokens, to tell whether two runs read the same text."""
        return hashlib.sha256(self.tokens.data).hexdigest()[:16]

    def bits_of(self, counts: np.ndarray) -> float:
        """Bits of its tokens, each by itself, where token k is as frequent as `counts` says.

        Args:
            counts: the counts of every token in another text, int64 [num_tokens]; one is added to each.
        """
        bits = np.log2((counts + 1).sum()) - np.log2(counts + 1)
        return float(bits[self.tokens[1:]].sum())

    def num_sequences(self, length: int) -> int:
        """Whole sequences of `length` predicted tokens, wherever in the first `length` tokens the first one begins."""
        return max(0, (len(self.tokens) - length) // length)

    def sequences(self, starts: np.ndarray, length: int) -> MicroBatch:
        """Sequences that begin at `starts`.

        Args:
            starts: places in `tokens`, int64 [B].
            length: tokens that are predicted of each.

        Returns:
            Inputs: tokens, int64 [B, length]. Targets: the token after each, int64 [B, length]; after the end of the
            text PAD, which is no item. On the CPU, pinned where there is a GPU.
        """
        places = starts[:, None] + np.arange(length + 1)
        rows = self.tokens[np.minimum(places, len(self.tokens) - 1)].astype(np.int64)
        rows[places >= len(self.tokens)] = PAD
        tokens = torch.from_numpy(rows)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if torch.cuda.is_available():
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        return MicroBatch((inputs,), targets, num_items=int((rows[:, 1:] != PAD).sum()))


@dataclass(frozen=True)
class SequenceBatches:
    """What the optimizer steps of a rank read: pure functions of (seed, rank, step).

    Every pass over the text cuts it elsewhere and puts other sequences together.

    Args:
        text: the text of this rank.
        length: tokens that are predicted of each sequence.
        batch_size: sequences of a micro-batch.
        accumulation_steps: micro-batches of an optimizer step.
        steps_per_pass: optimizer steps of one pass over the text, the same on every rank; see `steps_in`.
        rank: rank of this process.
        seed: the same on every rank.
    """

    text: PackedText
    length: int
    batch_size: int
    accumulation_steps: int
    steps_per_pass: int
    rank: int
    seed: int

    def train_stream(self, first_step: int, stride: int = 1) -> Iterator[Sequence[MicroBatch]]:
        """Without end, at every `stride`-th of this rank's steps from `first_step` on."""
        while True:
            number, step = divmod(first_step, self.steps_per_pass)
            for parts in self.plan(number)[step::stride]:
                yield [self.text.sequences(starts, self.length) for starts in parts]
                first_step += stride

    def plan(self, number: int) -> np.ndarray:
        """Where the sequences of a pass begin: int64 [steps_per_pass, accumulation_steps, batch_size]."""
        generator = np.random.default_rng([SEQUENCE_STREAM, self.seed, number, self.rank])
        offset = generator.integers(self.length)
        order = generator.permutation(self.text.num_sequences(self.length))
        shape = (self.steps_per_pass, self.accumulation_steps, self.batch_size)
        return offset + self.length * order[: int(np.prod(shape))].reshape(shape)


def steps_in(text: PackedText, *, length: int, batch_size: int, accumulation_steps: int) -> int:
    """Optimizer steps of one pass over `text`.

    Raises:
        ValueError: the text is too short for one.
    """
    steps = text.num_sequences(length) // (batch_size * accumulation_steps)
    if steps == 0:
        num_sequences = batch_size * accumulation_steps
        raise ValueError(
            f"got {len(text.tokens)} tokens of training text as the share of a rank, expected at least "
            f"{length * (num_sequences + 1)}: {num_sequences} sequences of {length} tokens are one step; lower "
            "--sequence-length, --batch-size or --accumulation-steps, or add text; with --dirichlet-alpha "
            "long lines make shares unequal, so break them, or pass 0"
        )
    return steps
