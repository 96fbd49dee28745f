"""A study of translation: BLEU of all-reduce, SGP and Overlap SGP on Multi30k, English to German.

SGP and Overlap SGP train by Adam, as in their paper, and by GossipAdamW without decay of the weights: Adam with the
second moments of all-reduce.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.studies.study import Study
from gossip_modules import GossipAdamW
from train.tasks.byte_tokenizer import END, PAD, START
from train.tasks.translation.corpus import load_corpus
from train.tasks.translation.parallel_text import ListedText
from train.tasks.translation.scores import text_scores
from train.tasks.translation.token_sequences import TokenizedText
from train.tasks.translation.tokenization import BytePairs

WIDTH, HEADS, LAYERS, VOCABULARY = 64, 4, 2, 2000
LONGEST, NUM_BUCKETS, BATCH_SIZE = 40, 8, 16
"""The most tokens of a sentence, the number of groups of sentences of a similar length, and a worker's pairs in a step.
"""
BETAS, EPS = (0.9, 0.98), 1e-9
EPOCHS, WORKERS, NUM_PAIRS = 12, 8, 29_000
STEPS = EPOCHS * NUM_PAIRS // (WORKERS * BATCH_SIZE)


class Attention(nn.Module):
    """Attention of several heads, behind a normalisation of the queries' input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        """Return x plus attention from x [N, T, width] to `memory` [N, S, width], or to x itself if it is None.

        Args:
            x: [N, T, width].
            bias: of the scores, to be broadcast to [N, heads, T, S].
            memory: [N, S, width].
        """
        normal = self.norm(x)
        q = self.q(normal).unflatten(-1, (HEADS, -1)).transpose(-3, -2)
        kv = self.kv(normal if memory is None else memory)
        k, v = kv.unflatten(-1, (2, HEADS, -1)).movedim(-3, 0).transpose(-3, -2)
        weights = (q @ k.mT * q.shape[-1] ** -0.5 + bias).softmax(-1)
        return x + self.out((weights @ v).transpose(-3, -2).flatten(-2))


class Layer(nn.Module):
    """A layer of the encoder, or of the decoder if it reads the encoder's output."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.own, self.other = Attention(), Attention() if reads else None
        self.forward_part = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return the layer of x [N, T, width]; `bias` is for x, `mask` for `memory` [N, S, width]."""
        x = self.own(x, bias)
        if self.other is not None:
            assert mask is not None, "an encoder's output comes with its mask"
            x = self.other(x, mask, memory)
        return x + self.forward_part(x)


class SmallTranslator(nn.Module):
    """Encoder and decoder of two layers each, normalised before each part, with one matrix of 2,000 embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.words.weight, std=WIDTH**-0.5)
        self.encoder = nn.ModuleList(Layer(reads=False) for _ in range(LAYERS))
        self.decoder = nn.ModuleList(Layer(reads=True) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        places = torch.arange(LONGEST + 1)[:, None] / 10_000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
        self.places: Tensor
        self.register_buffer("places", torch.cat([places.sin(), places.cos()], -1), persistent=False)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return the encoder's output [N, S, width] of tokens [N, S], and its mask [N, 1, 1, S]."""
        mask = torch.where(source == PAD, -math.inf, 0.0)[..., None, None, :]
        x = self._embed(source)
        for layer in self.encoder:
            x = layer(x, mask)
        return self.norms[0](x), mask

    def decode(self, target: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Return the decoder's output [N, T, width] for tokens [N, T]."""
        bias = torch.full((target.shape[-1],) * 2, -math.inf).triu(1)
        x = self._embed(target)
        for layer in self.decoder:
            x = layer(x, bias, memory, mask)
        return self.norms[1](x)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the scores [N, T, 2000] of the tokens behind each token of the target [N, T]."""
        return F.linear(self.decode(target, *self.encode(source)), self.words.weight)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) * WIDTH**0.5 + self.places[: tokens.shape[-1]]

    @torch.no_grad()
    def translate(self, source: Tensor) -> Tensor:
        """Return the likeliest token each time, int64 [N, longest], PAD behind END."""
        encoded = self.encode(source)
        found = torch.full((len(source), 1), START)
        is_over = torch.zeros(len(source), dtype=torch.bool)
        while found.shape[1] <= LONGEST and not is_over.all():
            scores = F.linear(self.decode(found, *encoded)[:, -1], self.words.weight)
            following = scores.argmax(-1).masked_fill(is_over, PAD)
            found = torch.cat([found, following[:, None]], 1)
            is_over |= following == END
        return found[:, 1:]


class Translation:
    """A task of `Study`: translation of Multi30k from English into German.

    In each step all workers draw pairs of about one length.

    Raises:
        ValueError: GOSSIP_DATA names no folder that has `multi30k`.
    """

    def __init__(self) -> None:
        folder = Path(os.environ.get("GOSSIP_DATA", "")) / "multi30k"
        if not folder.is_dir():
            raise ValueError(f"got no {folder}, expected it; set GOSSIP_DATA to the folder that has multi30k")
        corpus = load_corpus(str(folder), source="en", target="de", num_numbers=0)
        self.tokenizer = BytePairs.train(corpus.train, vocabulary_size=VOCABULARY)
        pairs = [list(text) for text in (corpus.validation, corpus.test)]
        self.references = [pair.target for pair in pairs[1]]
        encode = partial(TokenizedText.of, tokenizer=self.tokenizer, max_length=LONGEST)
        self.learned = encode(corpus.train, cuts=False)
        self.validation, self.test = (encode(ListedText(each), cuts=True) for each in pairs)
        self.buckets = np.array_split(np.argsort(self.learned.sizes, kind="stable"), NUM_BUCKETS)
        self.data = self.learned.digest[:8]

    def model(self) -> nn.Module:
        """See `StudyTask`."""
        return SmallTranslator()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """See `StudyTask`: nats per token with label smoothing 0.1, of (source, target)."""
        source, target = batch
        start = torch.full_like(target[..., :1], START)
        scores = model(source, torch.cat([start, target[..., :-1]], -1))
        return F.cross_entropy(scores.flatten(0, -2), target.flatten(), ignore_index=PAD, label_smoothing=0.1)

    def batch(self, worker: int, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """See `StudyTask`."""
        bucket = self.buckets[np.random.default_rng(step).integers(NUM_BUCKETS)]
        longest = int(self.learned.sizes[bucket].max())
        chosen = bucket[torch.randint(len(bucket), (BATCH_SIZE,), generator=generator).numpy()]
        sides = (side.padded(chosen) for side in (self.learned.sources, self.learned.targets))
        source, target = (F.pad(side, (0, longest - side.shape[1]), value=PAD) for side in sides)
        return source, target

    def optimizer(self, parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
        """See `StudyTask`."""
        return torch.optim.Adam(parameters, lr=rate, betas=BETAS, eps=EPS)

    @torch.no_grad()
    def score(self, model: nn.Module) -> tuple[float, float]:
        """See `StudyTask`: nats per token of the validation split, and 100 less BLEU of the test split, greedy."""
        assert isinstance(model, SmallTranslator), "the averaged model itself"
        everything = [np.arange(len(text)) for text in (self.validation, self.test)]
        batch = tuple(side.padded(everything[0]) for side in (self.validation.sources, self.validation.targets))
        validation = float(self.loss(model, batch))
        found = model.translate(self.test.sources.padded(everything[1]))
        texts = self.tokenizer.decode([[token for token in row if token > END] for row in found.tolist()])
        return validation, 100 - text_scores(texts, self.references, bleu_tokenizer="13a")["bleu"]


def gossip_adam(parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """Make the optimizer of the methods with GossipAdamW."""
    return GossipAdamW(parameters, lr=rate, betas=BETAS, eps=EPS, weight_decay=0.0, num_ranks=WORKERS)


METHODS: Mapping[str, Any] = {
    "all-reduce": "ar",
    "SGP": "sgp",
    "Overlap SGP": "osgp",
    "SGP with GossipAdamW": "sgp",
    "Overlap SGP with GossipAdamW": "osgp",
}
TRANSLATION: Mapping[str, Study] = {
    "translation": Study(
        Translation,
        lambda workers: METHODS,
        cells=tuple((WORKERS, STEPS, seed) for seed in (1, 2, 3)),
        rates=(0.004, 0.008, 0.002),
        tuning=0.15,
        points=4,
        optimizers=lambda workers: {name: gossip_adam for name in METHODS if "GossipAdamW" in name},
    )
}
"""The study by its name."""
