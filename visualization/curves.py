"""Curves of runs side by side in one picture: error, or NLL and BLEU, loss, consensus distance.

python -m visualization.curves runs/digits_sgp                        # writes curves.png there
python -m visualization.curves runs/sgp runs/ddp --output both.png    # beside DDP
python -m visualization.curves runs/sgp_seed* --output seeds.png      # seeds are one line
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from visualization.command import run_command
from visualization.logs.runs import SUMMARY, LoggedRun, find_runs, read_run, read_summary, seeds_together
from visualization.logs.tables import FileProblem
from visualization.panels.panel import BLEU_STEPS, CAPTION, CONSENSUS, ERROR_EPOCHS, ERROR_TIME, LOSS_EPOCHS, NLL_STEPS
from visualization.style import METHOD_STYLES, PAGE, add_legend, as_label, new_figure, save, styled

PANELS = (ERROR_EPOCHS, ERROR_TIME, NLL_STEPS, BLEU_STEPS, LOSS_EPOCHS, CONSENSUS)


def draw_run(folder: Path) -> Path:
    """Draw curves.png of one run into its folder; returns its path. For details see `draw`."""
    return draw({folder.resolve().name: folder}, folder / "curves.png")


def draw(runs: Mapping[str, Path], path: Path) -> Path:
    """Draw the curves of `runs`, by name, as the file `path`; returns it.

    Of their summary.json only the options are looked at, where it is there: they may be running. What is wrong with a
    table is a warning that names file and line, and the rest is drawn.

    Raises:
        ValueError: there is nothing to draw.
    """
    found, problems = _read(runs)
    for problem in problems:
        warnings.warn(str(problem), stacklevel=2)
    if not found:
        raise ValueError("got no run to draw:\n" + "\n".join(map(str, problems)))
    with styled():
        return save(draw_runs(found), path)


def draw_runs(runs: Sequence[LoggedRun]) -> Figure:
    """The panels that the runs have data for, two in a row; to be called within `styled`.

    Raises:
        ValueError: there is none.
    """
    runs = seeds_together(runs)
    panels = [panel for panel in PANELS if panel.runs_with(runs)]
    if not panels:
        names = ", ".join(str(run.folder) for run in runs)
        raise ValueError(f"got {names} without a single value of {', '.join(p.y for p in PANELS)}; has it just begun?")
    num_rows = -(-len(panels) // 2)
    figure = new_figure(PAGE, 2.2 * num_rows + 0.7)
    axes = figure.subplots(num_rows, 2, squeeze=False).flatten()
    for axis, panel in zip(axes, panels):
        panel.draw(axis, runs)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    add_legend(figure, axes)
    figure.suptitle(f"{title_of(runs)}\n{CAPTION}", fontsize="medium")
    return figure


def title_of(runs: Sequence[LoggedRun]) -> str:
    """The name of one run and its method, or how many runs there are; then ranks, data and seeds that all share."""
    name, method = as_label(runs[0].name), METHOD_STYLES.get(runs[0].recipe or "")
    texts = [f"{len(runs)} runs" if len(runs) > 1 else f"{name}: {method.title}" if method else name]
    facts = {
        (
            f"{run.world_size} rank{'' if run.world_size == 1 else 's'}",
            str(run.config.get("dataset", "")),
            f"seeds {', '.join(map(str, run.seeds))}" if run.seeds else f"seed {run.config.get('seed', '')}",
        )
        for run in runs
    }
    if len(facts) == 1:
        texts += [text for text in facts.pop() if text.strip() not in ("", "seed")]
    return ", ".join(texts)


def _read(runs: Mapping[str, Path]) -> tuple[list[LoggedRun], list[FileProblem]]:
    found, problems = [], []
    for name, folder in runs.items():
        run, wrong = read_run(folder, name=name, has_ended=False)
        problems += wrong
        if run is not None:
            # For the title and the colour only: a run that goes on may have the summary of its beginning.
            run = replace(run, summary=read_summary(folder / SUMMARY)[0])
        found += [] if run is None else [run]
    return found, problems


def main() -> int:
    """Draw the runs named on the command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="--out-dir of a run")
    parser.add_argument("--output", type=Path, help="file to write; default: curves.png in the first folder")
    arguments = parser.parse_args()
    folders, absent = find_runs(arguments.folders)
    runs, problems = _read(folders)
    for problem in (*absent, *problems):
        print(f"error: {problem}", file=sys.stderr)
    if runs:
        with styled():
            print(save(draw_runs(runs), arguments.output or arguments.folders[0] / "curves.png"))
    if not runs:
        return 2
    return 1 if absent or problems else 0


if __name__ == "__main__":
    run_command(main)
