"""TranslationConfig: all options of a translation run, one frozen dataclass, filled from the command line by tyro."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from train.tasks.byte_tokenizer import check_tokenizer_options
from train.tasks.token_config import TokenConfig
from train.tasks.translation.transformer import SIZES

# Assran et al., ICML 2019, arXiv 1811.10792, section 6.2, which trains as Ott et al., WMT 2018, arXiv 1806.00187.
_WMT16 = {
    "data_dir": "data/wmt16_en_de",
    "train_prefix": "train.tok.clean.bpe.32000",
    "validation_prefix": "newstest2013.tok.bpe.32000",
    "test_prefix": "newstest2014.tok.bpe.32000",
    "subword_joiner": "@@ ",
    "bleu_tokenizer": "none",
    "vocabulary_size": 32_768,
    "max_tokens": 3500,
    "max_length": 256,
    "lr": 5e-4,
    "warmup_steps": 4000,
    "label_smoothing": 0.1,
    "beam_size": 4,
    "timeout_seconds": 1800.0,  # rank 0 learns the tokenizer from 4.5 million pairs, which the others wait for
    "checkpoint_every": 1,
    "log_every": 100,
}


@dataclass(frozen=True)
class TranslationConfig(TokenConfig):
    """Train a Transformer to translate by gossip. The defaults learn number words by SGP in under two minutes."""

    source: str = "en"
    """Source language: the end of its files' names, or a code of num2words."""
    target: str = "de"
    """Target language."""
    data_dir: str = ""
    """Folder of <prefix>.<language> files, plain or .gz, one sentence per line; empty: number words, without files."""
    train_prefix: str = ""
    """Prefix of the training files; empty: train."""
    validation_prefix: str = ""
    """Prefix of the validation files, for the choice of the best checkpoint; empty: val, valid, validation or dev."""
    test_prefix: str = ""
    """Prefix of the test files; the averaged model translates them. Empty: the only prefix that begins with test."""
    subword_joiner: str = ""
    """Text to remove from every line; '@@ ' joins the subwords of files that are cut into subwords."""
    num_numbers: int = 6000
    """Number of training pairs of number words."""

    tokenizer: str = ""
    """tokenizer.json of an earlier run; empty: rank 0 trains a tokenizer on the training text."""
    vocabulary_size: int = 400
    """Tokens of the trained tokenizer, for both languages; the 256 bytes are among them."""
    max_length: int = 64
    """Most tokens of a sentence. Longer pairs are left out of training, and cut in validation and test."""
    max_tokens: int = 320
    """Tokens per rank and micro-batch, padding included, of the longer language."""

    model: str = "tiny"
    """tiny (2 layers, width 128), small (3, 256), base and big (Vaswani et al.)."""
    dropout: float = 0.0
    """Dropout of embeddings and of every sublayer's output."""
    epochs: int = 6
    """Passes over the training pairs."""
    optimizer: str = "adam"
    """adam, or sgd with momentum; qgdsgdm and decentlam need sgd."""
    lr: float = 0.0
    """Learning rate at the end of the warm-up; it then falls with the square root of the step. 0: 2e-3 with adam, 0.03
    with sgd."""
    warmup_steps: int = 60
    """Optimizer steps of linear warm-up."""
    validate_every: int = 2
    """Epochs from one validation to the next; the last epoch is always validated."""
    label_smoothing: float = 0.1
    """Share of the target to spread evenly over all tokens."""

    beam_size: int = 4
    """Hypotheses of beam search; 1: the likeliest token each time."""
    length_penalty: float = 0.6
    """The score of a hypothesis of l tokens is log-likelihood / l^length_penalty; 0: short hypotheses win."""
    num_validation: int = 0
    """Number of validation pairs, from the beginning of the set; 0: all."""
    num_test: int = 0
    """Number of test sentences to translate, from the beginning of the set; 0: all."""
    bleu_tokenizer: str = ""
    """Tokenizer of sacrebleu: 13a, none (for text cut into words), intl, char, ...; empty: 13a for files, char for
    number words."""

    RATES: ClassVar[Mapping[str, float]] = {"adam": 2e-3, "sgd": 0.03}
    CHOICES: ClassVar[Mapping[str, Collection[object]]] = {
        **TokenConfig.CHOICES,
        "model": SIZES,
        "optimizer": RATES,
    }
    POSITIVE: ClassVar[tuple[str, ...]] = (
        *TokenConfig.POSITIVE,
        *("num_numbers", "vocabulary_size", "max_length", "max_tokens", "warmup_steps", "beam_size"),
    )
    NOT_NEGATIVE: ClassVar[tuple[str, ...]] = (
        *TokenConfig.NOT_NEGATIVE,
        *("length_penalty", "num_validation", "num_test"),
    )
    ZERO: ClassVar[Mapping[str, str]] = {
        **TokenConfig.ZERO,
        "length_penalty": "lets short hypotheses win",
        "num_validation": "takes all",
        "num_test": "takes all",
    }
    # The text and its tokens are in the identity of the task, by their hashes: files may move.
    IDENTITY: ClassVar[tuple[str, ...]] = (
        *TokenConfig.IDENTITY,
        *("source", "target", "model", "max_tokens", "max_length"),
    )
    GROUPS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **TokenConfig.GROUPS,
        "data": (
            *("source", "target", "data_dir", "train_prefix", "validation_prefix", "test_prefix", "subword_joiner"),
            "num_numbers",
        ),
        "token": ("tokenizer", "vocabulary_size", "max_length", "max_tokens"),
        "model": ("model", "dropout"),
        "optimizer": ("optimizer", "lr", "momentum", "warmup_steps"),
        "test": ("beam_size", "length_penalty", "num_validation", "num_test", "bleu_tokenizer"),
    }
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "multi30k": {
            "data_dir": "data/multi30k",
            "vocabulary_size": 8000,
            "model": "small",
            "dropout": 0.1,
            "max_tokens": 1000,
            "epochs": 15,
            "lr": 1e-3,
            "warmup_steps": 400,
        },
        "wmt16-base": {**_WMT16, "model": "base", "dropout": 0.1, "epochs": 30},
        # The "400k-token batch" on eight nodes; with --accumulation-steps 1 the one of 25k tokens.
        "wmt16-big": {**_WMT16, "model": "big", "dropout": 0.3, "epochs": 70, "accumulation_steps": 16},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length > self.max_tokens:
            raise ValueError(
                f"got max_length={self.max_length} and max_tokens={self.max_tokens}, expected room for the longest "
                "sentence in a batch; raise --max-tokens or lower --max-length"
            )
        check_tokenizer_options(tokenizer=self.tokenizer, vocabulary_size=self.vocabulary_size, run_dir=self.run_dir)
        if self.source == self.target:
            raise ValueError(f"got source and target {self.source!r}, expected two languages; change one")

    @property
    def subject(self) -> str:
        """See `RunConfig`."""
        data = Path(self.data_dir).resolve().name if self.data_dir else "numbers"
        return f"{data}_{self.source}_{self.target}"
