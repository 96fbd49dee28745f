"""The picture of a plan is drawn from its JSON file alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from PIL import Image

from gossip_modules.matcha.__main__ import main as write_plan
from visualization.graphs import circle
from visualization.matcha import COLORS, NEVER, draw, draw_graph, draw_rhos, main, read_plan


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of graph 0 with its places, and two points of each curve."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    write_plan(["--graph", "0", "--num-budgets", "2", "--budget", "0.5", "--output", str(path)])
    return path


def test_the_command_draws_both(
    plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["matcha", str(plan_file), "--output", str(tmp_path / "a.png")])
    main()
    assert capsys.readouterr().out.strip() == str(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert image.width > 1.5 * image.height


def drawn_links(plan: dict[str, Any]) -> dict[tuple[tuple[float, float], ...], tuple[Any, str]]:
    """Colour, and whether solid or dotted, of each link that `draw_graph` draws, by its ends."""
    axis = Figure().subplots()
    draw_graph(axis, plan)
    (lines,) = (child for child in axis.get_children() if isinstance(child, LineCollection))
    ends = [tuple(map(tuple, np.asarray(path.vertices).tolist())) for path in lines.get_paths()]
    colors = [to_rgba(color) for color in np.asarray(lines.get_color())]
    patterns: Any = lines.get_linestyle()
    styles = ["dotted" if dashes else "solid" for _, dashes in patterns]
    return dict(zip(ends, zip(colors, styles, strict=True), strict=True))


@pytest.mark.parametrize("has_places", [True, False])
def test_links_are_drawn_where_and_as_often_as_they_are(has_places: bool, plan_file: Path) -> None:
    plan = read_plan(plan_file)
    places = [(float(rank), float(rank * rank)) for rank in range(8)]
    plan["probabilities"] = [1.0, 0.0, 0.2, 0.5, 0.8]  # another colour each
    links = drawn_links({**plan, "positions": places if has_places else None})
    assert len(links) == 12
    for matching, p in zip(plan["matchings"], plan["probabilities"], strict=True):
        expected = (COLORS(p), "solid") if p > 0 else (to_rgba(NEVER), "dotted")
        for u, v in matching:
            if has_places:
                assert links[places[u], places[v]] == expected
        assert list(links.values()).count(expected) == len(matching)


def test_many_ranks_without_a_place(tmp_path: Path) -> None:
    ring = [[(rank, (rank + 1) % 70) for rank in range(first, 70, 2)] for first in (0, 1)]
    ring[1][-1] = (0, 69)
    plan = {"matchings": ring, "probabilities": [1.0, 0.5], "positions": None, "budgets": [], "rhos": {}}
    plan |= {"name": "ring", "budget": 0.75, "rho": 0.5}
    assert len(drawn_links(plan)) == 70
    draw(plan, tmp_path / "c.png")
    with Image.open(tmp_path / "c.png") as image:
        assert image.width < 1.3 * image.height, "no curves without budgets"


def test_ranks_stand_as_in_pictures_of_rounds(plan_file: Path) -> None:
    links = drawn_links({**read_plan(plan_file), "positions": None})
    ends = {tuple(round(x, 6) for x in place) for link in links for place in link}
    assert ends == {tuple(round(x, 6) for x in place) for place in circle(8)}
    assert circle(4)[0] == (0, 1), "rank 0 on top"


def test_rho_is_drawn_against_the_budget(plan_file: Path) -> None:
    plan = read_plan(plan_file)
    axis = Figure().subplots()
    draw_rhos(axis, plan)
    lines = {line.get_label(): np.asarray(line.get_xydata()) for line in axis.get_lines()}
    for name, rhos in plan["rhos"].items():
        np.testing.assert_allclose(lines[name], np.column_stack([[0.5, 1], rhos]))
    assert set(lines["D-PSGD, budget 1"][:, 1]) == {plan["dpsgd"]["rho"]}
    assert set(lines["this plan"][:, 0]) == {0.5}


@pytest.mark.parametrize("text", ["not json", "[]", json.dumps({"matchings": []})])
def test_another_file_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"got .*plan.json, expected what python -m gossip_modules.matcha --output"):
        read_plan(path)
