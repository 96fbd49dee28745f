"""The HTML report: well-formed, whole in one file, nothing of a run taken for markup."""

from __future__ import annotations

import json
from base64 import b64decode
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.harness.finished_runs import write_run
from visualization.logs.runs import read_run
from visualization.report import Report, main, make_report

VOID = {"meta", "img"}


class Page(HTMLParser):
    """What is in a page; tags that do not match are an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data.strip())


def report_of(folder: Path) -> tuple[int, Page]:
    code = main(Report(folder))
    return code, Page((folder / "report.html").read_text(encoding="utf-8"))


def test_a_report_is_one_file_with_everything_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", num_ranks=4)
    code, page = report_of(folder)
    assert code == 0
    assert capsys.readouterr().out == f"wrote {folder / 'report.html'}\n"
    assert page.tags.count("img") == 5, "four panels and the topology"
    tables = ["rank_0000.csv", "rank_0001.csv", "rank_0002.csv", "rank_0003.csv", "summary.json"]
    assert [link for link in page.links if not link.startswith("data:")] == tables
    for link in page.links:
        if link in tables:
            continue
        kind, data = link.split(",")
        assert kind == "data:image/svg+xml;base64"
        assert ElementTree.fromstring(b64decode(data)).tag.endswith("svg")
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    style = page.texts[page.texts.index("run") + 1]
    assert "url(" not in style
    assert "@import" not in style
    for text in ("4 ranks", "Results", "Curves", "Ranks", "Who talks to whom", "Configuration"):
        assert any(text in each for each in page.texts)
    for cell in ("recipe", "sgp", "own test accuracy [%]", "100.00", "sent [MB]", "4.0", "time [s]", "11.0"):
        assert cell in page.texts


def test_the_report_has_date_version_and_command(tmp_path: Path) -> None:
    run, problems = read_run(write_run(tmp_path / "run"))
    assert run is not None
    made = {"date": "2026-11-22T20:00:00+00:00", "command": "python -m train.gossip_sgd", "torch": "2.14.1"}
    table = run.table[["rank", "epoch"]]  # nothing to draw
    page = Page(make_report(replace(run, table=table, summary={**run.summary, "made": made}), problems))
    assert set(made.values()) <= set(page.texts)
    assert "How it was made" in page.texts


@pytest.fixture
def _draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn in another test."""
    monkeypatch.setattr("visualization.report._image", lambda figure, description: f'<img alt="{description}">')


@pytest.mark.usefixtures("_draws_nothing")
def test_nothing_of_a_run_is_markup(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<b>run&")
    path = folder / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8"))
    attack = '"><script>alert(1)</script>$title'
    summary["config"] |= {attack: attack, "recipe": attack, "milestones": [1, 2]}
    summary["averaged_test"][attack] = attack
    summary["ranks"][0][attack] = attack
    path.write_text(json.dumps(summary), encoding="utf-8")
    assert main(Report(folder, output=tmp_path / "x.html")) == 0
    assert not (folder / "report.html").exists()
    page = Page((tmp_path / "x.html").read_text(encoding="utf-8"))
    assert not {"script", "b"} & set(page.tags)
    assert page.texts.count(attack) >= 5
    assert "1, 2" in page.texts
    assert "<b>run&" in page.texts


@pytest.mark.usefixtures("_draws_nothing")
def test_options_without_effect_stand_apart(tmp_path: Path) -> None:
    _, page = report_of(write_run(tmp_path / "before"))
    assert "Set, and not used by sgp:" not in page.texts
    folder = write_run(tmp_path / "run")
    path = folder / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**summary, "unused": {"theta": 2.5}}), encoding="utf-8")
    _, page = report_of(folder)
    begin = page.texts.index("Set, and not used by sgp:")
    assert page.texts.index("peers_per_itr") < begin
    assert [text for text in page.texts[begin + 1 :] if text.strip()][:2] == ["theta", "2.5"]


@pytest.mark.usefixtures("_draws_nothing")
def test_changed_options_come_before_all_others(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    path = folder / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**summary, "changed": ["seed"]}), encoding="utf-8")
    _, page = report_of(folder)
    begin = page.texts.index("Options that are not at their defaults:")
    every = page.texts.index("All options")
    assert page.texts[begin + 1 : every] == ["recipe", "sgp", "seed", "1"]
    assert "peers_per_itr" in page.texts[every:]


@pytest.mark.usefixtures("_draws_nothing")
def test_a_baseline_is_drawn_beside(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert main(Report(folder, baseline=write_run(tmp_path / "ddp", recipe="ar"))) == 0
    assert "Test error by epoch of run, ddp" in (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("_draws_nothing")
def test_problems_are_in_the_report_and_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "summary.json").unlink()
    code, page = report_of(folder)
    assert code == 1
    said = f"{folder / 'summary.json'}: got no such file"
    assert f"error: {said}" in capsys.readouterr().err
    assert any(text.startswith(said) for text in page.texts)
    assert "Configuration" not in page.texts
    (tmp_path / "none").mkdir()
    assert main(Report(tmp_path / "none")) == 2
    assert list((tmp_path / "none").iterdir()) == []


def test_runs_that_cannot_be_drawn_are_named(tmp_path: Path) -> None:
    for recipe, reason in (("ar", "there is no graph"), ("matcha", "The options name no graph that can be drawn")):
        run, problems = read_run(write_run(tmp_path / recipe, recipe=recipe))
        assert run is not None
        table = run.table[["rank", "epoch"]]  # nothing to draw
        run = replace(run, table=table, summary={**run.summary, "config": {**run.config, "graph": "octagon"}})
        page = Page(make_report(run, problems))
        assert any(reason in text for text in page.texts)
        assert "The tables of the ranks have nothing to draw." in page.texts
        assert "img" not in page.tags
