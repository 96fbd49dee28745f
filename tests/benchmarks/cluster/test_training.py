"""What the methods of the emulated cluster learn: shares of images and of text, trainings; and, as root, all of it."""

from __future__ import annotations

import math
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

from benchmarks.cluster.curves import EVALUATE_EVERY, Curves
from benchmarks.cluster.methods import CLUSTER_METHODS, ClusterMethod
from benchmarks.cluster.network.place import Place
from benchmarks.cluster.peers import PERIOD
from benchmarks.cluster.processes import Fleet, TrialError, TrialProcesses
from benchmarks.cluster.trials import Trial
from benchmarks.cluster.workload.delays import Delays
from benchmarks.cluster.workload.image_task import SIZE, ClusterImages, SmallNetwork, SplitImages
from benchmarks.cluster.workload.images import decode
from benchmarks.cluster.workload.language_task import LENGTH, ClusterText
from benchmarks.cluster.workload.split import Split
from benchmarks.cluster.workload.text import encode
from benchmarks.cluster.workload.training import Training, train
from benchmarks.cluster.workload.waited_model import WaitedModel
from benchmarks.contenders import Contender, Loss, PeriodicallyAveraged, Wrapped
from gossip_modules import DiLoCo, GossipDataParallel
from tests.benchmarks.cluster.test_cluster import ROOT, cannot_make_namespaces
from tests.harness.ranks import run_ranks

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


# Text.


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Arrays of two files of numbered lines: to train with and to validate on."""
    (tmp_path / "text").mkdir()
    for name, num in (("train.txt", 400), ("valid.txt", 60)):
        (tmp_path / "text" / name).write_text("".join(f"line {k:03} of a text\n" for k in range(num)))
    encode(tmp_path / "text", tmp_path / "tokens")
    return tmp_path / "tokens"


def test_ranks_share_the_sequences_of_a_pass(text: Path) -> None:
    task, tokens = ClusterText(text), np.load(text / "train.npy")
    assert len(tokens) == 400 * len("line 000 of a text\n") + 2  # with the end of the file, and one before it
    num_train, _ = task.sizes
    streams = [task.batches(rank, 2, size=num_train // 2, seed=3) for rank in range(2)]
    places = {tuple(tokens[start : start + LENGTH]): start for start in range(len(tokens) - LENGTH + 1)}
    assert len(places) == len(tokens) - LENGTH + 1
    passes = []
    for _ in range(2):
        inputs, targets = (torch.cat(parts) for parts in zip(*(next(stream) for stream in streams), strict=True))
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        passes.append([places[tuple(row.tolist())] for row in inputs])
        assert len(set(passes[-1])) == num_train // 2 * 2, "no sequence is two ranks'"
        assert len({start % LENGTH for start in passes[-1]}) == 1, "none overlaps another"
    assert passes[0] != passes[1]
    with pytest.raises(ValueError, match=r"got \d+ sequences of 64 bytes for 2 ranks, expected at least 999 for each"):
        next(task.batches(0, 2, size=999, seed=0))


def test_the_loss_of_a_guess_is_that_of_all_tokens(text: Path) -> None:
    task = ClusterText(text)

    class Guess(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return torch.zeros(*tokens.shape, 259)

    totals = [task.evaluate(Guess(), rank, 2) for rank in range(2)]
    num_tokens = LENGTH * task.sizes[1]  # that are all bytes: the file ends after them
    assert sum(num_bytes for _, num_bytes in totals) == num_tokens
    assert sum(nats for nats, _ in totals) == pytest.approx(num_tokens * math.log(259))
    score = ClusterText.score
    with pytest.raises(ValueError, match=r"got target=6, expected validation loss between 5\.545 and 0 nats per byte"):
        score.check_target(6.0)
    score.check_target(2.0)
    with pytest.raises(ValueError, match="got target=0, expected accuracy between 0 and 100 %"):
        ClusterImages.score.check_target(0.0)


def test_the_small_decoder_has_as_many_parameters_as_it_says(text: Path) -> None:
    network = ClusterText(text).network(1)
    assert sum(p.numel() for p in network.parameters()) == ClusterText.num_parameters
    assert network(torch.zeros(2, LENGTH, dtype=torch.int64)).shape == (2, LENGTH, 259)


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
        task="images",
        data=str(arrays),
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
    assert curve["num_items"] == [6, 6]
    assert curve["mean_loss"][1] < curve["mean_loss"][0]


@pytest.mark.usefixtures("own_group")
@pytest.mark.parametrize("method", ["ddp", "sgp", "streamingdiloco"])
def test_a_rank_alone_learns_a_language_and_its_rate_rises_first(
    method: str, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []
    monkeypatch.setattr(Contender, "step", recorded(Contender.step, rates))
    training = replace(
        training_of(method, text), task="language", num_steps=20, batch_size=4, learning_rate=0.01, evaluate_every=10
    )
    place = Place(0, ["here"], ["here"], dist.HashStore(), 0, timedelta(seconds=60), 0, 0.1)
    curve = train(training, place)
    # Half of the rate in the first of two steps of warm-up; the factor in brackets falls to zero.
    assert rates == pytest.approx([0.01 * min(1, (k + 1) / 2) * (1 - k / 20) for k in range(20)])
    losses = [total / num for total, num in zip(curve["total"], curve["num_items"], strict=True)]
    assert 0 < losses[1] < 3.5, "two nats better than a guess"
    assert training.learning_rate == 0.01


def test_ranks_that_train_alone_are_evaluated_as_their_average() -> None:
    def body(group: dist.ProcessGroup) -> tuple[float, float, float]:
        module = nn.Linear(1, 1, bias=False)
        contender = PeriodicallyAveraged(
            module,
            lambda parameters: torch.optim.SGD(parameters, lr=1.0),
            wrap=lambda x: GossipDataParallel(x, process_group=group, algorithm=DiLoCo(4)),
        )
        start = module.weight.item()
        contender.step(lambda model: model(torch.full((1, 1), float(group.rank()))).sum())  # x <- x - rank
        with contender.evaluation() as model:
            assert not model.training
            average = module.weight.item()
        assert contender.model.training
        own = module.weight.item()
        contender.close()
        return start, average, own

    for rank, (start, average, own) in enumerate(run_ranks(3, body)):
        assert average == pytest.approx(start - 1.0)
        assert own == pytest.approx(start - rank)


def recorded(step: Callable[[Contender, Loss], None], rates: list[float]) -> Callable[[Contender, Loss], None]:
    def recording(self: Contender, loss: Loss) -> None:
        rates.append(self.optimizer.param_groups[0]["lr"])
        step(self, loss)

    return recording


@pytest.mark.usefixtures("own_group")
def test_averages_of_all_ranks_are_a_wait_and_not_rounds() -> None:
    place = Place(0, ["here"], ["here"], dist.HashStore(), 0, timedelta(seconds=60), 1, 0.1)
    place.join()
    for method in ("localsgd", "diloco"):
        contender = CLUSTER_METHODS[method].make(WaitedModel(1e4, compute_seconds=0.0), place)
        split = Split(contender)
        for _ in range(6):
            contender.step(lambda model: model(torch.zeros(())))
        assert set(split.seconds()) == {"optimizer", "wait"}
        assert split.seconds()["wait"] > 0
        contender.close()


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
        Curves(folder, out=tmp_path / "out").main()
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
    options += ["--extra-rates", "0"]
    command = [sys.executable, "-m", "benchmarks.cluster.curves", *options, "--out", str(tmp_path / "out")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = pd.read_csv(tmp_path / "out" / "images.csv")
    assert rows["num_steps"].tolist() == [EVALUATE_EVERY]
    assert rows["mean_loss"].item() < np.log(10), "better than a guess"
    assert 0 <= rows["worst_score"].item() <= rows["score"].item() <= 100
