"""The page Reproduction: each published result once, with all measurements of it, and the papers' own figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.pages.headline import ENOUGH, IN_PART, NO, OTHER_SCALE, YES, Headline, of_all_scales
from benchmarks.pages.markdown import fold
from benchmarks.pages.pictures import pictures
from benchmarks.pages.reproduction import HEADLINES, NOT_REPRODUCED
from benchmarks.pages.studies import REPRODUCED
from benchmarks.record import RESULTS, rows_of
from benchmarks.sections import address
from gossip_modules.methods import METHODS

TITLE = "Reproduction: the figures of the papers, and ours"
INTRODUCTION = """\
The papers trained ImageNet or large language models on up to 1,024 GPUs. Here the same methods train small models, on
emulated networks and in the Lab. So compare order and direction first, then sizes.

"yes" means that at least {enough:.0f} % of the published effect was found, or that a gap is within the published one.
Without a published gap, half a point is the same accuracy, and a point is so in part. An order needs all pairs that
differ by a point. "in part" means the published direction at a smaller size, or measurements that do not agree. "not
comparable at this scale" means that what the result depends on, such as workers or rounds, is less than a tenth of the
published one."""


@dataclass(frozen=True)
class Section:
    """The results of a paper.

    Attributes:
        title: the heading.
        papers: the names in `Headline.paper`.
        method: the name of the method in the registry, which has the paper.
        pictures: names of `visualization.papers.PICTURES`.
    """

    title: str
    papers: tuple[str, ...]
    method: str
    pictures: tuple[str, ...] = ()


SECTIONS: Sequence[Section] = (
    Section(
        "SGP and Overlap SGP", ("SGP", "Overlap SGP", "SGP, Overlap SGP"), "sgp", ("accuracy_workers", "translation")
    ),
    Section("AD-PSGD", ("AD-PSGD",), "adpsgd", ("late_throughput", "steps_by_link")),
    Section("WAGMA-SGD", ("WAGMA-SGD",), "wagma", ("wagma_ablations", "late_error")),
    Section("MATCHA", ("MATCHA",), "matcha", ("matcha_rates", "matcha_budgets")),
    Section("PowerGossip", ("PowerGossip",), "powergossip", ("accuracy_bytes", "error_bits", "power_iterations")),
    Section("CHOCO-SGD", ("CHOCO-SGD",), "choco"),
    Section("DeepSqueeze", ("DeepSqueeze",), "deepsqueeze"),
    Section("Moniqua", ("Moniqua",), "moniqua"),
    Section("dpwa", ("dpwa",), "dpwa", ("crossover",)),
    Section("DiLoCo", ("DiLoCo", "Local SGD, DiLoCo (yeto)"), "diloco", ("utilisation", "outer_bytes", "outer_steps")),
    Section("MuLoCo", ("MuLoCo",), "muloco"),
    Section("NoLoCo", ("NoLoCo",), "noloco"),
    Section("HALoS", ("HALoS",), "", ("regions",)),
    Section("RelaySGD", ("RelaySGD",), "relaysgd", ("uneven_data",)),
    Section("Base-(k+1) graph", ("Base-(k+1) graph",), ""),
    Section("A2CiD2", ("A2CiD2",), "a2cid2", ("exchanges",)),
)
"""In the order of the page."""


def headlines() -> list[Headline]:
    """Return all headlines whose files are there."""
    return [each for each in (*HEADLINES, *REPRODUCED) if all((RESULTS / csv).exists() for csv in each.csvs)]


def results() -> Mapping[tuple[str, str], Sequence[Headline]]:
    """Return the measurements of each published result, by its paper and figure."""
    found: dict[tuple[str, str], list[Headline]] = {}
    for each in headlines():
        found.setdefault((each.paper, each.theirs), []).append(each)
    return found


@dataclass(frozen=True)
class Row:
    """A published result in the table of its section.

    Attributes:
        paper, theirs: of its headlines.
        ours: the figure and the verdict of each measurement, with its headline.
    """

    paper: str
    theirs: str
    ours: Sequence[tuple[Headline, str, str]]

    @property
    def verdict(self) -> str:
        """The verdict of all measurements together."""
        return of_all_scales(verdict for _, _, verdict in self.ours)

    def text(self) -> str:
        """Return the row in Markdown."""
        several = len(self.ours) > 1
        cells = [
            f"{text} ({each.scale}; [rows]({address(each.page)})){f': {verdict}' if several else ''}"
            for each, text, verdict in self.ours
        ]
        return f"| {self.theirs} | {'<br>'.join(cells)} | {self.verdict} |"


def measured() -> list[Row]:
    """Return all published results with their measurements, in the order of the page."""
    order = [paper for section in SECTIONS for paper in section.papers]
    rows = [Row(paper, theirs, [(each, *each.found()) for each in own]) for (paper, theirs), own in results().items()]
    return sorted(rows, key=lambda row: order.index(row.paper))


def reproduction_page() -> str:
    """Return the page."""
    rows = measured()
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in (YES, IN_PART, NO, OTHER_SCALE)}
    are = "is" if counts[OTHER_SCALE] == 1 else "are"
    return (
        "\n\n".join(
            [
                f"# {TITLE}",
                "<!-- Written by `python -m benchmarks.pages` from benchmarks/results/: change that, not this. -->",
                f"**Of {len(rows)} published results {counts[YES]} were reproduced, {counts[IN_PART]} in part, "
                f"{counts[NO]} were not, and {counts[OTHER_SCALE]} {are} not comparable at this scale.**",
                INTRODUCTION.format(enough=100 * ENOUGH),
                *(text for section in SECTIONS for text in _section(section, rows)),
                "## What was not reproduced, and why",
                "\n".join(
                    [
                        "| result | why not | nearest measurement here |",
                        "|---|---|---|",
                        *(f"| {' | '.join(row)} |" for row in NOT_REPRODUCED),
                    ]
                ),
                "## Measured with",
                "\n\n".join(_commands()),
            ]
        )
        + "\n"
    )


def _section(section: Section, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the heading, the paper, the table and the pictures of a section."""
    own = [row for row in rows if row.paper in section.papers]
    if not own:
        return
    yield f"## {section.title}"
    if section.method:
        paper = METHODS[section.method].paper
        assert paper is not None, f"got the method {section.method} without a paper"
        yield f"{paper.authors}, {paper.venue}: [the method](../methods/{section.method}.md)."
    lines = [row.text() for row in own]
    yield "\n".join(["| published | here | reproduced? |", "|---|---|---|", *lines])
    yield from pictures(section.pictures)


def _commands() -> Iterator[str]:
    """Yield for each file the commands of its rows, folded."""
    for csv in dict.fromkeys(csv for each in headlines() for csv in each.csvs):
        rows = rows_of(csv)
        days = " to ".join(dict.fromkeys((rows["date"].min()[:10], rows["date"].max()[:10])))
        text = "\n".join(dict.fromkeys(rows["command"]))
        yield fold(f"benchmarks/results/{csv}, {days}", f"```sh\n{text}\n```")
