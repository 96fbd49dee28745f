from __future__ import annotations

import json
import re
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gossip_modules import AllReduceDataParallel, GossipDataParallel, Membership, MetricsLogger, gossip, watch
from gossip_modules.dpwa import PairwiseAverager, PairwiseConfig
from gossip_modules.metrics import JSONLines, Prometheus, Row, TensorBoard, WeightsAndBiases
from tests.harness.problems import loss_of, mlp
from tests.harness.ranks import run_ranks, solo_group

ROW: Row = {"time": 1e9, "rank": "0", "step": 7, "loss": 0.5, "bytes_sent": 12, "bytes_sent/3": 12, "bytes_sent/4": 2}


def rows_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# The logger.


def test_rows_of_each_rank_and_watch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def body(group: dist.ProcessGroup) -> None:
        model = GossipDataParallel(mlp(group.rank()), process_group=group)
        logger = MetricsLogger(model, every=2, to=[JSONLines(tmp_path / "run")])
        for step in range(5):
            loss = loss_of(model, group.rank(), step)
            logger.step(loss=loss)
        model.consensus_distance()
        logger.step(loss=0.5)
        logger.close()
        logger.close()
        model.close()

    run_ranks(2, body)
    for rank in (0, 1):
        rows = rows_of(tmp_path / "run" / f"metrics_{rank}.jsonl")
        assert [row["step"] for row in rows] == [1, 2, 4, 6]
        assert [row["num_rounds"] for row in rows] == [1, 2, 4, 5]
        assert rows[0]["consensus_distance"] is None
        assert rows[-1]["consensus_distance"] == 0.0, "measured; there is no optimizer"
        assert rows[-1]["loss"] == 0.5
        assert rows[-1][f"bytes_sent/{1 - rank}"] > 0
        assert rows[-1]["rank"] == str(rank)
    assert watch.main([str(tmp_path / "run"), "--once"]) == 0
    first, head, *lines = capsys.readouterr().out.splitlines()
    assert first == f"{tmp_path / 'run'}: 2 ranks, steps 6 to 6"
    assert " ".join(head.split()) == "rank step /s loss wait peers slowest MB/s late distance age"
    for rank, line in enumerate(lines):
        assert re.match(rf" *{rank} +6 +\S+ +0.5 +\d+ % +1 +{1 - rank} \S+ ms ", line)


def test_a_row_is_read_only_where_it_is_due() -> None:
    model = GossipDataParallel(mlp(), process_group=solo_group())
    rows: list[Row] = []
    logger = MetricsLogger(model, every=10, to=[rows.append], num_steps=100)
    logger.step(loss=torch.tensor(2.0))
    logger.step(loss="not read")
    assert [(row["step"], row["loss"]) for row in rows] == [(101, 2.0)]
    model.close()


def test_every_wrapper_has_a_name(tmp_path: Path) -> None:
    membership = Membership(dist.HashStore(), min_workers=1)
    elastic = GossipDataParallel(mlp(), graph="ring", membership=membership)
    assert elastic.worker == "0"
    elastic.close()
    averager = PairwiseAverager(mlp(), PairwiseConfig("a/b", {"a/b": "tcp://127.0.0.1:*"}))
    receive = JSONLines(tmp_path)
    MetricsLogger(averager, to=[receive]).step()
    receive.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics_a%2Fb.jsonl"]
    averager.close()

    def body(group: dist.ProcessGroup) -> None:
        model = gossip(mlp(), process_group=group)
        rows: list[Row] = []
        MetricsLogger(model, to=[rows.append]).step()
        assert rows[0]["rank"] == str(group.rank())
        model.close()

    run_ranks(2, body)


def test_all_reduce_is_logged_too() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = AllReduceDataParallel(mlp())
        rows: list[Row] = []
        logger = MetricsLogger(model, to=[rows.append])
        loss_of(model, 0, 0).backward()
        logger.step()
        assert (rows[0]["rank"], rows[0]["num_rounds"]) == ("0", 1)
        model.close()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (nn.Linear(2, 1), {"to": []}, TypeError, r"got a Linear, expected a wrapper such as GossipDataParallel"),
        (None, {"to": "runs/a"}, TypeError, r"got to='runs/a', expected functions of a row"),
        (None, {"to": ["tensorboard"]}, TypeError, r"got to=\['tensorboard'\], expected functions of a row"),
        (None, {"to": [], "every": 0}, ValueError, r"got every=0 and num_steps=0, expected at least 1"),
    ],
)
def test_mistakes_are_named(model: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    wrapper = GossipDataParallel(mlp(), process_group=solo_group())
    with pytest.raises(error, match=message):
        MetricsLogger(model or wrapper, **options)
    wrapper.close()


# Receivers.


def test_tensorboard_gets_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    receive = TensorBoard(tmp_path)
    receive(ROW)
    receive.close()
    events = accumulator.EventAccumulator(str(tmp_path / "rank_0")).Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "bytes_sent", "bytes_sent/3", "bytes_sent/4"}
    (event,) = events.Scalars("bytes_sent/3")
    assert (event.step, event.value, event.wall_time) == (7, 12.0, 1e9)


def test_weights_and_biases_gets_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stub: the package needs an account."""
    calls: list[Any] = []

    class Run:
        def __init__(self, **options: Any) -> None:
            calls.append(options)

        def log(self, values: dict[str, float], *, step: int) -> None:
            calls.append((values, step))

        def finish(self) -> None:
            calls.append("finish")

    module: Any = ModuleType("wandb")
    module.init = Run
    monkeypatch.setitem(sys.modules, "wandb", module)
    receive = WeightsAndBiases(project="gossip")
    receive(ROW)
    receive.close()
    assert calls == [
        {"project": "gossip"},
        ({"loss": 0.5, "bytes_sent": 12, "bytes_sent/3": 12, "bytes_sent/4": 2}, 7),
        "finish",
    ]


@pytest.mark.parametrize(
    ("make", "module", "package"),
    [
        (lambda: TensorBoard("runs"), "torch.utils.tensorboard", "tensorboard"),
        (WeightsAndBiases, "wandb", "wandb"),
    ],
)
def test_a_missing_package_is_named(make: Any, module: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ModuleNotFoundError, match=rf"got no package {package}, .*in a clone: pip install '\.\[{package}"
    ):
        make()


PROMETHEUS = """\
# TYPE gossip_bytes_sent gauge
gossip_bytes_sent{rank="0"} 12.0
# TYPE gossip_peer_bytes_sent gauge
gossip_peer_bytes_sent{rank="0",peer="3"} 12.0
gossip_peer_bytes_sent{rank="0",peer="4"} 2.0
# TYPE gossip_loss gauge
gossip_loss{rank="0"} NaN
# TYPE gossip_step gauge
gossip_step{rank="0"} 7.0
"""


def test_prometheus_text_in_a_file_and_over_http(tmp_path: Path) -> None:
    receive = Prometheus(tmp_path, port=0)
    receive({**ROW, "loss": float("nan")})
    assert (tmp_path / "gossip_0.prom").read_text(encoding="utf-8") == PROMETHEUS
    assert len(list(tmp_path.iterdir())) == 1
    url = f"http://127.0.0.1:{receive.port}"
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        assert answer.read().decode() == PROMETHEUS
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{url}/other", timeout=10)
    receive.close()
    receive.close()
    assert list(tmp_path.iterdir()) == []  # else node_exporter would go on giving the numbers of a job that has ended
    with pytest.raises(OSError, match=r"."):
        socket.create_connection(("127.0.0.1", receive.port or 0), timeout=10)


def test_a_stranger_holds_the_server_for_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossip_modules.metrics._REQUEST_SECONDS", 0.2)
    receive = Prometheus(port=0)
    receive(ROW)
    assert receive.port
    address = ("127.0.0.1", receive.port)
    with socket.create_connection(address) as silent, socket.create_connection(address) as talkative:
        silent.sendall(b"GET ")
        talkative.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 8192)  # answered without the rest
        with urllib.request.urlopen(f"http://127.0.0.1:{receive.port}/metrics", timeout=10) as answer:
            assert answer.status == 200
    receive.close()


def test_prometheus_listens_on_ipv6() -> None:
    receive = Prometheus(port=0, host="::1")
    receive(ROW)
    with urllib.request.urlopen(f"http://[::1]:{receive.port}/metrics", timeout=10) as answer:
        assert answer.status == 200
    receive.close()


def test_prometheus_needs_a_place() -> None:
    with pytest.raises(ValueError, match="got neither folder nor port, expected one"):
        Prometheus()


# Watch.


def write(folder: Path, rank: str, *rows: dict[str, Any], rest: str = "") -> None:
    text = "".join(json.dumps({"rank": rank, **row}) + "\n" for row in rows)
    (folder / f"metrics_{rank}.jsonl").write_text(text + rest, encoding="utf-8")


def test_columns_are_rates_between_the_last_two_rows(tmp_path: Path) -> None:
    first = {"time": 0.0, "step": 0}
    before = {"time": 100.0, "step": 50, "wait_seconds": 3.0, "bytes_sent": 1e6, "consensus_distance": None}
    peers = {"bytes_sent/1": 5, "bytes_received/2": 5, "wait_median/1": 0.002, "wait_median/2": 0.25}
    more = {"loss": 0.123456, "mean_staleness": 1.0, "consensus_distance": 2.0}
    row = {"time": 110.0, "step": 70, "wait_seconds": 5.0, "bytes_sent": 21e6, **peers, **more}
    write(tmp_path, "10", first, before, row, rest='{"time": 120.0, "st')
    write(tmp_path, "9", {"time": 110.0, "step": 1, "wait_seconds": 0.0})
    ninth, tenth = list(watch.table(tmp_path, now=151.0))[2:]
    assert " ".join(tenth.split()) == "10 70 2 0.1235 20 % 2 2 250 ms 2 1 2 41!"
    assert " ".join(ninth.split()) == "9 1 - - - 0 - - - - 41"


def test_a_resumed_job_has_no_negative_rates(tmp_path: Path) -> None:
    write(tmp_path, "0", {"time": 0.0, "step": 90, "bytes_sent": 9}, {"time": 1.0, "step": 60, "bytes_sent": 1})
    line = list(watch.table(tmp_path, now=1.0))[-1]
    assert " ".join(line.split()) == "0 60 - - - 0 - - - - 0"


def test_only_the_end_of_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_BLOCK", 16)
    write(tmp_path, "0", *({"time": float(k), "step": k, "name": "x" * 50} for k in range(100)))
    rows = watch.last_rows(tmp_path / "metrics_0.jsonl")
    assert rows is not None
    assert [row["step"] for row in rows] == [98, 99]


def test_a_row_that_a_killed_process_left_unfinished_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, "0", {"time": 1.0, "step": 1}, rest='{"time": 2.0, "st')
    receive = JSONLines(tmp_path)
    receive({**ROW, "time": 3.0, "step": 3})
    receive.close()
    receive({**ROW, "time": 4.0, "step": 4})
    receive.close()
    assert len((tmp_path / "metrics_0.jsonl").read_text(encoding="utf-8").splitlines()) == 4
    rows = watch.last_rows(tmp_path / "metrics_0.jsonl")
    assert rows is not None
    assert [row["step"] for row in rows] == [3, 4]


MALFORMED = [
    "[1, 2]",
    "null",
    "no json",
    "[" * 100_000,
    '{"rank": 0, "time": 5.0}',
    '{"rank": 0, "step": 5}',
    '{"time": 5.0, "step": 5}',
    '{"rank": 0, "time": "now", "step": 5}',
    '{"rank": 0, "time": 5.0, "step": null}',
    '{"rank": 0, "time": NaN, "step": 5}',
    '{"rank": 0, "time": 5.0, "step": [5]}',
    '{"rank": 0, "time": 5.0, "step": 5, "loss": "high"}',
    '{"rank": 0, "time": 5.0, "step": 5, "bytes_sent": {}}',
    '{"rank": 0, "time": 5.0, "step": 5, "wait_median/1": "long"}',
    '{"rank": 0, "time": 5.0, "step": 5, "loss": 1' + "0" * 400 + "}",
]


@pytest.mark.parametrize("line", MALFORMED, ids=lambda line: line[:60])
def test_a_malformed_row_is_passed_over_and_told_once(tmp_path: Path, line: str) -> None:
    write(tmp_path, "0", {"time": 0.0, "step": 1}, {"time": 1.0, "step": 2}, rest=f"{line}\n" * 3)
    write(tmp_path, "1", {"time": 0.0, "step": 1}, {"time": 1.0, "step": 2})
    told = set[Path]()
    lines = list(watch.table(tmp_path, 1.0, told))
    assert [row.split()[:2] for row in lines[2:4]] == [["0", "2"], ["1", "2"]]
    assert lines[4:] == [f"metrics_0.jsonl: passed over a malformed row, {line[:60]!r}"]
    assert list(watch.table(tmp_path, 1.0, told)) == lines[:4]


def test_before_the_first_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics_0.jsonl").touch()
    assert list(watch.table(tmp_path, now=0.0)) == [f"{tmp_path}: no rows yet"]
    with pytest.raises(SystemExit) as end:
        watch.main([str(tmp_path / "none")])
    assert end.value.code == 2
    assert "none, expected the folder of a run" in capsys.readouterr().err


def test_live_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "0", {"time": 0.0, "step": 1}, {"time": 1.0, "step": 2})

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", interrupt)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert watch.main([str(tmp_path), "--interval", "0.5"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("\x1b[H\x1b[J\x1b[1m")
    assert "\x1b[31m" in out, "the rank has written nothing for long"
