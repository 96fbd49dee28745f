"""The measurement of deltas=True: both wires end with equal parameters, and the page has the figures of the rows."""

from __future__ import annotations

import pytest
import torch

from benchmarks import deltas
from benchmarks.record import rows_of
from benchmarks.studies.small_decoder import Text


def test_a_row_has_fewer_bytes_and_both_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "COUNTED", 2)
    task = Text(2, num_layers=1, symbols=torch.arange(20_000).remainder(97).to(torch.uint8))
    row = deltas.measure(1e-5, task, deltas.pretrained(task, steps=2), width=8, steps=10)
    assert row["plain_bytes"] == 2 * row["parameters"]
    assert row["times_fewer"] > 1.5
    assert min(row[f"{wire}_{kind}"] for wire in ("plain", "deltas") for kind in ("ms", "cpu_ms")) > 0


def test_the_rows_have_the_bytes_of_the_issue() -> None:
    fewer = rows_of("deltas.csv").set_index("rate")["times_fewer"]
    assert all(fewer[rate] >= least for rate, least in ((1e-4, 2.0), (1e-5, 4.2), (1e-6, 10.0)))
