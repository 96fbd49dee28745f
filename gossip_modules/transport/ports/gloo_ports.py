"""The ports of Gloo groups: closed to new connections as soon as all ranks of a group are connected."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterator

import torch.distributed as dist

_SO_ATTACH_FILTER = 26  # Linux, asm-generic/socket.h
_RETURN = 0x06  # BPF_RET | BPF_K: how many bytes of a packet are accepted


class _Instruction(ctypes.Structure):
    """struct sock_filter of linux/filter.h."""

    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jump_if_true", ctypes.c_uint8),
        ("jump_if_false", ctypes.c_uint8),
        ("constant", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    """struct sock_fprog of linux/filter.h."""

    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def close_ports(store: dist.Store, rank: int, num_devices: int) -> int:
    """Let the listening sockets of a connected Gloo group accept no more connections.

    [Note: ports of Gloo] Gloo listens for as long as a group exists, and keeps every connection that a stranger makes,
    also one that the stranger has closed. Where no descriptor is left, Gloo ends the process (torch 2.14: "accept: Too
    many open files"). A group that is connected needs its port no more, so the kernel drops the packets that arrive at
    it from then on. The connections of the group are sockets of their own, which this does not concern.

    A group that makes its connections later (TORCH_GLOO_LAZY_INIT) keeps its port open, and so do all groups where the
    system is not Linux.

    Args:
        store: the one that the group was made with, in which Gloo has put its addresses.
        rank: of the caller.
        num_devices: the number of devices of the group.

    Returns:
        The number of ports that were closed.

    Raises:
        RuntimeError: the store does not answer.
    """
    is_lazy = os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0")
    if is_lazy or sys.platform != "linux":
        return 0
    keys = [key for key in (f"{device}/{rank}" for device in range(num_devices)) if store.check([key])]
    published = [store.get(key) for key in keys]
    num_closed = 0
    for listener in _listeners():
        address = _raw_address(listener)
        if address and any(address in text for text in published):
            _drop_packets(listener)
            num_closed += 1
    return num_closed


def close_ports_of(group: dist.ProcessGroup) -> int:
    """`close_ports` for a group that `torch.distributed.new_group` has made, whose ranks are all connected."""
    _, store = dist.distributed_c10d._world.pg_map[group]
    num_devices = len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    return close_ports(dist.PrefixStore("cpu/", store), group.rank(), num_devices)


def _listeners() -> Iterator[socket.socket]:
    """The listening TCP sockets of this process, each for as long as the loop looks at it; they stay open."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            copy = os.dup(int(name))  # so that nobody who closes the socket meanwhile makes this another one
        except OSError:  # it was closed
            continue
        try:
            found = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        with found:
            if found.type == socket.SOCK_STREAM and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield found


def _raw_address(listener: socket.socket) -> bytes:
    """The address of a socket as the kernel's struct has it, which Gloo publishes; b"": of another family."""
    if listener.family == socket.AF_INET:
        host, port = listener.getsockname()
        return struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host)
    if listener.family == socket.AF_INET6:
        host, port, flow, _ = listener.getsockname()
        return struct.pack("=H", socket.AF_INET6) + struct.pack("!HI", port, flow) + socket.inet_pton(
            socket.AF_INET6, host.partition("%")[0]
        )  # fmt: skip
    return b""


def _drop_packets(listener: socket.socket) -> None:
    accept_nothing = (_Instruction * 1)(_Instruction(_RETURN, 0, 0, 0))
    program = _Program(1, accept_nothing)
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(program))
