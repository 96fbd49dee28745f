"""Topology drawings and spectra: what they show is what the library mixes, and what closed forms say."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from math import cos, log2, pi
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

import gossip_modules as gm
from gossip_modules.algorithms.relay_sgd import trees_of
from gossip_modules.graph_manager.named_graphs import GRAPHS, TREES, named_graph
from gossip_modules.matcha.__main__ import main as write_plan
from gossip_modules.methods import METHODS
from gossip_modules.methods import graphs as method_graphs
from gossip_modules.wrappers.choices import choose_bipartite_mixing, choose_mixing
from train.tasks.images.config import Config
from visualization import spectra, topology
from visualization.graphs import MatrixRounds, make_mixing, rounds_of_run
from visualization.spectra import Spectra, measure, rounds_to_consensus
from visualization.style import styled
from visualization.topology import Topology, as_text, draw_rounds, links_of, rounds_named

RANDOM = ("equi-dyn", "equi-dyn-undirected", "random-matching", "random-push")


def rounds_of(graph: gm.graph_manager.GraphManager) -> MatrixRounds:
    return MatrixRounds.of(make_mixing(graph), "graph")


@pytest.mark.parametrize("n", [4, 6, 8, 16])
def test_spectral_gaps_are_those_of_closed_forms(n: int) -> None:
    table = measure(Spectra(("ring", "hypercube", "complete", "npeer-exponential"), (n,)))
    gaps = dict(zip(table["graph"], table["gap"]))
    rounds = dict(zip(table["graph"], table["rounds"]))
    # W = (I + P + P^T) / 3 and (I + P) / 2 for the shift P, whose eigenvalues are the roots of unity.
    second = max(abs(1 + 2 * cos(2 * pi * k / n)) / 3 for k in range(1, n))
    assert gaps["ring, all neighbours"] == pytest.approx(1 - second)
    assert gaps["ring"] == pytest.approx(1 - cos(pi / n))
    assert gaps["complete, all neighbours"] == 1
    assert rounds["complete, all neighbours"] == 1
    if log2(n).is_integer():
        # Eigenvalues of the hypercube are (1 + d - 2 k) / (1 + d), k = 0..d.
        assert gaps["hypercube, all neighbours"] == pytest.approx(2 / (1 + log2(n)))
        for name in ("hypercube", "npeer-exponential"):
            assert (gaps[name], rounds[name]) == (1, log2(n))
    else:
        assert "hypercube" not in gaps
    # The ring is symmetric: its error is the second eigenvalue to the power of the rounds.
    expected = np.ceil(np.log(1e-6) / np.log(second))
    assert rounds["ring, all neighbours"] == expected
    assert dict(zip(table["graph"], table["messages"]))["ring, all neighbours"] == 2 * expected


@pytest.mark.parametrize("name", [name for name in GRAPHS if name not in RANDOM])
def test_rounds_to_consensus_are_the_first_that_suffice(name: str) -> None:
    rounds = rounds_of(named_graph(name, 8, peers_per_itr=2 if name == "equi-static-undirected" else 1))
    left = np.eye(8)
    errors: list[float] = []
    while not errors or errors[-1] > 1e-3:
        left = (rounds.matrix(len(errors)) - 1 / 8) @ left
        errors.append(float(np.linalg.norm(left, 2)))
    assert rounds_to_consensus(rounds, error=1e-3) == len(errors)


def test_spectra_of_a_base_graph_count_sent_messages() -> None:
    """Of three ranks two send in each of the three rounds; of six, four in three rounds and six in one."""
    table = measure(Spectra(("base",), (3, 6)))
    assert table[["gap", "rounds", "messages"]].to_numpy().tolist() == [[1, 3, 2], [1, 4, pytest.approx(3)]]


@pytest.mark.parametrize("name", RANDOM)
def test_spectra_of_random_graphs_are_expectations_and_say_so(name: str) -> None:
    """The rounds come out where the mean over many starts of the squared distance does."""
    table = measure(Spectra((name,), (2, 8), error=0.05))
    assert table["basis"].tolist() == ["period", "expectation"]
    assert table["rounds"][0] == table["gap"][0] == 1
    graph = named_graph(name, 8, 1)
    assert isinstance(graph, gm.graph_manager.RandomGraph)
    _, row = table.iterrows()
    rho, num_rounds = (1 - row[1]["gap"]) ** 2, row[1]["rounds"]
    assert rho == pytest.approx(graph.rho)
    assert rho**num_rounds <= 0.05**2 < rho ** (num_rounds - 1)
    sent = [graph.out_degree(rank, t) for t in range(num_rounds) for rank in range(8)]
    assert row[1]["messages"] == pytest.approx(sum(sent) / 8)
    with styled():
        titles = [axis.get_title(loc="left") for axis in spectra.draw_spectra(table, error=0.05).axes]
    assert titles[0] == f"{name}, in expectation"


def relayed_counts(links: Collection[tuple[int, int]], n: int, num_rounds: int) -> list[float]:
    """How many models each rank has after so many rounds: 1 + sum_j c_ji of RelaySGD's law."""
    both = [*links, *((j, i) for i, j in links)]
    counts = dict.fromkeys(both, 0)
    for _ in range(num_rounds):
        counts = {(i, j): 1 + sum(counts[k, to] for k, to in both if to == i and k != j) for i, j in both}
    return [1 + sum(count for (_, to), count in counts.items() if to == i) for i in range(n)]


@pytest.mark.parametrize("n", [2, 5, 8])
@pytest.mark.parametrize("name", TREES)
def test_spectra_of_trees_have_weights_and_the_rounds_of_relays(name: str, n: int) -> None:
    table = measure(Spectra((name,), (n,))).set_index("graph")
    graph = named_graph(name, n)
    mixed, relayed = table.loc[f"{name}, all neighbours"], table.loc[f"{name}, relayed"]
    assert mixed["gap"] == pytest.approx(make_mixing(graph).spectral_gap())
    assert mixed["basis"] == "period"
    assert (relayed["basis"], np.isnan(relayed["gap"])) == ("relay", True)
    for rounds, have_all in ((relayed["rounds"], True), (relayed["rounds"] - 1, False)):
        counts = [relayed_counts(links, n, rounds) for links in trees_of(graph)]
        assert (counts == [[n] * n] * len(counts)) == have_all
    sent = sum(len(graph.out_peers(rank, 0)) for rank in range(n))
    assert relayed["messages"] == pytest.approx(relayed["rounds"] * sent / n)


def test_relays_are_drawn_without_a_gap(tmp_path: Path, figures: list[Figure]) -> None:
    assert spectra.main(Spectra(("chain",), (4, 8), out_dir=tmp_path)) == 0
    lines = [{line.get_label(): line for line in axis.get_lines()} for axis in figures[0].axes]
    assert np.isnan(np.asarray(lines[0]["relayed"].get_ydata(), dtype=float)).all()
    np.testing.assert_array_equal(np.asarray(lines[1]["relayed"].get_xydata()), [[4, 3], [8, 7]])


def test_rounds_that_never_agree_or_never_repeat_are_refused() -> None:
    with pytest.raises(ValueError, match="whose ranks never agree, expected a spectral gap above 0"):
        rounds_to_consensus(MatrixRounds("alone", 4, 1, lambda t: np.eye(4)), error=0.1)
    matcha = gm.MatchaGraph(gm.graph_manager.select_graph(5), budget=0.5)
    with pytest.raises(ValueError, match="without a period, expected rounds that repeat"):
        rounds_to_consensus(rounds_of(matcha), error=0.1)


def test_spectra_are_drawn(tmp_path: Path, figures: list[Figure], capsys: pytest.CaptureFixture[str]) -> None:
    options = Spectra(("ring", "hypercube"), (4, 6, 8), out_dir=tmp_path / "out", format="svg")
    assert spectra.main(options) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"spectra.svg", "spectra.csv"}
    axes = figures[0].axes
    assert [axes[0].get_title(loc="left"), axes[3].get_title(loc="left")] == ["ring", "hypercube"]
    assert [axis.get_xlabel() for axis in axes] == [""] * 3 + ["ranks [log scale]"] * 3
    for axis in axes:
        assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    ring = next(line for line in axes[0].get_lines() if line.get_label() == "one peer per round")
    np.testing.assert_allclose(np.asarray(ring.get_xydata()), [[n, 1 - cos(pi / n)] for n in (4, 8)])
    assert spectra.main(Spectra(("hypercube",), (6,), out_dir=tmp_path)) == 1
    assert "got no graph of hypercube" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graphs": ("star",)}, r"got graphs=\['star'\], expected some of exponential"),
        ({"sizes": (1,)}, r"got sizes=\(1,\) and error=1e-06, expected n >= 2"),
        ({"error": 2.0}, "error=2.0, expected n >= 2 and 0 < error < 1"),
    ],
)
def test_spectra_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Spectra(**options)


def test_links_of_equal_weight_both_ways_are_one() -> None:
    matrix = np.array([[0.5, 0.25, 0.25], [0.25, 0.75, 0.0], [0.0, 0.5, 0.5]])
    assert {(frozenset((link.sender, link.receiver)), link.weight, link.is_mutual) for link in links_of(matrix)} == {
        (frozenset((0, 1)), 0.25, True),
        (frozenset((0, 2)), 0.25, False),
        (frozenset((1, 2)), 0.5, False),
    }
    directed = {(link.sender, link.receiver) for link in links_of(matrix) if not link.is_mutual}
    assert directed == {(2, 0), (1, 2)}


def test_weights_are_fractions_where_they_are() -> None:
    assert [as_text(weight) for weight in (1 / 3, 0.5, 1.0, -0.25, 0.2929)] == ["1/3", "1/2", "1", "-1/4", "0.293"]


def arrows(figure: Figure) -> list[list[FancyArrowPatch]]:
    return [[patch for patch in axis.patches if isinstance(patch, FancyArrowPatch)] for axis in figure.axes]


@pytest.mark.parametrize(
    ("name", "n", "num_links", "heads", "title"),
    [
        ("ring", 8, [8], False, "ring, 2 peers per round, 8 ranks: every round"),
        ("hypercube", 8, [12], False, "hypercube, 3 peers per round, 8 ranks: every round"),
        ("linear", 5, [5] * 4, True, "linear, 1 peer per round, 5 ranks: a period of 4 rounds"),
        (
            "bipartite-complete",
            6,
            [3] * 4,
            False,
            "bipartite-complete, 1 peer per round, 6 ranks: a period of 4 rounds",
        ),
        ("base", 6, [2, 2, 2, 3], False, "base, 1 peer per round, 6 ranks: a period of 4 rounds"),
        ("matcha0", 8, [12], False, "matcha0, 5 peers per round, 8 ranks: every round"),
    ],
)
def test_rounds_are_drawn_with_their_links_and_weights(
    name: str, n: int, num_links: list[int], heads: bool, title: str
) -> None:
    with styled():
        figure = draw_rounds(rounds_named(name, Topology(name, n)))
    drawn = arrows(figure)
    assert [len(each) for each in drawn if each] == num_links
    assert {type(patch.get_arrowstyle()).__name__ == "CurveFilledB" for each in drawn for patch in each} == {heads}
    assert figure.get_suptitle().replace("\n", " ") == title
    figure.draw_without_rendering()
    (box,) = [text.get_window_extent() for text in figure.texts if text.get_text() == figure.get_suptitle()]
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    rounds = rounds_named(name, Topology(name, n))
    weights = {as_text(link.weight) for t in range(len(num_links)) for link in links_of(rounds.matrix(t))}
    assert {text.removeprefix("weight ") for text in texts if text.startswith("weight")} == weights
    for axis in figure.axes[: len(num_links)]:
        assert {str(rank) for rank in range(n)} <= {text.get_text() for text in axis.texts}


def test_own_weights_are_written_where_they_differ() -> None:
    with styled():
        figure = draw_rounds(rounds_named("matcha0", Topology("matcha0", 8)))
    matrix = make_mixing(named_graph("matcha0", 8)).matrix(0)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert sorted(texts) == sorted([*map(str, range(8)), *(as_text(float(matrix[i, i])) for i in range(8))])
    assert "own weight" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_many_weights_share_looks_and_long_periods_are_cut() -> None:
    weights = np.random.default_rng(0).uniform(0, 0.05, (9, 9))
    many = MatrixRounds("many", 9, 100, lambda t: weights)
    with styled():
        figure = draw_rounds(many, max_rounds=2)
    assert figure.get_suptitle() == "many, 9 ranks: 2 of the 100 rounds of a period"
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len([text for text in texts if text.startswith("weight up to")]) == topology.MAX_WEIGHTS
    assert [len(each) for each in arrows(figure)] == [72, 72]


def test_the_command_draws_every_graph_of_a_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert topology.main(Topology("all", 5, rounds=1, out_dir=tmp_path / "out")) == 0
    said = capsys.readouterr().out
    drawn = {path.name for path in (tmp_path / "out").iterdir()}
    assert drawn == {
        f"topology_{name}_5.png"
        for name in (
            *("exponential", "npeer-exponential", "linear", "bipartite-complete", "base", "ring", "complete"),
            *("static-exponential", "equi-static", "equi-static-undirected", *RANDOM),
        )
    }
    assert "not drawn: hypercube: HypercubeGraph: got world_size=5, expected a power of two" in said
    assert "not drawn: matcha0: got graph='matcha0' for 5 ranks, expected the 8 ranks that it has" in said
    assert topology.main(Topology("hypercube", 5, out_dir=tmp_path / "out")) == 1
    assert "expected a power of two" in capsys.readouterr().err


def test_matcha_is_drawn_by_its_first_rounds(tmp_path: Path, figures: list[Figure]) -> None:
    assert topology.main(Topology("ring", 4, budget=0.5, rounds=3, out_dir=tmp_path)) == 0
    assert figures[0].get_suptitle() == "MATCHA on ring, budget 0.5, 4 ranks: 3 different rounds of a random sequence"
    with pytest.raises(ValueError, match="expected an undirected graph that never changes"):
        rounds_named("linear", Topology("linear", 4, budget=0.5))


def test_topology_options_are_checked() -> None:
    with pytest.raises(ValueError, match="got graph='star', expected all or one of exponential"):
        Topology("star")
    with pytest.raises(ValueError, match="got num_nodes=1 and rounds=8"):
        Topology(num_nodes=1)
    with pytest.raises(ValueError, match="got graph='star', expected one of exponential"):
        named_graph("star", 4)


OPTIONS = {"graph": "auto", "peers_per_itr": "1", "nprocs_per_node": 1, "seed": 3}


def assert_equal_rounds(rounds: MatrixRounds | str, mixing: gm.mixing_manager.MixingManager, num_rounds: int) -> None:
    assert isinstance(rounds, MatrixRounds)
    assert (rounds.num_ranks, rounds.period) == (mixing.graph.world_size, mixing.period)
    for t in range(num_rounds):
        np.testing.assert_array_equal(rounds.matrix(t), mixing.matrix(t))


@pytest.mark.parametrize("n", [2, 5, 8, 9])
@pytest.mark.parametrize(("name", "peers"), [("auto", "1"), ("auto", "2:1,0:2"), ("ring", "1"), ("complete", "1")])
@pytest.mark.parametrize("recipe", ["sgp", "osgp", "dpsgd"])
def test_the_graph_of_a_run_is_the_one_that_it_trains_on(recipe: str, name: str, peers: str, n: int) -> None:
    push_sum, num_peers = recipe != "dpsgd", 1 if peers == "1" or n == 2 else 2
    if n == 2:
        peers = "1"
    graph = method_graphs.make_graph(name, num_nodes=n, peers_per_itr=num_peers, push_sum=push_sum)
    trained = choose_mixing(graph, None, push_sum=push_sum, world_size=n)
    rounds = rounds_of_run({**OPTIONS, "recipe": recipe, "graph": name, "peers_per_itr": peers}, n)
    assert_equal_rounds(rounds, trained, trained.period)


@pytest.mark.parametrize(
    ("n", "peers", "trains", "title"),
    [
        (9, "0:1,30:2", {0: 1, 30: 2}, "base, 1 peer per round until epoch 30"),
        (9, "40:1,0:2,30:2", {0: 2, 30: 2, 40: 1}, "base, 2 peers per round until epoch 40"),
        (9, "0:1,30:1", {0: 1, 30: 1}, "bipartite-complete, 1 peer per round"),
        (7, "0:1,30:2", {0: 1, 30: 2}, "ring, 1 peer per round until epoch 30"),
        (7, "0:2,30:1", {0: 2, 30: 1}, "ring, 2 peers per round until epoch 30"),
        (7, "0:1,30:1", {0: 1, 30: 1}, "ring, 2 peers per round"),
    ],
)
def test_the_graph_of_a_run_is_that_of_all_its_numbers_of_peers(
    n: int, peers: str, trains: dict[int, int], title: str
) -> None:
    """Of which the first rounds are drawn."""
    graph = method_graphs.make_graph("auto", num_nodes=n, peers_per_itr=trains, push_sum=False)
    trained = choose_mixing(graph, None, push_sum=False, world_size=n)
    rounds = rounds_of_run({**OPTIONS, "recipe": "dpsgd", "peers_per_itr": peers}, n)
    assert isinstance(rounds, MatrixRounds)
    assert rounds.title == title
    for t in range(30):
        np.testing.assert_allclose(rounds.matrix(t), trained.matrix(t), rtol=1e-12)  # 1/3 and 1 - 2/3


@pytest.mark.parametrize("n", [2, 5, 8])
def test_the_graph_of_a_run_of_ad_psgd(n: int) -> None:
    trained = choose_bipartite_mixing(None, None, world_size=n)
    assert_equal_rounds(rounds_of_run({**OPTIONS, "recipe": "adpsgd"}, n), trained, trained.period)


@pytest.mark.parametrize(("name", "n"), [("auto", 6), ("torus", 6), ("matcha0", 8)])
def test_the_graph_of_a_run_that_takes_all_neighbours(name: str, n: int) -> None:
    options = {**OPTIONS, "graph": name}
    graph = named_graph("ring" if name == "auto" else name, n)
    trained = choose_mixing(graph, None, push_sum=False, world_size=n)
    assert_equal_rounds(rounds_of_run({**options, "recipe": "choco"}, n), trained, 1)
    matcha = gm.MatchaGraph(method_graphs.base_graph(name, num_nodes=n), budget=0.4, seed=3)
    assert_equal_rounds(
        rounds_of_run({**options, "recipe": "matcha", "algorithm": "MATCHA(budget=0.4)"}, n),
        gm.mixing_manager.LaplacianMixing(matcha),
        20,
    )


def test_the_graph_of_a_run_by_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(["--graph", "0", "--budget", "0.3", "--num-budgets", "0", "--output", str(path)])
    planned = gm.mixing_manager.LaplacianMixing(gm.MatchaGraph.from_plan(path, seed=3))
    assert_equal_rounds(
        rounds_of_run({**OPTIONS, "recipe": "matcha", "algorithm": f"MATCHA(plan={str(path)!r})"}, 8), planned, 20
    )


@pytest.mark.parametrize(("n", "group_size"), [(8, 0), (8, 2), (6, 2), (7, 4), (4, 1)])
def test_groups_average_and_come_around(n: int, group_size: int) -> None:
    rounds = rounds_of_run({**OPTIONS, "recipe": "wagma", "algorithm": f"WAGMA(group_size={group_size or None})"}, n)
    assert isinstance(rounds, MatrixRounds)
    assert rounds.title.endswith(", all ranks every 10 rounds")
    groups = gm.graph_manager.ButterflyGroups(n, group_size=group_size or None)
    for t in range(3 * rounds.period):
        matrix = rounds.matrix(t)
        np.testing.assert_allclose(matrix.sum(0), 1)
        np.testing.assert_array_equal(matrix, rounds.matrix(t + rounds.period))
        assert tuple(np.flatnonzero(matrix[1])) == groups.members(1, t)


@pytest.mark.parametrize("recipe", METHODS)
def test_the_options_that_a_recipe_uses_say_its_graph(recipe: str) -> None:
    config = Config(recipe=recipe, graph="auto" if recipe == "adpsgd" else "ring", seed=3, nesterov=False)
    used, every = rounds_of_run(config.used_choices, 8), rounds_of_run(asdict(config), 8)
    if isinstance(used, str) or isinstance(every, str):
        assert used == every
    else:
        assert used.title == every.title
        for t in range(20):
            np.testing.assert_array_equal(used.matrix(t), every.matrix(t))


def test_slowmo_gossips_between_its_averages() -> None:
    options = {**OPTIONS, "recipe": "slowmo", "algorithm": "SlowMo(sync_every=5)"}
    said = rounds_of_run(options, 8)
    assert said == "SlowMo: an outer step along the mean drift of all ranks every 5 steps; there is no graph."
    rounds = rounds_of_run({**options, "algorithm": "SlowMo(sync_every=5, gossip_every=2)"}, 8)
    trained = choose_mixing(None, None, push_sum=True, world_size=8)
    assert_equal_rounds(rounds, trained, trained.period)
    assert isinstance(rounds, MatrixRounds)
    assert rounds.title == "npeer-exponential, 1 peer per round, between averages over all ranks"


def test_nodes_gossip_not_processes() -> None:
    rounds = rounds_of_run({**OPTIONS, "recipe": "sgp", "nprocs_per_node": 2}, 8)
    assert isinstance(rounds, MatrixRounds)
    assert rounds.num_ranks == 4


@pytest.mark.parametrize(
    ("recipe", "n", "reason"),
    [
        *[("ar", 4, "there is no graph"), ("dpwa", 4, "a random live peer"), ("sgp", 1, "A single node has no peers")],
        ("localsgd", 4, "over all ranks every 10 steps; there is no graph"),
    ],
)
def test_runs_without_a_graph_say_so(recipe: str, n: int, reason: str) -> None:
    said = rounds_of_run({**OPTIONS, "recipe": recipe}, n)
    assert isinstance(said, str)
    assert reason in said


def test_runs_of_version_0_1_have_settings_of_methods_among_their_options() -> None:
    options = {**OPTIONS, "graph": "ring", "budget": 0.25, "sync_period": 7, "group_size": 2}
    titles = {}
    for recipe in ("matcha", "wagma", "diloco"):
        rounds = rounds_of_run({**options, "recipe": recipe}, 8)
        titles[recipe] = rounds if isinstance(rounds, str) else rounds.title
    assert titles == {
        "matcha": "MATCHA on ring, budget 0.25",
        "wagma": "groups of 2, all ranks every 7 rounds",
        "diloco": "DiLoCo: an outer step along the mean drift of all ranks every 7 steps; there is no graph.",
    }


@pytest.mark.parametrize(
    ("options", "title"),
    [
        ({"recipe": "sparta"}, "CompleteGraph(8, peers_per_itr=7)"),
        ({"recipe": "qgdsgdm", "graph": "ring"}, "ring, all neighbours"),
        ({"recipe": "sgp", "graph": "RingGraph(peers_per_itr=2)"}, "RingGraph(8, peers_per_itr=2)"),
        ({"recipe": "gasloc", "algorithm": "GASLoC().over(PowerGossip())", "graph": "torus"}, "torus, all neighbours"),
    ],
)
def test_graphs_by_their_texts_and_of_algorithms(options: dict[str, str], title: str) -> None:
    rounds = rounds_of_run({**OPTIONS, **options}, 8)
    assert isinstance(rounds, MatrixRounds)
    assert rounds.title == title
    np.testing.assert_allclose(rounds.matrix(0).sum(1), 1)
