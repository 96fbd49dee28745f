"""The papers' figures: those of the site are drawn from the CSV files, and charts have each value at its place."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.pages import DOCS, PAGES
from tests.harness.pictures import collisions, text_boxes
from visualization.charts import Curve, Look, Plane, Scale, SeedRange, apart, ranges, ticks
from visualization.diagrams import DARK, FOLDER, LIGHT, WIDTH, Drawing
from visualization.papers import PICTURES, RESULTS, main

HAVE_ROWS = [name for name, picture in PICTURES.items() if (RESULTS / picture.csv).exists()]


@pytest.mark.parametrize("name", HAVE_ROWS)
def test_the_site_has_the_picture_that_is_drawn(name: str) -> None:
    picture = PICTURES[name]
    drawn = picture.svg(RESULTS)
    stored = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert stored == drawn, "run python -m visualization.papers"


@pytest.mark.parametrize("name", HAVE_ROWS)
def test_letters_are_inside_of_a_picture_and_large_enough_for_a_phone(name: str) -> None:
    text = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    height = float(re.findall(r'viewBox="0 0 \d+ ([\d.]+)"', text)[0])
    found = text_boxes(text)
    assert len(found) > 8
    for own in found:
        assert own.left >= 0, own.letters
        assert own.right <= WIDTH, own.letters
        assert own.bottom <= height, own.letters
        assert own.size * 390 / WIDTH >= 11, own.letters


@pytest.mark.parametrize("name", HAVE_ROWS)
def test_letters_of_a_picture_do_not_collide(name: str) -> None:
    assert collisions((FOLDER / f"{name}.svg").read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", HAVE_ROWS)
def test_the_page_of_the_rows_shows_the_picture(name: str) -> None:
    picture = PICTURES[name]
    pages = [page for page in PAGES.values() if picture.csv in {own.csv for own in page.measurements()}]
    assert len(pages) == 1
    (page,) = (name for name, own in PAGES.items() if own is pages[0])
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert f"![{picture.title}](../assets/{name}.svg){{ .diagram }}" in text


@pytest.mark.parametrize("name", HAVE_ROWS)
def test_a_picture_has_the_colours_of_light_and_dark_pages(name: str) -> None:
    text = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    light, dark = text.split("@media(prefers-color-scheme:dark)")
    used = set(re.findall(r'class="[fs]-(\w+)"', text))
    assert used <= set(LIGHT) == set(DARK)
    for color in used:
        assert LIGHT[color] in light, color
        assert DARK[color] in dark, color


def test_a_picture_without_rows_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("visualization.papers.RESULTS", tmp_path)
    main(["--output", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(PICTURES)
    assert lines[0].startswith("not drawn: accuracy_workers: got no worker_numbers.csv, expected the rows")


def test_scales_place_the_ends_and_the_middle() -> None:
    assert [Scale((0, 5, 10), "").share(value) for value in (0, 2.5, 10)] == [0, 0.25, 1]
    assert Scale((1, 100), "", is_log=True).share(10) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("values", "expected"), [((0, 250), [0, 50, 100, 150, 200, 250]), ((0.31, 0.44), [0.3, 0.32, 0.34, 0.36, 0.38])]
)
def test_ticks_are_round_numbers_around_the_values(values: tuple[float, ...], expected: list[float]) -> None:
    found = ticks(values)
    assert found[: len(expected)] == pytest.approx(expected)
    assert found[0] <= min(values)
    assert found[-1] >= max(values)


@pytest.mark.parametrize("heights", [[1.0, 1.0, 1.0, 1.0], [5.0, 90.0, 8.0, 97.0, 99.0], [50.0]])
def test_labels_do_not_run_into_each_other(heights: list[float]) -> None:
    found = apart(heights, 14, top=0, bottom=100)
    ordered = sorted(found)
    assert all(b - a >= 14 - 1e-9 for a, b in pairwise(ordered))
    assert min(found) >= 0
    assert max(found) <= 100
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    assert [found[i] for i in order] == ordered


def test_a_plane_draws_curves_with_labels_and_rows_draw_their_ranges() -> None:
    drawing = Drawing("a", 200)
    plane = Plane(drawing, (40, 20), (200, 100), Scale((0, 10), "steps"), Scale((0, 1), "error"))
    plane.curves([Curve("one", Look("blue", dashed=True), [(0, 0), (10, 1)])])
    text = drawing.svg()
    assert 'd="M40 120L240 20" class="s-blue" stroke-width="1.8" stroke-dasharray' in text
    assert '<circle cx="240" cy="20"' in text
    assert ">one</text>" in text
    drawing = Drawing("b", 100)
    assert ranges(drawing, 10, 100, 200, Scale((0, 100), "%"), [SeedRange("x", 50, 25, 75, note="n")]) == 74
    text = drawing.svg()
    assert 'd="M150 18L250 18" class="s-blue"' in text
    assert '<circle cx="200" cy="18"' in text
