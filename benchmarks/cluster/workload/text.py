"""A folder of text as arrays of bytes: read once, for ranks that share them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.cluster.workload.language_task import SPLITS
from train.tasks.byte_tokenizer import SMALLEST_VOCABULARY, ByteTokenizer
from train.tasks.language_model.packed_text import PackedText
from train.tasks.language_model.text_folder import TextFolder, beginning

VALIDATION_SHARE = 0.05
"""Of the files, where their names do not say what they are for."""
NUM_BYTES = (4_000_000, 500_000)
"""That are read of each of SPLITS, to the end of the line."""


def encode(source: Path | None, target: Path) -> None:
    """Write <split>.npy, uint16 [N], for each of SPLITS: tokens, of which each byte is one, and the end of a file too.

    Args:
        source: folder of text files, UTF-8; None: the sources of Python's own standard library.
        target: folder to write to.

    Raises:
        ValueError: there is no text in `source`.
    """
    files = TextFolder.find("" if source is None else str(source), validation_share=VALIDATION_SHARE)
    tokenizer = ByteTokenizer.learn((), vocabulary_size=SMALLEST_VOCABULARY)
    target.mkdir(parents=True, exist_ok=True)
    for split, own, num_bytes in zip(SPLITS, (files.train, files.validation), NUM_BYTES, strict=True):
        np.save(target / f"{split}.npy", PackedText.of(beginning(own, num_bytes), tokenizer).tokens)
