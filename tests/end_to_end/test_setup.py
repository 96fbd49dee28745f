"""Set-up and the gate: what they run, against stand-ins for python3 and apt-get."""

import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GATE = ROOT / ".ci" / "run"
TOOLS = ("sbatch", "munged", "slurmctld", "slurmd", "ip", "tc")

# Debian's python3: `venv` fails and leaves half an environment until python3-venv brings ensurepip.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
  "-c import sysconfig"*) pwd ;;
  "-c "*) exit $PYTHON_IS_OLD ;;
  "--version") echo "Python 3.9.2" ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && test -e ensurepip ;;
  "-m pip --version") test -e ensurepip ;;
  "-m pip install"*) echo "$*" >>log ;;
esac
"""
FAKE_APT_GET = """#!/bin/sh
echo "apt-get $*" >>log
case "$*" in install*python3-venv) touch ensurepip ;; esac
"""


def write_executable(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def environment(bin_dir: Path, **variables: str) -> dict[str, str]:
    """This process's environment without make's variables, with stand-ins first on the path."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return inherited | {"PATH": f"{bin_dir}:{os.environ['PATH']}"} | variables


def test_the_gate_parses_and_is_executable() -> None:
    subprocess.run(["bash", "-n", str(GATE)], check=True)
    assert os.access(GATE, os.X_OK)


def test_every_requirement_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, object] = {}
    monkeypatch.setattr("setuptools.setup", options.update)
    runpy.run_path(str(ROOT / "setup.py"))
    install, extras = options["install_requires"], options["extras_require"]
    assert isinstance(install, list)
    assert isinstance(extras, dict)
    required = {
        re.split(r">=|\[", requirement)[0].lower()
        for requirement in [*install, *(r for extra in extras.values() for r in extra)]
    }
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines if not line.startswith("#")}
    assert {line for line in lines if not line.startswith("#") and "==" not in line} == set()
    assert required - pinned == set()
    assert {"torch==2.14.1", "torchvision==0.29.1"} <= set(lines)


@pytest.fixture
def make_venv(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A folder with the Makefile and what it reads, and the stand-ins for a Debian without python3-venv."""
    bin_dir = tmp_path / "bin"
    for name in ("Makefile", "setup.py", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    write_executable(bin_dir / "python3", FAKE_PYTHON)
    write_executable(bin_dir / "apt-get", FAKE_APT_GET)
    write_executable(bin_dir / "id", "#!/bin/sh\necho 0\n")
    return tmp_path, environment(bin_dir, PYTHON_IS_OLD="0")


def run_make_venv(folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = ["make", "venv", "PYTHON=python3", "VENV=.venv"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_make_venv_installs_python3_venv_on_debian(make_venv: tuple[Path, dict[str, str]]) -> None:
    folder, env = make_venv
    result = run_make_venv(folder, env)
    assert result.returncode == 0, result.stderr
    assert (folder / "log").read_text(encoding="utf-8").splitlines() == [
        "apt-get update",
        "apt-get install --yes --no-install-recommends python3-venv",
        "-m pip install --constraint constraints.txt --editable .[test,dev]",
    ]
    (folder / "log").unlink()
    assert run_make_venv(folder, env).returncode == 0
    assert not (folder / "log").exists(), "nothing changed, so nothing is installed again"


def test_make_venv_installs_again_after_a_pin_changed(make_venv: tuple[Path, dict[str, str]]) -> None:
    folder, env = make_venv
    (folder / "ensurepip").touch()
    run_make_venv(folder, env)
    stamp = (folder / ".venv" / ".installed").stat().st_mtime
    os.utime(folder / "constraints.txt", (stamp + 1, stamp + 1))
    run_make_venv(folder, env)
    assert (folder / "log").read_text(encoding="utf-8").count("pip install") == 2
    assert "apt-get" not in (folder / "log").read_text(encoding="utf-8")


def test_make_venv_names_the_remedy_when_it_may_not_install(make_venv: tuple[Path, dict[str, str]]) -> None:
    folder, env = make_venv
    write_executable(folder / "bin" / "id", "#!/bin/sh\necho 1000\n")
    result = run_make_venv(folder, env)
    assert result.returncode != 0
    assert "sudo apt-get install python3-venv" in result.stderr
    assert not (folder / "log").exists()


def test_make_venv_refuses_an_old_python(make_venv: tuple[Path, dict[str, str]]) -> None:
    folder, env = make_venv
    result = run_make_venv(folder, env | {"PYTHON_IS_OLD": "1"})
    assert result.returncode != 0
    assert "got Python 3.9.2, expected Python >= 3.10" in result.stderr
    assert "make venv PYTHON=" in result.stderr


def test_another_torch_gets_an_environment_of_its_own_beside_the_first(make_venv: tuple[Path, dict[str, str]]) -> None:
    folder, env = make_venv
    (folder / "ensurepip").touch()
    run_make_venv(folder, env)
    (folder / "log").unlink()
    for _ in range(2):
        done = subprocess.run(
            ["make", "venv-torch", "TORCH=2.7.0"], cwd=folder, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert (folder / "log").read_text(encoding="utf-8") == "-m pip install torch==2.7.0 torchvision==0.22.0\n"
    assert (folder / "beside.pth").read_text(encoding="utf-8") == f"{folder}\n"
    done = subprocess.run(["make", "venv-torch", "TORCH=2.5.1"], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode != 0
    assert "got TORCH=2.5.1, expected one whose torchvision the Makefile knows" in done.stderr
    subprocess.run(["make", "clean"], cwd=folder, env=env, capture_output=True, check=True)
    assert not (folder / ".venv-torch-2.7.0").exists()


def test_make_clean_removes_no_environment_but_its_own(make_venv: tuple[Path, dict[str, str]]) -> None:
    folder, env = make_venv
    for name in (".venv", "elsewhere", "runs"):
        (folder / name).mkdir()
    for arguments in ([], [f"VENV={folder / 'elsewhere'}"]):
        variables = env | {"VENV": str(folder / "elsewhere")}
        subprocess.run(["make", "clean", *arguments], cwd=folder, env=variables, capture_output=True, check=True)
    assert not (folder / ".venv").exists()
    assert (folder / "elsewhere").exists()
    assert (folder / "runs").exists()


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """The top of a repository with the gate; on its path are what it needs, stages that pass, and SLURM."""
    repository, bin_dir = tmp_path / "repository", tmp_path / "bin"
    repository.mkdir()
    write_executable(repository / ".ci" / "run", GATE.read_text(encoding="utf-8"))
    bin_dir.mkdir()
    for name in ("awk", "bash", "dirname", "env", "id", "sh", "timeout", "touch"):
        found = shutil.which(name)
        assert found is not None
        (bin_dir / name).symlink_to(found)
    for name in TOOLS:
        write_executable(bin_dir / name, "#!/bin/sh\n")
    write_make(bin_dir, accuracy="98.61", broken="")
    return repository


def write_make(bin_dir: Path, *, accuracy: str, broken: str) -> None:
    write_executable(
        bin_dir / "make",
        f"""#!/bin/sh
case "$1" in
  venv) echo no environment ;;
  test) echo "data in $GOSSIP_DATA" ;;
  venv-torch | test-torch) echo "$*" ;;
  train) echo "averaged model: test accuracy {accuracy} %" ;;
esac
test "$1" != "{broken}" && test "$*" != "{broken}"
""",
    )


def run_gate(repository: Path) -> tuple[int, list[str]]:
    """Its status and what it printed."""
    env = {**os.environ, "PATH": str(repository.parent / "bin")}
    env.pop("GOSSIP_DATA", None)
    command = [str(repository / ".ci" / "run")]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize(
    ("broken", "accuracy", "last_line"),
    [
        ("", "97.00", "passed: check docs test train torch-2.7 torch-2.15"),
        ("check", "98.61", "failed: check"),
        ("test", "98.61", "failed: test"),
        ("docs", "98.61", "failed: docs"),
        ("venv-torch TORCH=2.7.0", "98.61", "failed: torch-2.7"),
        ("smoke-torch TORCH=2.15.0", "98.61", "failed: torch-2.15"),
        ("smoke-torch", "98.61", "failed: torch-2.7 torch-2.15"),
        ("train", "98.61", "failed: train"),
        ("", "96.99", "failed: train"),
        ("", "nan", "failed: train"),
        ("venv", "98.61", "no environment"),
    ],
)
def test_ci_fails_when_a_stage_does(gate: Path, broken: str, accuracy: str, last_line: str) -> None:
    data = gate.parent / "shared" / "data"
    data.mkdir(parents=True)
    write_make(gate.parent / "bin", accuracy=accuracy, broken=broken)
    status, lines = run_gate(gate)
    assert (status == 0) == last_line.startswith("passed")
    assert lines[-1] == last_line
    assert (f"data in {data}" in lines) == (broken != "venv")


@pytest.mark.parametrize("user", ["0", "1000"])
@pytest.mark.parametrize("works", [True, False])
def test_ci_installs_tools_or_says_that_it_cannot(gate: Path, user: str, works: bool) -> None:
    bin_dir = gate.parent / "bin"
    (bin_dir / "sbatch").unlink()
    (bin_dir / "id").unlink()
    write_executable(bin_dir / "id", f"#!/bin/sh\necho {user}\n")
    write_executable(bin_dir / "apt-get", f'#!/bin/sh\necho "apt-get $*" >&2\n{str(works).lower()}\n')
    status, lines = run_gate(gate)
    assert status == 0, "its tests are skipped then, and say so"
    apt = [line for line in lines if line.startswith("apt-get")]
    install = "apt-get install --yes --quiet=2 --no-install-recommends slurm-wlm munge iproute2"
    assert apt == (["apt-get update --quiet=2", *[install] * works] if user == "0" else [])
    says_so = any(line.startswith("SLURM and iproute2 cannot be installed here") for line in lines)
    assert says_so != (works and user == "0")
