"""The tutorial, the quickstart and the notebook: their scripts run, print what the page shows, and agree."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from docs.tutorial import LAUNCH, NOTEBOOK, PAGE, QUICKSTART, README, ROOT, outputs, patched, scripts, written
from tests.harness.scripts import script_outputs

TEXT = PAGE.read_text(encoding="utf-8")
SCRIPTS = scripts(TEXT)
OUTPUTS = outputs(TEXT)
UNDER_TORCHRUN = [command.split()[-1] for command in OUTPUTS if command.startswith(LAUNCH)]
NUMBER = r"[\d.]+"
pytestmark = pytest.mark.timeout(120)


def check_output(name: str, output: str, shown: str) -> None:
    """Equal words, and losses that differ by little: the source code that is learnt depends on the Python."""
    assert re.sub(NUMBER, "#", output) == re.sub(NUMBER, "#", shown), name
    pairs = zip(*(re.findall(rf"test loss ({NUMBER})", text) for text in (output, shown)))
    assert [f"{own} near {other}" for own, other in pairs if abs(float(own) - float(other)) > 0.2] == []


@pytest.mark.parametrize("path", written(), ids=lambda path: path.name)
def test_the_files_that_follow_from_the_tutorial_are_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == written()[path], "run python docs/tutorial.py"


def test_readme_and_quickstart_have_the_script_of_the_tutorial() -> None:
    for page in (README, QUICKSTART):
        assert SCRIPTS["gossip.py"] in page.read_text(encoding="utf-8")
    assert OUTPUTS[f"{LAUNCH} gossip.py"] in QUICKSTART.read_text(encoding="utf-8")


def test_every_command_of_the_tutorial_shows_an_output() -> None:
    assert all(output.strip() for output in OUTPUTS.values())
    assert {*UNDER_TORCHRUN, "plain.py", "member.py", "job.sh"} == set(SCRIPTS)


def test_a_diff_that_fits_at_two_places_or_nowhere_is_refused() -> None:
    assert patched("a\nb\na\n", "-b\n+c\n a\n") == "a\nc\na\n"
    with pytest.raises(ValueError, match=r"got 2 places for a part of a diff, expected one:\n-a"):
        patched("a\nb\na\n", "-a\n")
    with pytest.raises(ValueError, match=r"got 0 places"):
        patched("a\nb\na\n", "-b\n@@\n-c\n")


@pytest.mark.e2e
def test_the_script_of_the_quickstart_begins_as_the_page_shows(tmp_path: Path) -> None:
    """Its first 50 steps of 500."""
    script = tmp_path / "gossip.py"
    script.write_text(SCRIPTS["gossip.py"].replace("range(1, 501)", "range(1, 51)"), encoding="utf-8")
    first, *others = script_outputs(script, 4)
    assert others == ["", "", ""]
    shown = OUTPUTS[f"{LAUNCH} gossip.py"].splitlines(keepends=True)
    check_output("gossip.py", first, shown[0] + shown[-1])


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.parametrize("name", ["plain.py", *UNDER_TORCHRUN])
def test_a_script_prints_the_output_of_the_page(name: str, tmp_path: Path) -> None:
    check_script(name, tmp_path)


def check_script(name: str, folder: Path) -> None:
    """Run a script on four ranks, or the plain one on one."""
    script = folder / name
    script.write_text(SCRIPTS[name], encoding="utf-8")
    first, *others = script_outputs(script, 1 if name == "plain.py" else 4)
    assert others == [""] * len(others)
    check_output(name, first, OUTPUTS.get(f"{LAUNCH} {name}") or OUTPUTS[f"python {name}"])


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_the_cells_of_the_notebook_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells are run as Jupyter runs them: they use %%writefile and ! besides Python."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, logs = str(server.getsockname()[1]), 0
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            continue
        if source.startswith("%%writefile "):
            first, _, text = source.partition("\n")
            Path(first.split()[1]).write_text(text.replace("29400", port) + "\n", encoding="utf-8")
        elif source.startswith("!"):
            command = "\n".join(line.removeprefix("!") for line in source.splitlines())
            output = shell_output(command)
            if "worker" in command:
                logs += 1
                check_membership(command, output)
            else:
                check_output(command, output, OUTPUTS[command])
        else:
            exec(source, {})
    assert logs == 2


def shell_output(command: str) -> str:
    """Return what a command prints; none of its processes is left, also where it takes too long."""
    shell = subprocess.Popen(
        ["bash", "-euc", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = shell.communicate(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0, output + errors
    return output


def check_membership(command: str, log: str) -> None:
    """A worker that lives trains with four, three and four workers; the new one does not begin at step 0."""
    steps = [
        (int(step), int(count)) for step, count in re.findall(r"^step (\d+): .*, (\d) workers$", log, re.MULTILINE)
    ]
    assert steps[-1] == (1500, 4), log
    if "worker_0" in command:
        assert [steps[0][1], min(count for _, count in steps)] == [4, 3], log
        assert re.search(r"left \(its connection closed\)", log)
    else:
        assert steps[0][0] > 200, log
