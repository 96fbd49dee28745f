"""Stores of objects of each kind, on this machine."""

from __future__ import annotations

import logging
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

KINDS = ("memory", "file", "store", "s3")


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The address of an S3 server on loopback, with the bucket "bucket"."""
    pytest.importorskip("obstore", reason="needs obstore: pip install 'gossip-modules[mailbox]'")
    moto = pytest.importorskip("moto.server", reason="needs moto, an S3 server: pip install 'moto[server]'")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT")).close()
    yield endpoint
    server.stop()


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of that server, which the environment names too."""
    for name, value in {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    return s3_endpoint


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
