"""The language models: GPT-2 in several sizes, built by the library transformers, and LSTMs with tied embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from train.tasks.byte_tokenizer import END


@dataclass(frozen=True)
class GptSize:
    """How large a GPT-2 is."""

    num_layers: int
    width: int
    num_heads: int


@dataclass(frozen=True)
class LstmSize:
    """How large an LSTM is; embeddings are as wide as its layers."""

    num_layers: int
    width: int


SIZES: Mapping[str, GptSize | LstmSize] = {
    "gpt-tiny": GptSize(num_layers=2, width=128, num_heads=4),
    "gpt-small": GptSize(num_layers=6, width=384, num_heads=6),
    # Radford et al., table 2.
    "gpt2": GptSize(num_layers=12, width=768, num_heads=12),
    "gpt2-medium": GptSize(num_layers=24, width=1024, num_heads=16),
    "gpt2-large": GptSize(num_layers=36, width=1280, num_heads=20),
    "lstm-tiny": LstmSize(num_layers=1, width=256),
    # Vogels, Karimireddy and Jaggi, "Practical Low-Rank Communication Compression in Decentralized Deep Learning",
    # NeurIPS 2020, arXiv 2008.01425: the model of the language task.
    "lstm": LstmSize(num_layers=3, width=650),
}


class GptLanguageModel(nn.Module):
    """GPT-2: a decoder with normalisation before each sublayer, learnt positions, and one matrix for both embeddings.

    Radford et al., "Language Models are Unsupervised Multitask Learners", 2019. Initialised at random; nothing is
    downloaded.

    Args:
        size: the size of the network.
        num_tokens: size of the vocabulary.
        max_length: the most tokens of a sequence.
        dropout: the dropout of embeddings, of attention weights and of every sublayer's output.

    Example:
        >>> model = GptLanguageModel(SIZES["gpt-tiny"], num_tokens=300, max_length=20, dropout=0.0)
        >>> model(torch.tensor([[5, 6, 7]])).shape
        torch.Size([1, 3, 300])
    """

    def __init__(self, size: GptSize, *, num_tokens: int, max_length: int, dropout: float) -> None:
        super().__init__()
        # Imported here: it takes seconds, and only this model needs it.
        from transformers import GPT2Config, GPT2LMHeadModel

        self.network: Any = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=num_tokens,
                n_positions=max_length,
                n_embd=size.width,
                n_layer=size.num_layers,
                n_head=size.num_heads,
                resid_pdrop=dropout,
                embd_pdrop=dropout,
                attn_pdrop=dropout,
                bos_token_id=END,
                eos_token_id=END,
            )
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the token after each.

        Args:
            tokens: int64 [B, T], T <= max_length.

        Returns:
            [B, T, num_tokens].
        """
        logits: Tensor = self.network(input_ids=tokens, use_cache=False).logits
        return logits


class LstmLanguageModel(nn.Module):
    """An LSTM whose embeddings are the weights of its output layer too; every sequence starts from a state of zeros.

    Merity, Keskar and Socher, "Regularizing and Optimizing LSTM Language Models", ICLR 2018, arXiv 1708.02182; tied as
    in Press and Wolf, "Using the Output Embedding to Improve Language Models", EACL 2017, arXiv 1608.05859.

    Args:
        size: the size of the network.
        num_tokens: size of the vocabulary.
        dropout: the dropout of embeddings and of every layer's output.

    Example:
        >>> model = LstmLanguageModel(SIZES["lstm-tiny"], num_tokens=300, dropout=0.0)
        >>> model(torch.tensor([[5, 6, 7]])).shape
        torch.Size([1, 3, 300])
    """

    def __init__(self, size: LstmSize, *, num_tokens: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, size.width)
        self.dropout = nn.Dropout(dropout)
        between_layers = dropout if size.num_layers > 1 else 0.0
        self.lstm = nn.LSTM(size.width, size.width, size.num_layers, dropout=between_layers, batch_first=True)
        self.output = nn.Linear(size.width, num_tokens)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.zeros_(self.output.bias)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the token after each: tokens are int64 [B, T], the result is [B, T, num_tokens]."""
        states, _ = self.lstm(self.dropout(self.embedding(tokens)))
        logits: Tensor = self.output(self.dropout(states))
        return logits


def make_language_model(name: str, *, num_tokens: int, max_length: int, dropout: float) -> nn.Module:
    """The model `name` of `SIZES`, initialised from torch's global generator."""
    size = SIZES[name]
    if isinstance(size, LstmSize):
        return LstmLanguageModel(size, num_tokens=num_tokens, dropout=dropout)
    return GptLanguageModel(size, num_tokens=num_tokens, max_length=max_length, dropout=dropout)
