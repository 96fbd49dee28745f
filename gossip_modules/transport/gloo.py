"""Gloo backends and groups without torch.distributed's global state, and their ports."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .forks import close_loop_in_children, close_server_in_children, tcp_sockets
from .shared_group import shared_by
from .stores import BoundedStore
from .threads import CallThread

CPU = torch.device("cpu")
_SO_ATTACH_FILTER = 26  # Linux, asm-generic/socket.h
CAN_BE_LAZY = "lazy_init" in (dist.ProcessGroupGloo.create_device.__doc__ or "")  # an older torch has no such devices
CONNECT_FACTOR = 5  # Gloo waits for a connection so many times as long as for a message
_REQUEST = timedelta(seconds=0.4)  # of a process that forks
_RETURN = 0x06  # BPF_RET | BPF_K: how many bytes of a packet are accepted


def gloo_backend(
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
    *,
    host: str | None = None,
    devices: Sequence[Any] | None = None,
    peers: Collection[int] | None = None,
) -> Any:
    """Return a Gloo backend, with the methods of a process group, once its ranks are connected.

    From then on its ports accept no connection: see [Note: ports of Gloo].

    [Note: groups and the interpreter's lock] In torch 2.7 the destructor of a group holds the interpreter's lock while
    it joins the threads of its backend. They may need the lock, and then it hangs. The destructor of a backend releases
    the lock, so the backend lives until its group has gone.

    [Note: late connections] After a timeout a constructor frees the ends of its connections, but not the devices. Their
    thread goes on accepting. A later rank is handed to a freed end, and the process dies by a segmentation fault (torch
    2.14). The options own the devices, and the traceback of the error holds the options, for as long as somebody holds
    the error. So the devices go before the error is raised.

    Args:
        store: shared by the ranks, for their addresses.
        rank: the rank of the caller.
        world_size: the number of ranks.
        timeout: the limit of every wait without its own; Gloo waits `CONNECT_FACTOR` times as long for connections.
        host: a name or address of this machine for the other ranks; None: the interfaces in the environment variable
            GLOO_SOCKET_IFNAME, with commas between them, or the choice of Gloo.
        devices: the result of `gloo_devices`, for several groups; the caller closes their ports. None: devices of its
            own.
        peers: the ranks for messages, beside the `collective_peers`: see [Note: few connections]. They have this rank
            among their peers. None: all ranks.

    Raises:
        RuntimeError: a rank does not come in time.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = gloo_devices(host, lazy=peers is not None) if devices is None else list(devices)
    try:
        backend = dist.ProcessGroupGloo(store, rank, world_size, options)
        if peers is not None and CAN_BE_LAZY:
            _connect(backend, sorted({*peers, *collective_peers(rank, world_size)} - {rank}))
    except RuntimeError:
        options._devices = []  # see [Note: late connections]
        raise
    if devices is None:
        close_ports(store, rank, len(options._devices))
    return backend


def gloo_devices(host: str | None, *, lazy: bool = False) -> list[Any]:
    """New devices of Gloo: each has a thread and a port. For `host` see `gloo_backend`."""
    options: dict[str, Any] = {"lazy_init": True} if lazy and CAN_BE_LAZY else {}
    new, interfaces = dist.ProcessGroupGloo, _interfaces()
    if host is not None:
        return [new.create_device(hostname=host, **options)]
    if interfaces:  # which only the constructor without options reads itself
        return [new.create_device(interface=name, **options) for name in interfaces]
    return [new.create_default_device(**options)]


def num_devices(host: str | None) -> int:
    """The number of devices of each `gloo_backend`: under so many keys it puts addresses into its store."""
    return 1 if host is not None else max(len(_interfaces()), 1)


def _interfaces() -> list[str]:
    return [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]


def gloo_group(
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
    *,
    host: str | None = None,
    peers: Collection[int] | None = None,
) -> dist.ProcessGroup:
    """A process group over `gloo_backend`; its last reference releases it."""
    group = as_group(gloo_backend(store, rank, world_size, timeout, host=host, peers=peers), store)
    if peers is not None and CAN_BE_LAZY:
        shared_by(group).peers = frozenset({*peers, *collective_peers(rank, world_size)} - {rank})
    return group


def as_group(backend: Any, store: dist.Store) -> dist.ProcessGroup:
    """A process group over a Gloo backend; its last reference releases it; store: of the group."""
    group, holder = dist.ProcessGroup(store, backend.rank(), backend.size()), [backend]
    group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, holder[0])
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    weakref.finalize(group, holder.clear).atexit = False  # [Note: groups and the interpreter's lock]
    return group


def collective_peers(rank: int, world_size: int) -> set[int]:
    """The peers of rings, of broadcasts and of `barrier.meet_in_turns`: the ranks 1, 2, 4, ... above and below."""
    distances = [1 << k for k in range((world_size - 1).bit_length())]
    return {(rank + sign * distance) % world_size for distance in distances for sign in (1, -1)}


def _connect(backend: Any, peers: Sequence[int]) -> None:
    """Connect with these ranks, in ascending order.

    [Note: few connections] Gloo connects each rank with all others. This takes n - 1 descriptors per rank.
    A lazy device connects two ranks at their first message. The first message waits inside C++ code until the other
    rank sends or receives too, with the timeout of the group. So a new group makes its connections at once, by a
    message in each direction, and closes its port afterwards. From then on its connections behave like others: they
    show at once when a rank has gone. A message to another rank is an error.
    """
    works = []
    for peer in peers:
        for post in (backend.recv, backend.send):
            works.append(post([torch.zeros(1, dtype=torch.uint8, device="cpu")], peer, 0))
    for work in works:
        work.wait()


def at_once(makes: Sequence[Callable[[], Any]], *, name: str) -> list[Any]:
    """Call functions at the same time, each in a thread of its own, and return their results.

    The first error among them is raised. An error holds its frames, so a list of errors in one of these frames would be
    a cycle. The cycle would keep all new groups, with their threads and descriptors, until the next garbage collection.

    Args:
        makes: at least one.
        name: the name of the threads.
    """
    futures = [CallThread(f"{name}-{i}").submit(make) for i, make in enumerate(makes)]
    wait(futures)
    try:
        return list(map(Future.result, futures))
    finally:
        futures.clear()


def close_ports(store: dist.Store, rank: int, num_devices: int) -> int:
    """Let the listening sockets of a connected Gloo group accept no more connections.

    [Note: ports of Gloo] Gloo listens for as long as a group exists, and keeps every connection of a stranger, also
    after the stranger has closed it. Where no descriptor is left, Gloo ends the process (torch 2.14: "accept: Too many
    open files"). A connected group needs its port no more, so from then on the kernel drops packets to the port. The
    connections of the group are sockets of their own and stay open.

    A group with later connections (TORCH_GLOO_LAZY_INIT) keeps its port open. All groups do so on systems other than
    Linux. A group with [Note: few connections] has made its connections already.

    Args:
        store: the store of the group, with Gloo's addresses.
        rank: the rank of the caller.
        num_devices: the number of devices of the group.

    Returns:
        The number of closed ports.

    Raises:
        RuntimeError: the store does not answer.
    """
    keys = [key for key in (f"{device}/{rank}" for device in range(num_devices)) if store.check([key])]
    return close_ports_at([store.get(key) for key in keys])


def close_ports_at(published: Sequence[bytes]) -> int:
    """`close_ports` for the published addresses of connected Gloo groups of this process."""
    is_lazy = os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0")
    instruction = ctypes.create_string_buffer(struct.pack("=HBBI", _RETURN, 0, 0, 0))  # struct sock_filter: 0 bytes
    program = struct.pack("@HP", 1, ctypes.addressof(instruction))  # struct sock_fprog of linux/filter.h
    num_closed = 0
    for listener in _listeners_at(published):
        close_loop_in_children(listener)
        if not is_lazy:
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
            num_closed += 1
    return num_closed


def close_ports_of(group: dist.ProcessGroup) -> int:
    """`close_ports` for a group of `torch.distributed.new_group`, once its ranks are all connected."""
    _, store = dist.distributed_c10d._world.pg_map[group]
    return close_ports(dist.PrefixStore("cpu/", store), group.rank(), _num_devices_of_torch())


def _num_devices_of_torch() -> int:
    return len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))


def keep_from_children() -> None:
    """See [Note: sockets in forked children] of `forks.py`, for the groups that a script has made by torch.distributed.

    Forks call it. A program that is started without a fork of Python, as by `os.system`, gets no sockets that an
    earlier call has found.
    """
    if not dist.is_initialized():
        return
    ports: set[int] = set()
    for group, (_, store) in list(dist.distributed_c10d._world.pg_map.items()):
        if group in _searched:
            continue
        bounded = BoundedStore(dist.PrefixStore("cpu/", store), timeout=_REQUEST)
        keys = (f"{device}/{group.rank()}" for device in range(_num_devices_of_torch()))
        with contextlib.suppress(ConnectionError, RuntimeError):  # the store does not answer now, or never does
            published = [bounded.get(key, what="looking for the address of a process group") for key in keys]
            for listener in _listeners_at([address for address in published if address is not None]):
                close_loop_in_children(listener)
            ports |= set() if bounded.port is None else {bounded.port}
            _searched.add(group)
    for port in ports:
        close_server_in_children(port)


_searched: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(before=keep_from_children)


def _listeners_at(published: Sequence[bytes]) -> Iterator[socket.socket]:
    """The listening TCP sockets of this process at these addresses; none on systems other than Linux."""
    for listener in tcp_sockets(is_listening=True):
        if any(_raw_address(listener) in text for text in published):
            yield listener


def _raw_address(listener: socket.socket) -> bytes:
    """The address of a socket as the kernel's struct, as published by Gloo."""
    host, port, *rest = listener.getsockname()
    flow = struct.pack("!I", rest[0]) if rest else b""
    address = socket.inet_pton(listener.family, host.partition("%")[0])
    return struct.pack("=H", listener.family) + struct.pack("!H", port) + flow + address
