"""The figures of the papers: which of them are drawn from which runs, and what is in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.harness.finished_runs import TEXT_METRICS, rank_table, write_run
from visualization.logs.runs import LoggedRun
from visualization.panels.panel import ACCURACY_BYTES, ERROR_EPOCHS, unit_of
from visualization.panels.scaling import scaling_points, seconds_per_step, why_not
from visualization.plot import FIGURES, Plot, main
from visualization.report import Report
from visualization.spectra import Spectra
from visualization.style import add_legend
from visualization.topology import Topology

IMAGE_FIGURES = {"error_epochs", "error_time", "loss_epochs", "loss_time", "accuracy_bytes", "consensus"}
TEXT_FIGURES = {"consensus", "nll_steps", "bleu_steps", "bleu_bytes"}


@pytest.mark.parametrize(
    ("metrics", "wanted", "expected"),
    [(None, FIGURES, IMAGE_FIGURES), (TEXT_METRICS, [name for name in FIGURES if "loss" not in name], TEXT_FIGURES)],
)
def test_columns_with_data_are_drawn(
    metrics: dict[str, list[float | None]] | None,
    wanted: Sequence[str],
    expected: set[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    figures: list[Figure],
) -> None:
    for recipe in ("sgp", "ar"):
        write_run(tmp_path / "runs" / recipe, recipe=recipe, metrics=metrics)
    assert main(Plot((tmp_path / "runs",), out_dir=tmp_path / "out", format="svg", figures=tuple(wanted))) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f"{name}.svg" for name in expected}
    said = capsys.readouterr().out
    for name in set(wanted) - expected:
        assert f"not drawn: {name}: " in said
    assert "not drawn: scaling: it needs runs of at least two world sizes, got of 2 ranks" in said
    for figure in figures:
        (axis,) = figure.axes
        assert axis.get_xlabel()
        assert axis.get_ylabel()
        assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ar", "sgp"]
        assert figure.get_figwidth() == 3.3
        assert_inside(figure)


def assert_inside(figure: Figure) -> None:
    """Every text lies within the picture, a pixel for rounding."""
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    width, height = figure.bbox.size
    texts = [*(text for legend in figure.legends for text in legend.get_texts())]
    for axis in figure.axes:
        texts += [axis.title, axis.xaxis.label, axis.yaxis.label]
    for text in texts:
        box = text.get_window_extent(renderer)
        assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= -1, text.get_text()


def test_figures_may_be_chosen_and_must_exist(tmp_path: Path) -> None:
    write_run(tmp_path / "sgp")
    assert main(Plot((tmp_path,), out_dir=tmp_path / "out", figures=("consensus",))) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["consensus.png"]
    with pytest.raises(ValueError, match=r"got figures=\['x'\], expected some of error_epochs"):
        Plot((tmp_path,), figures=("x",))
    with pytest.raises(ValueError, match="got no run, expected folders of runs"):
        Plot(())


def test_command_lines_are_understood() -> None:
    plot = tyro.cli(Plot, args=["a", "b", "--figures", "scaling", "consensus", "--format", "pdf"])
    assert plot == Plot((Path("a"), Path("b")), figures=("scaling", "consensus"), format="pdf")
    assert tyro.cli(Report, args=["a"]) == Report(Path("a"))
    assert tyro.cli(Topology, args=["--graph", "torus", "--peers", "2"]) == Topology("torus", peers=2)
    assert tyro.cli(Spectra, args=["--sizes", "4", "8"]) == Spectra(sizes=(4, 8))


def test_broken_logs_are_named_and_the_rest_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "good")
    broken = write_run(tmp_path / "broken") / "rank_0001.csv"
    broken.write_text(broken.read_text()[:-4])
    options = Plot((tmp_path / "good", tmp_path / "broken", tmp_path / "none"), tmp_path / "out", figures=FIGURES[:1])
    assert main(options) == 1
    out, err = capsys.readouterr()
    assert f"drew {tmp_path / 'out' / 'error_epochs.png'}" in out
    assert f"error: {broken}:5: got a line without its end" in err
    assert f"error: {tmp_path / 'none'}: got no rank_*.csv" in err
    assert main(Plot((tmp_path / "none",), tmp_path / "out")) == 2


def run_of(table: pd.DataFrame, *, recipe: str | None = "sgp", world_size: int = 1) -> LoggedRun:
    summary = {"config": {"recipe": recipe}, "world_size": world_size} if recipe else {}
    return LoggedRun(f"{recipe}{world_size}", Path(), table.assign(rank=0), summary)


def test_seconds_per_step_leave_out_the_first_epoch() -> None:
    table = pd.DataFrame({"own_steps": [10, 20, 40], "time_seconds": [9.0, 10.0, 12.0], "epoch": [1, 2, 3]})
    assert seconds_per_step(run_of(table)) == pytest.approx(0.1)
    assert seconds_per_step(run_of(table[:1])) == pytest.approx(0.9)
    assert seconds_per_step(run_of(table.assign(own_steps=0))) is None
    assert seconds_per_step(run_of(table.drop(columns="own_steps"))) is None


def test_time_per_iteration_against_ranks(tmp_path: Path, figures: list[Figure]) -> None:
    for recipe in ("sgp", "ar"):
        for num_ranks in (1, 2, 4):
            write_run(tmp_path / f"{recipe}{num_ranks}", recipe=recipe, num_ranks=num_ranks)
    write_run(tmp_path / "again", recipe="ar", num_ranks=4, steps_per_epoch=5)
    assert main(Plot((tmp_path,), out_dir=tmp_path / "out", figures=("scaling",))) == 0
    (axis,) = figures[0].axes
    lines = {container.get_label(): container.lines[0] for container in axis.containers}  # type: ignore[attr-defined]
    # Two seconds an epoch, of 10 steps, and of 5 in one of the runs.
    for recipe, milliseconds in (("sgp", [200, 200, 200]), ("ar", [200, 200, 300])):
        points = np.asarray(lines[recipe].get_xydata())
        np.testing.assert_allclose(points, np.column_stack([[1, 2, 4], milliseconds]))
    assert [text.get_text() for text in axis.get_xticklabels()] == ["1", "2", "4"]


def test_scaling_needs_the_recipe_and_two_sizes() -> None:
    table = rank_table(0)
    assert why_not(scaling_points([run_of(table, recipe=None)])) == (
        "it needs runs of at least two world sizes, got none with a summary"
    )
    assert why_not(scaling_points([run_of(table), run_of(table, world_size=2)])) is None


def draw(panel_runs: list[LoggedRun], draw_panel: Callable[[Axes, list[LoggedRun]], None]) -> Axes:
    axis = Figure().subplots()
    draw_panel(axis, panel_runs)
    return axis


def test_units_are_handy() -> None:
    assert unit_of("time_seconds", 599).name == "s"
    assert unit_of("time_seconds", 601).name == "min"
    assert unit_of("time_seconds", 36_000).name == "h"
    assert unit_of("bytes_sent", 1e3).name == "MB"
    assert unit_of("bytes_sent", 2e10).name == "GB"
    table = rank_table(0).assign(bytes_sent=[1e10, 2e10, 3e10, 4e10])
    axis = draw([run_of(table)], ACCURACY_BYTES.draw)
    assert axis.get_xlabel() == "sent per rank [GB]"
    assert np.asarray(axis.get_lines()[0].get_xydata()).tolist() == [[10, 91], [30, 99], [40, 100]]


def test_a_rank_alone_sends_nothing_and_has_no_place_on_the_axis_of_bytes() -> None:
    assert ACCURACY_BYTES.points(run_of(rank_table(0).assign(bytes_sent=0.0))) is None


def test_bytes_of_another_order_have_a_logarithmic_axis() -> None:
    table = rank_table(0)
    runs = [run_of(table), run_of(table.assign(bytes_sent=table["bytes_sent"] * 100))]
    assert draw(runs, ACCURACY_BYTES.draw).get_xscale() == "log"
    assert draw(runs[:1], ACCURACY_BYTES.draw).get_xscale() == "linear"


def test_small_errors_have_an_axis_near_to_logarithmic() -> None:
    table = rank_table(0)
    assert draw([run_of(table)], ERROR_EPOCHS.draw).get_yscale() == "symlog"
    axis = draw([run_of(table.assign(averaged_test_accuracy_percent=70.0))], ERROR_EPOCHS.draw)
    assert axis.get_yscale() == "linear"
    assert axis.get_ylim() == pytest.approx((0, 34.5))


def test_values_without_a_place_on_an_axis_are_left_out() -> None:
    table = rank_table(0)
    table.loc[0, "averaged_test_accuracy_percent"] = float("-inf")
    (line,) = draw([run_of(table)], ERROR_EPOCHS.draw).get_lines()
    assert np.asarray(line.get_xydata()).tolist() == [[3, 1], [4, 0]]


def test_names_are_shown_letter_by_letter() -> None:
    runs = [replace(run_of(rank_table(0)), name=name) for name in ("_tmp", "$n$")]
    axis = draw(runs, ERROR_EPOCHS.draw)
    legend = add_legend(Figure(), [axis])
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [" _tmp", r"\$n\$"]


def test_a_run_keeps_its_look_in_all_figures() -> None:
    table = rank_table(0)
    nothing = run_of(table.drop(columns="averaged_test_accuracy_percent"))
    first = draw([nothing, run_of(table)], ERROR_EPOCHS.draw).get_lines()
    second = draw([run_of(table), run_of(table)], ERROR_EPOCHS.draw).get_lines()
    assert [line.get_color() for line in first] == [second[1].get_color()]
