"""Processes that are forks of one that has imported everything: ready in milliseconds, and none outlives its parent.

Not `multiprocessing`, whose processes end by os._exit: here a process ends as a script does, with what the interpreter
does at its exit, because whether that hangs is measured.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PRELOAD = ("torch._dynamo", "torch.distributed", "torch.nn.parallel", "torch.optim", "benchmarks.faults.rank")
"""What every rank needs; torch loads torch._dynamo in the first step of an optimizer."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
"""No threads in the process that forks, and nothing but loopback."""
END_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.005


class End(NamedTuple):
    """How a process ended."""

    name: str
    exit_code: int  # negative: the signal
    time: float  # of time.monotonic()


class ForkServer:
    """The parent's side: starts and signals processes by name. `close()` it, or use it in a `with`.

    Each process calls `benchmarks.faults.rank.run(task)`. The server kills all processes when its stdin closes, which
    it does however the parent ends; and the kernel kills them when the server dies.
    """

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.faults.fork_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )
        self._unread = b""
        assert self._server.stdout is not None
        try:
            is_ready = self._server.stdout.readline() == b"ready\n"
        except BaseException:
            self.close()
            raise
        if not is_ready:
            self.close()
            raise RuntimeError("the server of processes did not start, expected it to import all that ranks need")
        os.set_blocking(self._server.stdout.fileno(), False)

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, name: str, task: dict[str, Any], log: Path) -> None:
        """Start a process; what it prints is appended to `log`."""
        self._tell({"name": name, "task": task, "log": str(log)})

    def signal(self, name: str, number: int) -> None:
        """Send a signal, unless the process has ended."""
        self._tell({"name": name, "signal": int(number)})

    def ends(self) -> Iterator[End]:
        """The processes that have ended since the last call."""
        assert self._server.stdout is not None
        while data := _read(self._server.stdout.fileno()):
            self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            yield End(*json.loads(line))
        if data is not None:
            raise RuntimeError("the server of processes has ended, and with it all processes; see its error")

    def close(self) -> None:
        """Kill all processes. Idempotent."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        try:
            self._server.wait(END_SECONDS)
        finally:
            if self._server.poll() is None:
                os.killpg(self._server.pid, signal.SIGKILL)
                self._server.wait()
            self._server.stdout.close()

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(message).encode() + b"\n")
        self._server.stdin.flush()


def _read(descriptor: int) -> bytes | None:
    """What is there; None = nothing yet, b"" = the other end is closed."""
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return None


def _serve() -> dict[str, Any] | None:
    """The server's side. Returns None at the end of stdin; in a fork, which returns too, its task."""
    names: dict[int, str] = {}  # by process id
    unread, is_open = b"", True
    while is_open:
        if select.select([0], [], [], _POLL_SECONDS)[0]:
            data = os.read(0, 1 << 16)
            is_open = bool(data)
            *lines, unread = (unread + data).split(b"\n")
            for message in map(json.loads, lines):
                if "signal" in message:  # a process that is in `names` is not reaped, so its id is its own
                    for pid in [pid for pid, name in names.items() if name == message["name"]]:
                        os.kill(pid, message["signal"])
                    continue
                if (pid := os.fork()) == 0:
                    _become_child(message["log"])
                    return message["task"]
                names[pid] = message["name"]
        _reap(names)
    for pid in names:
        os.kill(pid, signal.SIGKILL)
    for pid in names:
        os.waitpid(pid, 0)
    return None


def _reap(names: dict[int, str]) -> None:
    while names:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        print(json.dumps(End(names.pop(pid), os.waitstatus_to_exitcode(status), time.monotonic())), flush=True)


def _become_child(log: str) -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(1)
    with open(os.devnull) as nothing, open(log, "ab") as out:
        os.dup2(nothing.fileno(), 0)
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)


def main() -> None:
    """Import, then serve; in a fork, run its task and end as a script does."""
    for module in PRELOAD:
        importlib.import_module(module)
    gc.freeze()  # what is imported is nobody's garbage: collecting at exit would copy all of it, in each process
    print("ready", flush=True)
    task = _serve()
    if task is not None:
        importlib.import_module("benchmarks.faults.rank").run(task)


if __name__ == "__main__":
    main()
