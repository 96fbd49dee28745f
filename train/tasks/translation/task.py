"""TranslationTask: translate sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from train.job.files import write_atomically
from train.job.outputs import TOKENIZER, TRANSLATIONS
from train.job.world import World
from train.tasks.base import MicroBatch, Task
from train.tasks.momentum_sgd import sgd
from train.tasks.token_scores import count_tokens, mean_loss, nll, num_right, token_accuracy_percent
from train.tasks.translation.config import TranslationConfig
from train.tasks.translation.corpus import load_corpus
from train.tasks.translation.optim import InverseSquareRoot, adam
from train.tasks.translation.parallel_text import Corpus, ListedText, Pair, ParallelText
from train.tasks.translation.scores import make_bleu, text_scores
from train.tasks.translation.token_batches import TokenBatches, by_length, micro_batch
from train.tasks.translation.token_sequences import TokenizedText
from train.tasks.translation.tokenization import BytePairs
from train.tasks.translation.transformer import SIZES, Beam, Translator

EVALUATION_TOKENS = 4096
"""Of a batch of the validation or test set, which needs no room for gradients."""


class TranslationTask(Task):
    """Translate the text of `config.data_dir`, or number words, with the Transformer `config.model`.

    Args:
        config: the configuration of the run.
        world: the world of the run.

    Raises:
        ValueError: on some rank, which is named, the text is not there, or is damaged, or another one; or it is too
            short for the ranks.
    """

    def __init__(self, config: TranslationConfig, world: World) -> None:
        super().__init__(world, amp=config.amp)
        self.config = config
        self.bleu_tokenizer = config.bleu_tokenizer or ("13a" if config.data_dir else "char")
        (description, *_) = world.on_every_rank(self._read_corpus)
        self.tokenizer = BytePairs(description)
        digests = world.on_every_rank(self._tokenize)
        if len(set(digests)) > 1:
            raise ValueError(
                f"got other text on rank {next(r for r, digest in enumerate(digests) if digest != digests[0])} than on "
                f"rank 0, expected the same files in {config.data_dir} on every machine; copy them again"
            )
        self.batches = TokenBatches(
            self.train,
            max_tokens=config.max_tokens,
            accumulation_steps=config.accumulation_steps,
            rank=world.rank,
            world_size=world.size,
            seed=config.seed,
        )
        self.steps_per_epoch = self.batches.steps_per_epoch
        self.beam = Beam(config.beam_size, config.length_penalty, config.max_length)
        self.translations: list[str] = []
        """Of the test set, by the averaged model of the last validation."""
        self.score = "bleu" if config.data_dir else "exact_match_percent"
        data = Path(config.data_dir).name if config.data_dir else "number words"
        self.description = f"{config.model} Transformer on {data}, {config.source} to {config.target}"
        self.metadata = {
            "model": config.model,
            "source": config.source,
            "target": config.target,
            "num_tokens": str(self.tokenizer.num_tokens),
            "max_length": str(config.max_length),
            "beam_size": str(config.beam_size),
            "length_penalty": str(config.length_penalty),
        }
        self.identity = {"tokenizer": self.tokenizer.digest, "text": digests[0]}
        self._learning_rate = InverseSquareRoot(config.lr, config.warmup_steps)
        if world.rank == 0:
            print(self._summary(), flush=True)

    def make_model(self) -> nn.Module:
        """See `Task`."""
        config = self.config
        return Translator(
            SIZES[config.model],
            num_tokens=self.tokenizer.num_tokens,
            max_length=config.max_length,
            dropout=config.dropout,
        )

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """See `Task`."""
        if self.config.optimizer == "sgd":
            return sgd(module, momentum=self.config.momentum, weight_decay=0.0)
        return adam(module)

    def learning_rate(self, step: int) -> float:
        """See `Task`."""
        return self._learning_rate(step)

    def train_stream(self, first_step: int) -> Iterator[Sequence[MicroBatch]]:
        """See `Task`; for what is in a micro-batch `train.token_batches.micro_batch`."""
        return self.batches.train_stream(first_step)

    def dealt_stream(self, first: int, stride: int) -> Iterator[Sequence[MicroBatch]]:
        """See `Task`."""
        return self.batches.train_stream(first, stride)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `Task`; logits [B, T, num_tokens] and tokens, int64 [B, T], padded with PAD. Items are tokens."""
        return mean_loss(outputs, targets, label_smoothing=self.config.label_smoothing)

    def num_correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `Task`; logits [B, T, num_tokens] and tokens, int64 [B, T], padded with PAD."""
        return num_right(outputs, targets)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """See `Task`; on the test set, given the right tokens before each."""
        counts = self._count(model, self.test, np.arange(len(self.test)))
        return {"nll": nll(counts), "token_accuracy_percent": token_accuracy_percent(counts)}

    def evaluate_averaged(self, model: nn.Module) -> dict[str, float]:
        """See `Task`; every rank reads sentence rank, rank + size, ... of both sets, and translates the test set's."""
        assert isinstance(model, Translator), "the bare model, not its wrapper"
        validation, share = (
            np.arange(self.world.rank, len(text), self.world.size) for text in (self.validation, self.test)
        )
        counts = torch.stack([self._count(model, self.validation, validation), self._count(model, self.test, share)])
        own = [""] * len(share)
        for places in by_length(self.test.sizes[share], EVALUATION_TOKENS):
            (source, mask, _), _ = self.on_device(micro_batch(self.test, share[places]))
            texts = self.tokenizer.decode(model.translate(source, mask, self.beam))
            for place, text in zip(places.tolist(), texts, strict=True):
                own[place] = text
        all_counts, shares = zip(*self.world.gather((counts.tolist(), own)), strict=True)
        # Dealt out one by one, so collected row by row; the last row may be short.
        rows = zip_longest(*shares)
        self.translations = [text for row in rows for text in row if text is not None]
        validation_counts, test_counts = torch.tensor(all_counts, dtype=torch.float64, device="cpu").sum(0)
        return {
            "validation_nll": nll(validation_counts),
            "nll": nll(test_counts),
            **text_scores(
                self.translations,
                [pair.target for pair in self.test_pairs],
                bleu_tokenizer=self.bleu_tokenizer,
            ),
        }

    def selection(self, averaged: Mapping[str, float]) -> float:
        """See `Task`; the test set chooses nothing."""
        return -averaged["validation_nll"]

    def _count(self, model: nn.Module, text: TokenizedText, indices: np.ndarray) -> Tensor:
        """What `count_tokens` counts in the pairs of `text` at `indices`, float64 [3] on the CPU."""
        counts = torch.zeros(3, dtype=torch.float64, device="cpu")
        for places in by_length(text.sizes[indices], EVALUATION_TOKENS):
            inputs, targets = self.on_device(micro_batch(text, indices[places]))
            counts += count_tokens(model(*inputs), targets)
        return counts

    def finish(self, model: nn.Module) -> None:
        """See `Task`: the translations of the test set, and the tokenizer, without which nobody can use the model."""
        if self.world.rank == 0:
            self.tokenizer.save(self.config.run_dir / TOKENIZER)
            text = "".join(f"{line}\n" for line in self.translations)
            write_atomically(
                self.config.run_dir / f"{TRANSLATIONS}.{self.config.target}",
                lambda temporary: temporary.write_text(text, encoding="utf-8"),
            )

    def _read_corpus(self) -> str:
        """Find the text; on rank 0 learn, or load, the tokenizer, and return it as JSON."""
        config = self.config
        make_bleu(self.bleu_tokenizer)  # an error now, not after the first epochs
        self.corpus = corpus_of(config)
        if self.world.rank != 0:
            return ""
        if config.tokenizer:
            return BytePairs.load(Path(config.tokenizer)).description
        return BytePairs.train(self.corpus.train, vocabulary_size=config.vocabulary_size).description

    def _tokenize(self) -> str:
        """Encode all text and return its hash."""
        config = self.config
        self.train = self._encode(self.corpus.train, cuts=False)
        self.validation = self._encode(_beginning(self.corpus.validation, config.num_validation), cuts=True)
        self.test_pairs: Sequence[Pair] = _beginning(self.corpus.test, config.num_test).pairs
        self.test = self._encode(ListedText(self.test_pairs), cuts=True)
        for role, text in (("validation", self.validation), ("test", self.test)):
            if not len(text):
                raise ValueError(f"got a {role} set without a pair, expected one at least; see --{role}-prefix")
        return " ".join(text.digest for text in (self.train, self.validation, self.test))

    def _encode(self, text: ParallelText, *, cuts: bool) -> TokenizedText:
        return TokenizedText.of(text, self.tokenizer, max_length=self.config.max_length, cuts=cuts)

    def _summary(self) -> str:
        num_cut = self.validation.num_too_long + self.test.num_too_long
        return (
            f"{len(self.train)} training pairs, {len(self.validation)} for validation, {len(self.test)} for test, "
            f"{self.tokenizer.num_tokens} tokens; left out of training: {self.corpus.train.num_blank} blank pairs and "
            f"{self.train.num_too_long} with more than {self.config.max_length} tokens; cut elsewhere: {num_cut}"
        )


def _beginning(text: ParallelText, num_pairs: int) -> ListedText:
    """The first pairs of a text, in memory; 0: all."""
    return ListedText(list(islice(text, num_pairs or None)))


def corpus_of(config: TranslationConfig) -> Corpus:
    """The corpus of a run; see `load_corpus`."""
    return load_corpus(
        config.data_dir,
        source=config.source,
        target=config.target,
        num_numbers=config.num_numbers,
        joiner=config.subword_joiner,
        train_prefix=config.train_prefix,
        validation_prefix=config.validation_prefix,
        test_prefix=config.test_prefix,
    )
