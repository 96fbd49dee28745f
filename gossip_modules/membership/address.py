"""The addresses of the store and of this machine. The store may move; other workers reach this machine."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ..transport.deadline import Deadline
from ..transport.own_address import checked_host

_FILE = "file:"
_TRY_SECONDS = 1.0  # after which a file is read again
_PAUSE_SECONDS = 0.05  # between two attempts


def store_address(store: str) -> str:
    """The "host:port" of a store: `store` itself, or what stands in the file of "file:path" now, if anything does."""
    if not store.startswith(_FILE):
        return store
    try:
        text = Path(store.removeprefix(_FILE)).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):  # not written yet, or on a file system that is away
        return store
    return text if _is_address(text) else store


def connect_store(
    store: str, timeout: timedelta, *, was_lost: bool = False, deadline: Deadline | None = None
) -> dist.TCPStore:
    """A client of a store.

    Args:
        store: "host:port", or "file:path" for a file with it. The file is read again while nobody answers there.
        timeout: the timeout of this call, and of the requests of the client.
        was_lost: whether it may be away, so that this asks often whether somebody listens: torch itself waits longer
            and longer between its attempts, up to seconds after the store is back.
        deadline: the deadline of this call; None: `timeout` from now.

    Raises:
        ConnectionError: nobody has answered in time.
        ValueError: `store` has another form.
    """
    is_file = store.startswith(_FILE) and store != _FILE
    if not (is_file or _is_address(store)):
        raise ValueError(
            f"got store={store!r}, expected 'host:port', like 'node0:29400', or 'file:path'; for a mailbox, "
            "'s3://bucket/run' or 'file:///folder/run'"
        )
    why, has_failed = "it has not written its address there", was_lost
    deadline = deadline or Deadline(timeout)
    while True:
        address, left = store_address(store), max(deadline.left, 0.01)
        try:
            if _is_address(address):
                patience = min(left, _TRY_SECONDS) if is_file else left
                return _client(address, patience, timeout, is_doubtful=has_failed)
        except (OSError, RuntimeError) as error:
            why, has_failed = str(error), True
        if deadline.is_over or not (is_file or was_lost):
            host, _, port = store.rpartition(":")
            option = f"--address-file {store.removeprefix(_FILE)}" if is_file else f"--host {host} --port {port}"
            raise ConnectionError(
                f"the store of the job at {address} did not answer within {deadline.seconds:g} s ({why}); start "
                f"it with: python -m gossip_modules.membership.serve {option}"
            )
        time.sleep(_PAUSE_SECONDS)


def _client(address: str, patience: float, timeout: timedelta, *, is_doubtful: bool) -> dist.TCPStore:
    host, _, port = address.rpartition(":")
    if is_doubtful:  # torch prints a stack for each attempt that fails, so it is not asked where nobody listens
        socket.create_connection((host, int(port)), timeout=min(patience, _TRY_SECONDS)).close()
    limit = timedelta(seconds=patience)
    client = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)
    client.set_timeout(timeout)
    return client


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 1 << 16


def own_address(store: str, host: str | None = None) -> str:
    """The numbers of the address of `host`, looked up once; without one, the address of the interface to the store.

    Args:
        store: its "host:port"; any other text stands for a store on this machine.
        host: a name or an address of this machine.

    Raises:
        ValueError: `host` is not this machine, or all of its interfaces; or there is no way to the store by IPv4, with
            which workers reach each other.
    """
    if host is not None:
        return checked_host(host, others="the other workers")
    name, _, port = store.rpartition(":")
    if not port.isdigit():
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((name, int(port)))
        except OSError as error:
            raise ValueError(
                f"got the store of the job at {store}, to which there is no way by IPv4 ({error}), expected one, "
                "as workers reach each other by IPv4 only; give the store by an IPv4 address, or this machine's "
                "as host="
            ) from error
        return str(probe.getsockname()[0])
