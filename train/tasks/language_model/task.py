"""LanguageModelTask: predict the next token of text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import gossip_modules as gm
from train.job.outputs import TOKENIZER
from train.job.world import World
from train.tasks.base import MicroBatch, Task
from train.tasks.byte_tokenizer import ByteTokenizer
from train.tasks.language_model.config import LanguageModelConfig
from train.tasks.language_model.models import make_language_model
from train.tasks.language_model.optim import WarmupCosine, adamw
from train.tasks.language_model.packed_text import PackedText, SequenceBatches, steps_in
from train.tasks.language_model.text_folder import Passage, TextFolder, beginning, read, share_of
from train.tasks.language_model.uneven_shares import uneven_share_of
from train.tasks.momentum_sgd import sgd
from train.tasks.parameter_groups import decay_groups
from train.tasks.token_scores import count_tokens, mean_loss, nll, num_right

TOKENIZER_BYTES = 10_000_000
"""Of the training text, that a tokenizer is learnt from at most."""
EVALUATION_TOKENS = 8192
"""Of a batch of the validation set, which needs no room for gradients."""


class LanguageModelTask(Task):
    """Predict the next token of the text in `config.data_dir`, or of Python's own sources, with `config.model`.

    Each rank learns from its own share of the training text, which it alone reads; all read the validation text.

    Args:
        config: the configuration of the run.
        world: the world of the run.

    Raises:
        ValueError: on some rank, which is named, there is no text, or it is no text, or another one; or a share is too
            short for one step.
    """

    score = "bits_per_byte"

    def __init__(self, config: LanguageModelConfig, world: World) -> None:
        super().__init__(world, amp=config.amp)
        self.config = config
        self._require_same(world.on_every_rank(self._find), "names or sizes of files")
        (description, *_) = world.on_every_rank(self._tokenizer_of_all)
        self.tokenizer = ByteTokenizer(description)
        steps, shares, validations, num_bytes = zip(*world.on_every_rank(self._encode), strict=True)
        self._require_same(validations, "validation text")
        self.batches = SequenceBatches(
            self.train,
            length=config.sequence_length,
            batch_size=config.batch_size,
            accumulation_steps=config.accumulation_steps,
            steps_per_pass=min(steps),
            rank=world.rank,
            seed=config.seed,
        )
        self.steps_per_epoch = config.steps_per_epoch * config.num_founders or self.batches.steps_per_pass
        data = Path(config.data_dir).resolve().name if config.data_dir else "Python's standard library"
        self.description = f"{config.model} on {data}"
        self.metadata = {
            "model": config.model,
            "num_tokens": str(self.tokenizer.num_tokens),
            "sequence_length": str(config.sequence_length),
        }
        self.identity = {"tokenizer": self.tokenizer.digest, "text": [*shares, validations[0]]}
        num_steps = config.epochs * self.steps_per_epoch // config.num_founders
        self._learning_rate = WarmupCosine(config.lr, warmup_steps=config.warmup_steps, num_steps=num_steps)
        if world.rank == 0:
            print(self._summary(sum(num_bytes)), flush=True)

    def make_model(self) -> nn.Module:
        """See `Task`."""
        config = self.config
        return make_language_model(
            config.model,
            num_tokens=self.tokenizer.num_tokens,
            max_length=config.sequence_length,
            dropout=config.dropout,
        )

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """See `Task`."""
        config = self.config
        if config.optimizer == "sgd":
            return sgd(module, momentum=config.momentum, weight_decay=config.weight_decay)
        if config.optimizer == "gossip-adamw":
            # An elastic worker is alone in its world; all-reduce has the mean gradient already.
            num_workers = config.num_founders * self.world.size // config.nprocs_per_node
            num_ranks = 1 if config.recipe == "ar" else max(num_workers, 1)
            return gm.GossipAdamW(decay_groups(module, weight_decay=config.weight_decay), lr=0.0, num_ranks=num_ranks)
        if config.optimizer == "muon":
            return gm.MuonAdamW(module, weight_decay=config.weight_decay)
        return adamw(module, weight_decay=config.weight_decay)

    def learning_rate(self, step: int) -> float:
        """See `Task`."""
        return self._learning_rate(step)

    def train_stream(self, first_step: int) -> Iterator[Sequence[MicroBatch]]:
        """See `Task`; for what is in a micro-batch `PackedText.sequences`."""
        return self.batches.train_stream(first_step)

    def dealt_stream(self, first: int, stride: int) -> Iterator[Sequence[MicroBatch]]:
        """See `Task`."""
        return self.batches.train_stream(first, stride)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `Task`; logits [B, T, num_tokens] and tokens, int64 [B, T]. Items are tokens."""
        return mean_loss(outputs, targets, label_smoothing=self.config.label_smoothing)

    def num_correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `Task`; logits [B, T, num_tokens] and tokens, int64 [B, T]."""
        return num_right(outputs, targets)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """See `Task`; on the validation set."""
        return self._metrics(self._count(model, self._validation_starts()))

    def evaluate_averaged(self, model: nn.Module) -> dict[str, float]:
        """See `Task`; every rank reads sequence rank, rank + size, ... of the validation set."""
        counts = self._count(model, self._validation_starts()[self.world.rank :: self.world.size])
        return self._metrics(torch.tensor(self.world.gather(counts.tolist()), dtype=torch.float64, device="cpu").sum(0))

    def selection(self, averaged: Mapping[str, float]) -> float:
        """See `Task`; fewer bits are better."""
        return -averaged[self.score]

    def finish(self, model: nn.Module) -> None:
        """See `Task`: the tokenizer, without which nobody can use the model."""
        if self.world.rank == 0:
            self.tokenizer.save(self.config.run_dir / TOKENIZER)

    def _validation_starts(self) -> np.ndarray:
        """Where the sequences begin that predict each token once; the last one may be short."""
        return np.arange(0, len(self.validation.tokens) - 1, self.config.sequence_length)

    def _count(self, model: nn.Module, starts: np.ndarray) -> Tensor:
        """What `count_tokens` counts in the sequences that begin at `starts`, float64 [3] on the CPU."""
        length, counts = self.config.sequence_length, torch.zeros(3, dtype=torch.float64, device="cpu")
        rows = max(1, EVALUATION_TOKENS // length)
        for first in range(0, len(starts), rows):
            inputs, targets = self.on_device(self.validation.sequences(starts[first : first + rows], length))
            counts += count_tokens(model(*inputs), targets)
        return counts

    def _metrics(self, counts: Tensor) -> dict[str, float]:
        """Of the whole validation set: nats per token, their exponential, and bits per byte of the text."""
        loss = nll(counts)
        bits = float(counts[0]) / math.log(2)
        return {
            "nll": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "bits_per_byte": bits / self.validation.num_bytes,
        }

    def _find(self) -> str:
        """Find the files and return their hash."""
        config = self.config
        self.folder = TextFolder.find(config.data_dir, patterns=config.files, validation_share=config.validation_share)
        return self.folder.digest

    def _tokenizer_of_all(self) -> str:
        """On rank 0 learn, or load, the tokenizer, and return it as JSON."""
        config = self.config
        if self.world.rank != 0:
            return ""
        if config.tokenizer:
            return ByteTokenizer.load(Path(config.tokenizer)).description
        passages = beginning(self.folder.train, TOKENIZER_BYTES)
        pieces = (piece for passage in passages for piece in read(passage))
        return ByteTokenizer.learn(pieces, vocabulary_size=config.vocabulary_size).description

    def _require_same(self, digests: Sequence[str], what: str) -> None:
        """Check that all ranks have read the same.

        Raises:
            ValueError: one has not.
        """
        if other := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise ValueError(
                f"got other {what} on rank {other[0]} than on rank 0, expected the same in "
                f"{self.config.data_dir or 'the standard library'} on every machine; copy the files again, or start "
                "the same version of Python"
            )

    def _encode(self) -> tuple[int, str, str, int]:
        """Encode the text of this rank.

        Returns:
            Optimizer steps of one pass over its share, the hash of the share, that of the validation text, and the
            bytes of the share.
        """
        config = self.config
        self.validation = PackedText.of(beginning(self.folder.validation, config.num_validation_bytes), self.tokenizer)
        self.train = PackedText.of(self._share(), self.tokenizer)
        steps = steps_in(
            self.train,
            length=config.sequence_length,
            batch_size=config.batch_size,
            accumulation_steps=config.accumulation_steps,
        )
        return steps, self.train.digest, self.validation.digest, self.train.num_bytes

    def _share(self) -> list[Passage]:
        """What this rank learns from."""
        files, rank, size, alpha = self.folder.train, self.world.rank, self.world.size, self.config.dirichlet_alpha
        if alpha:
            return uneven_share_of(files, rank, size, alpha=alpha, seed=self.config.seed)
        return share_of(files, rank, size)

    def _summary(self, num_bytes: int) -> str:
        """What there is to learn from, and what a model would reach that knows how frequent each token is."""
        counts = np.bincount(self.train.tokens, minlength=self.tokenizer.num_tokens)
        unigrams = self.validation.bits_of(counts) / self.validation.num_bytes
        return (
            f"{len(self.folder.train)} training files, {num_bytes / 1e6:.1f} MB; {len(self.folder.validation)} for "
            f"validation, of which {self.validation.num_bytes / 1e6:.2f} MB are read; {self.tokenizer.num_tokens} "
            f"tokens; {self.batches.steps_per_pass} steps are a pass; by frequencies of tokens alone: bits per byte "
            f"{unigrams:.2f}"
        )
