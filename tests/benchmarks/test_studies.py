"""Studies: rates are tuned alike, trainings that have ended are not run again, and all methods of the tables train."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from benchmarks.pages import image_studies, study_tables, uneven_studies
from benchmarks.pages.study_tables import ends, progress
from benchmarks.record import DTYPES, PROVENANCE
from benchmarks.studies import __main__ as studies
from benchmarks.studies import images, study, uneven
from benchmarks.studies.crossover import BATCH, CROSSOVER, NUM_IMAGES
from benchmarks.studies.ends import split_ends
from benchmarks.studies.study import COLUMNS, Study, Trainings
from gossip_modules import DiLoCo
from gossip_modules.lab import Compute, LabPlan, LabTask, Network, Setting
from gossip_modules.lab.comparison import LabTraining


class Line:
    """A task whose best rate is known: the loss is (x - 1)^2 / 2 for all batches."""

    data = "0123"

    def model(self) -> nn.Module:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) - 1).square().mean() / 2

    def batch(self, worker: int, step: int, generator: torch.Generator) -> Tensor:
        return torch.ones(1, 1)

    def optimizer(self, parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=rate)

    def score(self, model: nn.Module) -> tuple[float, float]:
        error = abs(float(model(torch.ones(1, 1))) - 1)
        return error, 2 * error


LINE = Study(
    Line,
    lambda workers: {"all-reduce": "ar", "SGP": "sgp"},
    cells=((2, 20, 1), (2, 20, 2)),
    rates=(0.05, 0.1),
    tuning=0.5,
    points=4,
)


def run(monkeypatch: pytest.MonkeyPatch, path: Path, *options: str, study: Study = LINE) -> int:
    monkeypatch.setattr(studies, "STUDIES", {"line": study})
    return studies.main(["line", "--output", str(path), *options])


def test_a_quick_study_trains_each_method_for_a_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "line.csv"
    assert run(monkeypatch, path, "--quick") == 0
    rows = pd.read_csv(path, dtype=DTYPES)
    assert set(rows["method"]) == {"all-reduce", "SGP"}
    assert set(zip(rows["workers"], rows["steps"], rows["rate"], rows["is_tuning"])) == {(2, 8, 0.05, False)}


def test_methods_are_chosen_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "line.csv"
    assert run(monkeypatch, path, "--quick", "--methods", "SGP") == 0
    assert set(pd.read_csv(path, dtype=DTYPES)["method"]) == {"SGP"}
    with pytest.raises(SystemExit):
        run(monkeypatch, path, "--methods", "SGP", "sgp")
    assert "got methods ['sgp'], expected some of ['SGP', 'all-reduce']" in capsys.readouterr().err


def test_whole_trainings_that_choose_a_rate_are_those_of_the_first_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, num_trainings = tmp_path / "line.csv", list[int]()
    train = study.by_compare

    def counted(*args: Any) -> list[dict[str, Any]]:
        num_trainings.append(1)
        return train(*args)

    monkeypatch.setattr(study, "by_compare", counted)
    assert run(monkeypatch, path, study=replace(LINE, tuning=1.0)) == 0
    rows = pd.read_csv(path, dtype=DTYPES)
    tuning, curves = rows[rows["is_tuning"]], rows[~rows["is_tuning"]]
    assert len(num_trainings) == 2 * (4 + 1)  # of two methods: four rates, and the second seed
    assert curves.groupby(["method", "seed"])["rate"].agg(set).map(len).eq(1).all()
    first = curves[curves["seed"] == 1].drop(columns="is_tuning").merge(tuning.drop(columns="is_tuning"))
    assert len(first) == len(curves) / 2 == 2 * 4


def test_numbers_of_workers_that_a_study_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path / "line.csv", "--workers", "3")
    assert "got --workers [3], expected some of [2]" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path / "line.csv", "--seeds", "3")
    assert "got --seeds [3], expected some of [1, 2]" in capsys.readouterr().err
    assert LINE.seeded([2]).cells == ((2, 20, 2),)
    assert LINE.of([2]) == LINE


def test_a_study_tunes_each_method_alike_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "line.csv"
    assert run(monkeypatch, path, "--minutes", "0") == 3
    assert not path.exists()
    assert run(monkeypatch, path) == 0
    rows = pd.read_csv(path, dtype=DTYPES)
    assert list(rows) == [*PROVENANCE, *COLUMNS]
    assert set(rows["data"]) == {"0123"}
    for method, own in rows.groupby("method"):
        tuning, curves = own[own["is_tuning"]], own[~own["is_tuning"]]
        assert tuning["rate"].tolist() == [0.05, 0.1, 0.2, 0.4], method  # on while the best is the highest
        assert set(tuning["seed"]) == {1}
        assert set(tuning["step"]) == {10}
        assert set(curves["rate"]) == {0.4}
        assert curves.groupby("seed")["step"].apply(list).to_dict() == {1: [5, 10, 15, 20], 2: [5, 10, 15, 20]}
        np.testing.assert_allclose(curves["test"], 2 * curves["validation"])
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    changing = ["date", "cpu_seconds"]
    for num_lost in (4, 2):  # the last training, and a part of it
        path.write_text("".join(lines[:-num_lost]))
        assert run(monkeypatch, path) == 0
        again = pd.read_csv(path, dtype=DTYPES)
        assert len(again) == len(rows) + 4 - num_lost
        again = again.drop_duplicates(["method", "is_tuning", "rate", "seed", "step"], ignore_index=True)
        pd.testing.assert_frame_equal(again.drop(columns=changing), rows.drop(columns=changing))


@pytest.mark.parametrize(
    ("found", "rate"),
    [
        ({}, 0.05),
        ({0.05: 3.0}, 0.1),
        ({0.05: 3.0, 0.1: 2.0}, 0.2),
        ({0.05: 2.0, 0.1: 3.0}, 0.025),
        ({0.05: 3.0, 0.1: 2.0, 0.2: float("inf")}, None),
        ({0.05: 4.0, 0.1: 3.0, 0.2: 2.0, 0.4: 1.0}, None),
    ],
)
def test_next_rate(found: Mapping[float, float], rate: float | None) -> None:
    assert LINE.next_rate(found) == rate


def test_only_the_best_candidate_is_trained_to_the_end(tmp_path: Path) -> None:
    rates = {"outer rate 0.1": 0.1, "outer rate 1": 1.0}
    outer = {name: DiLoCo(sync_every=2, lr=lr, momentum=0.0) for name, lr in rates.items()}
    study = replace(LINE, methods=lambda workers: {"all-reduce": "ar", **outer}, candidates=frozenset(outer))
    assert Trainings(study, tmp_path / "line.csv", 1.0).run()
    rows = pd.read_csv(tmp_path / "line.csv")
    tuning, ends = rows[rows["is_tuning"]], rows[~rows["is_tuning"] & (rows["step"] == 20)]
    assert set(tuning["method"]) == {"all-reduce", *outer}
    expected = [["all-reduce", 1], ["outer rate 1", 1], ["all-reduce", 2], ["outer rate 1", 2]]
    assert ends[["method", "seed"]].to_numpy().tolist() == expected
    assert Trainings(study, tmp_path / "line.csv", -1.0).run()  # nothing is left


def test_without_tuning_all_rates_are_trained_with_all_seeds(tmp_path: Path) -> None:
    assert Trainings(replace(LINE, tuning=0), tmp_path / "line.csv", 1.0).run()
    rows = pd.read_csv(tmp_path / "line.csv")
    assert not rows["is_tuning"].any()
    found = rows[rows["step"] == 20][["method", "rate", "seed"]].itertuples(index=False, name=None)
    methods = ("all-reduce", "SGP")
    assert sorted(found) == sorted((m, rate, seed) for m in methods for rate in (0.05, 0.1) for seed in (1, 2))


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive of few images, one colour for each class."""
    for split, count in (("train", 3), ("test", 1)):
        for label in range(10):
            for number in range(count):
                path = tmp_path / split / str(label) / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                pixels = np.full((32, 32, 3), 25 * label, np.uint8)
                pixels[:, :16] = 0
                Image.fromarray(pixels).save(path)
    with tarfile.open(tmp_path / images.ARCHIVE, "w:gz") as tar:
        for split in ("train", "test"):
            tar.add(tmp_path / split, arcname=split)
    monkeypatch.setenv("GOSSIP_DATA", str(tmp_path))
    monkeypatch.setattr(images, "NUM_VALIDATION", 10)


@pytest.mark.usefixtures("archive")
def test_images_are_split_scaled_and_mirrored() -> None:
    task = images.SmallImages(4, normalizes=True)
    assert [len(labels) for _, labels in task.splits] == [10, 10]
    assert task.images.shape == (40, 16, 16, 3)
    torch.testing.assert_close(task.images[:20].flip(2), task.images[20:])
    found = torch.cat([task.splits[0][1], task.labels[:20]]).sort().values
    assert found.tolist() == [label for label in range(10) for _ in range(3)]
    scaled, labels = task.batch(0, 0, torch.Generator().manual_seed(0))
    assert scaled.shape == (4, 16, 16, 3)
    assert labels.shape == (4,)
    validation, test = task.score(task.model().eval())
    assert 0 <= min(validation, test) <= max(validation, test) <= 100


@pytest.mark.usefixtures("archive")
@pytest.mark.parametrize("name", images.IMAGES)
def test_the_lab_trains_all_methods_of_a_study(name: str) -> None:
    study = images.IMAGES[name]
    task: Any = study.task()
    own = LabTask(task.model, task.loss, task.batch, lambda parameters: task.optimizer(parameters, 0.1))
    workers = min(n for n, *_ in study.cells)
    for method, what in study.methods(workers).items():
        setting = Setting(workers, study.num_parameters, study.compute, study.network)
        training = LabTraining(LabPlan.of(what), setting, own)
        for _ in training.run(1):
            pass
        assert training.models.by == "vmap", method


@pytest.mark.usefixtures("archive")
@pytest.mark.parametrize(("name", "workers"), [("uneven_data", 16), ("uneven_workers", 3), ("uneven_workers", 25)])
def test_the_lab_trains_all_methods_on_their_split(name: str, workers: int) -> None:
    task = uneven.UnevenImages(2).split("alpha 0.1", workers, seed=1)
    own = LabTask(task.model, task.loss, task.batch, lambda parameters: task.optimizer(parameters, 0.1))
    methods = {each.partition(": ")[2]: what for each, what in uneven.UNEVEN[name].methods(workers).items()}
    for method, what in methods.items():
        training = LabTraining(LabPlan.of(what), Setting(workers, None, Compute(0.1), Network("1 Gbit/s")), own)
        for _ in training.run(1):
            pass
        assert training.models.by == "vmap", method


@pytest.mark.usefixtures("archive")
def test_a_training_has_the_split_that_its_name_begins_with(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[tuple[np.ndarray, int]]()
    monkeypatch.setattr(uneven, "by_compare", lambda study, task, key, seed: seen.append((task.shards.numpy(), seed)))
    study = uneven.UNEVEN["uneven_workers"]
    task: Any = study.task()
    uneven.on_split(study, task, {"method": "alike: SGP", "workers": 5}, 2)
    assert seen[0][1] == 2
    np.testing.assert_array_equal(seen[0][0], uneven.SPLITS["alike"](task.labels.numpy(), 5, 2))


@pytest.mark.parametrize("name", uneven.SPLITS)
def test_a_split_has_each_image_once(name: str) -> None:
    labels = np.random.default_rng(0).permutation(np.arange(960) % 10)
    shards, again, other = (uneven.SPLITS[name](labels, 16, seed) for seed in (1, 1, 2))
    assert sorted(shards.flat) == list(range(960))
    np.testing.assert_array_equal(shards, again)
    assert (shards != other).any()
    num_classes = [len(set(labels[shard])) for shard in shards]
    if name == "1-2 classes":
        assert set(num_classes) == {1, 2}
    elif name == "alike":
        assert min(num_classes) == 10


@pytest.mark.usefixtures("archive")
def test_a_worker_draws_from_its_own_shard() -> None:
    whole = uneven.UnevenImages(32)
    task = whole.split("1-2 classes", 10, seed=1)
    assert task.images is whole.images
    for worker in range(10):
        images_, labels = task.batch(worker, 0, torch.Generator().manual_seed(0))
        assert images_.shape == (32, 16, 16, 3)
        assert set(labels.tolist()) <= set(task.labels[task.shards[worker]].tolist())


def test_all_numbers_of_workers_of_the_crossover_learn_from_equal_numbers_of_images() -> None:
    for workers, steps, _ in CROSSOVER["crossover"].cells:
        assert workers * steps * BATCH == NUM_IMAGES


def test_two_workers_are_late_in_each_step() -> None:
    compute, workers = images.TwoLate(0.6), np.arange(64)
    for step in range(20):
        seconds = compute.step_seconds(step, workers)
        assert sorted(seconds) == pytest.approx([0.6] * 62 + [0.92] * 2)
    assert (compute.step_seconds(0, workers) != compute.step_seconds(1, workers)).any()


def test_data_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOSSIP_DATA", raising=False)
    with pytest.raises(ValueError, match="expected it; set GOSSIP_DATA"):
        images.SmallImages(4, normalizes=True)


def rows_of(errors: Mapping[tuple[str, int], float], **others: Any) -> pd.DataFrame:
    """Rows of trainings of 8 workers by method and seed, and of a point before the end."""
    shared = {"workers": 8, "rate": 0.1, "steps": 20, "is_tuning": False, "megabytes": 2.0, "seconds": 4.0, **others}
    return pd.DataFrame(
        {**shared, "method": method, "seed": seed, "step": step, "test": error, "validation": error}
        for (method, seed), error in errors.items()
        for step in (10, 20)
    )


def test_gaps_are_those_of_common_seeds() -> None:
    rows = rows_of({("a", 1): 40.0, ("a", 2): 20.0, ("b", 1): 41.0, ("b", 2): 22.0, ("c", 1): 40.5})
    found = ends(rows, "a").set_index("method")
    assert found["gap"].to_dict() == pytest.approx({"a": 0.0, "b": 1.5, "c": 0.5})
    assert found["seeds"].to_dict() == {"a": 2, "b": 2, "c": 1}
    assert found["accuracy"].to_dict() == pytest.approx({"a": 70.0, "b": 68.5, "c": 59.5})


def test_gaps_are_compared_before_rounding() -> None:
    assert image_studies.within(float(np.float32(41.23)) - float(np.float32(40.23)), 1.0)
    assert not image_studies.within(1.01, 1.0)  # an image of 10,000


def test_a_page_says_how_many_trainings_have_run() -> None:
    rows = rows_of({("a", 1): 40.0})
    assert progress(rows, 1) == ""
    assert progress(rows, 3).startswith("The study has 1 of its 3 trainings.")
    for studies_, expected in ((images.IMAGES, image_studies.PLANNED), (uneven.UNEVEN, uneven_studies.PLANNED)):
        planned = {name: sum(len(study.methods(n)) for n, *_ in study.cells) for name, study in studies_.items()}
        assert planned == expected


def test_a_study_has_a_page_once_the_trainings_of_its_first_sentence_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_tables, "RESULTS", tmp_path)
    for name, needed in image_studies.NEEDED.items():
        found = [rows_of({(method, 1): 40.0}, workers=workers) for method, workers in sorted(needed)]
        for rows, has_page in ((found[:-1], False), (found, True)):
            (tmp_path / f"{name}.csv").touch()
            own = pd.concat([rows_of({("other", 1): 1.0}, is_tuning=True), *rows]).assign(waiting=0.1)
            monkeypatch.setattr(study_tables, "rows_of", lambda csv, own=own: own)
            assert (name in image_studies.pages()) == has_page, name
            (tmp_path / f"{name}.csv").unlink()


def test_matcha_is_compared_on_the_seeds_that_have_a_target() -> None:
    errors = {("graph 0, budget 0.5", 1): 9.0, ("graph 0, budget 0.5", 2): 9.0, ("graph 0, budget 1", 1): 9.0}
    found = image_studies.matcha_ends(rows_of(errors)).set_index("budget")
    assert found["seeds"].to_dict() == {0.5: 1, 1.0: 1}
    assert found["seconds_to"].to_dict() == {0.5: 4.0, 1.0: 4.0}


def test_a_method_is_compared_with_all_reduce_on_the_same_split() -> None:
    errors = {("alpha 1: all-reduce", 1): 40.0, ("alpha 1: all-reduce", 2): 42.0, ("alpha 1: SGP", 1): 41.0}
    rows = rows_of({**errors, ("alpha 1: SGP", 2): 45.0, ("alpha 0.1: all-reduce", 1): 50.0}, workers=16)
    found = split_ends(rows, "alpha 1").set_index("method")
    assert found["gap"].to_dict() == pytest.approx({"all-reduce": 0.0, "SGP": 2.0})
    assert found["spread"].to_dict() == pytest.approx({"all-reduce": 2**0.5, "SGP": 8**0.5})
    assert uneven_studies.accuracy_text(found.loc["SGP"]) == "57.0 ± 2.8"
    alone = split_ends(rows, "alpha 0.1").iloc[0]
    assert uneven_studies.accuracy_text(alone) == "50.0"


def test_the_pages_of_uneven_studies_have_the_gaps_of_their_rows() -> None:
    errors = {
        (f"{split}: {name}", seed): 40.0 + gap
        for split in uneven.SKEWED
        for name, gap in (("all-reduce", 0.0), ("SGP", 3.0), ("RelaySGD", 1.0), ("D-PSGD", 6.0))
        for seed in (1, 2)
    }
    said = uneven_studies.data_said(rows_of(errors, workers=16))
    first = "RelaySGD on two trees ends 1.0 points below all-reduce, SGP on the exponential graph 3.0"
    assert f"{first} and D-PSGD on a ring 6.0.**" in said
    assert "Compare the methods on the ring with D-PSGD: D-PSGD 6.0." in said
    assert "All-reduce reaches 60.0, 60.0 and 60.0 % with alpha 1, alpha 0.1 and 1-2 classes" in said
    assert said.endswith("Seeds: 2.")
    fewer = {(name, seed): error for (name, seed), error in errors.items() if seed == 1 or "classes" not in name}
    said = uneven_studies.data_said(rows_of(fewer, workers=16))
    assert said.endswith("Seeds: 2 with alpha 1, 2 with alpha 0.1 and 1 with 1-2 classes.")
    assert uneven_studies.unsigned(-0.02) == "0.0"
    names = [name for name in uneven.on_base_graphs(25) if name.startswith("Base")]
    gaps = {"all-reduce": 0.0, "SGP": 2.0, **dict(zip(names, (3.0, 1.5, -0.5), strict=True))}
    few = rows_of({(f"alike: {name}", 1): 50.0 + gap / 2 for name, gap in gaps.items()}, workers=5)
    many = rows_of({(f"alike: {name}", 1): 40.0 + gap for name, gap in gaps.items()}, workers=25)
    said = uneven_studies.numbers_said(pd.concat([few, many], ignore_index=True))
    assert "ends 2.0 points below all-reduce" in said
    assert "3.0 with 1 peer, 1.5 with 2 peers and -0.5 with 4 peers.**" in said
