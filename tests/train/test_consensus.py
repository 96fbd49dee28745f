"""The consensus experiment: its data, its runs, and the figures that follow from the spectrum of the ring."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from train.consensus import (
    SETTLED,
    Experiment,
    best_step_size,
    is_logged,
    largest_difference,
    main,
    ring,
    run,
    significant,
    summarize,
)
from train.consensus_experiment.data import DATA, make_matrices
from train.consensus_experiment.methods import VARIANTS, Variant
from train.job.errors import UsageError


def small(num_workers: int = 4, size: int = 12) -> list[torch.Tensor]:
    return make_matrices("random", num_workers=num_workers, size=size, seed=1, data_dir=Path("nowhere"))


@pytest.mark.parametrize("name", [name for name in DATA if name != "faces"])
def test_matrices_are_functions_of_the_seed_and_differ_between_workers(name: str) -> None:
    first, again = (make_matrices(name, num_workers=3, size=5, seed=2, data_dir=Path("nowhere")) for _ in range(2))
    assert all(x.shape == (5, 5) and x.dtype == torch.float32 for x in first)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])


def test_the_matrices() -> None:
    def make(name: str) -> list[torch.Tensor]:
        return make_matrices(name, num_workers=3, seed=2, data_dir=Path("nowhere"))

    assert make("random")[0].shape == (100, 100)
    assert torch.equal(make("offset")[2], make("random")[2] + 2)
    assert torch.equal(make("lognormal")[1], make("random")[1].exp())
    assert make("sparse")[1].flatten().nonzero().tolist() == [[1]]


def test_faces_are_never_downloaded(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"got no Olivetti faces in .*scikit_learn .*run sklearn.datasets.fetch_olivetti"
    ):
        make_matrices("faces", num_workers=8, data_dir=tmp_path)
    with pytest.raises(ValueError, match=r"got matrix_size=100 for faces, expected the 64 pixels they have"):
        make_matrices("faces", num_workers=8, size=100, data_dir=tmp_path)
    with pytest.raises(ValueError, match=r"got matrix_size=2 for 8 workers, expected an entry for each"):
        make_matrices("sparse", num_workers=8, size=2, data_dir=tmp_path)


def test_best_step_size_of_rings() -> None:
    # I - W of a ring with weights 1/3 has the eigenvalues (2 - 2 cos(2 pi k / n)) / 3, for n = 8 from .19526 to 4/3.
    assert best_step_size(ring(8)) == pytest.approx(2 / ((2 - math.sqrt(2)) / 3 + 4 / 3), abs=1e-6)
    assert best_step_size(ring(2)) == 1.0
    assert best_step_size(ring(1)) == 1.0


def test_points_are_few_and_early() -> None:
    logged = [step for step in range(301) if is_logged(step)]
    assert logged == [*range(10), *range(10, 100, 10), 100, 200, 300]


def test_plain_gossip_contracts_at_the_rate_of_the_spectrum() -> None:
    # W' = I - s (I - W) with the best s contracts the worst direction by (l_n - l_2) / (l_n + l_2) per step.
    matrices = small(num_workers=8)
    least, most = (2 - math.sqrt(2)) / 3, 4 / 3
    rate = ((most - least) / (most + least)) ** 2
    points = run(VARIANTS["plain"], best_step_size(ring(8)), matrices, steps=60, seed=0)
    assert points[0] == {"step": 0, "error": 1.0, "megabits": 0.0, "diverged": False, "message": ""}
    assert points[-1]["error"] < SETTLED
    for point in points:
        assert point["error"] <= rate ** point["step"] * (1 + 1e-3)
        assert point["megabits"] == pytest.approx(2 * 32 * 144 * point["step"] / 1e6)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_method_brings_workers_closer(name: str) -> None:
    matrices = small(num_workers=3)
    before = [x.clone() for x in matrices]
    step_size = 0.05 if VARIANTS[name].is_tuned else best_step_size(ring(3))
    points = run(VARIANTS[name], step_size, matrices, steps=40, seed=0)
    assert points[-1]["error"] < 0.99
    assert not points[-1]["diverged"]
    assert points[-1]["megabits"] > 0
    assert all(torch.equal(x, y) for x, y in zip(matrices, before, strict=True)), "matrices are not changed"


def test_a_run_that_diverges_ends_there() -> None:
    points = run(VARIANTS["choco-topk"], 1.3, small(), steps=500, seed=0)
    assert points[-1]["diverged"]
    assert points[-1]["step"] < 500
    assert not any(point["diverged"] for point in points[:-1])


def test_a_method_that_refuses_to_go_on_ends_its_run_and_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A step of 1.308 on the coarse grid of 2 bits throws neighbours further apart than theta, of which Moniqua knows.
    options = {"methods": ("moniqua-2", "plain"), "step_sizes": (1.308,), "steps": 20, "matrix_size": 10}
    main(Experiment(**options, out_dir=tmp_path))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"got an --out-dir with earlier results \(.*consensus.csv\).*or --overwrite"):
        main(Experiment(**options, out_dir=tmp_path))  # type: ignore[arg-type]
    points = pd.read_csv(tmp_path / "consensus.csv")
    coarse, plain = (points[points["method"] == name] for name in ("moniqua-2", "plain"))
    assert coarse["diverged"].tolist() == [False] * (len(coarse) - 1) + [True]
    assert coarse["step"].is_unique
    assert "differs in an entry by more than theta" in coarse["message"].iloc[-1]
    assert plain["error"].iloc[-1] < 1e-2
    assert not plain["diverged"].any()
    text = capsys.readouterr().out
    assert re.search(r"moniqua-2, step size 1.308: diverged after \d+ steps: .*theta", text)
    assert re.search(r"moniqua-2 .* 1 of 1", text)


def test_every_run_is_written_when_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(method: Variant, step_size: float, matrices: list[torch.Tensor], *, steps: int, seed: int) -> Any:
        if step_size > 1:
            raise KeyboardInterrupt
        return run(method, step_size, matrices, steps=steps, seed=seed)

    monkeypatch.setattr("train.consensus.run", stop)
    with pytest.raises(KeyboardInterrupt):
        main(Experiment(methods=("plain",), step_sizes=(0.5, 1.1), steps=2, num_workers=2, out_dir=tmp_path))
    assert set(pd.read_csv(tmp_path / "consensus.csv")["step_size"]) == {0.5}


def test_a_mistake_in_the_program_is_no_divergence() -> None:
    class Failing(Variant):
        def make(self, *_: Any, **__: Any) -> Any:
            raise TypeError("of the program")

    with pytest.raises(TypeError, match="of the program"):
        run(Failing("dpsgd"), 1.0, small(), steps=2, seed=0)


def test_theta_bounds_the_differences_of_neighbours() -> None:
    matrices = [torch.full((2, 2), value) for value in (0.0, 1.0, 5.0, 1.0)]
    assert largest_difference(matrices, ring(4)) == 4.0
    assert largest_difference([torch.zeros(2, 2)], ring(1)) == 1.0


def test_the_table_takes_the_best_step_size() -> None:
    rows = [
        *[{"method": "a", "step_size": 0.1, "step": s, "error": 0.1**s, "megabits": 2.0 * s} for s in range(4)],
        *[{"method": "a", "step_size": 0.2, "step": s, "error": 0.01**s, "megabits": 2.0 * s} for s in range(3)],
    ]
    text = summarize(pd.DataFrame([{**row, "diverged": False} for row in rows]))
    assert text.splitlines()[1].split() == ["a", "0.2", "1", "2.00", "2", "4.00", "0.0001", "0", "of", "2"]


def test_experiment_writes_points_a_picture_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(
        Experiment(
            methods=("plain", "choco-sign"),
            step_sizes=(0.1, 1.0),
            steps=12,
            num_workers=3,
            matrix_size=8,
            out_dir=tmp_path,
        )
    )
    points = pd.read_csv(tmp_path / "consensus.csv")
    assert points.groupby(["method", "step_size"]).ngroups == 4
    assert (tmp_path / "consensus.png").is_file()
    assert "steps to 0.01" in capsys.readouterr().out


def test_grid_of_step_sizes() -> None:
    experiment = Experiment(num_step_sizes=3)
    assert experiment.step_sizes_of("plain", 1.308) == [1.308]
    assert experiment.step_sizes_of("choco-sign", 1.0) == [0.01, 0.1, 1.0]
    assert Experiment(step_sizes=(0.3,)).step_sizes_of("plain", 1.308) == [0.3]
    assert len(Experiment(methods=("all", "plain")).names) == len(VARIANTS)
    twice = Experiment(methods=("plain", "bfloat16", "plain"), step_sizes=(0.3, 0.1, 0.3))
    assert twice.names == ("plain", "bfloat16")
    assert twice.step_sizes_of("plain", 1.308) == [0.3, 0.1]


def test_unknown_words_are_named() -> None:
    with pytest.raises(ValueError, match=r"got methods=magic, expected all, plain, .*; see --help"):
        Experiment(methods=("plain", "magic"))
    with pytest.raises(ValueError, match=r"got data=cats, expected random, "):
        Experiment(data="cats")
    with pytest.raises(ValueError, match=r"got steps=0, expected 1 or more"):
        Experiment(steps=0)
    for name, value, least in (
        ("num_workers", 1, 2),
        ("num_step_sizes", 1, 2),
        ("seed", -1, 0),
        ("matrix_size", -1, 0),
    ):
        with pytest.raises(ValueError, match=rf"got {name}={value}, expected {least} or more"):
            Experiment(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"got step_sizes=\(-1.0,\), expected positive numbers"):
        Experiment(step_sizes=(-1.0,))


def test_three_significant_digits() -> None:
    numbers = {
        0.0012345: "0.00123",
        0.999: "0.999",
        1.0: "1.00",
        12.345: "12.3",
        123.45: "123",
        1234.5: "1230",
        0: "0.00",
    }
    assert {number: significant(number) for number in numbers} == numbers
