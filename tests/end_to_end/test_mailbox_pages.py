"""The commands of docs/guides/two_laptops.md, as they stand on the page, in a new folder; the lists of mailbox.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from gossip_modules import DiLoCo, GossipDataParallel, Membership, Schedule
from gossip_modules.extend import Algorithm
from gossip_modules.methods import METHODS, read_algorithm
from tests.end_to_end.test_examples import number, until
from tests.harness.pages import ROOT
from tests.library.mailbox.conftest import s3, s3_server

__all__ = ["s3", "s3_server"]  # fixtures
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

PAGE = (ROOT / "docs" / "guides" / "two_laptops.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "guides" / "mailbox.md").read_text(encoding="utf-8")
COMMANDS: list[str] = re.findall(r"^```bash\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


class Terminals:
    """Shells in a new folder with the script of the page."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []
        (name,) = re.findall(r'^--8<-- "(.+)"$', PAGE, flags=re.MULTILINE)
        (folder / "mailbox.py").write_bytes((ROOT / name).read_bytes())

    def type(self, commands: str, **environment: str) -> subprocess.Popen[str]:
        """Start a shell that runs the commands; `python` is the interpreter of the tests, and the library is there."""
        own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        own |= {"PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1", **environment}
        self.processes.append(
            subprocess.Popen(
                ["bash", "-c", commands.replace("\npython ", "\nexec python ")],  # so that the process is the worker
                cwd=self.folder,
                env={**os.environ, **own},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return self.processes[-1]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    terminals = Terminals(tmp_path)
    yield terminals
    terminals.close()


def test_two_terminals_and_a_folder(terminals: Terminals) -> None:
    command = COMMANDS[0]
    assert "export GOSSIP_JOB_KEY=" in command
    workers = [terminals.type(command, STEPS="120") for _ in range(2)]
    accuracies = [number(r"accuracy ([\d.]+)%", until(worker, r"accuracy [\d.]+%")) for worker in workers]
    assert accuracies[0] == accuracies[1] > 70
    assert [worker.wait(60) for worker in workers] == [0, 0]


@pytest.mark.soak
def test_a_worker_is_stopped_and_comes_back(terminals: Terminals) -> None:
    command = COMMANDS[0]
    first, second = (terminals.type(command, STEPS="100000") for _ in range(2))
    until(second, r"step 500: loss [\d.]+, workers \(0, 1\)")
    second.kill()
    until(first, r"workers \(\d,\)")
    again = terminals.type(command, STEPS="100000")
    assert number(r"worker 2 trains from step (\d+)", until(again, r"worker 2 trains from step \d+")) > 0
    until(first, r"workers \(\d, 2\)")
    first.kill()
    again.kill()
    last = terminals.type(command, STEPS="100")  # the whole run is in the folder, and has more steps already
    assert number(r"worker 3 trains from step (\d+)", until(last, r"worker 3 trains from step \d+")) > 500


@pytest.mark.soak
def test_two_laptops_and_a_bucket(terminals: Terminals, s3: object) -> None:
    (command,) = (block for block in COMMANDS if "s3://" in block)
    credentials, key, worker = command.splitlines()
    assert credentials.startswith("export AWS_ACCESS_KEY_ID=...")
    typed = "\n".join([key, worker.replace("my-bucket", "bucket"), ""])
    workers = [terminals.type(typed, STEPS="600") for _ in range(2)]
    accuracies = [number(r"accuracy ([\d.]+)%", until(worker, r"accuracy [\d.]+%")) for worker in workers]
    assert accuracies[0] == accuracies[1] > 85


def fits(name: str) -> bool:
    """Whether a method trains over a mailbox with a round every 10 steps."""
    made = read_algorithm(name).made
    membership = Membership(f"memory://{name}", min_workers=1)
    options: dict[str, Any] = {"algorithm": made} if isinstance(made, Algorithm) else {"overlap": name == "osgp"}
    try:
        model = GossipDataParallel(
            nn.Linear(2, 2), schedule=Schedule(1 if "sync_every" in str(made) else 10), membership=membership, **options
        )
    except ValueError:
        membership.close()
        return False
    model.close()
    return True


def test_the_methods_that_fit_are_in_the_table_of_the_guide() -> None:
    section = GUIDE.partition("{ #fits }")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|" and "---" not in line]
    fitting, refused = (" ".join(column) for column in zip(*rows, strict=True))
    of_rounds = [name for name in METHODS if name not in ("ar", "adpsgd", "a2cid2", "wagma", "dpwa")]
    for name in of_rounds:
        title = METHODS[name].title
        if fits(name):
            assert re.search(rf"\b{re.escape(title)}\b", fitting), title
        elif name != "osgp":  # overlap=True
            assert re.search(rf"(?i)\b{re.escape(title)}\b", refused), title


def test_the_commands_of_the_guide_run(terminals: Terminals) -> None:
    """The costs before a run, and the view of a run that has ended."""
    ask, look = re.findall(r"^(python -m gossip_modules\.(?:lab|mailbox) [^#\n]*?) *(?:#.*workers.*)?$", GUIDE, re.M)[
        :2
    ]
    costs = terminals.type(ask)  # the other one starts meanwhile
    membership = Membership(f"file://{terminals.folder}/run1", min_workers=1, key="a secret of the tests")
    GossipDataParallel(nn.Linear(2, 2), algorithm=DiLoCo(sync_every=2), membership=membership).close()
    address = f"file://{terminals.folder}/run1"
    shown = terminals.type(look.replace("s3://my-bucket/run1", address), GOSSIP_JOB_KEY="a secret of the tests")
    table, view = (process.communicate(timeout=100)[0] for process in (costs, shown))
    requests, storage, egress = map(float, re.findall(r"^ +100 .*% +(\S+) +(\S+) +(\S+)$", table, re.M)[0])
    assert requests + storage < 0.01 < 1 < egress
    assert "0 live, 0 silent, 1 left" in view
