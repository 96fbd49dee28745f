"""Scores of translations: how likely the right tokens are, and how near what is written comes to the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from train.tokenization import PAD


def count_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    """What `token_scores` is made of, to be added up over batches and ranks.

    Args:
        logits: [B, T, num_tokens].
        targets: int64 [B, T], padded with PAD.

    Returns:
        Negative log-likelihood in nats, tokens that are the likeliest, tokens: float64 [3] on the CPU.
    """
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=PAD, reduction="sum")
    is_token = targets != PAD
    num_correct = ((logits.argmax(2) == targets) & is_token).sum()
    return torch.stack([loss.double(), num_correct.double(), is_token.sum().double()]).cpu()


def nll(counts: Tensor) -> float:
    """Mean negative log-likelihood of a token in nats; `counts` is a sum of `count_tokens`."""
    return float(counts[0] / counts[2])


def token_accuracy_percent(counts: Tensor) -> float:
    """Tokens that are the likeliest after those before them; `counts` is a sum of `count_tokens`."""
    return float(100 * counts[1] / counts[2])


def text_scores(hypotheses: Sequence[str], references: Sequence[str], *, bleu_tokenizer: str) -> dict[str, float]:
    """BLEU and chrF of a corpus by sacrebleu, and how many translations are the reference, letter by letter.

    Papineni et al., "BLEU", ACL 2002; Popović, "chrF", WMT 2015; Post, "A Call for Clarity in Reporting BLEU Scores",
    WMT 2018, arXiv 1804.08771. All three from 0 to 100.

    Args:
        hypotheses: one translation per sentence.
        references: as many.
        bleu_tokenizer: by its name in sacrebleu: 13a for text, none for text that is cut into words already, char.
    """
    from sacrebleu.metrics import BLEU, CHRF

    # sacrebleu would print advice about full stops with a space before them, which number words and Moses' text have.
    bleu = BLEU(tokenize=bleu_tokenizer, force=True)
    num_exact = sum(hypothesis == reference for hypothesis, reference in zip(hypotheses, references, strict=True))
    return {
        "bleu": bleu.corpus_score(hypotheses, [references]).score,
        "chrf": CHRF().corpus_score(hypotheses, [references]).score,
        "exact_match_percent": 100 * num_exact / len(references),
    }
