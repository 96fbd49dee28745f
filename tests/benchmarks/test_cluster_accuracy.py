"""Time to a fixed accuracy on the emulated cluster: shares of images, curves, the join; and, as root, all of it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from itertools import count, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn

from benchmarks.cluster.accuracy import COLUMNS as accuracy_columns
from benchmarks.cluster.accuracy import EVALUATE_EVERY, Accuracy, curve
from benchmarks.cluster.job import Job
from benchmarks.cluster.methods import CLUSTER_METHODS, ClusterMethod, require_methods
from benchmarks.cluster.network.place import Place
from benchmarks.cluster.peers import PERIOD
from benchmarks.cluster.processes import Fleet, TrialError, TrialProcesses
from benchmarks.cluster.table import failed_row, frame, rows_of
from benchmarks.cluster.time_to_accuracy import TimeToAccuracy, markdown, paces, seconds_per_step, steps_to, times
from benchmarks.cluster.trials import Trial
from benchmarks.cluster.workload.delays import Delays
from benchmarks.cluster.workload.images import decode
from benchmarks.cluster.workload.training import SIZE, SmallNetwork, SplitImages, Training, train
from benchmarks.contenders import Contender, Loss, Wrapped
from tests.benchmarks.test_cluster import ROOT, answer, cannot_make_namespaces

# Images.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An ImageFolder tree: 24 training and 6 test images of three classes, each of one colour."""
    for split, num in (("train", 8), ("test", 2)):
        for label in range(3):
            (tmp_path / "images" / split / f"class{label}").mkdir(parents=True)
            for index in range(num):
                color = (80 * label, 10 * index, 255)
                Image.new("RGB", (40, 32), color).save(tmp_path / "images" / split / f"class{label}" / f"{index}.png")
    return tmp_path / "images"


def test_decoded_images_are_those_of_the_folder(folder: Path, tmp_path: Path) -> None:
    decode(folder, tmp_path / "arrays")
    images = SplitImages(tmp_path / "arrays", "test")
    x, labels = images.batch(np.arange(len(images)))
    assert x.shape == (6, 3, SIZE, SIZE)
    assert labels.tolist() == [0, 0, 1, 1, 2, 2]
    expected = torch.tensor([[80 * label, 10 * index, 255] for label in range(3) for index in range(2)]) / 127.5 - 1
    torch.testing.assert_close(x, expected[:, :, None, None].expand_as(x))
    network = SmallNetwork(0)
    assert network(x).shape == (6, 10)
    assert sum(p.numel() for p in network.parameters()) == SmallNetwork.NUM_PARAMETERS


def test_a_folder_without_splits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without train, test, expected train/ and test/"):
        decode(tmp_path, tmp_path / "arrays")


def test_ranks_share_an_epoch_and_flip_half_of_it(tmp_path: Path) -> None:
    images = np.zeros((64, 3, SIZE, SIZE), dtype=np.uint8)
    images[..., 0] = 255  # a white line at the left
    np.save(tmp_path / "train.npy", images)
    np.save(tmp_path / "train-labels.npy", np.arange(64))
    data = SplitImages(tmp_path, "train")
    epochs = [list(islice(data.batches(rank, 2, size=8, seed=3), 8)) for rank in range(2)]
    first, second = (
        [int(y) for rank in epochs for _, labels in rank[part] for y in labels] for part in (slice(4), slice(4, 8))
    )
    assert sorted(first) == sorted(second) == list(range(64))
    assert first != second
    is_left = torch.cat([x[:, 0, 0, 0] for rank in epochs for x, _ in rank]) > 0
    assert 0.3 < is_left.float().mean() < 0.7


# Jobs.


def test_jobs_survive_their_messages() -> None:
    shared: dict[str, Any] = {"method": "sgp", "number": 3, "num_steps": 5, "compute_seconds": 0.1}
    shared.update(delays=Delays(straggle_chance=0.5), limit_seconds=9.0)
    jobs: list[Job] = [
        Trial(**shared, num_parameters=1e6),
        Training(
            **shared, learning_rate=0.5, images="here", batch_size=2, num_parameters=0.0, evaluate_every=1, seed=4
        ),
    ]
    for job in jobs:
        message = job.as_message()
        assert message["kind"] == type(job).__name__
        assert type(job).from_message(message) == job


@pytest.mark.parametrize("names", [(), ("ddp", "ddp"), ("ddp", "typo")])
def test_methods_are_there_and_named_once(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="expected some of local, sgp"):
        require_methods(names)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"hosts": 1}, "expected 2 to"),
        ({"steps": 0}, "expected steps, batch_size and repeats >= 1"),
        ({"learning_rates": (0.1, -1.0)}, "expected some above 0, each once"),
        ({"learning_rates": (0.1, 0.1)}, "expected some above 0, each once"),
        ({"parameters": 100.0}, "expected 0 or at least 26154"),
        ({"rate": 1e-6}, "options are in Gbit/s"),
        ({"straggle_chance": 0.1}, "compute=0, of which there is no multiple"),
        ({"straggle_chance": 2.0, "compute": 1.0}, "a straggle_chance from 0 to 1"),
    ],
)
def test_wrong_options(wrong: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Accuracy(Path("data"), **wrong)


def test_evaluations_come_right_after_an_average() -> None:
    assert all(EVALUATE_EVERY % method.period == 0 for method in CLUSTER_METHODS.values())
    assert EVALUATE_EVERY % PERIOD == 0


# Curves and the join.


def test_the_curve_counts_all_ranks() -> None:
    ranks: list[dict[str, list[float]]] = [
        {
            "num_steps": [40, 80],
            "num_correct": [10, 15],
            "num_tested": [50, 50],
            "mean_loss": [2.0, 1.0],
            "mean_seconds": [0.1, 0.2],
        },
        {
            "num_steps": [44, 90],
            "num_correct": [20, 48],
            "num_tested": [100, 100],
            "mean_loss": [4.0, 3.0],
            "mean_seconds": [0.3, 0.2],
        },
    ]
    assert curve(ranks) == [
        {"num_steps": 42.0, "accuracy": 20.0, "worst_accuracy": 20.0, "mean_loss": 3.0, "mean_step_ms": 200.0},
        {"num_steps": 85.0, "accuracy": 42.0, "worst_accuracy": 30.0, "mean_loss": 2.0, "mean_step_ms": 200.0},
    ]


EVEN = {
    "hosts": 2,
    "rate_gbit": 1.0,
    "num_parameters": 1e6,
    "planned_ms": 20.0,
    "spread": 0.0,
    "straggle_chance": 0.0,
    "slow_factor": 10.0,
    "slow_host": 1.0,
    "slow_link_share": 0.0,
}
UNSHAPED = {**EVEN, "rate_gbit": 0.0, "num_parameters": 0.0, "planned_ms": 0.0}


def trained(
    method: str, *accuracy: float, rate: float = 0.1, repeat: int = 0, cell: dict[str, float] = UNSHAPED
) -> pd.DataFrame:
    """An evaluation every 40 steps; none: it failed."""
    points = [{"num_steps": 40.0 * (k + 1), "accuracy": value} for k, value in enumerate(accuracy)]
    own = {
        **cell,
        "method": method,
        "learning_rate": rate,
        "repeat": repeat,
        "seed": 0,
        "batch_size": 8,
        "planned_steps": 120,
    }
    failed = [{"num_steps": np.nan, "accuracy": np.nan, "error": "no"}]
    return pd.DataFrame([{**point, **own} for point in points or failed], columns=list(accuracy_columns))


def test_steps_to_a_target() -> None:
    rows = pd.concat(
        [
            trained("ddp", 30, 50, 70),  # 60 after 100
            trained("ddp", 30, 60, 70, repeat=1),  # 80
            trained("ddp", 20, 30, 90, rate=0.3),  # 100
            trained("ddp", rate=0.3, repeat=1),  # never
            trained("sgp", 20, 30, 59),
            trained("sgp", 80, cell=EVEN),  # 30
            trained("choco"),
        ]
    )
    found = steps_to(rows, 60.0).set_index(["method", "rate_gbit"])
    assert found.loc[("ddp", 0.0), ["num_steps", "learning_rate", "best"]].tolist() == [90, 0.1, 70]
    assert found.loc[("sgp", 0.0), "num_steps"] == float("inf")
    assert found.loc[("sgp", 1.0), "num_steps"] == 30
    assert found.loc[("choco", 0.0), "num_steps"] == float("inf")


def cluster_rows(method: str, *step_ms: float, cell: dict[str, float] = EVEN) -> list[dict[str, Any]]:
    return rows_of({**cell, "method": method, "repeat": 0}, [answer(value) for value in step_ms], rate=1e9)


def test_time_is_steps_times_seconds() -> None:
    slow = {**EVEN, "straggle_chance": 0.05}
    slower = {**slow, "slow_factor": 20.0}
    more = {**EVEN, "hosts": 4}
    steps = steps_to(
        pd.concat(
            [
                trained("ddp", 60),
                trained("adpsgd", 60),
                trained("adpsgd", 0, 60, cell=EVEN),
                trained("adpsgd", 0, 0, 60, cell=slow),
                trained("choco", 5),
            ]
        ),
        60.0,
    )
    rows = cluster_rows("ddp", 500, 500) + cluster_rows("adpsgd", 100, 100) + cluster_rows("choco", 50, 50)
    rows += cluster_rows("ddp", 900, 900, cell=slow) + cluster_rows("adpsgd", 100, 300, cell=slow)
    rows += cluster_rows("ddp", 910, 910, cell=slower) + cluster_rows("adpsgd", 100, 300, cell=slower)
    rows += cluster_rows("ddp", 920, 920, cell=more) + cluster_rows("sgp", 70, 70, cell=more)
    seconds = seconds_per_step(frame(rows))
    table = times(steps, seconds)
    even = "2 hosts, 1 M parameters, 1 Gbit/s, compute 20 ms"
    straggling = f"{even}, 5 % stragglers 10 times slower"
    assert table.loc["ddp", even] == pytest.approx(40 * 0.5)
    assert table.loc["ddp", straggling] == pytest.approx(40 * 0.9), "what it computes does not depend on stragglers"
    assert table.loc["adpsgd", even] == pytest.approx(80 * 0.1), "trained there, not on other links"
    assert table.loc["adpsgd", straggling] == pytest.approx(120 * 0.15), "2 steps take 100 and 300: 0.15 s each"
    assert table.loc["choco", even] == float("inf")
    assert np.isnan(table.loc["choco", straggling])
    assert np.isnan(table.loc["adpsgd", f"{even}, 5 % stragglers 20 times slower"]), "not trained there"
    assert table[even.replace("2 hosts", "4 hosts")].isna().all(), "trained by 2"
    text = markdown(table, 60.0)
    assert "| DDP | 60.0 | 0.10 | 40 | 20 | 36 |" in text
    assert "| AD-PSGD |  |  |  | 8 | 18 |" in text
    assert "| fastest of ours | | | | AD-PSGD 8 | AD-PSGD 18 |" in text
    assert "| fastest of the others | | | | DDP 20 | DDP 36 |" in text
    assert "| DDP | 500 | 900 | 910 | 920 |" in paces(seconds)


def test_a_table_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = pd.concat([trained("ddp", 60), trained("sgp", 30, 60)])
    rows.to_csv(tmp_path / "accuracy.csv", index=False)
    frame(cluster_rows("ddp", 500) + cluster_rows("sgp", 100)).to_csv(tmp_path / "cluster.csv", index=False)
    TimeToAccuracy((tmp_path / "accuracy.csv",), (tmp_path / "cluster.csv",), target=60.0).main()
    assert "| fastest of ours | | | | SGP, one-peer exponential 8 |" in capsys.readouterr().out

    with pytest.raises(ValueError, match=r"accuracy.csv without .*, expected a CSV of benchmarks.cluster; write it"):
        TimeToAccuracy((tmp_path / "accuracy.csv",), (tmp_path / "accuracy.csv",)).main()
    frame(cluster_rows("ddp", 500)).assign(method="gone").to_csv(tmp_path / "cluster.csv", index=False)
    with pytest.raises(ValueError, match="with the methods gone, expected some of CLUSTER_METHODS"):
        TimeToAccuracy((tmp_path / "accuracy.csv",), (tmp_path / "cluster.csv",)).main()
    pd.concat([rows, rows.assign(batch_size=16)]).to_csv(tmp_path / "accuracy.csv", index=False)
    with pytest.raises(ValueError, match="got trainings with batch_size of 8, 16, expected one"):
        TimeToAccuracy((tmp_path / "accuracy.csv",), (tmp_path / "cluster.csv",)).main()
    rows.to_csv(tmp_path / "accuracy.csv", index=False)
    frame(cluster_rows("ddp", 500)).to_csv(tmp_path / "cluster.csv", index=False)
    with pytest.raises(ValueError, match=r"got the same runs of ddp, sgp twice, .*; see --accuracy"):
        TimeToAccuracy((tmp_path / "accuracy.csv",) * 2, (tmp_path / "cluster.csv",)).main()
    with pytest.raises(ValueError, match=r"got the same runs of ddp twice, .*; see --cells"):
        TimeToAccuracy((tmp_path / "accuracy.csv",), (tmp_path / "cluster.csv",) * 2).main()
    frame([failed_row({**EVEN, "method": "ddp", "repeat": 0}, "no")]).to_csv(tmp_path / "cluster.csv", index=False)
    with pytest.raises(ValueError, match="got no trial with a time"):
        TimeToAccuracy((tmp_path / "accuracy.csv",), (tmp_path / "cluster.csv",)).main()
    with pytest.raises(ValueError, match="got target=0"):
        TimeToAccuracy((), (), target=0)


# Trainings.


@pytest.fixture
def own_group() -> Iterator[None]:
    """The default process group is this test's."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def training_of(method: str, arrays: Path) -> Training:
    """Two steps of half an epoch each, then an evaluation."""
    return Training(
        method=method,
        number=0,
        num_steps=2,
        compute_seconds=0.0,
        delays=Delays(),
        learning_rate=0.1,
        limit_seconds=60.0,
        images=str(arrays),
        batch_size=12,
        num_parameters=0.0,
        evaluate_every=2,
        seed=0,
    )


@pytest.mark.usefixtures("own_group")
@pytest.mark.parametrize("method", ["ddp", "post-local", "sgp", "osgp"])
def test_a_rank_alone_learns_and_its_rate_falls(
    method: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode(folder, tmp_path / "arrays")
    rates: list[float] = []
    monkeypatch.setattr(Contender, "step", recorded(Contender.step, rates))
    training = replace(training_of(method, tmp_path / "arrays"), num_steps=8, num_parameters=3e4, evaluate_every=4)
    place = Place(0, ["here"], ["here"], dist.HashStore(), 0, timedelta(seconds=60), 0, 0.1)
    curve = train(training, place)
    assert rates == pytest.approx([0.1 * (1 - k / 8) for k in range(8)])
    assert curve["num_steps"] == [4, 8]
    assert curve["num_tested"] == [6, 6]
    assert curve["mean_loss"][1] < curve["mean_loss"][0]


def recorded(step: Callable[[Contender, Loss], None], rates: list[float]) -> Callable[[Contender, Loss], None]:
    def recording(self: Contender, loss: Loss) -> None:
        rates.append(self.optimizer.param_groups[0]["lr"])
        step(self, loss)

    return recording


@pytest.mark.usefixtures("own_group")
def test_post_local_averages_before_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(0, ["here"], ["here"], dist.HashStore(), 0, timedelta(seconds=60), 40, 0.1)
    place.join()
    contender = CLUSTER_METHODS["post-local"].make(SmallNetwork(0), place)
    steps: list[int] = []
    averaged: list[int] = []
    monkeypatch.setattr(
        "torch.distributed.algorithms.model_averaging.utils.average_parameters_or_parameter_groups",
        lambda *_: averaged.append(len(steps)),
    )
    for step in range(EVALUATE_EVERY):
        steps.append(step)
        contender.step(lambda model: model(torch.zeros(1, 3, SIZE, SIZE)).sum())
    place.leave(contender.close)
    assert averaged == list(range(PERIOD, EVALUATE_EVERY + 1, PERIOD))


serials = count()


class Slow(nn.Module):
    """A wrapper that waits for its peers before the forward pass."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        time.sleep(0.2)
        return self.module(x)


@pytest.mark.usefixtures("own_group")
def test_compute_is_waited_on_top_of_rounds(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode(folder, tmp_path / "arrays")
    slow = ClusterMethod("slow", lambda model, place: Wrapped(model, place.optimizer, wrap=Slow))
    monkeypatch.setattr("benchmarks.cluster.workload.training.CLUSTER_METHODS", {"slow": slow})
    delays = Delays(straggle_chance=1.0, slow_factor=2.0)
    training = replace(training_of("slow", tmp_path / "arrays"), compute_seconds=0.1, delays=delays)
    place = Place(0, ["here"], ["here"], dist.HashStore(), 0, timedelta(seconds=60), 0, 0.1)
    assert train(training, place)["mean_seconds"][0] >= 0.4


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
        shared: dict[str, Any] = {"compute_seconds": 0.1, "delays": Delays(), "limit_seconds": 9.0}
        return Trial(method=method, number=number, num_steps=1, num_parameters=1.0, **shared)

    with closing(Fleet(cast(Any, None), tmp_path)) as fleet:
        first = fleet.run(job("ddp"))
        assert fleet.run(job("sgp")) == first, "the same processes"
        assert fleet.run(job("hivemind")) != first, "wants to be alone"
        assert not alive
        fleet.run(job("ddp"))
        with pytest.raises(TrialError, match="as told"):
            fleet.run(job("sgp", number=1))
        assert not alive
        fleet.run(job("sgp"))
        assert len(alive) == 1
    assert not alive
    fleet.close()


def test_too_few_images_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got 24 training and 6 test images, expected at least 256 and 8"):
        Accuracy(folder, out=tmp_path / "out").main()
    with pytest.raises(ValueError, match="got 24 images for 3 ranks, expected at least 9 for each"):
        next(SplitImages(tmp_path / "out" / "images", "train").batches(0, 3, size=9, seed=0))
    (folder / "train" / "class2").rename(folder / "train" / "class3")
    with pytest.raises(ValueError, match="expected the same in both"):
        decode(folder, tmp_path / "other")


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.timeout(560)
def test_one_command_from_images_to_a_curve(folder: Path, tmp_path: Path) -> None:
    if why := cannot_make_namespaces():
        pytest.skip(why)
    options = ["--data", str(folder), "--methods", "osgp", "--hosts", "2", "--steps", "40", "--batch-size", "4"]
    command = [sys.executable, "-m", "benchmarks.cluster.accuracy", *options, "--out", str(tmp_path / "out")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = pd.read_csv(tmp_path / "out" / "accuracy.csv")
    assert rows["num_steps"].tolist() == [EVALUATE_EVERY]
    assert rows["mean_loss"].item() < np.log(10), "better than a guess"
    assert 0 <= rows["worst_accuracy"].item() <= rows["accuracy"].item() <= 100
