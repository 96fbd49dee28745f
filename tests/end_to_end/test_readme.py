"""The README's examples run as they stand."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The README's code blocks in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_the_academic_version_finds_the_optimum() -> None:
    code = next(block for block in blocks("python") if "def sgp" in block)
    assert len(code.splitlines()) <= 40
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "README.md", "exec"), {})
    errors = [float(line.split()[-1]) for line in output.getvalue().splitlines()]
    assert len(errors) == 2
    assert max(errors) < 1e-4


def test_a_pairwise_worker_starts_from_its_peer() -> None:
    code = next(block for block in blocks("python") if "PairwiseDataParallel(" in block)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "README.md", "exec"), {})
    assert output.getvalue() == "True\n"


@pytest.mark.e2e
def test_asynchronous_training_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "adpsgd.py"
    script.write_text(next(block for block in blocks("python") if "# torchrun" in block and "adpsgd" in block))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert result.returncode == 0, result.stderr
    errors = [float(value) for value in re.findall(r"averaged weights ([-+.e0-9]+)", result.stdout)]
    assert len(errors) == 4
    assert len(set(errors)) == 1
    assert errors[0] < 0.1


@pytest.mark.e2e
def test_distributed_averaging_and_the_diff_run_under_torchrun(tmp_path: Path) -> None:
    average = next(block for block in blocks("python") if "PushSum" in block)
    (diff,) = blocks("diff")
    kept = [line[1:] for line in diff.splitlines() if not line.startswith("-")]
    setup = f"""
from pathlib import Path
import torch
from torch import nn
from torch.nn.functional import cross_entropy
model = nn.Linear(4, 3)
loader = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)]
def evaluate(model):
    norm = sum(p.abs().sum().item() for p in model.parameters())
    Path({str(tmp_path)!r}, f"norm_{{dist.get_rank()}}").write_text(str(norm))
"""
    average = average.replace("dist.destroy_process_group()", "")
    diff_code = "\n".join(kept).replace('torch.distributed.init_process_group("gloo")  # or nccl', "")
    script = tmp_path / "both.py"
    script.write_text(average + setup + diff_code + "\nmodel.close()\ndist.destroy_process_group()\n", encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("[1.5, 1.5, 1.5]") == 4
    norms = [(tmp_path / f"norm_{rank}").read_text() for rank in range(4)]
    assert len(set(norms)) == 1
