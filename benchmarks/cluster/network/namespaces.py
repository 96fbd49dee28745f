"""Network namespaces by `ip netns`: made, listed, and removed with every process in them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

COMMAND_SECONDS = 20.0
"""For every call of `ip`, `tc` and `bridge`; they take milliseconds."""
NAMESPACES = Path("/run/netns")
"""Where iproute2 keeps them by name."""
_NEW_NAMES, _NEW_NETWORK = 0x0400_0000, 0x4000_0000  # CLONE_NEWUTS and CLONE_NEWNET of <sched.h>
_OWNED = re.compile(r"gossip-(\d+)-(\d+)-\d+-\w+")
"""Process id and start time of the owner, a number within it, the host."""


class ClusterUnavailableError(RuntimeError):
    """This machine, or this user, cannot have network namespaces; the text names the remedy."""


def require() -> None:
    """Make sure that namespaces can be had.

    Raises:
        ClusterUnavailableError: not root, or no iproute2.
    """
    missing = [tool for tool in ("ip", "tc", "bridge") if shutil.which(tool) is None]
    if missing:
        raise ClusterUnavailableError(
            f"got no {' and no '.join(missing)}, expected iproute2: install it (Debian: apt-get install iproute2)"
        )
    if os.geteuid() != 0:
        raise ClusterUnavailableError(
            f"got user id {os.geteuid()}, expected root: network namespaces and shaped links need it; run with sudo"
        )


@contextlib.contextmanager
def or_exit() -> Iterator[None]:
    """For a command line: where there can be no cluster, say why on stderr and end with exit code 2."""
    try:
        yield
    except ClusterUnavailableError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def run_batch(namespace: str, lines: Sequence[str], *, tool: str = "ip") -> None:
    """Run many commands of `ip` or `bridge` in a namespace at once; raises as `run`."""
    run(tool, "-n", namespace, "-batch", "-", text="\n".join(lines))


def run(*command: str, text: str = "") -> str:
    """Run `ip`, `tc` or `bridge`; its output.

    Args:
        command: and its arguments.
        text: for its stdin.

    Raises:
        ClusterUnavailableError: it failed, or did not end in time.
    """
    try:
        result = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ClusterUnavailableError(
            f"got no end of `{' '.join(command)}` in {COMMAND_SECONDS:.0f} s, expected milliseconds; is the kernel "
            "still removing namespaces?"
        ) from None
    if result.returncode:
        reason = (result.stderr.strip() or f"exit code {result.returncode}").splitlines()[0]
        raise ClusterUnavailableError(
            f"got `{reason}` of `{' '.join(command)}`, expected it to work: the kernel must have namespaces, veth, "
            "bridges and tbf, and a container the capability NET_ADMIN and SYS_ADMIN"
        )
    return result.stdout


def owner_prefix(serial: int) -> str:
    """What the names of this process's namespaces begin with; of no other process, not even one with its id later.

    Args:
        serial: of the network within the process.
    """
    return f"gossip-{os.getpid()}-{_start_time(os.getpid())}-{serial}-"


def names(prefix: str = "gossip-") -> list[str]:
    """The namespaces whose names begin so."""
    listed = (line.split()[0] for line in run("ip", "netns", "list").splitlines() if line.strip())
    return [name for name in listed if name.startswith(prefix)]


def abandoned(existing: Sequence[str]) -> list[str]:
    """Those of a process that is not alive any more."""
    owned = [(name, match) for name in existing if (match := _OWNED.fullmatch(name))]
    return [name for name, match in owned if _start_time(int(match[1])) != int(match[2])]


def enter(namespace: str, *, name: str = "") -> None:
    """Move this process, which must have one thread only, to a network namespace.

    Args:
        namespace: of `ip netns`.
        name: what this process then takes for that of its machine; empty: it keeps it.

    Raises:
        OSError: there is none, or no right to enter it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with (NAMESPACES / namespace).open() as file:
        failed = libc.setns(file.fileno(), _NEW_NETWORK) or (name and libc.unshare(_NEW_NAMES))
    if failed:
        raise OSError(ctypes.get_errno(), f"entering {namespace}: {os.strerror(ctypes.get_errno())}")
    if name:
        socket.sethostname(name)


def remove(existing: Sequence[str]) -> None:
    """Kill the processes in these namespaces, then delete them; with the last one its links and bridges go too."""
    clear(existing)  # a device lives as long as its namespace, and that as long as a process in it
    for name in existing:
        _run_if_there(name, "delete")


def clear(existing: Sequence[str]) -> None:
    """Kill the processes in these namespaces, and those that they start meanwhile; wait for their end."""
    deadline = time.monotonic() + COMMAND_SECONDS
    while (processes := [x for name in existing for x in _processes(name)]) and time.monotonic() < deadline:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def _processes(name: str) -> list[int]:
    return [int(word) for word in _run_if_there(name, "pids").split()]


def _run_if_there(name: str, action: str) -> str:
    """`ip netns` on a namespace that another run may be removing at the same time, as one that is left over."""
    try:
        return run("ip", "netns", action, name)
    except ClusterUnavailableError:
        if name in names():
            raise
        return ""


def _start_time(process: int) -> int:
    """In clock ticks after boot; -1: there is no such process."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return -1
    return int(stat.rpartition(")")[2].split()[19])
