"""An S3 server for tests, moto's, with a log of its requests, and with faults."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from gossip_modules.mailbox.sealed import Seal, unpack

if TYPE_CHECKING:
    from werkzeug.serving import BaseWSGIServer

LOG, REFUSE = "requests.jsonl", "refuse"
"""Files of a job: the requests, a line of JSON each; and the share of requests that the server refuses with 503."""
BUCKET = "bucket"
VARIABLES = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
"""Of the environment of each worker, beside AWS_ENDPOINT_URL."""
_MAX_SHARE = 1 << 30


class LoggingServer:
    """A WSGI application in front of the server of moto.

    It carries out one request after the other, as S3 keeps the first of two racing writes, and moto does not.

    Args:
        app: the application of moto.
        folder: of the job.
        seed: of the draw of refused requests.
    """

    def __init__(self, app: Callable[..., Iterable[bytes]], folder: Path, *, seed: int = 0) -> None:
        self._app, self._refuse = app, folder / REFUSE
        self._log = folder / LOG
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request."""
        data = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = BytesIO(data)
        status = ""

        def start(line: str, headers: Any, error: Any = None) -> Any:
            nonlocal status
            status = line
            return start_response(line, headers)

        with self._lock:
            share = float(self._refuse.read_text()) if self._refuse.exists() else 0.0
            if self._random.random() < share:
                start("503 Slow Down", [("Content-Type", "application/xml")])
                answer = [b"<Error><Code>SlowDown</Code><Message>a fault</Message></Error>"]
            else:
                answer = list(self._app(environ, start))
            line = {
                "at": round(time.time(), 3),
                "from": environ["REMOTE_ADDR"],
                **described(environ, data),
                "status": int(status.split()[0]),
                "in": len(data),
                "out": sum(map(len, answer)),
            }
            with self._log.open("a") as file:
                file.write(json.dumps(line) + "\n")
        return answer


def described(environ: Mapping[str, Any], data: bytes) -> dict[str, Any]:
    """The verb and the path of a request below the run; and the weight of a share of push-sum, or its taker."""
    query = parse_qs(environ.get("QUERY_STRING", ""))
    _, _, path = environ["PATH_INFO"].removeprefix(f"/{BUCKET}/").partition("/")
    verb = environ["REQUEST_METHOD"]
    if "list-type" in query:
        return {"verb": "LIST", "path": query.get("prefix", [""])[0].partition("/")[2]}
    if verb == "PUT" and path.startswith("mail/"):
        header, _ = unpack(data[Seal.num_bytes :], max_bytes=_MAX_SHARE)
        return {"verb": verb, "path": path, **{name: header[name] for name in ("weight", "by") if name in header}}
    return {"verb": verb, "path": path}


def serve(host: str, port: int, folder: Path) -> BaseWSGIServer:
    """Serve in a thread; returns the server, which has its port and ends by `shutdown()`."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    app = LoggingServer(DomainDispatcherApplication(create_backend_app), folder)
    server = make_server(host, port, app, threaded=True)
    threading.Thread(target=server.serve_forever, name="s3", daemon=True).start()
    return server


def logged(folder: Path) -> list[dict[str, Any]]:
    """The requests so far, in their order."""
    path = folder / LOG
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
