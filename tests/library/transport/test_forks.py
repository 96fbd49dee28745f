"""Forked children close the sockets of process groups, and no others."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gossip_modules.dpwa.protocol import PeerConnection, listen
from gossip_modules.transport.gloo import gloo_backend
from gossip_modules.transport.uncaught_errors import leave, leave_at_error, stay
from tests.harness.ranks import TIMEOUT, run_ranks
from tests.harness.scripts import script_outputs

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the sockets of Gloo are found on Linux only")


class Held:
    """A leaver that writes into a pipe."""

    def __init__(self, pipe: int) -> None:
        self.thread, self._pipe = threading.get_ident(), pipe

    def end_by(self, error: BaseException) -> None:
        """See `Leaver`."""
        os.write(self._pipe, b"ended")


def inodes() -> dict[int, int]:
    """The open sockets of this process: inodes by descriptor."""
    found = {}
    for fd in range(os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 4096 else 4096):
        try:
            status = os.fstat(fd)
        except OSError:
            continue
        if stat.S_ISSOCK(status.st_mode):
            found[fd] = status.st_ino
    return found


def inodes_of_child() -> Mapping[int, int]:
    """The same of a forked child, with the sockets of its parent."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, json.dumps(list(inodes().items())).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return dict(json.loads(text))


@on_linux
def test_a_child_has_no_socket_of_a_group_and_all_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as own:
        before, store = inodes(), dist.HashStore()
        backends = run_ranks(2, lambda group: gloo_backend(store, group.rank(), 2, TIMEOUT, host="127.0.0.1"))
        of_groups = {fd: inode for fd, inode in inodes().items() if before.get(fd) != inode}
        assert len(of_groups) >= 4, "two listening sockets, and two ends of a connection"
        assert not any(os.get_inheritable(fd) for fd in of_groups), "a started program gets none"
        in_child = inodes_of_child()
        assert not of_groups.items() & in_child.items()
        assert {fd: in_child.get(fd) for fd in (server.fileno(), own.fileno())} == {
            fd: before[fd] for fd in (server.fileno(), own.fileno())
        }

        def add(group: dist.ProcessGroup) -> float:
            x = torch.ones(3)
            backends[group.rank()].allreduce([x]).wait()
            return float(x.sum())

        assert run_ranks(2, add) == [6.0, 6.0], "the parent goes on"


@pytest.mark.e2e
@on_linux
def test_a_started_program_has_no_socket_of_a_group_of_the_script(tmp_path: Path) -> None:
    """`os.system` calls no function of a fork."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    assert script_outputs(script, 1) == ["0\n"]


_SCRIPT = """
import os, stat
import torch, torch.distributed as dist
from gossip_modules import AllReduceDataParallel

dist.init_process_group("gloo")
wrapper = AllReduceDataParallel(torch.nn.Linear(1, 1))
found = [fd for fd in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{fd}")]
print(sum(stat.S_ISSOCK(os.fstat(fd).st_mode) and os.get_inheritable(fd) for fd in found))
wrapper.close()
dist.destroy_process_group()
"""


def test_a_child_has_no_socket_of_a_worker_of_dpwa() -> None:
    listener, address = listen("tcp://127.0.0.1:*", name="w0")
    client = socket.create_connection(listener.getsockname())
    connection = PeerConnection(client, address)
    in_child = inodes_of_child()
    assert not {listener.fileno(), client.fileno()} & in_child.keys()
    connection.close()
    listener.close()


def test_a_child_leaves_for_no_wrapper_of_its_parent() -> None:
    """An error of a child, and its end, are not those of the rank."""
    reader, writer = os.pipe()
    held = Held(writer)
    leave_at_error(held)
    pid = os.fork()
    if pid == 0:
        leave(ValueError("of the child"))
        os._exit(0)
    os.waitpid(pid, 0)
    stay(held)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b""
