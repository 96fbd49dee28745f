"""The report of one run as a single HTML file: results, curves, ranks, graph and configuration.

Of an elastic run it also tells who came and who left, when, and why.

    python -m visualization.report runs/digits_sgp          # writes report.html there
    python -m visualization.report runs/digits_sgp --output sgp.html
    python -m visualization.report runs/digits_sgp --baseline runs/digits_ar   # beside another run

The file loads nothing, and links to the tables of the run. What cannot be read is said in it and on
the terminal, by file and line; the exit code is then 1, or 2 where there is no run.
"""

from __future__ import annotations

import os
import sys
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import Annotated, Any

import tyro
from matplotlib.figure import Figure

from visualization.command import read_arguments, run_command
from visualization.curves import PANELS, title_of
from visualization.graphs import rounds_of_run
from visualization.logs.membership import AROUND_SECONDS, Generation, LoggedMembership, read_membership
from visualization.logs.runs import LoggedRun, read_run
from visualization.logs.tables import FileProblem
from visualization.panels.membership import draw_membership
from visualization.panels.panel import CAPTION
from visualization.style import add_legend, as_svg, new_figure, styled
from visualization.topology import draw_rounds

TEMPLATE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; }
h2 { font-size: 1.15rem; margin-top: 2rem; border-bottom: 1px solid #8888; }
img { width: 100%; height: auto; }
div.pictures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); }
div.wide { overflow-x: auto; }
div.wide img { min-width: 34rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.15rem 0.8rem 0.15rem 0; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
table.options td { text-align: left; overflow-wrap: anywhere; vertical-align: top; }
ul.problems { color: #d2691e; }
p.muted, figcaption { opacity: 0.75; }
</style>
</head>
<body>
$body
</body>
</html>
""")
UNITS: Mapping[str, tuple[str, float, str]] = {
    "seconds": ("s", 1, ".1f"),
    "percent": ("%", 1, ".2f"),
    "bytes_sent": ("MB", 1e6, ".1f"),
}
"""By the end of a name: the unit that is shown, its size, and the format of a number."""


@dataclass(frozen=True)
class Report:
    """Which run to report."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run."""
    output: Path | None = None
    """File to write; none: report.html in the folder of the run."""
    baseline: Path | None = None
    """Folder of a run whose curves are drawn beside, such as one with --recipe ar, which is DDP's."""


def make_report(
    run: LoggedRun,
    problems: Sequence[FileProblem],
    membership: LoggedMembership | None = None,
    *,
    baseline: LoggedRun | None = None,
    tables: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The report as HTML.

    Args:
        run: with or without a summary.
        problems: what is wrong with its files.
        membership: the membership of an elastic run.
        baseline: a run whose curves are drawn beside.
        tables: links to the files of the run, by their names.
    """
    name = escape(run.name)
    recipe = f"{escape(run.recipe)} on {run.world_size} ranks" if run.recipe else f"{run.world_size} ranks"
    parts = [f"<h1>{name}</h1>", f'<p class="muted">{recipe}; {escape(str(run.folder))}</p>']
    if problems:
        items = "".join(f"<li>{escape(str(problem))}</li>" for problem in problems)
        parts += ["<h2>What could not be read</h2>", f'<ul class="problems">{items}</ul>']
    if run.summary:
        results = {**run.summary["averaged_test"], "consensus_distance": run.summary.get("consensus_distance")}
        row = {"model": "average of all ranks", **{key: value for key, value in results.items() if value is not None}}
        parts += ["<h2>Results</h2>", _table([row])]
    parts += ["<h2>Curves</h2>", _curves([run] if baseline is None else [run, baseline])]
    if tables:
        links = ", ".join(f'<a href="{escape(link)}">{escape(name)}</a>' for name, link in tables.items())
        parts.append(f"<p>The numbers: {links}</p>")
    if membership is not None:
        parts += ["<h2>Who came and went</h2>", *_membership(membership)]
    if run.summary:
        ranks = [{"rank": str(rank), **result} for rank, result in zip(run.numbers, run.summary["ranks"], strict=True)]
        parts += ["<h2>Ranks</h2>", _table(ranks), "<h2>Who talks to whom</h2>", _topology(run)]
        parts += ["<h2>Configuration</h2>", _configuration(run)]
    if isinstance(unused := run.summary.get("unused"), dict) and unused:
        parts += [f'<p class="muted">Set, and not used by {escape(str(run.recipe))}:</p>', _options(unused)]
    if isinstance(made := run.summary.get("made"), dict):
        parts += ["<h2>How it was made</h2>", _options(made)]
    return TEMPLATE.substitute(title=name, body="\n".join(parts))


def _curves(runs: Sequence[LoggedRun]) -> str:
    panels = [panel for panel in PANELS if panel.runs_with(runs)]
    if not panels:
        return '<p class="muted">The tables of the ranks have nothing to draw.</p>'
    images = []
    with styled():
        for panel in panels:
            figure = new_figure(height=2.6)
            axis = figure.subplots()
            panel.draw(axis, runs)
            add_legend(figure, [axis])
            images.append(_image(figure, f"{panel.title} of {', '.join(run.name for run in runs)}"))
    caption = escape(f"{title_of(runs)}. {CAPTION}")
    return f'<div class="pictures">{"".join(images)}</div><p class="muted">{caption}</p>'


def _configuration(run: LoggedRun) -> str:
    """The options that differ from their defaults, and all of them to be unfolded."""
    every = f"<details><summary>All options</summary>{_options(run.config)}</details>"
    if not isinstance(names := run.summary.get("changed"), list):  # a run of version 0.2 or before has no such list
        return every
    changed = {name: value for name, value in run.config.items() if name in names or name == "recipe"}
    return f'<p class="muted">Options that are not at their defaults:</p>{_options(changed)}{every}'


def _membership(membership: LoggedMembership) -> list[str]:
    rows = []
    for one in membership.generations:
        around = membership.around(one.seconds)
        row = {
            "what happened": _in_words(one),
            "at [s]": f"{one.seconds:.1f}",
            "generation": str(one.number),
            "workers": str(len(one.members)),
        }
        if len(around):
            row |= {
                "deadline [s]": f"{around['deadline_seconds'].max():.2f}",
                "median step [ms]": f"{1000 * around['median_seconds'].median():.1f}",
                "slowest step [ms]": f"{1000 * around['slowest_seconds'].max():.1f}",
            }
        rows.append(row)
    text = f"Steps are those of all workers within {AROUND_SECONDS:g} s of the beginning of a generation."
    with styled():
        image = _image(draw_membership(membership), "Workers over time, and the slowest step meanwhile")
    return [f'<div class="wide">{image}</div>', f'<p class="muted">{text}</p>', _table(rows)]


def _in_words(generation: Generation) -> str:
    """Who joined and who left, and why."""
    if generation.number == 1 or len(generation.joined) == len(generation.members):
        return f"workers {_numbers(generation.members)} began"
    left = [f"worker {number} left: {why}" for number, why in generation.left.items()]
    joined = [f"worker {number} joined" for number in generation.joined]
    return "; ".join(left + joined) or "the same workers formed another generation"


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _topology(run: LoggedRun) -> str:
    try:
        rounds = rounds_of_run(run.config, run.world_size)
    except (ValueError, KeyError) as error:
        return f'<p class="muted">The options name no graph that can be drawn: {escape(str(error))}</p>'
    if isinstance(rounds, str):
        return f"<p>{escape(rounds)}</p>"
    with styled():
        return f'<div class="wide">{_image(draw_rounds(rounds), f"Mixing weights of {rounds.title}")}</div>'


def _image(figure: Figure, description: str) -> str:
    """The figure inside the page, as an image of its own: pictures in one page share no names."""
    data = b64encode(as_svg(figure).encode()).decode()
    return f'<img alt="{escape(description)}" src="data:image/svg+xml;base64,{data}">'


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a table with a header, units in it."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = _cells("th", (_header(name) for name in names))
    body = "".join(_cells("td", (_cell(name, row.get(name, "")) for name in names)) for row in rows)
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts) + "</tr>"


def _header(name: str) -> str:
    for end, (unit, _, _) in UNITS.items():
        if name.endswith(end):
            stem = name if end == "bytes_sent" else name.removesuffix(end)
            return f"{stem.replace('bytes_sent', 'sent').replace('_', ' ').strip()} [{unit}]"
    return name.replace("_", " ")


def _cell(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    for end, (_, size, form) in UNITS.items():
        if name.endswith(end):
            return format(value / size, form)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _options(values: Mapping[str, Any]) -> str:
    """Names and values as a table."""
    rows = (f"<tr><td>{escape(name)}</td><td>{escape(_option(value))}</td></tr>" for name, value in values.items())
    return f'<table class="options">{"".join(rows)}</table>'


def _option(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def main(report: Report) -> int:
    """Write the report; the exit code."""
    run, problems = read_run(report.run)
    membership, wrong = read_membership(report.run)
    problems += wrong
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if run is None:
        return 2
    baseline = None
    if report.baseline is not None:
        baseline, wrong = read_run(report.baseline)
        problems += wrong
    path = report.output or report.run / "report.html"
    files = sorted([*report.run.glob("rank_*.csv"), *report.run.glob("summary.json")])
    tables = {file.name: Path(os.path.relpath(file, path.parent)).as_posix() for file in files}
    text = make_report(run, problems, membership, baseline=baseline, tables=tables)
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}")
    return 1 if problems else 0


if __name__ == "__main__":
    run_command(lambda: main(read_arguments(Report, description=__doc__)))
