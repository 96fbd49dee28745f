"""Every file of examples/ runs as it stands, is short, and shows what it says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.scripts import script_outputs
from tests.library.integrations.hosts import needs

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {path.name: path for path in sorted((ROOT / "examples").glob("*.py"))}
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def outputs(name: str, world_size: int) -> list[str]:
    """What each rank of an example prints."""
    return script_outputs(EXAMPLES[name], world_size, with_warnings=name.startswith("with_"))


def number(pattern: str, text: str) -> float:
    """The number in parentheses of a pattern that must be there."""
    found = re.search(pattern, text)
    assert found, f"got {text!r}, expected {pattern!r}"
    return float(found[1])


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_says_how_it_is_started(name: str) -> None:
    text = EXAMPLES[name].read_text(encoding="utf-8")
    assert len(text.splitlines()) <= (300 if name == "nano_gossip.py" else 60)
    launcher = "python" if name in ("elastic.py", "mailbox.py") else r"torchrun --standalone --nproc-per-node \d+"
    assert re.search(rf"{launcher} examples/{name}(?: \S+)*\n", text)


def test_every_example_is_run_here() -> None:
    tested = re.findall(r'outputs\("(\w+\.py)"', Path(__file__).read_text(encoding="utf-8"))
    assert sorted({*tested, "plain_loop.py", "elastic.py", "elastic_nodes.py", "mailbox.py", "nano_gossip.py"}) == list(
        EXAMPLES
    )  # the mailbox in test_mailbox_pages


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


class Job:
    """The store of a job, and workers: processes that end with the test."""

    def __init__(self) -> None:
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.processes: list[subprocess.Popen[str]] = []
        store = self.start("-m", "gossip_modules.membership.serve", "--host", "127.0.0.1", "--port", "0")
        port = number(r"port (\d+)", until(store, r"port \d+"))
        self.environment["STORE"] = f"127.0.0.1:{port:.0f}"

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        self.environment |= environment
        self.processes.append(
            subprocess.Popen(
                [sys.executable, *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=self.environment,
            )
        )
        return self.processes[-1]

    def worker(self, **environment: str) -> subprocess.Popen[str]:
        return self.start(str(EXAMPLES["elastic.py"]), **environment)

    def node(self) -> subprocess.Popen[str]:
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
        environment = {"STEPS": "1000000", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return self.start(*launcher, str(EXAMPLES["elastic_nodes.py"]), **environment)


def until(process: subprocess.Popen[str], pattern: str) -> str:
    """What matches in the next line of its output that has it."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if found := re.search(pattern, line):
            return found[0]
    raise AssertionError(f"got {''.join(lines)!r}, expected {pattern!r}")


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    for process in job.processes:
        process.terminate()  # so that torchrun ends its own
    for process in job.processes:
        process.communicate()


@pytest.mark.soak
def test_workers_of_a_job_die_and_come_back(job: Job) -> None:
    """The guide's two lines: a store, and workers of which one is killed and started again."""
    first, second, third = workers = [job.worker(WORKERS="3", STEPS="600") for _ in range(3)]
    for worker in workers:
        until(worker, r"trains from step 0")
    third.kill()
    until(first, r"with 2 workers .* left \(its connection closed\)")
    again = job.worker()
    assert number(r"from step (\d+)", until(again, r"trains from step \d+")) > 0
    for worker in (first, second, again):
        assert number(r"accuracy ([\d.]+)%", until(worker, r"accuracy [\d.]+%")) > 85
        assert worker.wait(60) == 0


@pytest.mark.soak
def test_a_node_that_loses_a_process_falls_and_comes_back_as_one(job: Job) -> None:
    """torchrun ends a node with the first process that dies, and starts all anew."""
    first, second = job.node(), job.node()
    for node in (first, second):
        for _ in range(2):
            until(node, r"trains from step 0")
    *_, sibling = Path(f"/proc/{second.pid}/task/{second.pid}/children").read_text().split()
    os.kill(int(sibling), signal.SIGKILL)
    until(first, r"with 1 workers .* left \(its connection closed\)")
    steps = [number(r"from step (\d+)", until(second, r"trains from step \d+")) for _ in range(2)]
    assert steps[0] == steps[1] > 0
    until(first, r"with 2 workers .* joined")


def test_fine_tuning_sends_the_trained_tensors() -> None:
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


def test_own_algorithm() -> None:
    first, *_ = outputs("own_algorithm.py", 4)
    assert number(r"sent (\d+)%", first) == pytest.approx(11, abs=1)
    assert number(r"from the average ([-+.e\d]+)", first) < 0.5


@pytest.mark.soak
def test_own_compressor() -> None:
    first, *_ = outputs("own_compressor.py", 4)
    assert number(r"averaged weights ([-+.e\d]+)", first) < 0.05
    assert number(r"(\d+) bytes per message", first) < 100


@pytest.mark.soak
@needs("accelerate")
def test_accelerate() -> None:
    first, second = outputs("with_accelerate.py", 2)
    assert number(r"accuracy ([\d.]+)% after 6 rounds", first) > 85  # 64 steps, a round of DiLoCo at every tenth
    assert second == ""


def test_semi_sync() -> None:
    first, second = outputs("with_semi_sync.py", 2)
    assert number(r"accuracy ([\d.]+)% after 20 rounds", first) > 90
    assert second == ""


@pytest.mark.soak
@needs("torchtitan")
def test_torchtitan() -> None:
    first, *others = outputs("with_torchtitan.py", 4)
    assert number(r"to ([\d.]+), 49.3 MB between regions, which are 0.0e\+00 apart", first) < 1
    assert others == ["", "", ""]


@pytest.mark.soak
@needs("transformers")
def test_transformers() -> None:
    first, _ = outputs("with_trainer.py", 2)
    assert number(r"loss ([\d.]+) after 32 steps and 32 rounds", first) < 2


@pytest.mark.soak
@needs("lightning")
def test_lightning() -> None:
    first, _ = outputs("with_lightning.py", 2)
    assert number(r"accuracy ([\d.]+)% after 192 steps", first) > 90


@pytest.mark.soak
@needs("lightning")
def test_fabric() -> None:
    first, _ = outputs("with_fabric.py", 2)
    assert number(r"accuracy ([\d.]+)% after 64 rounds", first) > 80
