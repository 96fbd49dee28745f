"""The comparison with an earlier commit: its statistics, and that both sides train with the library they should."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks import step_rank
from benchmarks.contenders import CONTENDERS, STANDARDS
from benchmarks.record import ROOT
from benchmarks.step_time import STEPS, Options, compare, extract, interval


def test_the_interval_holds_the_median_and_narrows_with_more_cycles() -> None:
    generator = np.random.default_rng(0)
    few, many = (generator.normal(1.0, 0.1, n) for n in (10, 1000))
    (a, b), (c, d) = interval(few, generator), interval(many, generator)
    assert a <= np.median(few) <= b
    assert c <= np.median(many) <= d
    assert d - c < b - a


def test_methods_have_standards_and_models_run() -> None:
    assert {*STANDARDS, *STANDARDS.values(), *Options().methods} <= set(CONTENDERS)
    for model in STEPS:
        module, inputs = step_rank.make_model(model)
        assert module(inputs).isfinite().all()


def test_an_unknown_commit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"got 'no such commit', expected a commit of .* with gossip_modules"):
        extract("no such commit", tmp_path)


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_both_sides_train(tmp_path: Path) -> None:
    methods = ("local", "hand-sgp", "hand-osgp", "hand-diloco", "hand-ar", "ddp-view", "sgp", "ar", "wagma")
    options, trees = Options(methods=methods, cycles=2, ranks=2), {"one": ROOT, "other": ROOT}
    rows = pd.DataFrame(compare(options, "mlp", trees, tmp_path))
    assert list(rows["method"]) == [*methods, *methods]
    assert (rows[["wall_ms", "cpu_ms", "ratio", "cpu_ratio"]] > 0).all(axis=None)
    assert (rows["ratio_low"] <= rows["ratio"]).all()
    assert (rows["ratio"] <= rows["ratio_high"]).all()
