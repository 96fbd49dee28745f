"""Stores of objects of each kind, on this machine."""

from __future__ import annotations

import logging
import socket
import threading
import urllib.request
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

KINDS = ("memory", "file", "store", "s3")


class FaultyServer:
    """Stands in front of the S3 server of moto, which does not carry out one of two racing writes after the other.

    Attributes:
        answers: the faults of the next requests, in their order: a status with a code of S3, given in the place of an
            answer; "lost", which cuts the connection after the request was carried out; "cut", which does so before.
    """

    def __init__(self, app: Any) -> None:
        self.app, self.answers, self.lock = app, list[tuple[str, str] | str](), threading.Lock()

    def __call__(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        with self.lock:
            fault = self.answers.pop(0) if self.answers else None
            if isinstance(fault, tuple):
                status, code = fault
                start_response(status, [("Content-Type", "application/xml")])
                return [f"<Error><Code>{code}</Code><Message>a test</Message></Error>".encode()]
            if fault == "cut":
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                return []
            answer = list(self.app(environ, start_response))
            if fault == "lost":
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            return answer


@pytest.fixture(scope="session")
def s3_server() -> Iterator[tuple[FaultyServer, str]]:
    """An S3 server on loopback, with the bucket "bucket", and its address."""
    pytest.importorskip("obstore", reason="needs obstore: pip install '.[mailbox]'")
    moto = pytest.importorskip("moto.server", reason="needs moto, an S3 server: pip install 'moto[server]'")
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    server._server.app = faulty = FaultyServer(server._server.app)
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT")).close()
    yield faulty, endpoint
    server.stop()


@pytest.fixture
def s3(s3_server: tuple[FaultyServer, str], monkeypatch: pytest.MonkeyPatch) -> FaultyServer:
    """That server, with its address and credentials in the environment."""
    server, endpoint = s3_server
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    server.answers.clear()
    return server


@pytest.fixture(scope="session")
def server_store() -> dist.TCPStore:
    """The server of a key-value store."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(params=KINDS)
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty store, of each kind."""
    run = uuid.uuid4().hex
    if request.param == "s3":
        request.getfixturevalue("s3")
        return f"s3://bucket/{run}"
    if request.param == "store":
        return f"store://127.0.0.1:{request.getfixturevalue('server_store').port}/{run}"
    return {"memory": f"memory://{run}", "file": f"file://{tmp_path}/run"}[request.param]
