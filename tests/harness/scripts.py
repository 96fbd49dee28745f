"""Scripts and modules as torchrun or Python starts them, but as forks of a server that has imported torch."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
import warnings
from pathlib import Path

import torch.distributed as dist

from tests.harness.processes import run_processes


def script_outputs(path: Path, world_size: int, *arguments: str, with_warnings: bool = False) -> list[str]:
    """What each rank of a script prints, started with the environment that torchrun gives; all must end well.

    Args:
        path: of the script, which makes and ends its process group by itself.
        world_size: the number of processes.
        arguments: of its command line.
        with_warnings: whether other libraries may warn in it.
    """
    return _outputs(world_size, [str(path), *arguments], with_warnings=with_warnings)


def module_output(name: str, *arguments: str) -> str:
    """What `python -W error -m name arguments` prints; it must end well.

    Args:
        name: of the module or the package.
        arguments: of its command line.
    """
    (output,) = _outputs(1, [name, *arguments])
    return output


def _outputs(world_size: int, command: list[str], *, with_warnings: bool = False) -> list[str]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent has one
    given = (command, store.port, world_size, with_warnings)
    outcomes = run_processes(world_size, _run, *given, backend=None, timeout=100)
    return [outcome.result for outcome in outcomes]


def _run(rank: int, command: list[str], port: int, world_size: int, with_warnings: bool) -> str:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    sys.argv = command
    if not with_warnings:
        warnings.simplefilter("error")
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            if command[0].endswith(".py"):
                runpy.run_path(command[0], run_name="__main__")
            else:
                runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"the script ended with code {end.code}: {output.getvalue()}") from end
    return output.getvalue()
