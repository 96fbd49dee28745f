"""Translator: the Transformer of Vaswani et al., built by the library transformers; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from train.tasks.byte_tokenizer import END, PAD, START


@dataclass(frozen=True)
class Size:
    """How large a Transformer is; encoder and decoder have as many layers."""

    num_layers: int
    width: int
    feed_forward_width: int
    num_heads: int


SIZES: Mapping[str, Size] = {
    "tiny": Size(num_layers=2, width=128, feed_forward_width=256, num_heads=4),
    "small": Size(num_layers=3, width=256, feed_forward_width=1024, num_heads=4),
    # Vaswani et al., table 3.
    "base": Size(num_layers=6, width=512, feed_forward_width=2048, num_heads=8),
    "big": Size(num_layers=6, width=1024, feed_forward_width=4096, num_heads=16),
}


@dataclass(frozen=True)
class Beam:
    """How a translation is searched for.

    Args:
        size: hypotheses that are followed at once; 1: the likeliest token each time.
        length_penalty: a hypothesis of l tokens is as good as its log-likelihood / l^length_penalty.
        longest: tokens of a translation.
    """

    size: int
    length_penalty: float
    longest: int


class Translator(nn.Module):
    """Encoder and decoder with normalisation behind each layer and one matrix for all three embeddings.

    Vaswani et al., "Attention Is All You Need", NeurIPS 2017, arXiv 1706.03762. Positions are sinusoidal: a frozen
    parameter, which no optimizer and no gossip touches.

    Args:
        size: the size of the network.
        num_tokens: size of the vocabulary of both languages.
        max_length: the most tokens of a sequence.
        dropout: the dropout of embeddings and of every sublayer's output.

    Example:
        >>> translator = Translator(SIZES["tiny"], num_tokens=300, max_length=20, dropout=0.1)
        >>> source = torch.tensor([[5, 6, 7, END]])
        >>> translator(source, source != PAD, torch.tensor([[START, 8]])).shape
        torch.Size([1, 2, 300])
    """

    def __init__(self, size: Size, *, num_tokens: int, max_length: int, dropout: float) -> None:
        super().__init__()
        # Imported here: it takes seconds, and only what translates needs it.
        from transformers import MarianConfig, MarianMTModel

        # Any: as annotated, generate() could be called on none of the library's models.
        self.network: Any = MarianMTModel(
            MarianConfig(
                vocab_size=num_tokens,
                max_position_embeddings=max_length,
                encoder_layers=size.num_layers,
                decoder_layers=size.num_layers,
                d_model=size.width,
                encoder_ffn_dim=size.feed_forward_width,
                decoder_ffn_dim=size.feed_forward_width,
                encoder_attention_heads=size.num_heads,
                decoder_attention_heads=size.num_heads,
                dropout=dropout,
                activation_function="relu",
                scale_embedding=True,
                # Of embeddings, as in the paper's code; of square matrices it is Glorot's.
                init_std=size.width**-0.5,
                pad_token_id=PAD,
                bos_token_id=START,
                decoder_start_token_id=START,
                eos_token_id=END,
                forced_eos_token_id=None,
            )
        )
        # Zeros that nothing trains: they need neither travel nor be saved.
        zeros = torch.zeros(1, num_tokens, device=next(self.network.parameters()).device)
        self.network.register_buffer("final_logits_bias", zeros, persistent=False)

    def forward(self, source: Tensor, source_mask: Tensor, decoder_input: Tensor) -> Tensor:
        """Logits of the next token after each of the decoder's.

        Args:
            source: tokens, int64 [B, S].
            source_mask: which of them are no padding, bool [B, S].
            decoder_input: START and the target without its last token, int64 [B, T].

        Returns:
            [B, T, num_tokens].
        """
        outputs = self.network(
            input_ids=source, attention_mask=source_mask, decoder_input_ids=decoder_input, use_cache=False
        )
        logits: Tensor = outputs.logits
        return logits

    def translate(self, source: Tensor, source_mask: Tensor, beam: Beam) -> list[list[int]]:
        """The best translation that a beam search finds for each sequence, without START, END and padding.

        Args:
            source: tokens, int64 [B, S].
            source_mask: which of them are no padding, bool [B, S].
            beam: how to search. A translation has at most 50 tokens more than the longest source here, as in the paper.
        """
        from transformers import GenerationConfig

        # Without a beam there is nothing to weigh by length, and the library says so at every call. With early_stopping
        # it would end at so many finished hypotheses as the beam is wide, however bad, before the good ones are.
        search = {"length_penalty": beam.length_penalty, "early_stopping": False} if beam.size > 1 else {}
        generation = GenerationConfig(
            num_beams=beam.size,
            **search,
            do_sample=False,
            suppress_tokens=[PAD, START],
            max_new_tokens=min(beam.longest, source.shape[1] + 50),
            pad_token_id=PAD,
            bos_token_id=START,
            decoder_start_token_id=START,
            eos_token_id=END,
        )
        output = self.network.generate(input_ids=source, attention_mask=source_mask, generation_config=generation)
        return [[token for token in row if token not in (PAD, START, END)] for row in output.tolist()]
