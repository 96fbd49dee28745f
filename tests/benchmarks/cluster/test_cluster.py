"""The emulated cluster: delays, the waited model, tables, failures of trials; and, as root, the network itself."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pytest
import torch
import torch.distributed as dist
import tyro
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from benchmarks.by_hand import PlainLoop
from benchmarks.cluster.__main__ import Cluster, main
from benchmarks.cluster.delays import Delays
from benchmarks.cluster.methods import CLUSTER_METHODS, method_of, optimizer_of, require_methods
from benchmarks.cluster.network import namespaces
from benchmarks.cluster.network.line import region_of
from benchmarks.cluster.network.links import EmulatedNetwork, LinkRates, RegionLine, line_bytes
from benchmarks.cluster.network.namespaces import ClusterUnavailableError
from benchmarks.cluster.network.place import Place, bytes_sent
from benchmarks.cluster.processes import Fleet, TrialError, TrialProcesses
from benchmarks.cluster.rank import STORE_PORT, last_line
from benchmarks.cluster.split import Split
from benchmarks.cluster.table import failed_row, frame, markdown, medians, rows_of
from benchmarks.cluster.trials import Trial
from benchmarks.cluster.waited_model import WaitedModel, resnet_shapes
from tests.harness.misbehaving_rank import misbehave
from visualization.cluster import draw

ROOT = Path(__file__).resolve().parents[3]
ANSWER = {
    "num_rounds": 3,
    "compute_ms": 20.0,
    "encode_ms": 0.0,
    "wire_ms": 30.0,
    "mix_ms": 5.0,
    "wait_ms": 0.0,
    "rest_ms": 1.0,
    "is_hidden": False,
    "bytes_per_step": 3e6,
    "cpu_ms": 12.0,
    "rss_mb": 300.0,
    "memory_mb": 50.0,
    "construct_s": 0.5,
    "first_round_s": 0.25,
}


def answer(*step_ms: float, **others: Any) -> dict[str, Any]:
    return {**ANSWER, "step_ms": list(step_ms), "mean_step_ms": sum(step_ms) / len(step_ms), **others}


def key(method: str, repeat: int = 0, hosts: int = 2) -> dict[str, Any]:
    return {"hosts": hosts, "rate_gbit": 1.0, "method": method, "repeat": repeat}


def example_rows() -> pd.DataFrame:
    local = {"wire_ms": None, "mix_ms": None, "encode_ms": None, "bytes_per_step": 0.0, "cpu_ms": 4.0}
    rows = []
    for repeat, factor in enumerate((1.0, 2.0, 9.0)):
        for hosts in (2, 4):
            steps = [factor * x for x in (50.0, 60.0, 70.0)]
            slower = [factor * x for x in (55.0, 58.0, 400.0)]
            rows += rows_of(key("sgp", repeat, hosts), [answer(*steps), answer(*slower)], rate=1e9)
            rows += rows_of(key("local", repeat, hosts), [answer(21.0, **local)] * 2, rate=1e9)
    rows.append(failed_row(key("torchft-local"), "rank 1: torchft is not installed: make cluster-venv"))
    return frame(rows)


# Delays.


def test_delays_are_a_pure_function_of_seed_rank_and_step() -> None:
    delays = Delays(spread=0.3, straggle_chance=0.2, seed=5)
    factors = [[delays.factor(rank, step, num_hosts=4) for step in range(50)] for rank in range(4)]
    again = Delays(spread=0.3, straggle_chance=0.2, seed=5)
    assert factors == [[again.factor(rank, step, num_hosts=4) for step in range(50)] for rank in range(4)]
    assert len({x for row in factors for x in row}) == 200
    other = Delays(spread=0.3, straggle_chance=0.2, seed=6)
    assert factors[0] != [other.factor(0, step, num_hosts=4) for step in range(50)]


def test_all_methods_of_a_repeat_get_the_same_delays() -> None:
    cluster = Cluster(spread=0.3, straggle_chance=0.1)
    trials = [
        cluster.trial(method, number, repeat=1, limit_seconds=1.0) for number, method in enumerate(CLUSTER_METHODS)
    ]
    assert len({trial.delays for trial in trials}) == 1
    assert cluster.delays(0) != cluster.delays(1)


def test_spread_keeps_the_mean() -> None:
    delays = Delays(spread=0.5)
    factors = torch.tensor([delays.factor(0, step, num_hosts=2) for step in range(4000)], dtype=torch.float64)
    # The variance of a lognormal of mean 1 is exp(sigma^2) - 1 = 0.284, so the mean of 4000 has a deviation of 0.0084.
    assert abs(factors.mean() - 1) < 0.04


def test_stragglers_and_the_slow_host() -> None:
    delays = Delays(straggle_chance=0.25, slow_factor=10.0, slow_host=3.0)
    factors = [delays.factor(0, step, num_hosts=2) for step in range(400)]
    assert set(factors) == {1.0, 10.0}
    assert 60 < factors.count(10.0) < 140  # binomial: 100, deviation 8.7
    assert {delays.factor(1, step, num_hosts=2) for step in range(400)} == {3.0, 30.0}
    assert {Delays().factor(rank, 0, num_hosts=4) for rank in range(4)} == {1.0}


@pytest.mark.parametrize("wrong", [{"spread": -1.0}, {"straggle_chance": 1.5}, {"slow_factor": 0.5}, {"slow_host": 0}])
@pytest.mark.parametrize("is_nan", [False, True])
def test_delays_out_of_range(wrong: dict[str, Any], is_nan: bool) -> None:
    with pytest.raises(ValueError, match=r"got Delays.*expected spread >= 0"):
        Delays(**(dict.fromkeys(wrong, math.nan) if is_nan else wrong))


# The waited model.


def test_shapes_are_those_of_a_resnet() -> None:
    import torchvision

    layers = resnet_shapes(11.2e6)
    shapes = [shape for layer in layers for shape in layer]
    ours, theirs = (
        sorted(shapes),
        sorted(tuple(p.shape) for p in torchvision.models.resnet18(num_classes=10).parameters()),
    )
    assert ours == theirs
    assert len(layers) == 21
    small = sum(torch.Size(shape).numel() for layer in resnet_shapes(1e6) for shape in layer)
    assert 0.9e6 < small < 1.1e6


def test_gradients_come_layer_by_layer_and_their_deadlines_ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds + 0.001  # every sleep is a millisecond too long

    monkeypatch.setattr("benchmarks.cluster.waited_model.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("benchmarks.cluster.waited_model.time.sleep", sleep)
    model = WaitedModel(1e4, compute_seconds=3.0, gradient=0.5)
    model.factor = 2.0
    order: list[int] = []
    for index, layer in enumerate(model.layers):
        next(layer.parameters()).register_post_accumulate_grad_hook(lambda p, index=index: order.append(index))
    loss = model(torch.zeros(()))
    forward = now[0] - 100.0
    loss.backward()
    assert order == list(reversed(range(21)))
    assert {x for p in model.parameters() for x in cast(Tensor, p.grad).unique().tolist()} == {0.5}
    # Oversleeping does not add up: a third of 6 s, then the rest, each a millisecond late.
    assert forward == pytest.approx(2.001)
    assert now[0] - 100.0 == pytest.approx(6.002)
    assert len(slept) == 42
    assert min(slept) > 0


def test_a_late_step_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("benchmarks.cluster.waited_model.time.sleep", slept.append)
    model = WaitedModel(1e4, compute_seconds=0.0)
    model(torch.zeros(())).backward()
    assert set(slept) == {0.0}


def test_split_counts_a_call_within_a_call_once(monkeypatch: pytest.MonkeyPatch) -> None:
    contender = PlainLoop(WaitedModel(1e4, compute_seconds=0.0))
    now = [0.0]
    monkeypatch.setattr("benchmarks.cluster.split.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(contender.optimizer, "step", lambda: now.__setitem__(0, now[0] + 2.0))
    split = Split(contender)
    contender.step(lambda model: model(torch.zeros(())))
    contender.step(lambda model: model(torch.zeros(())))
    assert split.seconds() == {"optimizer": 4.0, "wait": 0.0}
    outer = split._timed("outer", split._timed("outer", lambda: now.__setitem__(0, now[0] + 1.0)))
    outer()
    assert split._seconds["outer"] == 1.0


# Rows and tables.


def test_rows_of_a_trial() -> None:
    first, second = rows_of(key("sgp"), [answer(50.0, 60.0, 70.0), answer(10.0, 90.0, 80.0)], rate=1e9)
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["step_ms"] == second["step_ms"] == 80.0  # the slower rank's median
    assert first["mean_step_ms"] == pytest.approx(60.0)
    assert first["fleet_step_ms"] == pytest.approx(60.0)
    # 3 MB are 24 ms of 1 Gbit/s.
    assert first["link_share"] == pytest.approx(24 / 60)
    assert first["line_share"] == pytest.approx(24 / 30)
    (unshaped, _) = rows_of(key("sgp"), [answer(1.0)] * 2, rate=0)
    assert unshaped["line_share"] is None


def test_the_fleet_is_as_fast_as_all_ranks_together() -> None:
    (row, _) = rows_of(key("adpsgd"), [answer(50.0), answer(200.0)], rate=1e9)
    # 20 and 5 steps a second are 25 of two ranks: 80 ms each.
    assert row["fleet_step_ms"] == pytest.approx(80.0)


def test_table_of_medians() -> None:
    table = medians(example_rows()).set_index(["hosts", "method"])
    sgp = table.loc[(2, "sgp")]
    assert (sgp["step_ms"], sgp["low_ms"], sgp["high_ms"]) == (120.0, 60.0, 540.0)
    assert sgp["num_repeats"] == 3
    assert sgp["extra_cpu_ms"] == pytest.approx(8.0)
    assert "torchft-local" not in {method for _, method in table.index}
    text = markdown(example_rows())
    assert text.count("### ") == 2
    assert "| SGP, one-peer exponential | 120 | 60-540 | " in text
    assert "| torchft LocalSGD, period 4 | rank 1: torchft is not installed: make cluster-venv |" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {18}
    assert text.index("no communication") < text.index("SGP, one-peer")  # the fastest first


def test_a_table_of_failures_only() -> None:
    text = markdown(frame([failed_row(key("diloco"), "x | y" * 100)]))
    assert "| DiLoCo, period 4 | x / yx" in text
    assert all(len(line) < 250 for line in text.splitlines())


def test_pictures(tmp_path: Path, figures: list[Figure]) -> None:
    csv = tmp_path / "cluster.csv"
    example_rows().to_csv(csv, index=False)
    assert [path.name for path in draw(csv, tmp_path)] == ["steps.png", "line.png", "scaling.png"]
    steps = figures[0].axes[0]
    assert [label.get_text() for label in steps.get_yticklabels()] == ["no communication", "SGP, one-peer exponential"]
    # Compute, then wire and mix of SGP on top of it.
    widths = [cast(Rectangle, bar).get_width() for bar in steps.patches]
    assert widths[:2] == [20.0, 20.0]
    assert 30.0 in widths
    frame([failed_row(key("diloco"), "no")]).to_csv(csv, index=False)
    assert draw(csv, tmp_path) == []


# The command line.


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"methods": ("ddp", "nothing")}, "got the method .nothing.*expected some of local, sgp"),
        ({"repeats": 0}, "expected repeats, steps and parameters >= 1"),
        ({"rates": (1e-6,)}, r"got a rate of 1000 bit/s.*options are in Gbit/s"),
        ({"slow_link_share": 2.0}, "a share of at most 1"),
        ({"congestion_control": "vegas"}, r"got congestion_control='vegas', expected one of \('cubic', 'bbr'\)"),
        ({"slow_link_share": 1e-4}, r"the slowest link 100000 bit/s, expected 0 or at least 1e\+06"),
        ({"hosts": (8, 8)}, r"got hosts=\(8, 8\).*each once"),
        ({"straggle_chance": -0.1}, "a straggle_chance from 0 to 1"),
        ({"hosts": (8, 1)}, r"got hosts=\(8, 1\), expected 2 to 250 of them"),
        ({"hosts": ()}, r"got hosts=\(\), expected 2 to 250 of them"),
        ({"rates": ()}, r"got rates=\(\), expected one at least"),
        ({"compute": math.nan}, "expected repeats, steps and parameters >= 1"),
        ({"parameters": math.inf}, "expected repeats, steps and parameters >= 1"),
    ],
)
def test_wrong_options(wrong: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Cluster(**wrong)


def test_command_line() -> None:
    line = ["--hosts", "2", "8", "--rates", "0.1", "1", "--methods", "ddp", "sgp", "--slow-host", "2", "--out", "x"]
    cluster = tyro.cli(Cluster, args=line)
    assert (cluster.hosts, cluster.rates, cluster.methods) == ((2, 8), (0.1, 1.0), ("ddp", "sgp"))
    trial = cluster.trial("sgp", 3, repeat=2, limit_seconds=60.0)
    assert Trial.from_message(trial.as_message()) == trial
    assert cluster.limit_seconds(8, 1e8) > cluster.limit_seconds(8, 1e9)


@pytest.mark.parametrize(
    ("name", "stand_in", "expected"),
    [
        ("os.geteuid", lambda: 1000, "got user id 1000, expected root.*run with sudo"),
        ("shutil.which", lambda tool: None, "got no ip and no tc and no bridge, expected iproute2: install it"),
    ],
)
def test_missing_tools_are_named_in_one_line(
    name: str,
    stand_in: Callable[..., Any],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("shutil.which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(f"benchmarks.cluster.network.namespaces.{name}", stand_in)
    monkeypatch.setattr(sys, "argv", ["cluster", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    with pytest.raises(ClusterUnavailableError, match=expected):
        namespaces.require()


def test_a_command_that_fails_is_named() -> None:
    with pytest.raises(ClusterUnavailableError, match=r"got `no luck` of `sh -c .*`, expected it to work"):
        namespaces.run("sh", "-c", "echo no luck >&2; exit 3")


def test_a_command_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "COMMAND_SECONDS", 0.05)
    with pytest.raises(ClusterUnavailableError, match="got no end of `sleep 30`"):
        namespaces.run("sleep", "30")


def test_namespaces_of_ended_processes_are_left_over() -> None:
    mine = f"{namespaces.owner_prefix(0)}3"
    process, start = mine.split("-")[1:3]
    reused = f"gossip-{process}-{int(start) + 1}-0-3"
    gone = "gossip-4194305-77-0-switch"  # beyond the largest process id of Linux
    assert namespaces.abandoned([mine, reused, gone, "somebody-elses", "gossip-x"]) == [reused, gone]


def test_bytes_sent_by_the_shaped_interface() -> None:
    table = "Inter-|  Receive | Transmit\n lo: 1 2 0 0 0 0 0 0 9 1\n  eth0: 11 2 0 0 0 0 0 0 4711 6 0 0\n"
    assert bytes_sent(table) == 4711
    with pytest.raises(ValueError, match="got no interface eth0"):
        bytes_sent("lo: 1")


def test_ports_of_trials_are_given_to_no_other_trial() -> None:
    ports = {
        Place(0, [], [], dist.HashStore(), number, timedelta(seconds=1)).port for number in [*range(20_000), 10**6]
    }
    assert min(ports) > 1024
    assert max(ports) < STORE_PORT < 32_768  # from there on Linux hands them out to connections


def test_links() -> None:
    assert LinkRates(1e9, 0.1).rates(3) == [1e9, 1e9, 1e8]
    assert LinkRates(1e9).rates(2) == [1e9, 1e9]


def test_regions_are_runs_of_hosts_and_need_a_line() -> None:
    assert [region_of(host, 4, 2) for host in range(4)] == [0, 0, 1, 1]
    assert [region_of(host, 5, 2) for host in range(5)] == [0, 0, 0, 1, 1]
    for num_regions, line in ((2, None), (1, RegionLine(1e8, 0.02)), (0, None)):
        with pytest.raises(ValueError, match="expected a line for several"):
            LinkRates(1e9, num_regions=num_regions, line=line)
    with pytest.raises(ValueError, match="and a round trip of 0 to 10 s"):
        RegionLine(1e8, -0.1)


# Trials that go wrong.


def test_errors_fit_into_a_row() -> None:
    assert last_line(ModuleNotFoundError("no", name="torchft")) == "torchft is not installed: make cluster-venv"
    assert last_line(RuntimeError("first\n last \n")) == "RuntimeError: last"
    assert last_line(AssertionError()) == "AssertionError: "


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("raises", "rank 1 ended with exit code 1: RuntimeError: as told"),
        ("dies", "rank 1 ended with exit code -9: my last words"),
        ("garbage", "rank 1 answered .*no JSON.*, expected JSON"),
        ("list", r"rank 1 answered b'\[\]', expected JSON"),
        ("error", "rank 1: ValueError: no"),
    ],
)
@pytest.mark.timeout(330)  # the first process waits for the imports of the server that all are forks of
def test_a_trial_that_goes_wrong_says_why(what: str, expected: str, tmp_path: Path) -> None:
    ranks = TrialProcesses(misbehave, [("fine",), (what,)], tmp_path)
    try:
        with pytest.raises(TrialError, match=expected):
            ranks.run({}, 200.0)
    finally:
        ranks.close()
    ranks.close()


@pytest.mark.timeout(330)
def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    ranks = TrialProcesses(misbehave, [("fine",), ("hangs",)], tmp_path)
    try:
        for connection in ranks._connections:
            connection.send_bytes(b"{}")
        assert ranks._connections[0].poll(200), "rank 0 answers"
        with pytest.raises(TrialError, match=r"no answer of ranks \[1\] in 0 s"):
            ranks.answers(0.0)  # what has come counts
    finally:
        ranks.close()


# The network itself.


def cannot_make_namespaces() -> str:
    """Why not; empty: they can be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and iproute2"
    name = f"{namespaces.owner_prefix(99)}probe"
    try:
        namespaces.run("ip", "netns", "add", name)
        namespaces.remove([name])
    except ClusterUnavailableError as error:
        return str(error)
    return ""


@pytest.fixture
def network_rights() -> None:
    """Skips where namespaces cannot be made."""
    if why := cannot_make_namespaces():
        pytest.skip(why)


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.timeout(560)  # starting Python takes most of it, and many times as long on a busy machine
@pytest.mark.usefixtures("network_rights")
def test_one_command_from_namespaces_to_pictures(tmp_path: Path) -> None:
    options = ["--hosts", "2", "--methods", "ddp", "sgp", "--repeats", "1", "--steps", "2", "--parameters", "2e4"]
    command = [sys.executable, "-m", "benchmarks.cluster", *options, "--compute", "5", "--out", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=500)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, output
    assert namespaces.names(f"gossip-{process.pid}-") == []
    rows = pd.read_csv(tmp_path / "cluster.csv")
    assert rows["error"].isna().all(), rows["error"].tolist()
    assert sorted(zip(rows["method"], rows["rank"])) == [("ddp", 0), ("ddp", 1), ("sgp", 0), ("sgp", 1)]
    sgp = rows[rows["method"] == "sgp"]
    # Each step sends the model once; headers come on top.
    num_bytes = 4 * sum(torch.Size(shape).numel() for layer in resnet_shapes(2e4) for shape in layer)
    assert ((sgp["bytes_per_step"] > num_bytes) & (sgp["bytes_per_step"] < 1.5 * num_bytes)).all()
    assert {"steps.png", "line.png", "cluster.md"} <= {path.name for path in tmp_path.iterdir()}


ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("listening", flush=True)
while True:
    connection, _ = server.accept()
    while data := connection.recv(1 << 16):
        connection.sendall(data[-1:])
"""
PING = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000))
seconds = []
for _ in range(5):
    start = time.perf_counter()
    connection.sendall(b"x")
    connection.recv(1)
    seconds.append(time.perf_counter() - start)
print(sorted(seconds)[2])
"""


@pytest.mark.e2e
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("network_rights")
def test_the_line_between_regions_adds_its_round_trip_and_counts_its_bytes() -> None:
    if not os.path.exists("/dev/net/tun"):
        pytest.skip("the kernel has no TAP devices")
    python = [sys.executable, "-S", "-c"]
    with (
        EmulatedNetwork(4, LinkRates(1e9, num_regions=2, line=RegionLine(1e8, 0.06))) as network,
        ExitStack() as servers,
    ):
        for host in (1, 2):
            command = ["ip", "netns", "exec", network.hosts[host], *python, ECHO, network.address(host)]
            server = servers.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            servers.callback(server.kill)
            assert server.stdout is not None
            assert server.stdout.readline() == "listening\n"

        def ping(host: int) -> float:
            return float(namespaces.run("ip", "netns", "exec", network.hosts[0], *python, PING, network.address(host)))

        ping(1)
        assert line_bytes(network.switch, 0) == 0  # inside a region nothing is on the line
        assert ping(2) >= 0.06
        assert line_bytes(network.switch, 0) > 0
        assert line_bytes(network.switch, 1) > 0


HOLD = """
import time
from benchmarks.cluster.network.line import region_of
from benchmarks.cluster.network.links import EmulatedNetwork, LinkRates, RegionLine, line_bytes
network = EmulatedNetwork(2, LinkRates(1e8))
print("built", flush=True)
time.sleep(300)
"""


@pytest.mark.e2e
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("network_rights")
def test_a_killed_run_leaves_nothing_behind() -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "built\n"
        prefix = f"gossip-{process.pid}-"
        hosts = namespaces.names(prefix)
        assert len(hosts) == 3
        held = subprocess.Popen(["ip", "netns", "exec", hosts[0], "sleep", "300"])
        deadline = time.monotonic() + 60
        while str(held.pid) not in namespaces.run("ip", "netns", "pids", hosts[0]).split():
            assert time.monotonic() < deadline, "the process enters its namespace"
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    deadline = time.monotonic() + 60
    while namespaces.names(prefix) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert namespaces.names(prefix) == []
    assert held.wait(timeout=60) == -signal.SIGKILL


@pytest.mark.e2e
@pytest.mark.usefixtures("network_rights")
def test_leftovers_of_a_dead_run_are_removed() -> None:
    left = f"gossip-4194305-{os.getpid()}-0-0"  # a name of its own: other runs of the tests make one too
    namespaces.run("ip", "netns", "add", left)
    network = EmulatedNetwork(2, LinkRates(0))
    try:
        assert namespaces.names(left) == []
        with EmulatedNetwork(2, LinkRates(0)) as other:
            assert network.has_neighbours()
            assert other.has_neighbours()
        assert all(host in namespaces.names() for host in network.hosts)
        with pytest.raises(ValueError, match="got 1 hosts, expected 2 to 250"):
            EmulatedNetwork(1, LinkRates(0))
    finally:
        network.close()
    network.close()
    assert not set(network.hosts) & set(namespaces.names())


def test_trials_survive_their_messages() -> None:
    trial = Trial("sgp", 3, 5, 0.1, Delays(straggle_chance=0.5), 9.0, 1e6)
    assert Trial.from_message(trial.as_message()) == trial


@pytest.mark.parametrize("names", [(), ("ddp", "ddp"), ("ddp", "typo")])
def test_methods_are_there_and_named_once(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="expected some of local, sgp"):
        require_methods(names)


def test_texts_of_algorithms_are_methods_with_their_periods() -> None:
    late = "StreamingDiLoCo(sync_every=8, fragments=4, delay=7)"
    assert [method_of(name).period for name in ("sgp", "PowerGossip()", "DiLoCo(sync_every=8)", late)] == [1, 1, 8, 16]
    for name in ("DiLoCo(every=8)", "SGP()"):
        with pytest.raises(ValueError, match=re.escape(f"got the method {name!r}, expected")):
            method_of(name)


@pytest.mark.usefixtures("own_group")
@pytest.mark.parametrize("method", ["local", "ddp-fp16", "ddp-bf16", "sgp-bf16", "LocalSGD(sync_every=10)"])
def test_a_rank_trains_by_the_optimizer_of_its_row(method: str) -> None:
    place = Place(0, ["here"], ["here"], dist.HashStore(), 0, timedelta(seconds=60))
    place.join()
    for is_adam in (False, True):
        own = replace(place, optimizer=optimizer_of(method, is_adam=is_adam))
        contender = method_of(method).make(WaitedModel(1e4, compute_seconds=0.0), own)
        assert type(contender.optimizer).__name__ == own.optimizer
        contender.step(lambda model: model(torch.zeros(())))
        assert contender.optimizer.state, "it has stepped"
        contender.close()
    assert own.optimizer == ("AdamW" if method in ("local", "ddp-fp16", "ddp-bf16") else "GossipAdamW")


@pytest.fixture
def own_group() -> Iterator[None]:
    """The default process group is this test's."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("own_group")
def test_averages_of_all_ranks_are_a_wait_and_not_rounds() -> None:
    place = Place(0, ["here"], ["here"], dist.HashStore(), 0, timedelta(seconds=60))
    place.join()
    for method in ("localsgd", "diloco"):
        contender = CLUSTER_METHODS[method].make(WaitedModel(1e4, compute_seconds=0.0), place)
        split = Split(contender)
        for _ in range(6):
            contender.step(lambda model: model(torch.zeros(())))
        assert set(split.seconds()) == {"optimizer", "wait"}
        assert split.seconds()["wait"] > 0
        contender.close()


serials = count()


class Ranks:
    """Stands in for `TrialProcesses`: answers, or fails at one job."""

    def __init__(self, alive: set[Ranks]) -> None:
        self.alive = alive
        self.serial = next(serials)
        alive.add(self)

    def run(self, message: dict[str, Any], limit_seconds: float) -> list[dict[str, Any]]:
        if message["number"] == 1:
            raise TrialError("as told")
        return [{"serial": self.serial}]

    def close(self) -> None:
        self.alive.discard(self)


def test_a_fleet_is_renewed_where_it_must(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alive: set[Ranks] = set()
    monkeypatch.setattr(TrialProcesses, "in_hosts", lambda network, folder: Ranks(alive))

    def job(method: str, number: int = 0) -> Trial:
        return Trial(method, number, 1, 0.1, Delays(), 9.0, num_parameters=1.0)

    with closing(Fleet(cast(Any, None), tmp_path)) as fleet:
        first = fleet.run(job("ddp"))
        assert fleet.run(job("sgp")) == first, "the same processes"
        assert fleet.run(job("torchft-local")) != first, "wants to be alone"
        assert not alive
        fleet.run(job("ddp"))
        with pytest.raises(TrialError, match="as told"):
            fleet.run(job("sgp", number=1))
        assert not alive
        fleet.run(job("sgp"))
        assert len(alive) == 1
    assert not alive
    fleet.close()
