"""One rank, in the namespace of its host: takes trials as messages of JSON, answers each with one."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cluster.network import namespaces
from benchmarks.cluster.network.links import DATA
from benchmarks.cluster.network.place import Place
from benchmarks.cluster.trials import Trial, measure

STORE_PORT = 29_500
START_TIMEOUT = timedelta(minutes=5)
"""For all ranks to be there."""


def serve(connection: Connection, namespace: str, rank: int, addresses: Sequence[str], controls: Sequence[str]) -> None:
    """Run trials as rank `rank` until the connection ends; the body of a process.

    Args:
        connection: to whoever started it.
        namespace: to live in, of `ip netns`.
        rank, addresses, controls: see `Place`.
    """
    namespaces.enter(namespace)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = DATA
    store = dist.TCPStore(controls[0], STORE_PORT, is_master=rank == 0, wait_for_workers=False, timeout=START_TIMEOUT)
    connection.send_bytes(json.dumps({"ready": rank}).encode())
    while True:
        try:
            message = json.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)  # threads that a method has left behind would keep the process
        connection.send_bytes(json.dumps(_answer(message, rank, addresses, controls, store)).encode())


def _answer(
    message: dict[str, Any], rank: int, addresses: Sequence[str], controls: Sequence[str], store: dist.Store
) -> dict[str, Any]:
    """The result of the trial, or {"error": ...}."""
    try:
        trial = Trial.from_message(message)
        own_store = dist.PrefixStore(f"{trial.number}", store)
        limit = timedelta(seconds=trial.limit_seconds)
        return measure(trial, Place(rank, addresses, controls, own_store, trial.number, limit, trial.optimizer))
    except Exception as error:  # noqa: BLE001 (a row of the table; whoever started this process then ends it)
        traceback.print_exc()
        return {"error": last_line(error)}


def last_line(error: BaseException) -> str:
    """Of its text, with its type: what fits into a row."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed: make cluster-venv"
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"


def print_to(log: Path) -> None:
    """Whatever this process prints from now on, from C++ too, goes to that file."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
