"""Studies of the number of outer steps: training as long as in the paper of DiLoCo, and short fine-tuning."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from functools import partial
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.record import ROOT
from benchmarks.studies.small_decoder import NUM_SYMBOLS, SmallDecoder, StackedMuon, Text
from benchmarks.studies.study import Study, StudyTask, by_compare, rate_factor
from gossip_modules import DiLoCo, LocalSGD, MuLoCo, SparseLoCo

STEPS, PERIOD, SEEDS = 88_000, 500, (1, 2, 3)
"""DiLoCo's paper trains for 88,000 steps with H = 500: 176 outer steps."""
TUNING_STEPS = 10_000
"""Steps of a training that chooses rates: 20 outer steps."""
FIRST = {"all-reduce": "ar", "DiLoCo": DiLoCo(sync_every=PERIOD), "local SGD": LocalSGD(sync_every=PERIOD)}
"""The methods that the claim of DiLoCo is about, with 2 workers or more."""
CANDIDATES = {
    f"DiLoCo, outer rate {lr:g}, momentum {momentum:g}": DiLoCo(sync_every=PERIOD, lr=lr, momentum=momentum)
    for lr, momentum in ((1.0, 0.5), (1.0, 0.8), (0.5, 0.9))
}
"""Outer settings beside the published ones, 0.7 and 0.9; the best one is trained for all steps."""
FURTHER = {"SparseLoCo": SparseLoCo(sync_every=PERIOD), "MuLoCo": MuLoCo(sync_every=PERIOD), **CANDIDATES}

SHORT_STEPS, SHORT_PERIOD = 256, 42
SHORT = {
    "all-reduce": "ar",
    "DiLoCo": DiLoCo(sync_every=SHORT_PERIOD),
    "DiLoCo, momentum 0.5": DiLoCo(sync_every=SHORT_PERIOD, momentum=0.5),
    "plain averages": LocalSGD(sync_every=SHORT_PERIOD),
}
TRAINED_STEPS, TRAINED_RATE = 3000, 0.032
"""Of the model that fine-tuning begins with; the rate is the best one of all-reduce with 8 workers in as many steps."""
TRAINED = ROOT / "runs" / "outer_short"
RANK = 4
"""The rank of adapters."""


def language_reference() -> Tensor:
    """Return the ASCII characters of the language reference that Python's `help` prints, by topic, uint8."""
    text = "\0".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(symbol for symbol in text if symbol < NUM_SYMBOLS), dtype=torch.uint8)


@functools.cache
def trained_decoder(seed: int) -> SmallDecoder:
    """Return a decoder that one worker has trained on Python's sources, with 32 sequences in a step.

    A file in `TRAINED` keeps it for the next process.
    """
    task, draws = Text(32), torch.Generator().manual_seed(seed)
    path = TRAINED / f"{task.data}_{TRAINED_STEPS}_{TRAINED_RATE}_{seed}.pt"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SmallDecoder()
    if path.is_file():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model
    optimizer = task.optimizer(list(model.parameters()), TRAINED_RATE)
    for k in range(TRAINED_STEPS):
        optimizer.param_groups[0]["lr"] = TRAINED_RATE * rate_factor(k, TRAINED_STEPS)
        optimizer.zero_grad()
        task.loss(model, task.batch(0, k, draws)).backward()
        optimizer.step()
    TRAINED.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model


class Adapted(nn.Module):
    """A frozen matrix W with a trained correction of low rank: (W + 2 B A) x; B is zero at first.

    Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022, arXiv 2106.09685.

    Args:
        layer: has W; without a bias.
        rank: the rank of B A.
    """

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
        self.a = nn.Parameter(torch.randn(rank, layer.in_features) / math.sqrt(layer.in_features))
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Return (W + 2 B A) x for the rows of x [..., columns]."""
        return F.linear(x, self.weight) + 2 * F.linear(F.linear(x, self.a), self.b)


def with_adapters(model: SmallDecoder, rank: int) -> SmallDecoder:
    """Freeze a decoder, and put adapters to its hidden matrices; returns the decoder."""
    model.requires_grad_(False)
    for block in model.layers:
        for name, layer in list(block.named_children()):
            assert isinstance(layer, nn.Linear), "the children of a block are its matrices"
            setattr(block, name, Adapted(layer, rank))
    return model


class FineTuning(Text):
    """A task of `Study`: a decoder that was trained on Python's sources goes on with the language reference.

    Args:
        rank: the rank of adapters on the hidden matrices, which are trained alone; None: all parameters are trained.
        seed: the seed of the trained decoder and of the adapters.
    """

    def __init__(self, rank: int | None = None, *, seed: int = 1) -> None:
        super().__init__(4, symbols=language_reference())
        self.rank, self.seed = rank, seed

    def model(self) -> nn.Module:
        """See `StudyTask`."""
        model = SmallDecoder()
        model.load_state_dict(trained_decoder(self.seed).state_dict())
        torch.manual_seed(self.seed)
        return model if self.rank is None else with_adapters(model, self.rank)


def fine_tune(study: Study, task: StudyTask, key: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
    """Train from the decoder of this seed: see `Study.train`. The first row has the score before the first step."""
    assert isinstance(task, FineTuning), "a study of fine-tuning has such a task"
    own = FineTuning(task.rank, seed=seed)
    validation, test = own.score(own.model())
    return [{"step": 0, "validation": validation, "test": test}, *by_compare(study, own, key, seed)]


def long(methods: Mapping[str, Any], order: tuple[tuple[int, int], ...]) -> Study:
    """Return a study of long training: these methods, in this order of (workers, seed)."""
    return Study(
        partial(Text, 4),
        lambda workers: {"one worker alone": "ar"} if workers == 1 else methods,
        cells=tuple((workers, STEPS, seed) for workers, seed in order),
        rates=(0.008, 0.004, 0.016),
        tuning=TUNING_STEPS / STEPS,
        optimizers=lambda workers: {"MuLoCo": StackedMuon},
        by="compile",
        candidates=frozenset(CANDIDATES),
    )


def short(rank: int | None, rates: tuple[float, ...]) -> Study:
    """Return a study of fine-tuning, with all rates and all seeds; adapters have names of their own."""
    suffix = "" if rank is None else ", LoRA"
    methods = {name + suffix: method for name, method in SHORT.items()}
    return Study(
        partial(FineTuning, rank),
        lambda workers: methods,
        cells=tuple((workers, SHORT_STEPS, seed) for seed in SEEDS for workers in (2, 4)),
        rates=rates,
        tuning=0,
        points=6,
        train=fine_tune,
    )


OUTER: Mapping[str, Study] = {
    "outer_short": short(None, (0.001, 0.002, 0.004, 0.008)),
    "outer_short_lora": short(RANK, (0.004, 0.008, 0.016, 0.032)),
    "outer_long": long(
        FIRST,
        (
            *((workers, 1) for workers in (4, 1, 8, 2)),
            *((workers, seed) for workers in (8, 4, 1, 2) for seed in SEEDS[1:]),
        ),
    ),
    "outer_long_further": long(
        FURTHER,
        tuple((workers, seed) for workers in (4, 8, 2) for seed in SEEDS),
    ),
}
"""The studies by name. Those of short training write one file, `outer_short.csv`, and so do those of long training."""
