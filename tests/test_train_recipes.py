"""Recipes and configuration: what the command line can say, and what it may not."""

from __future__ import annotations

import ast
import inspect
import json
from dataclasses import replace
from itertools import pairwise

import pytest
import tyro

import gossip_modules as gm
from train.config import Config
from train.recipes import GRAPHS, RECIPES, make_graph, peers_by_round


def test_peers_by_round_counts_rounds_up_to_the_epoch() -> None:
    assert peers_by_round("2", steps_per_epoch=10, steps_per_round=1) == 2
    assert peers_by_round("0:2,30:1", steps_per_epoch=10, steps_per_round=1) == {0: 2, 300: 1}
    # Rounds at steps 0, 4, 8, 12: the first one of epoch 1, which begins at step 10, is round 3.
    assert peers_by_round("0:2,1:1", steps_per_epoch=10, steps_per_round=4) == {0: 2, 3: 1}


@pytest.mark.parametrize("text", ["two", "0:2;30:1", "0:2,30", ""])
def test_peers_by_round_refuses_other_words(text: str) -> None:
    with pytest.raises(ValueError, match=r"got peers_per_itr='.*', expected a number or <epoch>:<peers> pairs; write"):
        peers_by_round(text, steps_per_epoch=10, steps_per_round=1)


@pytest.mark.parametrize("name", [name for name in GRAPHS if name != "auto"])
def test_every_graph_of_the_command_line_exists(name: str) -> None:
    graph = make_graph(name, num_nodes=8, peers_per_itr={0: 2, 5: 1}, push_sum=True)
    assert graph is not None
    assert (len(graph.out_peers(0, 4)), len(graph.out_peers(0, 5))) == (2, 1)


def test_auto_graph_is_the_librarys_choice() -> None:
    assert make_graph("auto", num_nodes=4, peers_per_itr=1, push_sum=True) is None
    directed = make_graph("auto", num_nodes=4, peers_per_itr=2, push_sum=True)
    assert isinstance(directed, gm.NPeerDynamicDirectedExponentialGraph)
    pairs = make_graph("auto", num_nodes=4, peers_per_itr=2, push_sum=False)
    assert isinstance(pairs, gm.DynamicBipartiteExponentialGraph)
    ring = make_graph("auto", num_nodes=5, peers_per_itr=2, push_sum=False)
    assert isinstance(ring, gm.RingGraph)


def test_command_line_fills_the_configuration() -> None:
    config = tyro.cli(
        Config,
        args=[
            "--recipe",
            "osgp",
            "--milestones",
            "30",
            "60",
            "80",
            "--no-nesterov",
            "--amp",
            "bfloat16",
            "--peers-per-itr",
            "0:2,30:1",
        ],
    )
    assert config == Config(
        recipe="osgp", milestones=(30, 60, 80), nesterov=False, amp="bfloat16", peers_per_itr="0:2,30:1"
    )
    assert str(config.run_dir) == "runs/digits_osgp"
    assert str(Config(out_dir="x/y").run_dir) == "x/y"


@pytest.mark.parametrize("name", ["recipe", "dataset", "model", "graph"])
def test_unknown_choices_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=rf"got {name}='nonesuch', expected one of .*; see --help"):
        replace(Config(), **{name: "nonesuch"})  # type: ignore[arg-type]


def test_senseless_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got epochs=0, expected more than 0"):
        Config(epochs=0)
    with pytest.raises(ValueError, match=r"got checkpoint_every=-1, expected 0 or more; 0 switches it off"):
        Config(checkpoint_every=-1)
    for options, message in (
        ({"lr": float("nan")}, "got lr=nan, expected more than 0"),
        ({"lr": float("inf")}, "got lr=inf, expected more than 0"),
        ({"dirichlet_alpha": -0.1}, "got dirichlet_alpha=-0.1, expected 0 or more; 0 switches it off"),
        ({"weight_decay": float("nan")}, "got weight_decay=nan, expected 0 or more"),
        ({"seed": -1}, "got seed=-1, expected 0 or more"),
        ({"label_smoothing": 1.0}, "got label_smoothing=1.0, expected 0 <= label_smoothing < 1"),
        ({"momentum": 1.0}, "got momentum=1.0, expected 0 <= momentum < 1"),
        ({"milestones": (5, 3)}, r"got milestones=\(5, 3\), expected ascending epochs; sort them"),
    ):
        with pytest.raises(ValueError, match=message):
            Config(**options)
    with pytest.raises(ValueError, match=r"got batch_size=32 and accumulation_steps=5, .* divisor"):
        Config(accumulation_steps=5)


def test_every_option_has_a_help_text() -> None:
    (source,) = ast.parse(inspect.getsource(Config)).body
    assert isinstance(source, ast.ClassDef)
    silent = [
        ast.unparse(option)
        for option, text in pairwise(source.body)
        if isinstance(option, ast.AnnAssign)
        and not (isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant))
    ]
    assert silent == []


def test_identity_and_settings_are_plain_and_apart() -> None:
    config = Config(milestones=(3, 5))
    values = {**config.identity, **config.settings}
    assert json.loads(json.dumps(values)) == values
    assert not config.identity.keys() & config.settings.keys()


def test_the_methods_of_the_first_release() -> None:
    assert list(RECIPES) == ["ar", "dpsgd", "sgp", "osgp"]
