"""MetricsLogger: the statistics of a wrapper, written every few steps for TensorBoard, Weights & Biases, Prometheus or
`python -m gossip_modules.watch`."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

from torch import Tensor

from .wrappers.averaging import AveragingMixin
from .wrappers.composable import GossipModule

Row = Mapping[str, Any]
"""The figures of one worker at one step: "time" (seconds since 1970), "rank" (see `AveragingMixin.worker`), "step", and
numbers by name: the arguments of `MetricsLogger.step`, and the entries of `comm_stats()`."""

_PLACE = ("time", "rank", "step")
_REQUEST_SECONDS, _REQUEST_BYTES, _POLL_SECONDS = 2.0, 8192, 0.2


class MetricsLogger:
    """Writes the statistics of a wrapper every few steps.

    Every rank has a logger of its own. A logger sends nothing to other ranks. `consensus_distance` is the last result
    of `model.consensus_distance()`. That method is collective: call it when you evaluate.

    Args:
        model: a wrapper, or a module of `gossip()`.
        every: the number of steps from one row to the next; the first step has a row too.
        to: the receivers of rows, such as `JSONLines("runs/a")`: functions of one row. Their `close()` is called at the
            end where they have one. An error of a receiver is raised by `step`.
        num_steps: the steps taken before, where training resumes.

    Raises:
        TypeError: another kind of model, or a receiver other than a function.
        ValueError: `every` or `num_steps` is too small.

    Example:
        >>> logger = MetricsLogger(model, every=50, to=[JSONLines("runs/a"), TensorBoard("runs/a")])
        >>> for x, y in loader:
        ...     loss = criterion(model(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     logger.step(loss=loss)
        >>> logger.close()
    """

    def __init__(
        self, model: object, *, every: int = 50, to: Sequence[Callable[[Row], object]], num_steps: int = 0
    ) -> None:
        wrapper = model._gossip if isinstance(model, GossipModule) else model
        if not isinstance(wrapper, AveragingMixin):
            raise TypeError(
                f"got a {type(model).__name__}, expected a wrapper such as GossipDataParallel, or a module of gossip()"
            )
        if isinstance(to, str) or not isinstance(to, Sequence) or not all(map(callable, to)):
            raise TypeError(f"got to={to!r}, expected functions of a row, such as [JSONLines('runs/a')]")
        if every < 1 or num_steps < 0:
            raise ValueError(f"got every={every} and num_steps={num_steps}, expected at least 1 and at least 0")
        self.model, self.every, self.num_steps = wrapper, every, num_steps
        self._to, self._first = tuple(to), num_steps + 1

    def step(self, **values: Any) -> None:
        """Count an optimizer step, and write a row where one is due. Call it after each `optimizer.step()`.

        Args:
            values: more numbers by name, such as the loss. Tensors of one entry are read only where a row is due, as
                this waits for a GPU.
        """
        self.num_steps += 1
        if self.num_steps == self._first or self.num_steps % self.every == 0:
            place = {"time": time.time(), "rank": self.model.worker, "step": self.num_steps}
            stats = self.model.comm_stats()
            if taken := sorted({*place, *stats} & values.keys()):
                raise ValueError(f"got {', '.join(taken)} in step(), expected other names: rows have entries of these")
            row = {**place, **{name: _as_number(x) for name, x in values.items()}, **stats}
            for receive in self._to:
                receive(row)

    def close(self) -> None:
        """Close the receivers; idempotent."""
        receivers, self._to = self._to, ()
        with contextlib.ExitStack() as stack:
            for receive in receivers:
                stack.callback(getattr(receive, "close", lambda: None))


class JSONLines:
    """Appends rows to `metrics_<rank>.jsonl`, one JSON object a line; infinities and NaN become null.

    Args:
        folder: the folder of the run, made if it is missing; `python -m gossip_modules.watch` reads it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file: TextIO | None = None

    def __call__(self, row: Row) -> None:
        """Write a row, at once."""
        if self._file is None:
            path = self.folder / f"metrics_{_as_name(row)}.jsonl"
            self._file = path.open("a", encoding="utf-8", buffering=1)
            if _is_unfinished(path):  # by a process that was killed
                self._file.write("\n")
        finite = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in row.items()}
        self._file.write(json.dumps(finite) + "\n")

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoard:
    """Writes rows as scalars for TensorBoard, each rank to a folder of its own, `rank_<rank>`.

    Args:
        folder: the folder of the run.

    Raises:
        ModuleNotFoundError: the package tensorboard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._make = _imported("torch.utils.tensorboard", package="tensorboard").SummaryWriter
        self._writer: Any = None

    def __call__(self, row: Row) -> None:
        """Add the numbers of a row."""
        if self._writer is None:
            self._writer = self._make(self.folder / f"rank_{_as_name(row)}", purge_step=row["step"])
        for name, value in _numbers(row):
            self._writer.add_scalar(name, value, row["step"], walltime=row["time"])

    def close(self) -> None:
        """Write out and close; idempotent."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WeightsAndBiases:
    """Logs rows to a run of Weights & Biases, one run for each rank with this object.

    Args:
        options: of `wandb.init`, such as `project="gossip", group="a", name="rank 3"`.

    Raises:
        ModuleNotFoundError: the package wandb is not installed.
    """

    def __init__(self, **options: Any) -> None:
        self.run: Any = _imported("wandb", package="wandb").init(**options)

    def __call__(self, row: Row) -> None:
        """Log the numbers of a row."""
        self.run.log(dict(_numbers(row)), step=row["step"])

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


class Prometheus:
    """Keeps the last row as text for Prometheus: in a file, over HTTP, or both.

    A number `bytes_sent` is `gossip_bytes_sent{rank="0"}`, and `bytes_sent/3` is
    `gossip_peer_bytes_sent{rank="0",peer="3"}`.

    The HTTP server is for a scraper on this machine, or in a trusted network: it answers every client with this text
    and nothing else, one connection at a time, each for 2 s and 8 KiB at most.

    Args:
        folder: the folder of node_exporter's text-file collector; gets `gossip_<rank>.prom`, replaced as a whole, which
            `close` removes: node_exporter would go on giving the last numbers of a job that has ended.
        port: serves `http://host:port/metrics`; 0 takes a free port. Give each rank of a machine its own.
        host: the address to listen at, of IPv4 or IPv6 ("::" for all).

    Attributes:
        port: the port, None without a server.

    Raises:
        ValueError: neither a folder nor a port.
        OSError: the port is taken.
    """

    def __init__(self, folder: str | Path | None = None, *, port: int | None = None, host: str = "127.0.0.1") -> None:
        if folder is None and port is None:
            raise ValueError("got neither folder nor port, expected one; e.g. Prometheus(port=9400 + local_rank)")
        self.folder, self.port, self._text = None if folder is None else Path(folder), port, ""
        self._written: set[Path] = set()
        self._server: socket.socket | None = None
        if port is not None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            server = self._server = socket.create_server((host, port), family=family)
            server.settimeout(_POLL_SECONDS)
            self.port = server.getsockname()[1]
            self._thread = threading.Thread(target=self._serve, args=(server,), name="gossip-metrics", daemon=True)
            self._thread.start()

    def __call__(self, row: Row) -> None:
        """Replace the text by this row's."""
        self._text = "".join(_prometheus_lines(row))
        if self.folder is not None:
            path = self.folder / f"gossip_{_as_name(row)}.prom"
            temporary = path.with_suffix(".tmp")
            temporary.write_text(self._text, encoding="utf-8")
            os.replace(temporary, path)
            self._written.add(path)

    def close(self) -> None:
        """End the server, and remove the file; idempotent."""
        while self._written:
            self._written.pop().unlink(missing_ok=True)
        if self._server is not None:
            server, self._server = self._server, None
            self._thread.join(_POLL_SECONDS + _REQUEST_SECONDS + 1.0)
            server.close()

    def _serve(self, server: socket.socket) -> None:
        while self._server is not None:
            with contextlib.suppress(OSError):  # no client within the poll, or one that has left
                connection, _ = server.accept()
                with connection:
                    self._answer(connection)
                continue
            time.sleep(1e-2)  # where accept fails at once, as without descriptors

    def _answer(self, connection: socket.socket) -> None:
        deadline, request = time.monotonic() + _REQUEST_SECONDS, b""
        while b"\r\n\r\n" not in request and len(request) < _REQUEST_BYTES:
            if (left := deadline - time.monotonic()) <= 0:
                return
            connection.settimeout(left)
            if not (part := connection.recv(_REQUEST_BYTES)):
                return
            request += part
        is_known = request.startswith(b"GET /metrics ")
        body = self._text.encode() if is_known else b"see /metrics\n"
        head = f"HTTP/1.0 {'200 OK' if is_known else '404 Not Found'}\r\nContent-Type: text/plain; version=0.0.4\r\n"
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


def _prometheus_lines(row: Row) -> Iterator[str]:
    """The numbers of a row in the text format of Prometheus, the samples of a metric side by side."""
    seen: set[str] = set()
    samples = [(name.partition("/"), value) for name, value in _numbers(row)]
    samples.append((("step", "", ""), row["step"]))
    for (name, _, peer), value in sorted(samples):
        metric = re.sub(r"\W", "_", f"gossip_{'peer_' if peer else ''}{name}", flags=re.ASCII)
        labels = {"rank": row["rank"], **({"peer": peer} if peer else {})}
        if metric not in seen:
            seen.add(metric)
            yield f"# TYPE {metric} gauge\n"
        text = ",".join(f"{key}={json.dumps(str(label), ensure_ascii=False)}" for key, label in labels.items())
        yield f"{metric}{{{text}}} {float(value)}\n".replace(" nan\n", " NaN\n").replace("inf\n", "Inf\n")


def _is_unfinished(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
        return file.read() not in (b"", b"\n")


def _as_number(x: Any) -> float:
    if isinstance(x, Tensor) and x.numel() != 1:
        raise ValueError(f"got a tensor of shape {tuple(x.shape)} in step(), expected one number; pass its mean or sum")
    return float(x.item() if isinstance(x, Tensor) else x)


def _numbers(row: Row) -> Iterator[tuple[str, float]]:
    return ((name, value) for name, value in row.items() if name not in _PLACE)


def _as_name(row: Row) -> str:
    """The rank as a part of a file name; a worker of dpwa may have any name."""
    return quote(str(row["rank"]), safe="")


def _imported(module: str, *, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"got no package {package}, expected it to be installed; in a clone: pip install '.[{package}]'"
        ) from error
