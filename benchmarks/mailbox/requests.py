"""The requests and bytes of each worker and round, by the log of the server and by the counters of the workers."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.mailbox.job import WireRun
from benchmarks.mailbox.network import STORE_ADDRESS, StoreNetwork
from benchmarks.mailbox.training import WireTraining

_WRITES = ("message", "close", "mean", "model", "beat", "taken", "other")


def measure(training: WireTraining, *, num_rounds: int) -> dict[str, Any]:
    """One row: a run without faults."""
    size = training.num_workers
    with StoreNetwork(size) as network, WireRun(training, network) as job:
        ranks = job.start(size)
        job.until_step(ranks, 2 * training.sync_every)
        start = time.time()
        job.until_step(ranks, (2 + num_rounds) * training.sync_every)
        end = time.time()
        job.end_at(0)
        job.until(lambda: not job.backend.running, 120.0)
        if job.backend.errors or job.backend.running:
            raise RuntimeError(f"got errors {job.backend.errors} and hung {job.backend.running} in a calm run")
        requests = [request for request in job.requests() if request["from"] != STORE_ADDRESS]
        results = list(job.backend.results.values())
    window = [request for request in requests if start <= request["at"] < end]
    written = Counter(kind_of(request["path"]) for request in _puts(window))
    rounds = written["message"] / size
    each = size * rounds
    verbs = Counter(request["verb"] for request in window)
    messages = [request["in"] for request in _puts(window) if kind_of(request["path"]) == "message"]
    message = sum(messages) / len(messages)
    counted = {name: sum(result[f"store_{name}"] for result in results) for name in ("writes", "reads", "lists")}
    reads = verbs["GET"] + verbs["HEAD"]
    money = 5.0 * (verbs["PUT"] + verbs["LIST"]) + 0.4 * reads  # dollars for a million, S3
    return {
        "method": training.method,
        "num_workers": size,
        "sync_every": training.sync_every,
        "save_every": training.save_every,
        "interval_s": training.interval,
        "poll_s": training.poll,
        "rounds": round(rounds, 1),
        "round_s": round((end - start) / rounds, 2),
        "message_bytes": round(message),
        "writes": round(sum(written.values()) / each, 3),
        **{f"writes_{kind}": round(written[kind] / each, 3) for kind in _WRITES},
        **_of_rounds(window),
        "reads": round(reads / each, 3),
        "reads_absent": round(sum(r["status"] == 404 for r in window) / each, 3),
        "lists": round(verbs["LIST"] / each, 3),
        "deletes": round((verbs["POST"] + verbs["DELETE"]) / each, 3),
        "messages_up": round(sum(r["in"] for r in _puts(window) if _is_large(r)) / each / message, 3),
        "messages_down": round(
            sum(r["out"] for r in window if r["verb"] == "GET" and _is_large(r)) / each / message, 3
        ),
        "model_bytes_up": round(sum(r["in"] for r in _puts(window) if kind_of(r["path"]) == "model") / each),
        "other_bytes": round(sum(r["in"] + r["out"] for r in window if not _is_large(r, "model")) / each),
        "dollars_1000_rounds": round(money / rounds / 1000, 6),
        "log_writes": sum(1 for _ in _puts(requests)),
        "counted_writes": int(counted["writes"]),
        "log_lists": sum(r["verb"] == "LIST" for r in requests),
        "counted_lists": int(counted["lists"]),
        "log_gets": sum(r["verb"] == "GET" for r in requests),
        "counted_reads": int(counted["reads"]),
        "seconds_for_outcome_s": round(max(result.get("longest_wait", 0.0) for result in results), 3),
    }


def _of_rounds(requests: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The writes, and the uploads and downloads of the size of a message, of one worker in one round of a close."""
    writes, up, down = Counter[tuple[str, str]](), Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for request in requests:
        path = request["path"]
        if path.startswith("round/") and path.count("/") == 3:
            key, is_put = (request["from"], path.rpartition("/")[0]), request["verb"] == "PUT"
            writes[key] += is_put
            up[key] += is_put and _is_large(request)
            down[key] += request["verb"] == "GET" and request["status"] == 200 and _is_large(request)
    if not writes:
        return dict.fromkeys(
            ("writes_most", "uploads_median", "uploads_most", "downloads_median", "downloads_most"), ""
        )
    return {
        "writes_most": max(writes.values()),
        "uploads_median": statistics.median(up.values()),
        "uploads_most": max(up.values()),
        "downloads_median": statistics.median(down.values()),
        "downloads_most": max(down.values()),
    }


def _puts(requests: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    return (request for request in requests if request["verb"] == "PUT")


def kind_of(path: str) -> str:
    """The kind of an object."""
    first, last = path.split("/")[0], path.rsplit("/", 1)[-1]
    if first == "model":
        return "model"
    if path.endswith(".taken"):
        return "taken"
    if first in ("round", "mail") and last.isdigit():
        return "message"
    return last if last in ("close", "mean", "beat") else "other"


def _is_large(request: Mapping[str, Any], *others: str) -> bool:
    """Whether the object has the size of a message."""
    return kind_of(request["path"]) in ("message", "mean", *others)
