"""LanguageModelConfig: every choice of a language model run, one frozen dataclass, filled from the command line."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from train.job.world import World
from train.tasks.byte_tokenizer import check_tokenizer_options
from train.tasks.language_model.models import SIZES
from train.tasks.token_config import TokenConfig

# Of Radford et al., 2019: vocabulary and length; batches and decay of Brown et al., 2020, arXiv 2005.14165, table 2.1.
_GPT2 = {
    "vocabulary_size": 50_257,
    "sequence_length": 1024,
    "batch_size": 16,
    "accumulation_steps": 4,
    "warmup_steps": 700,
    "weight_decay": 0.1,
    "amp": "bfloat16",
    "num_validation_bytes": 4_000_000,
    "epochs": 20,
    "steps_per_epoch": 1000,
    "timeout_seconds": 1800.0,  # rank 0 learns the tokenizer, which the others wait for
    "checkpoint_every": 1,
}


DECAYS = {"adamw": 0.1, "gossip-adamw": 0.1, "muon": 0.1, "sgd": 0.0}
"""The weight decay that a negative one stands for. SGD's is multiplied by a larger learning rate, and its momentum."""


@dataclass(frozen=True)
class LanguageModelConfig(TokenConfig):
    """Train a language model by gossip. The defaults learn Python's own sources by SGP in under two minutes."""

    data_dir: str = ""
    """Folder of text files, at any depth, UTF-8; empty: the sources of Python's own standard library. Files called
    train and valid, such as wiki.train.tokens, are the two sets; otherwise the hash of each file's name decides."""
    files: tuple[str, ...] = ()
    """Patterns of the names of files to read, such as '*.txt' '*.md'; none: all but hidden ones."""
    validation_share: float = 0.05
    """About the share of files to validate on, where their names do not say it."""
    dirichlet_alpha: float = 0.0
    """Uneven shares: the mix of folders (the first of each file's path) that a rank learns from is drawn from
    Dirichlet(alpha); small is uneven; 0: shares are alike."""
    num_validation_bytes: int = 60_000
    """Validate on so many bytes from the beginning of the validation files; 0: all."""

    tokenizer: str = ""
    """tokenizer.json of an earlier run; empty: learnt by rank 0 from the training text."""
    vocabulary_size: int = 1024
    """Tokens of the tokenizer that is learnt, the 256 bytes among them; 259: bytes alone."""
    sequence_length: int = 64
    """Tokens of a sequence."""
    batch_size: int = 8
    """Sequences per rank and micro-batch."""

    model: str = "gpt-tiny"
    """gpt-tiny (2 layers, width 128), gpt-small (6, 384), gpt2, gpt2-medium, gpt2-large; lstm-tiny (1, 256), lstm
    (3, 650, as in the paper of PowerGossip), both with tied embeddings."""
    dropout: float = 0.0
    """Of embeddings and of every sublayer's or layer's output."""
    label_smoothing: float = 0.0
    """Share of the target that is spread evenly over all tokens."""

    epochs: int = 4
    """Parts of the run, each followed by a validation; see steps_per_epoch."""
    steps_per_epoch: int = 100
    """Optimizer steps per rank of an epoch; 0: as many as one pass over the training text takes."""
    optimizer: str = "adamw"
    """adamw; gossip-adamw, for ranks that step by gradients of their own, with --elastic as for --min-workers; muon:
    Muon for matrices and AdamW for all else, as in muloco; or sgd: with momentum, which qgdsgdm and decentlam need."""
    lr: float = 0.0
    """At the end of the warm-up; it then falls to a tenth by half a cosine. 0: 6e-3, 3e-3 with gossip-adamw,
    or 0.1 with sgd."""
    warmup_steps: int = 40
    """Optimizer steps of linear warm-up."""
    weight_decay: float = -1.0
    """Of matrices and embeddings; biases and normalisation are left alone. Below 0: 0.1, or 0 with sgd."""
    clip_norm: float = 1.0
    """Gradients of a larger norm are scaled down to this one, in each rank by itself; 0: they stay as they are."""

    RATES: ClassVar[Mapping[str, float]] = {"adamw": 6e-3, "gossip-adamw": 3e-3, "muon": 6e-3, "sgd": 0.1}
    CHOICES: ClassVar[Mapping[str, Collection[object]]] = {
        **TokenConfig.CHOICES,
        "model": SIZES,
        "optimizer": RATES,
    }
    POSITIVE: ClassVar[tuple[str, ...]] = (
        *TokenConfig.POSITIVE,
        *("vocabulary_size", "sequence_length", "batch_size"),
    )
    NOT_NEGATIVE: ClassVar[tuple[str, ...]] = (
        *TokenConfig.NOT_NEGATIVE,
        *("num_validation_bytes", "steps_per_epoch", "warmup_steps", "dirichlet_alpha"),
    )
    ZERO: ClassVar[Mapping[str, str]] = {
        **TokenConfig.ZERO,
        "num_validation_bytes": "takes all",
        "steps_per_epoch": "is one pass over the training text",
    }
    SHARES: ClassVar[tuple[str, ...]] = (*TokenConfig.SHARES, "validation_share")
    # The text and its tokens are in the identity of the task, by their hashes: files may move.
    IDENTITY: ClassVar[tuple[str, ...]] = (
        *TokenConfig.IDENTITY,
        *("model", "sequence_length", "batch_size", "dirichlet_alpha"),
    )
    SETTINGS: ClassVar[tuple[str, ...]] = (
        *TokenConfig.SETTINGS,
        *("epochs", "weight_decay"),
    )
    GROUPS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **TokenConfig.GROUPS,
        "data": ("data_dir", "files", "validation_share", "dirichlet_alpha", "num_validation_bytes"),
        "token": ("tokenizer", "vocabulary_size", "sequence_length", "batch_size"),
        "model": ("model", "dropout"),
        "optimizer": ("optimizer", "steps_per_epoch", "lr", "momentum", "warmup_steps", "weight_decay"),
    }
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        # Half a million tokens a step on eight GPUs, which have room for them in 80 GB each.
        "gpt2": {**_GPT2, "model": "gpt2", "lr": 6e-4},
        "gpt2-medium": {**_GPT2, "model": "gpt2-medium", "lr": 3e-4, "batch_size": 8, "accumulation_steps": 8},
        "gpt2-large": {**_GPT2, "model": "gpt2-large", "lr": 2.5e-4, "batch_size": 4, "accumulation_steps": 16},
        # The model, length, batch, dropout and clipping of Vogels et al., arXiv 2008.01425; the optimizer is AdamW.
        "wikitext2-lstm": {
            "data_dir": "data/wikitext-2",
            "files": ("wiki.*",),
            "num_validation_bytes": 0,
            "vocabulary_size": 16_384,
            "sequence_length": 30,
            "batch_size": 64,
            "model": "lstm",
            "dropout": 0.4,
            "epochs": 90,
            "steps_per_epoch": 0,
            "validate_every": 5,
            "lr": 2e-3,
            "warmup_steps": 100,
            "clip_norm": 0.4,
        },
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.validation_share == 1:
            raise ValueError("got validation_share=1, expected less: the other files are learnt from")
        if self.elastic and self.dirichlet_alpha:
            raise ValueError(
                f"got dirichlet_alpha={self.dirichlet_alpha} with --elastic, expected 0: workers share all text, and "
                "none has folders of its own"
            )
        check_tokenizer_options(tokenizer=self.tokenizer, vocabulary_size=self.vocabulary_size, run_dir=self.run_dir)

    def resolved(self, world: World) -> LanguageModelConfig:
        """With learning rate and weight decay, where they were left to the optimizer."""
        decay = self.weight_decay if self.weight_decay >= 0 else DECAYS[self.optimizer]
        return replace(super().resolved(world), weight_decay=decay)

    @property
    def subject(self) -> str:
        """See `RunConfig`."""
        data = Path(self.data_dir).resolve().name if self.data_dir else "python"
        return f"{data}_{self.model}"
