"""A run over a mailbox: processes that train, the process of an S3 server, and the log of its requests."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.elastic.job import Job, NamespaceHost
from benchmarks.mailbox import server
from benchmarks.mailbox.network import STORE_ADDRESS, StoreNetwork
from benchmarks.mailbox.training import WireTraining
from gossip_modules.testing.backend import send
from gossip_modules.testing.process_backend import Host, ProcessBackend, _begin, receive

_END_SECONDS = 30.0


class WireRun(Job):
    """Workers that share an S3 server. Use it in a `with`: all processes end with the block.

    Args:
        training: of each worker; its folder is replaced by a temporary one.
        network: of whose hosts each worker gets one; None: all are processes of this machine.
    """

    backend: WireBackend

    def __init__(self, training: WireTraining, network: StoreNetwork | None = None) -> None:
        super().__init__(training, network)  # type: ignore[arg-type]

    def make_backend(self, network: Any) -> ProcessBackend:
        """See `Job`."""
        return WireBackend(self.training, network)  # type: ignore[arg-type]

    def requests(self) -> list[dict[str, Any]]:
        """The requests so far, in their order."""
        return server.logged(self.folder)

    def refuse(self, share: float) -> None:
        """From now on, the server answers this share of its requests with 503."""
        part = self.folder / f"{server.REFUSE}.part"
        part.write_text(str(share))
        part.replace(self.folder / server.REFUSE)  # so that the server never reads an empty file


class WireBackend(ProcessBackend):
    """See `ProcessBackend`; the store is an S3 server.

    Args:
        body: of the workers.
        network: their hosts; a worker that is started later has the host of an earlier one.
    """

    def __init__(self, body: WireTraining, network: StoreNetwork | None) -> None:
        self.network, self._folder = network, body.folder
        super().__init__(body)

    def _host(self, rank: int | None) -> Host:
        if self.network is None:
            return Host()
        if rank is None:
            return NamespaceHost(STORE_ADDRESS, self.network.store_host)
        place = rank % len(self.network.hosts)
        return NamespaceHost(self.network.address(place), self.network.hosts[place])

    def pid(self, rank: int) -> int | None:
        """The process id of a worker."""
        return self._processes[rank].pid

    def start_store(self) -> None:
        """See `Backend`."""
        host = self._host(None)
        mine, other = self._context.Pipe()
        with mine:
            self._server = self._start_process("s3", _serve, (self._folder,), host, mine, other)
            self._port = int(receive(mine)["port"])
        self.store = f"{host.address}:{self._port}"

    def stop_store(self) -> None:
        """The store stands still: it answers nothing."""
        self._signal_store(signal.SIGSTOP)

    def resume_store(self) -> None:
        """Undo `stop_store()`."""
        self._signal_store(signal.SIGCONT)

    def _signal_store(self, number: signal.Signals) -> None:
        if self._server is not None and self._server.pid is not None:
            os.kill(self._server.pid, number)

    def close(self) -> None:
        """See `Backend`."""
        with contextlib.suppress(ProcessLookupError):
            self.resume_store()
        super().close()


def _serve(folder: str, host: Host, pipe: Any) -> None:
    """The process of the store."""
    _begin(host, pipe)
    port = server.serve(host.address, 0, Path(folder)).server_port
    request = urllib.request.Request(f"http://{host.address}:{port}/{server.BUCKET}", method="PUT")
    urllib.request.urlopen(request).close()
    send(pipe, port=port)
    threading.Event().wait()


def ledger(requests: Iterable[Mapping[str, Any]]) -> tuple[dict[int, float], float]:
    """The push-sum weight that each worker has by the requests that the server has carried out.

    Returns:
        The weight of each worker that has a number: 1, and the shares that it has taken, without those that it has
        sent; and the weight of the shares that nobody has taken.
    """
    done = [request for request in requests if request["verb"] == "PUT" and request["status"] == 200]
    workers = [each["path"].split("/") for each in done if each["path"].endswith("/claim")]
    weights = {int(number): 1.0 for _, number, _ in workers}
    lying: dict[str, float] = {}
    taken: set[str] = set()
    for request in done:
        path, suffix, _ = request["path"].partition(".taken")
        sender = int(path.split("/")[2]) if path.startswith("mail/") else -1
        if suffix:
            # Without a share there, its sender has taken it back before a write of it was carried out.
            weights[request["by"]] += lying.pop(path) if path in lying or request["by"] != sender else 0.0
            taken.add(path)
        elif "weight" in request and path not in taken:
            lying[path] = request["weight"]
            weights[sender] -= request["weight"]
    return weights, sum(lying.values())
