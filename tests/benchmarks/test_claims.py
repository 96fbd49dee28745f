"""Figures of hand-written pages are those of the CSV files."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from benchmarks.claims import command, registry
from benchmarks.claims.base import Claim
from benchmarks.claims.figures import unclaimed
from benchmarks.claims.measured import METHODS, SOURCES, WITHOUT_PAGE, slug_of
from benchmarks.record import DTYPES, RESULTS, ROOT, rows_of
from benchmarks.studies.ends import split_ends
from benchmarks.studies.uneven import SKEWED


def test_all_pages_have_the_texts_of_the_rows() -> None:
    assert list(command.wrong()) == [], "run python -m benchmarks.claims"


def test_all_claims_are_on_a_page() -> None:
    assert [name for name, found in command.places().items() if not found] == []


def test_a_changed_row_is_found_on_each_page_that_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in RESULTS.glob("*.csv"):
        (tmp_path / path.name).symlink_to(path)
    rows = pd.read_csv(RESULTS / "elastic.csv", dtype=DTYPES)
    rows.loc[rows["method"] == "SGP", "slowest_after_kill_ms"] = 4321.0
    (tmp_path / "elastic.csv").unlink()
    rows.to_csv(tmp_path / "elastic.csv", index=False)
    found = [line for line in command.wrong(tmp_path) if "elastic.sentence" in line]
    assert [line.partition(":")[0] for line in found] == ["README.md", "docs/index.md"]
    assert all("expected '\\nIn " in line and "4321 ms" in line for line in found)
    monkeypatch.setattr(command, "wrong", lambda: iter(found))
    assert command.main(["--check"]) == 1
    assert "error: README.md:" in capsys.readouterr().out


@pytest.fixture
def _one_claim(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    claim = Claim(("x.csv",), "the sum of ms", lambda rows: rows["ms"].sum(), "{:.0f} ms in all")
    monkeypatch.setattr(registry, "CLAIMS", {"step.sum": claim})
    (tmp_path / "x.csv").write_text("ms\n1\n2\n")


@pytest.mark.usefixtures("_one_claim")
def test_a_page_is_rewritten_in_place_and_keeps_its_line_breaks(tmp_path: Path) -> None:
    page = "It took **<!--claim step.sum-->3 ms in\nall<!--/-->**, | <!--claim step.sum-->9<!--/--> |\n"
    assert registry.rendered(page, tmp_path) == page.replace(">9<", ">3 ms in all<")
    (fault,) = registry.faults(page, tmp_path)
    assert (fault.line, fault.claim, fault.got, fault.expected) == (2, "step.sum", "9", "3 ms in all")
    assert registry.plain(page) == "It took **3 ms in\nall**, | 9 |\n"
    block = "<!--claim step.sum-->\n9\n<!--/-->\n"
    assert registry.rendered(block, tmp_path) == "<!--claim step.sum-->\n3 ms in all\n<!--/-->\n"
    assert registry.filled("It took {step.sum} of {'rate': 0.1}.", tmp_path) == "It took 3 ms in all of {'rate': 0.1}."


@pytest.mark.usefixtures("_one_claim")
@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("It took <!--claim step.summ-->3<!--/-->.", "expected one such as step.sum;"),
        ("It took <!--claim step.sum-->3 ms.", "one after the other"),
        ("It took 3<!--/--> ms.", "one after the other"),
        ("x\n- <!--claim step.sum-->3 ms in all<!--/-->.", "a word before it in the line"),
    ],
)
def test_a_place_that_cannot_be_read_is_a_fault(page: str, expected: str, tmp_path: Path) -> None:
    assert expected in [fault.expected for fault in registry.faults(page, tmp_path)][-1]


def test_the_list_names_text_files_rows_and_pages() -> None:
    found = "\n".join(command.listed())
    assert "default.ms_osgp: " in found
    assert "    language.csv, default_cells.csv: method osgp-bf16, rate_gbit 0.25: " in found
    assert "on docs/faq.md:" in found


SECTIONS = {
    "README.md": "A measured result",
    "docs/index.md": "What you gain",
    "docs/choosing.md": "Which graph?",
    "docs/faq.md": "Results",
    "docs/guides/default.md": "What you get",
    **{f"docs/methods/{slug}.md": "Measured" for slug in METHODS},
}
"""The section of each page in which a number with a unit is a figure."""
SETTINGS = {
    ("README.md", "40 ms"),  # how a step of the emulated cluster is set up
    ("docs/guides/default.md", "40 ms"),
    ("docs/guides/default.md", "**Local SGD and not DiLoCo, at 0.1 Gbit/s.**"),
}
"""Numbers that say how something was measured."""


@pytest.mark.parametrize("page", SECTIONS)
def test_all_figures_of_a_page_are_claims(page: str) -> None:
    found = unclaimed((ROOT / page).read_text(encoding="utf-8"), SECTIONS[page])
    assert [f"{page}:{line}: {text}" for line, text in found if (page, text) not in SETTINGS] == []


def test_a_figure_that_is_no_claim_is_found_with_its_line() -> None:
    page = (
        "# A page\n\nIt is **0.05\nnats** above, and 3 points below.\n\n## Measured\n\n"
        "It took 50 ms, `99 ms`, [1](x3.md) and <!--claim a.b-->3 ms<!--/-->, 26 %, 1.5-points and 4 workers.\n"
    )
    assert list(unclaimed(page, "Measured")) == [(3, "**0.05 nats**"), (8, "50 ms"), (8, "26 %"), (8, "1.5-points")]
    assert (4, "3 points") in list(unclaimed(page))


def test_each_method_of_a_study_has_a_page_that_shows_it() -> None:
    for name in SOURCES:
        path = RESULTS / f"{name}.csv"
        if path.is_file():
            names = pd.read_csv(path)["method"].unique()
            assert [x for x in names if not slug_of(x) and not WITHOUT_PAGE.match(x) and x != "ar"] == [], name


def test_good_and_bad_rows_are_on_the_pages_of_methods() -> None:
    wagma, pairs = ((ROOT / "docs" / "methods" / f"{name}.md").read_text("utf-8") for name in ("wagma", "adpsgd"))
    rows = pd.read_csv(RESULTS / "worker_numbers.csv")
    last = rows[~rows["is_tuning"] & (rows["step"] == rows["steps"]) & (rows["workers"] == 32)]
    ends = last.pivot(index="seed", columns="method", values="test")
    for text, name in ((wagma, "WAGMA-SGD"), (pairs, "AD-PSGD")):
        gap = (ends[name] - ends["all-reduce"]).mean()
        assert f"| 32 | SGD | {100 - ends[name].mean():.1f} % | {gap:+.2f} points" in text


def test_the_advice_on_uneven_data_is_that_of_the_rows() -> None:
    """Of docs/choosing.md, the README and the page for forks of SGP."""
    found = {split: split_ends(rows_of("uneven_data.csv"), split).set_index("method") for split in SKEWED}
    gaps = {split: ends["gap"].drop("all-reduce").sort_values() for split, ends in found.items()}
    even, uneven, apart = (gaps[split] for split in SKEWED)
    assert even["SGP"] <= even.min() + 0.1
    assert list(uneven.index[:2]) == ["RelaySGD", "SGP"]
    assert apart.index[0] == "RelaySGD"
    for own in (uneven, apart):
        assert (own[["gradient tracking", "D2", "exact diffusion"]] > own["SGP"]).all()
    sent = found[SKEWED[0]]["megabytes"]
    assert 0.5 < sent["SGP"] / sent["RelaySGD"] < 0.55
