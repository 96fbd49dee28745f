"""Sockets in forked children: each child closes its copies of the sockets of process groups and wrappers."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import sys
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

# [Note: sockets in forked children] A forked process, such as a loader process of a DataLoader, has copies of all
# sockets of its parent, and a connection is open as long as a copy of its socket is. If the parent is killed, its peers
# would see that only when the last child has ended, seconds or minutes later. The threads that serve the sockets stay
# in the parent, so the copies are of no use in the child: the child puts /dev/null in the place of each of them. The
# number of the descriptor stays taken, so that nothing else is behind it if the child frees the objects of its parent.
#
# Only sockets that are known to be of a process group, or of a wrapper, are closed. Gloo, and the server of a TCPStore,
# have one event loop for each listening socket. Linux lists the sockets of such a loop. So the listening socket, at the
# address in the store of the group, identifies them all. Processes by `spawn` and by `forkserver` have no copies. The
# copies of a program that is started without Python's `subprocess`, such as by `os.system`, close at its start.
#
# A child cannot go on with the groups of its parent: Gloo's threads are not there. It may make process groups of its
# own. On systems other than Linux the sockets of Gloo, and everywhere those of NCCL and MPI, stay open in a child.


class Forgotten(Protocol):
    """A collection that forked children clear."""

    def clear(self) -> None: ...


_TARGET = re.compile(r"^tfd:\s*(\d+)\s.*\sino:([0-9a-f]+)", re.MULTILINE)
_HAS_LISTS = sys.platform == "linux"
_listening: set[int] = set()  # the inodes of listening sockets of process groups in C++
_forgotten: list[Forgotten] = []
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def forget_in_children(objects: Forgotten) -> None:
    """Have forked children clear a collection of objects that belong to the parent.

    Python calls the functions that end a program also at the end of a child, such as of a loader process.
    """
    _forgotten.append(objects)


def close_in_children(own: socket.socket) -> socket.socket:
    """Return a socket, which forked children close."""
    _sockets.add(own)
    return own


def close_loop_in_children(listener: socket.socket) -> None:
    """Have forked children, and started programs, close a listening socket of C++ code and all others of its loop."""
    if not _HAS_LISTS:
        return
    _listening.add(os.fstat(listener.fileno()).st_ino)
    for fd in _descriptors():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            os.set_inheritable(fd, False)


def close_server_in_children(port: int) -> None:
    """`close_loop_in_children` for the server of a TCPStore, if it is in this process, which then has a client too."""
    ends = {(_name(end.getsockname()), _name(end.getpeername())) for end in tcp_sockets(is_listening=False)}
    if any(own[1] == port and (other, own) in ends for own, other in ends):
        for listener in tcp_sockets(is_listening=True):
            if listener.getsockname()[1] == port:
                close_loop_in_children(listener)


def _name(address: Sequence[Any]) -> tuple[str, int]:
    """The host and the port of an end of a connection, alike for IPv4 and for IPv4 within IPv6."""
    return str(address[0]).removeprefix("::ffff:"), int(address[1])


def tcp_sockets(*, is_listening: bool) -> Iterator[socket.socket]:
    """The listening, or the connected, TCP sockets of this process; none on systems other than Linux.

    Each is a copy, for as long as the loop looks at it; the sockets stay open.
    """
    for name in os.listdir("/proc/self/fd") if _HAS_LISTS else ():
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            copy = os.dup(int(name))  # which stays the same socket if another thread closes this one meanwhile
        except OSError:  # it was closed
            continue
        try:
            found = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        with found:
            is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
            if is_tcp and (_listens(found) if is_listening else _is_connected(found)):
                yield found


def _listens(found: socket.socket) -> bool:
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _is_connected(found: socket.socket) -> bool:
    try:
        found.getpeername()
    except OSError:
        return False
    return True


def _descriptors() -> Iterator[int]:
    """The event loops of the known listening sockets, and the sockets in them."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") != "anon_inode:[eventpoll]":
                continue
            listed = Path(f"/proc/self/fdinfo/{name}").read_text()
        except OSError:  # it was closed meanwhile
            continue
        inodes = {int(fd): int(inode, 16) for fd, inode in _TARGET.findall(listed)}
        if _listening.isdisjoint(inodes.values()):
            continue
        yield int(name)
        for fd, inode in inodes.items():
            with contextlib.suppress(OSError):
                found = os.fstat(fd)
                if stat.S_ISSOCK(found.st_mode) and found.st_ino == inode:
                    yield fd


def _leave_to_parent() -> None:
    """The first act of a forked child."""
    for objects in _forgotten:
        objects.clear()
    for own in list(_sockets):
        with contextlib.suppress(OSError):
            socket.socket.close(own)
    if not _listening:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in list(_descriptors()):
        os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_leave_to_parent)
