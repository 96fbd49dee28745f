"""The command shows the workers, rounds and costs of a run, and deletes it or its old rounds."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from gossip_modules.mailbox import follow
from gossip_modules.mailbox.__main__ import as_json, as_text, main
from gossip_modules.mailbox.costs import PRICES, UNKNOWN
from gossip_modules.mailbox.job import MailJob, Settings
from gossip_modules.mailbox.medium import Medium, open_medium
from gossip_modules.mailbox.report import report_of
from tests.library.mailbox.clock import InstantClock
from tests.library.mailbox.runs import H, Worker, train


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a run of three workers and four rounds; they have left."""
    monkeypatch.setenv("GOSSIP_JOB_KEY", "key of these tests")
    address = f"memory://{uuid.uuid4().hex}"
    train(address, 4 * H)
    return address


def objects_of(address: str) -> list[str]:
    return sorted(open_medium(address, timeout=5.0, key=b"key of these tests").list())


class BeatingClock(InstantClock):
    """Time that passes in sleeps only, and a worker that writes a sign of life in each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: list[MailJob] = []

    def sleep(self, seconds: float) -> None:
        """See `Clock`."""
        super().sleep(seconds)
        for worker in self.workers:
            worker.beat()


def started(medium: Medium) -> MailJob:
    """A worker with a sign of life."""
    job = MailJob(medium, Settings.of_reader(poll=10.0, timeout=9.0))
    job.claim(job.header("job").get("description", {}))
    job.beat()
    return job


def test_the_report_of_a_run_that_has_ended(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([run]) == 0
    said = capsys.readouterr()
    lines = [" ".join(line.split()) for line in said.out.splitlines()]
    assert said.err == ""
    assert lines[0] == f"{run}: 0 live, 0 silent, 3 left"
    assert lines[2:6] == ["worker state last round steps", *(f"{i} left 3 {4 * H}" for i in range(3))]
    assert lines[7] == "stream newest seconds MB counted late"
    assert lines[8].startswith("0-average 3 ")
    assert lines[8].endswith(" 0,1,2 -")
    assert "saved models: 5, the newest after round 4" in lines
    assert any(
        line.startswith("per worker and round of 0-average, at least: 2.33 writes, 3.33 reads,") for line in lines
    )
    assert any("storage 0, requests 0; egress 0" in line for line in lines)


def test_the_report_as_json(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([run, "--json", "--price", "storage=730", "writes=1000000"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    (stream,) = found["streams"]
    assert [worker["state"] for worker in found["workers"]] == ["left"] * 3
    assert (stream["name"], stream["newest"], stream["counted"], stream["late"]) == ("0-average", 3, [0, 1, 2], [])
    assert found["models"] == [0, 1, 2, 3, 4]
    assert found["num_objects"] == len(objects_of(run))
    assert found["dollars_per_hour"]["storage"] == pytest.approx(found["stored_bytes"] / (1 << 30))
    per_round = stream["requests"]["writes"] + stream["requests"]["lists"]
    assert found["dollars_per_hour"]["requests"] == pytest.approx(per_round * 3600 / stream["seconds"])


def test_two_looks_tell_live_workers_from_silent_ones() -> None:
    clock = BeatingClock()
    medium = open_medium(f"memory://{uuid.uuid4().hex}", timeout=9.0, key=b"key of these tests", clock=clock)
    live, _, left = (started(medium) for _ in range(3))
    clock.workers.append(live)
    left.leave()
    shown: list[str] = []
    report = report_of(medium, wait=None, show=shown.append)
    assert [(worker.number, worker.state) for worker in report.workers] == [(0, "live"), (1, "silent"), (2, "left")]
    assert clock.now() == pytest.approx(16.0), "one and a half periods of ten seconds, and one second"
    assert shown == ["2 workers have not left; looking for their signs of life, for up to 16 s"]


def test_the_second_look_comes_when_all_workers_were_heard() -> None:
    clock = BeatingClock()
    medium = open_medium(f"memory://{uuid.uuid4().hex}", timeout=9.0, key=b"key of these tests", clock=clock)
    clock.workers.append(started(medium))
    assert report_of(medium, wait=None, show=str).workers[0].state == "live"
    assert clock.now() == 1.0


def test_late_workers_are_named() -> None:
    address = f"memory://{uuid.uuid4().hex}"

    def end(worker: Worker) -> None:
        worker.membership.release()

    train(address, 2 * H, end=end)
    medium = open_medium(address, timeout=9.0, key=b"key of these tests", clock=InstantClock())
    started(medium)
    (stream,) = report_of(medium, wait=0.0, show=str).streams
    assert (stream.counted, stream.late) == ((0, 1, 2), (3,))


def test_unknown_prices_and_damaged_objects_are_told(run: str) -> None:
    medium = open_medium(run, timeout=5.0, key=b"key of these tests")
    path = f"round/0-average/{3:010d}/close"
    medium.delete([path])
    assert medium._create(path, b"?" * 100)
    report = report_of(medium, wait=0.0, show=str)
    assert report.num_refused == 1
    assert report.streams == ()
    text = as_text(report, UNKNOWN)
    assert "1 objects did not open: they are damaged, or sealed with another key" in text
    assert "storage nan" in text
    assert "nan: the prices of this store or the duration of its rounds are unknown" in text
    assert json.loads(as_json(report, UNKNOWN))["dollars_per_hour"]["storage"] is None
    assert "requests 0; egress 0 if" in as_text(report, PRICES["s3"])


def test_clean_asks_for_yes(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = objects_of(run)
    assert main([run, "--clean"]) == 2
    assert f"got --clean without --yes, expected it to delete {len(before)} objects of {run}" in capsys.readouterr().err
    assert objects_of(run) == before
    assert main([run, "--clean", "--yes"]) == 0
    assert capsys.readouterr().out == f"deleted {len(before)} objects of {run}\n"
    assert objects_of(run) == []
    assert main([run]) == 1
    assert capsys.readouterr().err.startswith(f"error: there is no run at {run}; see whether")


def test_old_rounds_are_deleted_and_the_run_goes_on(run: str) -> None:
    before = objects_of(run)
    assert main([run, "--clean", "--before", "3", "--yes"]) == 0
    gone = sorted(set(before) - set(objects_of(run)))
    numbers = {path.split("/")[-2 if path.startswith("round") else -1] for path in gone}
    assert numbers == {f"{number:010d}" for number in range(3)}
    assert {path.split("/")[0] for path in gone} == {"model", "round"}
    (worker,) = train(run, 5 * H, parabolas=[0])
    assert worker.first == 4 * H + 1


def test_rounds_that_workers_may_need_stay(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = objects_of(run)
    assert main([run, "--clean", "--before", "5", "--yes"]) == 2
    assert "got --before 5, expected 0 to 4: the newest saved model" in capsys.readouterr().err
    started(open_medium(run, timeout=9.0, key=b"key of these tests"))
    assert main([run, "--clean", "--before", "1", "--yes", "--wait", "0"]) == 2
    assert "got --before 1, expected 0 to 0" in capsys.readouterr().err
    assert set(before) <= set(objects_of(run))


def test_another_key_is_one_line(run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSIP_JOB_KEY", "another key of these tests")
    assert main([run]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        f"error: the object 'job' of the run at {run} did not open; set GOSSIP_JOB_KEY to the key of its workers, or "
        "unset it if they have none\n"
    )


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ("ftp://a/b", 2, "got the address 'ftp://a/b', expected s3://bucket/run"),
        ("file:///absent/run", 1, "there is no run at file:///absent/run; see whether the address is right"),
        ("memory://a --before 3", 2, "got --before without --clean, expected both"),
        ("memory://a --timeout 0", 2, "got --timeout 0 and --wait None, expected seconds"),
    ],
)
def test_errors_are_one_line(
    arguments: str, code: int, expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOSSIP_JOB_KEY", "key of these tests")
    assert main(arguments.split()) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"error: {expected}")
    assert said.err.count("\n") == 1


def test_a_price_has_a_name_and_dollars(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("egress", "egress=x", "tax=1", "reads=-1"):
        with pytest.raises(SystemExit):
            main(["memory://a", "--price", text])
        assert f"got '{text}', expected such as egress=0.09, with one of storage" in capsys.readouterr().err


def test_nothing_is_written_by_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSIP_JOB_KEY", "key of these tests")
    train(f"file://{tmp_path}/run", H, parabolas=[0])
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "round").rglob("*")}
    assert main([f"file://{tmp_path}/run"]) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "round").rglob("*")} == before
    assert list((tmp_path / "run" / ".parts").iterdir()) == []


def test_each_kind_of_store_is_read_followed_and_cleaned(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOSSIP_JOB_KEY", "key of these tests")
    train(address, 2 * H, parabolas=[0])
    assert [model.round for model in follow(address, poll=0.1)] == [2]
    assert main([address]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{address}: 0 live, 0 silent, 1 left")
    assert ("nan: the prices of this store" in said) == address.startswith(
        ("s3", "store")
    )  # another provider; no times
    assert main([address, "--clean", "--yes"]) == 0
    assert objects_of(address) == []
