"""The store of a job, in a process of its own, which outlives the workers: python -m gossip_modules.membership.serve"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

DEFAULT_PORT = 29400


def shorten_lookups() -> None:
    """Let this process wait 1 s for a name server, unless RES_OPTIONS says otherwise; before it makes a connection.

    torch looks up the names of hosts when a client of a store connects, in both processes. The server answers nobody
    meanwhile. Where a name server does not answer, that is 5 to 10 s for each by default; see resolv.conf(5).
    """
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def serve(port: int = DEFAULT_PORT) -> dist.TCPStore:
    """A key-value store that answers for as long as the object lives.

    Args:
        port: on all interfaces; 0: a free one, see `.port`.

    Raises:
        RuntimeError: the port is taken.
    """
    return dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal ends it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m gossip_modules.membership.serve", description=__doc__)
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="of the store on all interfaces; 0: a free one")
    parser.add_argument("--host", default=socket.gethostname(), help="at which workers reach it (default: %(default)s)")
    parser.add_argument("--address-file", type=Path, help="write host:port there, for workers with store='file:...'")
    options = parser.parse_args(arguments)
    port: int = options.port
    shorten_lookups()
    try:
        store = serve(port)
    except RuntimeError as error:
        print(f"error: got --port {port}, expected a free one: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    if options.address_file is not None:
        write_address(options.address_file, f"{options.host}:{store.port}")
    print(f"serving the membership of jobs on port {store.port}", flush=True)
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
