"""The store of a job, in a process of its own: python -m gossip_modules.membership.serve"""

from __future__ import annotations

import argparse
import errno
import ipaddress
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from ..transport.bounded_listener import BACKLOG
from ..transport.job_key import WITHOUT_KEY, key_of

DEFAULT_PORT = 29400
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # by address of all interfaces


def shorten_lookups() -> None:
    """Let this process wait 1 s for a name server, unless RES_OPTIONS says otherwise; before it makes a connection.

    torch looks up the names of hosts when a client of a store connects, in both processes. The server answers nobody
    meanwhile. Where a name server does not answer, that is 5 to 10 s for each by default; see resolv.conf(5).
    """
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def serve(port: int = DEFAULT_PORT, *, host: str = "127.0.0.1") -> dist.TCPStore:
    """A key-value store; it answers until the object is freed.

    Args:
        port: the port of its listener; 0: a free one, see `.port`.
        host: a name or an address of this machine. The store listens there only; "0.0.0.0": on all interfaces. The
            store has no passwords; with GOSSIP_JOB_KEY workers sign their values. See the guide to security.

    Raises:
        ValueError: `host` is no name or address of this machine.
        RuntimeError: the port is taken, or is not allowed.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise ValueError(
                f"got host {host!r}, expected a name or an address of this machine at which the workers reach it "
                f"({error})"
            ) from error
        raise RuntimeError(f"got port {port} at {host}, expected a free one: {error}") from error
    own, port = listener.getsockname()[:2]
    own = _LOOPBACK.get(own, own)  # at which the store of this process reaches itself
    return dist.TCPStore(own, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal ends it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m gossip_modules.membership.serve", description=__doc__)
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="where the store listens; 0: a free one")
    parser.add_argument(
        "--host",
        default=socket.gethostname(),
        help="a name or an address of this machine, at which workers reach it. The store listens there only; 0.0.0.0: "
        "on all interfaces (default: %(default)s)",
    )
    parser.add_argument("--address-file", type=Path, help="write host:port there, for workers with store='file:...'")
    options = parser.parse_args(arguments)
    port: int = options.port
    shorten_lookups()
    try:
        key = key_of()
        store = serve(port, host=options.host)
    except (RuntimeError, ValueError) as error:
        print(f"error: {str(error).splitlines()[0]}; see --host and --port", file=sys.stderr)
        return 2
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    if options.address_file is not None:
        host = socket.gethostname() if options.host in _LOOPBACK else options.host
        write_address(options.address_file, f"{host}:{store.port}")
    is_name = options.host not in (*_LOOPBACK, store.host, "localhost")
    if is_name and ipaddress.ip_address(store.host).is_loopback:
        print(f"note: {options.host} is {store.host}, which only this machine reaches; see --host", file=sys.stderr)
    is_open = options.host in _LOOPBACK or not ipaddress.ip_address(store.host).is_loopback
    if key is None and is_open:
        print(f"warning: got workers at {options.host} and no key: {WITHOUT_KEY}", file=sys.stderr)
    print(f"serving the membership of jobs at {options.host} on port {store.port}", flush=True)
    ended.wait()
    return 0


def write_address(path: Path, address: str) -> None:
    """Let `path` hold where the store is, whole or not at all: workers read it at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(f"{address}\n", encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
