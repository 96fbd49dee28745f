"""The picture of a plan is drawn from its JSON file alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from gossip_modules.matching import main as write_plan
from visualization.matcha import draw, main, read_plan


def plan_file(folder: Path, *arguments: str) -> Path:
    path = folder / "plan.json"
    write_plan([*arguments, "--budget", "0.5", "--output", str(path)])
    return path


def num_colors(path: Path) -> int:
    with Image.open(path) as image:
        assert image.height >= 600
        return len(image.convert("RGB").getcolors(maxcolors=1 << 20) or [])


def test_graph_and_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_file(tmp_path, "--graph", "0", "--num-budgets", "2")
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["matcha", str(plan), "--output", str(tmp_path / "a.png")])
    main()
    assert capsys.readouterr().out.strip() == str(tmp_path / "a.png")
    assert num_colors(tmp_path / "a.png") > 50


def test_graph_alone_with_places_of_its_own(tmp_path: Path) -> None:
    plan = plan_file(tmp_path, "--nodes", "20", "--radius", "0.4", "--num-budgets", "0")
    assert num_colors(draw(read_plan(plan), tmp_path / "b.png")) > 50


def test_many_ranks_without_a_place(tmp_path: Path) -> None:
    plan = read_plan(plan_file(tmp_path, "--nodes", "70", "--radius", "0.3", "--num-budgets", "0"))
    assert num_colors(draw({**plan, "positions": None}, tmp_path / "c.png")) > 50


@pytest.mark.parametrize("text", ["not json", "[]", json.dumps({"matchings": []})])
def test_another_file_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"got .*plan.json, expected what python -m gossip_modules.matching --output"):
        read_plan(path)
