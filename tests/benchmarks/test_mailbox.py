"""The mailbox on the wire: figures are computed from what workers and the server write; short runs are run."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster.network import namespaces
from benchmarks.mailbox import __main__ as command
from benchmarks.mailbox import faults, requests, soak
from benchmarks.mailbox.job import ledger
from gossip_modules.mailbox.medium import open_medium


def put(path: str, status: int = 200, **values: Any) -> dict[str, Any]:
    """A line of the server for a request that writes."""
    return {"verb": "PUT", "path": path, "status": status, "from": "10.79.0.2", "in": 10, "out": 0, **values}


def test_the_ledger_follows_every_share_to_one_end() -> None:
    log = [
        *(put(f"worker/{number:06d}/claim") for number in range(3)),
        put("mail/000001/000000/0000000000", weight=0.5),
        put("mail/000001/000000/0000000000", 412, weight=0.5),  # written again, as the answer was lost
        put("mail/000001/000000/0000000000.taken", by=1),
        put("mail/000001/000000/0000000000.taken", 412, by=0),
        put("mail/000002/000000/0000000000", weight=0.25),
        put("mail/000002/000000/0000000000.taken", by=0),  # taken back
        put("mail/000002/000001/0000000000", weight=0.75),
        put("mail/000002/000001/0000000001.taken", by=1),  # taken back before it was written
        put("mail/000002/000001/0000000001", weight=0.125),
    ]
    assert ledger(log) == ({0: 0.5, 1: 0.75, 2: 1.0}, 0.75)
    with pytest.raises(KeyError, match="mail/000001/000000/0000000000"):
        ledger([*log, put("mail/000001/000000/0000000000.taken", by=1)])  # taken twice
    results = {7: {"number": 0, "weight": 0.5}, 8: {"number": 1, "weight": 0.75}}
    assert faults.weight_error(log, results) == 0.0
    assert faults.weight_error(log, {7: {"number": 0, "weight": 0.25}}) == 0.25


def test_anchors_are_compared_by_their_number_of_rounds() -> None:
    lines: dict[int, list[dict[str, Any]]] = {
        0: [{"at": 1.0, "anchors": {"0/1": "a"}}, {"at": 9.0, "anchors": {"0/2": "b", "1/2": "c"}}],
        1: [{"at": 1.0, "anchors": {"0/1": "a"}}, {"at": 9.0, "anchors": {"0/2": "x"}}],
    }
    assert faults.compared_anchors(lines) == (2, 1)
    assert faults.last_anchors(lines, since=0.0) == (2, "no")
    assert faults.last_anchors({0: lines[0]}, since=5.0) == (2, "yes")
    assert faults.last_anchors(lines, since=10.0) == (0, "")


def test_growth_is_from_a_fifth_of_the_time_to_its_end() -> None:
    own = [{"at": float(at), "megabytes": float(at), "descriptors": 3, "threads": 5} for at in range(100)]
    figures = soak.growth(own, 0.0, 100.0)
    assert (figures["megabytes_early"], figures["megabytes_late"]) == (19.5, 94.5)
    good = {"failed": 0, "hung": 0, "anchors_that_differ": 0, "weight_error": "", "method": "DiLoCo", **figures}
    assert soak.broken({**good, "megabytes_late": 30.0}) == []
    bad = {"megabytes_late": 94.5, "failed": 1, "weight_error": 1e-3}
    assert [text.split(", expected")[0] for text in soak.broken({**good, **bad})] == [
        "DiLoCo: got failed=1",
        "DiLoCo: got weight_error=0.001",
        "DiLoCo: got 94.5 megabytes late in the run and 19.5 early",
    ]


def test_objects_have_kinds() -> None:
    paths = ["round/0-average/0000000001/000002", "round/0-average/0000000001/close", "worker/000001/beat", "model/01"]
    paths += ["mail/000001/000002/0000000003", "mail/000001/000002/0000000003.taken", "job"]
    kinds = ["message", "close", "beat", "model", "message", "taken", "other"]
    assert [requests.kind_of(path) for path in paths] == kinds


def test_one_of_eight_racing_threads_creates_and_a_loser_makes_two_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A create is a PUT with If-None-Match; one that finds an object looks whether it is there: see `BucketMedium`."""
    pytest.importorskip("obstore", reason="needs obstore: pip install '.[mailbox]'")
    pytest.importorskip("moto.server", reason="needs moto, an S3 server: pip install 'moto[server]'")
    from benchmarks.mailbox import server

    serving = server.serve("127.0.0.1", 0, tmp_path)
    address = f"http://127.0.0.1:{serving.server_port}"
    urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT")).close()
    for name, value in {**server.VARIABLES, "AWS_ENDPOINT_URL": address}.items():
        monkeypatch.setenv(name, value)
    media = [open_medium("s3://bucket/run", timeout=10.0, key=b"key", seed=i) for i in range(8)]
    won: list[tuple[int, int]] = []

    def race(i: int) -> None:
        won.extend((k, i) for k in range(5) if media[i].create(f"race/{k}", str(i).encode()))

    threads = [threading.Thread(target=race, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    serving.shutdown()
    assert sorted(k for k, _ in won) == list(range(5))
    lines = [line for line in server.logged(tmp_path) if line["path"].startswith("race/")]
    found = [(line["verb"], line["status"]) for line in lines]
    assert {x: found.count(x) for x in {*found}} == {
        ("PUT", 200): 5,
        ("PUT", 412): 35,
        ("HEAD", 200): 35,
    }


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> dict[str, str]:
    """The row of a short run."""
    monkeypatch.setattr(sys, "argv", ["mailbox", "--quick", "--folder", str(folder), *options])
    assert command.main() == 0
    (path,) = folder.glob("*.csv")
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    return row


@pytest.fixture
def _has_network() -> None:
    pytest.importorskip("obstore", reason="needs obstore: pip install '.[mailbox]'")
    pytest.importorskip("moto.server", reason="needs moto, an S3 server: pip install 'moto[server]'")
    try:
        namespaces.require()
        subprocess.run(["unshare", "-n", "true"], check=True, capture_output=True)
    except (namespaces.ClusterUnavailableError, OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs network namespaces: {error}")
    if shutil.which("ss") is None:
        pytest.skip("needs ss of iproute2")


@pytest.mark.soak
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("_has_network")
@pytest.mark.parametrize("method", ["DiLoCo", "push-sum"])
def test_workers_that_reach_the_store_alone_train_through_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    row = run(monkeypatch, tmp_path, "--figure", "faults", "--methods", method, "--sync-every", "10")
    for name in ("survivors_that_failed", "hung", "listening_sockets", "reachable_workers", "anchors_that_differ"):
        assert row[name] == "0", name
    assert (row["survivors"], row["killed"]) == ("3", "2")
    assert int(row["least_steps_in_outage"]) > 0
    if method == "push-sum":
        assert float(row["weight_error"]) <= 1e-12
    else:
        assert row["last_anchor_equal"] == "yes"


@pytest.mark.soak
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("_has_network")
def test_the_closing_worker_writes_four_objects_and_the_others_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message, a claim to read the messages, the close, and the mean."""
    row = run(monkeypatch, tmp_path, "--figure", "requests", "--methods", "DiLoCo")
    assert int(row["writes_most"]) <= 4
    assert (float(row["uploads_median"]), float(row["downloads_median"])) == (1.0, 1.0)
    assert float(row["writes"]) < 3
    assert abs(int(row["log_lists"]) - int(row["counted_lists"])) <= 8


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_workers_in_a_folder_are_killed_while_they_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = run(monkeypatch, tmp_path, "--figure", "folder", "--methods", "DiLoCo")
    names = ("survivors_that_failed", "hung", "objects_refused", "unfinished_after_two_hours", "anchors_that_differ")
    assert {name: row[name] for name in names} == dict.fromkeys(names, "0")
    assert int(row["objects_read"]) > 0
    assert int(row["unfinished_files"]) > 0


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_a_soak_of_a_minute_over_a_mailbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="needs obstore: pip install '.[mailbox]'")
    pytest.importorskip("moto.server", reason="needs moto, an S3 server: pip install 'moto[server]'")
    row = run(monkeypatch, tmp_path, "--figure", "soak", "--methods", "push-sum")
    assert int(row["faults"]) >= 15
