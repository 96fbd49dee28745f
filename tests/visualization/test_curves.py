"""The overview of a run's curves is drawn from CSV files alone, and looks as all pictures do."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from gossip_modules.methods import METHODS
from tests.harness.finished_runs import TEXT_METRICS, write_run
from visualization import style
from visualization.curves import draw, draw_run, main


def lines_of(axis: Axes) -> list[list[tuple[float, float]]]:
    return [[(float(x), float(y)) for x, y in np.asarray(line.get_xydata())] for line in axis.get_lines()]


def test_curves_of_one_run(tmp_path: Path, figures: list[Figure]) -> None:
    path = draw_run(write_run(tmp_path / "run"))
    assert path == tmp_path / "run" / "curves.png"
    with Image.open(path) as image:
        assert image.width >= 1000
    errors, errors_over_time, losses, distances = figures[0].axes
    validated = [1, 3, 4]
    drawn: dict[Axes, tuple[Any, Any]] = {
        errors: (validated, [9, 1, 0]),
        errors_over_time: ([2.5, 6.5, 8.5], [9, 1, 0]),  # seconds: mean over ranks
        losses: ([1, 2, 3, 4], [1, 1 / 2, 1 / 3, 1 / 4]),
        distances: (validated, [0.1, 0.05, 0.025]),
    }
    for axis, (xs, ys) in drawn.items():
        (line,) = axis.get_lines()
        np.testing.assert_allclose(np.asarray(line.get_xydata()), np.column_stack([xs, ys]))
    assert errors.get_xlabel() == "epoch"
    assert errors_over_time.get_xlabel() == "training time [s]"
    assert distances.get_yscale() == "log"


def test_the_title_has_run_and_method_and_the_floor_of_the_loss(tmp_path: Path, figures: list[Figure]) -> None:
    folder = write_run(tmp_path / "mine")
    summary = json.loads((folder / "summary.json").read_text())
    summary["config"] |= {"dataset": "digits", "label_smoothing": 0.1}
    (folder / "summary.json").write_text(json.dumps(summary))
    draw_run(folder)
    assert figures[0].get_suptitle().startswith("mine: SGP, 2 ranks, digits, seed 1\n")
    losses = figures[0].axes[2]
    labels = np.full(10, 0.01)
    labels[0] += 0.9
    # The loss of a model whose probabilities are the smoothed labels themselves.
    floor = float(-(labels * np.log(labels)).sum())
    np.testing.assert_allclose([y for _, y in lines_of(losses)[0]], [1 / epoch - floor for epoch in range(1, 5)])
    assert losses.get_title() == "Training loss by epoch\nabove its floor of 0.50"
    assert losses.get_yscale() == "log"
    summary["config"]["dataset"] = "imagefolder"  # of how many classes is not known
    (folder / "summary.json").write_text(json.dumps(summary))
    draw_run(folder)
    assert lines_of(figures[1].axes[2])[0] == [(epoch, 1 / epoch) for epoch in range(1, 5)]
    (folder / "summary.json").unlink()
    draw_run(folder)
    assert figures[2].get_suptitle().startswith("mine, 2 ranks\n")


def test_curves_of_a_translation(tmp_path: Path, figures: list[Figure]) -> None:
    draw_run(write_run(tmp_path / "run", metrics=TEXT_METRICS))
    titles = [axis.get_title() for axis in figures[0].axes]
    assert titles[:2] == ["Test negative log-likelihood", "Test BLEU"]
    assert [axis.get_ylim()[0] for axis in figures[0].axes[:2]] == [0, 0]
    assert lines_of(figures[0].axes[0]) == [[(10, 3.5), (30, 1.5), (40, 1.0)]]
    assert lines_of(figures[0].axes[1]) == [[(10, 1), (30, 20), (40, 30)]]


def test_the_band_is_from_the_lowest_rank_to_the_highest(tmp_path: Path, figures: list[Figure]) -> None:
    folder = write_run(tmp_path / "run")
    table = pd.read_csv(folder / "rank_0001.csv")
    table["own_test_accuracy_percent"] -= 6
    table.to_csv(folder / "rank_0001.csv", index=False)
    draw_run(folder)
    (band,) = figures[0].axes[0].collections
    vertices = {tuple(vertex) for vertex in np.asarray(band.get_paths()[0].vertices).tolist()}
    assert {(1, 10), (1, 16), (3, 2), (3, 8), (4, 0), (4, 6)} == vertices


def test_runs_side_by_side_with_one_that_has_no_distance(tmp_path: Path, figures: list[Figure]) -> None:
    runs = {name: write_run(tmp_path / name, distance=d) for name, d in (("ar", 0.0), ("sgp", 0.1))}
    assert draw(runs, tmp_path / "both.png").is_file()
    assert figures[0].axes[3].get_title().endswith("\n0 throughout: ar")
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["ar", "sgp"]


def test_running_runs_are_drawn_and_broken_ones_are_a_warning(tmp_path: Path, figures: list[Figure]) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "summary.json").unlink()
    path = folder / "rank_0001.csv"
    path.write_text(path.read_text()[:-3])
    with pytest.warns(UserWarning, match=r"rank_0001\.csv:5: got a line without its end"):
        draw_run(folder)
    assert len(lines_of(figures[0].axes[2])[0]) == 4


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(write_run(tmp_path / name)) for name in ("a", "b")]
    monkeypatch.setattr(sys, "argv", ["curves", *folders, "--output", str(tmp_path / "c.png")])
    assert main() == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "c.png")
    monkeypatch.setattr(sys, "argv", ["curves", str(tmp_path / "none")])
    assert main() == 2
    assert "none: got no rank_*.csv" in capsys.readouterr().err


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match="got no row"),
        pytest.raises(ValueError, match=r"got no run to draw:\n.*expected rank_\*\.csv of a run"),
    ):
        draw_run(tmp_path)
    bare = pd.DataFrame({"epoch": [1], "step": [1], "time_seconds": [1.0]} | dict.fromkeys(("loss", "own_steps"), None))
    bare.assign(bytes_sent=1.0, consensus_distance=None).to_csv(tmp_path / "rank_0000.csv", index=False)
    with pytest.raises(ValueError, match=r"without a single value of averaged_test_accuracy_percent, .*begun"):
        draw_run(tmp_path)


def test_runs_that_differ_in_the_seed_are_one_line_with_a_band(tmp_path: Path, figures: list[Figure]) -> None:
    runs = {}
    for seed, distance in ((1, 0.1), (2, 0.3)):
        folder = runs[f"sgp_{seed}"] = write_run(tmp_path / f"sgp_{seed}", distance=distance)
        summary = json.loads((folder / "summary.json").read_text())
        summary["config"]["seed"] = seed
        (folder / "summary.json").write_text(json.dumps(summary))
    runs["ar"] = write_run(tmp_path / "ar", recipe="ar")
    draw(runs, tmp_path / "all.png")
    distances = figures[0].axes[3]
    assert [line.get_label() for line in distances.get_lines()] == ["sgp_1, 2 seeds", "ar"]
    np.testing.assert_allclose([y for _, y in lines_of(distances)[0]], [0.2, 0.1, 0.05])
    (band,) = distances.collections
    vertices = np.asarray(band.get_paths()[0].vertices)
    assert (vertices[:, 1].min(), vertices[:, 1].max()) == pytest.approx((0.025, 0.3))
    assert figures[0].get_suptitle().startswith("2 runs\n")


def test_lines_are_told_apart_without_colour_and_settings_are_put_back() -> None:
    looks = [style.line_style(index, 5) for index in range(28)]
    assert len({(look["color"], str(look["linestyle"])) for look in looks}) == 28
    for kind, count in (("color", 7), ("marker", 9), ("linestyle", 4)):
        assert len({str(look[kind]) for look in looks}) == count
    before = mpl.rcParams["font.size"]
    with style.styled():
        sizes = [mpl.rcParams[name] for name in ("font.size", "xtick.labelsize", "legend.fontsize", "axes.labelsize")]
    assert min(sizes) >= 7
    assert mpl.rcParams["font.size"] == before


def test_every_method_has_one_colour_of_its_own_and_is_found_by_its_names() -> None:
    colors = [method.color for method in style.METHOD_STYLES.values()]
    assert len(set(colors)) == len(colors)
    assert not set(colors) & set(style.OTHERS)
    channels = np.array([to_rgb(color) for color in (*colors, *style.OTHERS)])
    apart = np.abs(channels[:, None] - channels[None]).sum(-1) + np.eye(len(channels))
    assert apart.min() > 0.15, "no two are nearly the same"
    named = {
        "AllReduce": "ar",
        "DDP, fp16 hook": "ar",
        "periodic D-PSGD": "dpsgd",
        "plain": "dpsgd",
        "digits_sgp": "sgp",
        "OSGP, bfloat16 on the wire": "osgp",
        "AD-PSGD": "adpsgd",
        "power-r1-i1": "powergossip",
        "runs/ar": "ar",
        "local SGD, average every 4": "localsgd",
        "no communication": "none",
        "fairscale SlowMo on SGP": "slowmo",
        "Decent-DP, ring": None,
        "hivemind averager": None,
        "cargo": None,
    }
    assert {label: style.method_of(label) for label in named} == named
    assert {style.method_of(method.title) for method in style.METHOD_STYLES.values()} == set(style.METHOD_STYLES)


def test_every_method_of_the_registry_has_a_look_and_one_title() -> None:
    titles = {name: method.title for name, method in METHODS.items()}
    assert titles == {name: style.METHOD_STYLES[name].title for name in titles}


def test_a_method_keeps_its_colour_beside_others_and_its_variants_have_other_marks() -> None:
    alone = style.method_styles(["D-PSGD"])["D-PSGD"]
    looks = style.method_styles(["SGP", "CHOCO, signs", "D-PSGD", "CHOCO, top 1 %", "Decent-DP"])
    assert looks["D-PSGD"]["color"] == alone["color"] == style.METHOD_STYLES["dpsgd"].color
    assert looks["CHOCO, signs"]["color"] == looks["CHOCO, top 1 %"]["color"]
    assert looks["CHOCO, signs"]["marker"] != looks["CHOCO, top 1 %"]["marker"]
    assert looks["Decent-DP"]["color"] in style.OTHERS
    assert style.method_styles(["x"], ["sgp"])["x"]["color"] == style.METHOD_STYLES["sgp"].color


def test_numbers_of_a_logarithmic_axis_do_not_overprint() -> None:
    for values in ([0.05, 0.1], [0.11, 0.19], [0.082, 0.15], [3.0, 200.0], [1e-3, 9e4]):
        figure = style.new_figure(style.COLUMN)
        axis = figure.subplots()
        axis.plot(values, values)
        style.log_scale(axis, "x")
        figure.draw_without_rendering()
        boxes = [text.get_window_extent() for text in axis.get_xticklabels(which="both") if text.get_text()]
        inside = sorted((box for box in boxes if 0 <= box.x0 <= figure.bbox.width), key=lambda box: box.x0)
        assert len(inside) >= 2
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(inside))


def test_percents_are_shown_by_whole_tens() -> None:
    assert style.percent_limits([98.1, 98.6]) == (90, 100)
    assert style.percent_limits([49.9, 62.7]) == (40, 70)
    assert style.percent_limits([100.0, float("nan")]) == (90, 100)


def test_many_points_have_few_markers() -> None:
    assert style.line_style(3, 1000)["markevery"] == [999]
    assert style.line_style(3, 4)["markevery"] == [0, 1, 2, 3]


def test_legends_are_as_wide_as_the_figure() -> None:
    assert style.legend_columns(["sgp"] * 3, style.COLUMN) == 3
    assert style.legend_columns(["wagma-group-4"] * 5, style.COLUMN) == 2
    assert style.legend_columns(["x" * 200], style.COLUMN) == 1


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_equal_data_make_equal_files(ending: str, tmp_path: Path) -> None:
    contents = []
    for name in ("a", "b"):
        with style.styled():
            figure = style.new_figure()
            axis = figure.subplots()
            axis.plot([1, 2], [3, 4], label="x")
            contents.append(style.save(figure, tmp_path / f"{name}.{ending}").read_bytes())
    assert contents[0] == contents[1]
