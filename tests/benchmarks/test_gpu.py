"""The sections of the GPU benchmark run, on a CPU and small; one that fails leaves a row, and the others stay."""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
import pytest
import torch.distributed as dist

from benchmarks import gpu
from tests.harness.ranks import run_ranks

SMALL = ["--device", "cpu", "--tiny", "--seconds", "0.1", "--numels", "4096", "--batch", "2", "--workers", "2"]


def test_sections_run_once_and_an_error_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(options: argparse.Namespace) -> list[gpu.Row]:
        return run_ranks(2, lambda group: gpu.gossip_steps(group, options))[0]

    def fails(options: argparse.Namespace) -> gpu.Rows:
        yield gpu.row("a", "b", 1.0)
        raise RuntimeError("no memory")

    for name, section in (("steps", steps), ("all_reduce", fails)):
        monkeypatch.setitem(gpu.SECTIONS, name, section)
    monkeypatch.setattr(gpu, "NUM_STEPS", 1)
    path = tmp_path / "gpu.csv"
    arguments = [*SMALL, "--commit", "abc", "--output", str(path), "--sections", "bandwidth", "steps", "all_reduce"]
    gpu.main(arguments)
    first = pd.read_csv(path, dtype={"commit": str})
    assert set(first["commit"]) == {"abc"}
    assert set(first["section"]) == {"bandwidth", "steps", "all_reduce"}
    bandwidth = first[first["section"] == "bandwidth"]
    assert (bandwidth["value"] > 0).all()
    assert {"4096", "0.004096 M float32", "0.004096 M bfloat16"} >= set(bandwidth["case"])
    cases = {case.split(",")[0] for case in first[first["section"] == "steps"]["case"]}
    assert cases == {"bare", "rounds off", "blocking", "overlap"}
    assert first[first["figure"] == "error"]["note"].tolist() == ["RuntimeError: no memory"]
    gpu.main(arguments)  # only the section with an error runs again
    again = pd.read_csv(path)
    assert set(again[len(first) :]["section"]) == {"all_reduce"}


def test_the_model_of_the_lab_has_ten_million_parameters() -> None:
    model = gpu.Decoder(320, 8)
    assert 9.9e6 < sum(p.numel() for p in model.parameters()) < 10.2e6


def test_ranks_agree_on_the_number_of_rank_zero() -> None:
    def body(group: dist.ProcessGroup) -> int:
        return gpu.agree(group, 7 + group.rank())

    assert run_ranks(2, body) == [7, 7]
