"""The comparison with an earlier commit: its statistics, and that both sides train with the library they should."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from torch import nn

import gossip_modules
from benchmarks.before_after import bits, rank
from benchmarks.before_after.__main__ import COMPARED_METHODS, RANK, STEPS, Options, compare, extract, interval
from benchmarks.record import ROOT


def test_the_interval_holds_the_median_and_narrows_with_more_cycles() -> None:
    generator = np.random.default_rng(0)
    few, many = (generator.normal(1.0, 0.1, n) for n in (10, 1000))
    (a, b), (c, d) = interval(few, generator), interval(many, generator)
    assert a <= np.median(few) <= b
    assert c <= np.median(many) <= d
    assert d - c < b - a


def test_methods_and_models_are_those_of_the_ranks() -> None:
    assert tuple(rank.COMPARED_METHODS) == COMPARED_METHODS
    for model in STEPS:
        module, inputs = rank.make_model(model)
        assert module(inputs).isfinite().all()


def test_what_is_no_commit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"got 'no such commit', expected a commit of .* with gossip_modules"):
        extract("no such commit", tmp_path)


def test_ranks_use_public_names_only() -> None:
    """So that they run with the library of earlier commits."""
    text = RANK.read_text()
    assert "import gossip_modules as gm" in text
    assert "from gossip_modules" not in text
    assert "from benchmarks" not in text


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_both_sides_train(tmp_path: Path) -> None:
    methods = ("sgp", "wagma")
    rows = pd.DataFrame(compare(Options("HEAD", methods=methods, cycles=2, ranks=2), "mlp", ROOT, tmp_path))
    assert list(rows["method"]) == list(methods)
    assert (rows[["before_ms", "after_ms", "ratio"]] > 0).all(axis=None)
    assert (rows["ratio_low"] <= rows["ratio"]).all()
    assert (rows["ratio"] <= rows["ratio_high"]).all()


def test_two_trainings_give_the_same_bits_and_copies_are_counted() -> None:
    def make(group: dist.ProcessGroup, model: nn.Module) -> nn.Module:
        return gossip_modules.GossipDataParallel(model, process_group=group, algorithm="d2")

    (first, copies), (second, _) = (bits.train(make, torch.float32) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first[0], first[1])  # ranks differ, so that their bits say something
    assert 4 < copies < 8  # parameters, gradients, momentum and c, and the room for messages
