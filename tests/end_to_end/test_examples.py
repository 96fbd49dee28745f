"""Every file of examples/ runs as it stands, is short, and shows what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.scripts import script_outputs

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {path.name: path for path in sorted((ROOT / "examples").glob("*.py"))}
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def outputs(name: str, world_size: int) -> list[str]:
    """What each rank of an example prints."""
    return script_outputs(EXAMPLES[name], world_size)


def number(pattern: str, text: str) -> float:
    """The number in parentheses of a pattern that must be there."""
    found = re.search(pattern, text)
    assert found, f"got {text!r}, expected {pattern!r}"
    return float(found[1])


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_says_how_it_is_started(name: str) -> None:
    text = EXAMPLES[name].read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    assert re.search(rf"torchrun --standalone --nproc-per-node \d+ examples/{name}\n", text)


def test_every_example_is_run_here() -> None:
    tested = re.findall(r'outputs\("(\w+\.py)"', Path(__file__).read_text(encoding="utf-8"))
    assert sorted({*tested, "plain_loop.py"}) == list(EXAMPLES)


@pytest.mark.soak
def test_the_plain_loop_under_torchrun() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*launcher, str(EXAMPLES["plain_loop.py"])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert number(r"accuracy ([\d.]+)%", result.stdout) > 85


@pytest.mark.soak
def test_gpu() -> None:
    first, second = outputs("gpu.py", 2)
    assert number(r"averaged model ([\d.]+)%", first) > 60
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", first)]
    assert losses[-1] < losses[0]
    assert second == ""


def test_fine_tuning_sends_what_is_trained() -> None:
    first, second = outputs("fine_tuning.py", 2)
    lines = re.findall(r"loss ([\d.]+), (\d+) trained parameters, (\d+) bytes per step", first)
    (frozen_loss, *frozen), (unfrozen_loss, *unfrozen) = lines
    for num_parameters, num_bytes in (frozen, unfrozen):  # one message per round, padded to whole cache lines
        assert 0 <= int(num_bytes) - 4 * int(num_parameters) < 0.03 * int(num_bytes) + 256
    assert int(unfrozen[0]) > 40 * int(frozen[0])
    assert float(unfrozen_loss) < float(frozen_loss) < 1.1
    assert second == ""


@pytest.mark.soak
def test_processes_of_a_node_hold_one_model() -> None:
    first, *others = outputs("processes_per_node.py", 4)
    assert first.count("its processes hold the same model") == 2
    assert "the two nodes differ" in first
    assert others == ["", "", ""]


@pytest.mark.soak
def test_own_graph() -> None:
    first, *_ = outputs("own_graph.py", 4)
    assert "round 0: 0 -> 1, 1 -> 0, 2 -> 3, 3 -> 2\nround 1: 0 -> 2, 1 -> 3, 2 -> 0, 3 -> 1\n" in first
    assert "doubly stochastic: True; spectral gap 1.00" in first  # two averages of pairs are that of four
    assert number(r"averaged weights ([-+.e\d]+)", first) < 0.05


def test_own_gossiper() -> None:
    first, *_ = outputs("own_gossiper.py", 4)
    assert number(r"sent (\d+)%", first) == pytest.approx(10, abs=1)
    assert number(r"from the average ([-+.e\d]+)", first) < 0.5


@pytest.mark.soak
def test_own_compressor() -> None:
    first, *_ = outputs("own_compressor.py", 4)
    assert number(r"averaged weights ([-+.e\d]+)", first) < 0.05
    assert number(r"(\d+) bytes per message", first) < 100
