"""Scores of translations: how near what is written comes to the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sacrebleu.metrics import BLEU


def make_bleu(tokenizer: str) -> BLEU:
    """BLEU by sacrebleu, of what its `tokenizer` calls words: 13a for text, none for text that is cut already, char.

    Raises:
        ValueError: sacrebleu has none of that name, or lacks a library for it.
    """
    from sacrebleu.metrics import BLEU

    if tokenizer not in BLEU.TOKENIZERS:
        raise ValueError(f"got bleu_tokenizer={tokenizer!r}, expected one of {', '.join(BLEU.TOKENIZERS)}; see --help")
    try:
        # It would print advice about full stops with a space before them, which number words and Moses' text have.
        return BLEU(tokenize=tokenizer, force=True)
    except (RuntimeError, ImportError) as error:
        raise ValueError(f"got bleu_tokenizer={tokenizer!r}: {error}; install that, or choose another") from error


def text_scores(hypotheses: Sequence[str], references: Sequence[str], *, bleu_tokenizer: str) -> dict[str, float]:
    """BLEU and chrF of a corpus by sacrebleu, and how many translations are the reference, letter by letter.

    Papineni et al., "BLEU", ACL 2002; Popović, "chrF", WMT 2015; Post, "A Call for Clarity in Reporting BLEU Scores",
    WMT 2018, arXiv 1804.08771. All three from 0 to 100.

    Args:
        hypotheses: one translation per sentence.
        references: as many.
        bleu_tokenizer: see `make_bleu`.
    """
    from sacrebleu.metrics import CHRF

    num_exact = sum(hypothesis == reference for hypothesis, reference in zip(hypotheses, references, strict=True))
    return {
        "bleu": make_bleu(bleu_tokenizer).corpus_score(hypotheses, [references]).score,
        "chrf": CHRF().corpus_score(hypotheses, [references]).score,
        "exact_match_percent": 100 * num_exact / len(references),
    }
