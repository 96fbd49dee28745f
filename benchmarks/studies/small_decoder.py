"""A small decoder on the sources of Python's standard library, and Muon for the models of all workers at once."""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.record import short_hash

NUM_SYMBOLS, WIDTH, HEADS, LENGTH = 128, 32, 2, 32
TEXT_BYTES, NUM_HELD = 4_500_000, 256
"""Of the text, and the number of sequences of the validation split and of the test split."""
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1
"""Of AdamW."""
_SCHULZ = (3.4445, -4.7750, 2.0315)  # as torch.optim.Muon


class Block(nn.Module):
    """A layer of the decoder: attention and a perceptron, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return the layer of x [N, length, width], with a bias of attention [heads, length, length]."""
        q, k, v = self.qkv(_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(_norm(x))).square())


class SmallDecoder(nn.Module):
    """A decoder, of two layers with 20,480 parameters unless you say otherwise: scores of the next symbol.

    Attention has a bias that falls linearly with the distance (ALiBi) in place of embeddings of places. The head is the
    transposed embedding, so all `nn.Linear` are hidden matrices, as Muon wants them.

    Args:
        num_layers: each has 8,192 parameters.
    """

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_SYMBOLS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        places = torch.arange(LENGTH)
        distance = (places[:, None] - places).float()
        slopes = torch.tensor([2.0 ** (-2 * head) for head in range(HEADS)])[:, None, None]
        self.register_buffer("bias", (-slopes * distance).masked_fill(distance < 0, -math.inf), persistent=False)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, symbols: Tensor) -> Tensor:
        """Return the scores [N, length, symbols] of symbols [N, length]."""
        x = self.words(symbols)
        for layer in self.layers:
            x = layer(x, self.bias)
        return F.linear(_norm(x), self.words.weight)


def _norm(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


def python_sources() -> Tensor:
    """Return the ASCII characters of the standard library of this Python, files in a fixed order, uint8."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda path: path.name)
    order = np.random.default_rng(0).permutation(len(files))
    text = b"\0".join(files[i].read_bytes() for i in order)
    kept = bytes(symbol for symbol in text[:TEXT_BYTES] if symbol < NUM_SYMBOLS)
    return torch.frombuffer(bytearray(kept), dtype=torch.uint8)


class Text:
    """A task of `Study`: prediction of the next symbol of Python's sources.

    Workers draw their sequences from the whole training split. The last two twentieths of the text are the validation
    split and the test split.

    Args:
        batch_size: the sequences of a worker in a step.
        muon: whether Muon steps the hidden matrices; AdamW steps all else.
        num_layers: of the decoder.
        symbols: another text, uint8; None: Python's sources.
    """

    def __init__(
        self, batch_size: int, *, muon: bool = False, num_layers: int = 2, symbols: Tensor | None = None
    ) -> None:
        symbols = python_sources() if symbols is None else symbols
        held = len(symbols) // 20
        self.batch_size, self.muon, self.num_layers = batch_size, muon, num_layers
        self.train, *rest = symbols.split([len(symbols) - 2 * held, held, held])
        self.splits = [_even(part) for part in rest]
        self.data = short_hash(symbols.numpy().tobytes())

    def model(self) -> nn.Module:
        """See `StudyTask`."""
        return SmallDecoder(self.num_layers)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """See `StudyTask`: nats per symbol, of (symbols, next symbols)."""
        return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())

    def batch(self, worker: int, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """See `StudyTask`."""
        starts = torch.randint(len(self.train) - LENGTH, (self.batch_size, 1), generator=generator)
        rows = self.train[starts + torch.arange(LENGTH + 1)].long()
        return rows[:, :-1], rows[:, 1:]

    def optimizer(self, parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
        """See `StudyTask`."""
        if self.muon:
            return StackedMuon(parameters, rate)
        return torch.optim.AdamW(parameters, lr=rate, betas=BETAS, weight_decay=WEIGHT_DECAY)

    def score(self, model: nn.Module) -> tuple[float, float]:
        """See `StudyTask`: nats per symbol."""
        with torch.no_grad():
            losses = [float(self.loss(model, split)) for split in self.splits]
        return losses[0], losses[1]


def _even(part: Tensor) -> tuple[Tensor, Tensor]:
    starts = torch.linspace(0, len(part) - LENGTH - 1, NUM_HELD).long()
    rows = part[starts[:, None] + torch.arange(LENGTH + 1)].long()
    return rows[:, :-1], rows[:, 1:]


class StackedMuon(torch.optim.Optimizer):
    """`MuonAdamW` for the models of all workers at once: the matrices of each worker are orthogonalised by themselves.

    Args:
        params: parameters with a leading dimension of the workers. Those of the shape of the embedding, and vectors,
            are stepped by AdamW.
        lr: the learning rate of both.
        weight_decay: decoupled, of all matrices.
    """

    is_elementwise = True  # no element of one worker depends on another worker

    def __init__(self, params: Any, lr: float, *, weight_decay: float = 0.1) -> None:
        params = list(params)
        is_muon = [p.ndim == 3 and p.shape[1:] != (NUM_SYMBOLS, WIDTH) for p in params]
        self._adamw = torch.optim.AdamW(
            [p for p, muon in zip(params, is_muon) if not muon], lr, (0.9, 0.95), weight_decay=weight_decay
        )
        super().__init__([p for p, muon in zip(params, is_muon) if muon], {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all workers."""
        group = self.param_groups[0]
        self._adamw.param_groups[0]["lr"] = group["lr"]
        self._adamw.step()
        for x in group["params"]:
            assert x.grad is not None
            m = self.state[x].setdefault("momentum_buffer", torch.zeros_like(x))
            m.lerp_(x.grad, 0.05)
            update = orthogonalized(x.grad.lerp(m, 0.95))
            x.mul_(1 - group["lr"] * group["weight_decay"])
            x.add_(update, alpha=-group["lr"] * 0.2 * max(x.shape[1:]) ** 0.5)


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return each of [n, rows, columns] with singular values near one, by five Newton-Schulz steps."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = _SCHULZ
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x
