"""Options of methods on the command line and in the configuration."""

from __future__ import annotations

import ast
import inspect
import json
from dataclasses import fields, replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import tyro

import gossip_modules as gm
from gossip_modules.methods import WRAPPER_OPTIONS, WrapperOptions
from gossip_modules.methods.graphs import GRAPHS, make_graph, peers_by_round
from train.command_line import read_command_line
from train.job.errors import UsageError
from train.run_config import RunConfig
from train.tasks.images.config import Config
from train.tasks.language_model.config import LanguageModelConfig
from train.tasks.translation.config import TranslationConfig


def test_peers_by_round_counts_rounds_up_to_the_epoch() -> None:
    assert peers_by_round("2", steps_per_epoch=10, steps_per_round=1) == 2
    assert peers_by_round("0:2,30:1", steps_per_epoch=10, steps_per_round=1) == {0: 2, 300: 1}
    # Rounds at steps 0, 4, 8, 12: the first one of epoch 1, which begins at step 10, is round 3.
    assert peers_by_round("0:2,1:1", steps_per_epoch=10, steps_per_round=4) == {0: 2, 3: 1}


@pytest.mark.parametrize("text", ["two", "0:2;30:1", "0:2,30", ""])
def test_peers_by_round_refuses_other_words(text: str) -> None:
    with pytest.raises(ValueError, match=r"got peers_per_itr='.*', expected a number or <epoch>:<peers> pairs; write"):
        peers_by_round(text, steps_per_epoch=10, steps_per_round=1)


MAKES_PAIRS = ("auto", "bipartite-complete", "random-matching", "equi-dyn-undirected")


@pytest.mark.parametrize("name", [name for name in GRAPHS if name not in (*MAKES_PAIRS, "equi-static-undirected")])
def test_every_graph_of_the_command_line_exists(name: str) -> None:
    # Base-3 of eight ranks is a hypercube, with one peer per round; of nine all ranks have two.
    graph = make_graph(name, num_nodes=9 if name == "base" else 8, peers_per_itr={0: 2, 5: 1}, push_sum=True)
    assert graph is not None
    assert (len(graph.out_peers(0, 4)), len(graph.out_peers(0, 5))) == (2, 1)


def test_auto_graph_is_the_librarys_choice() -> None:
    assert make_graph("auto", num_nodes=4, peers_per_itr=1, push_sum=True) is None
    directed = make_graph("auto", num_nodes=4, peers_per_itr=2, push_sum=True)
    assert isinstance(directed, gm.graph_manager.NPeerDynamicDirectedExponentialGraph)
    pairs = make_graph("auto", num_nodes=4, peers_per_itr=2, push_sum=False)
    assert isinstance(pairs, gm.graph_manager.DynamicBipartiteExponentialGraph)
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


def test_a_preset_sets_defaults_and_an_option_overrides_it() -> None:
    arguments = ["--recipe", "osgp", "--preset", "imagenet-resnet50", "--epochs", "60"]
    config = read_command_line(Config, description="", arguments=arguments)
    assert (config.recipe, config.epochs) == ("osgp", 60)
    assert (config.model, config.milestones, config.lr, config.weight_decay) == ("resnet50", (30, 60, 80), 0.1, 1e-4)
    assert (config.warmup_epochs, config.nesterov, config.label_smoothing) == (5, True, 0.0)
    assert (config.images_per_node, config.momentum, config.milestone_factor, config.decay_all) == (
        256,
        0.9,
        0.1,
        False,
    )
    assert read_command_line(Config, description="", arguments=[]) == Config()


def test_an_unknown_preset_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_command_line(Config, description="", arguments=["--preset", "imagenet"])
    assert "choose from" in capsys.readouterr().err


def test_the_batch_of_a_machine_and_that_of_a_rank_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"got batch_size=64 and images_per_node=256, expected one of them; .* 0 as"):
        Config(batch_size=64, images_per_node=256)
    per_rank = ["--preset", "imagenet-resnet50", "--batch-size", "64"]
    with pytest.raises(UsageError, match=r"got batch_size=64 and images_per_node=256, expected one of them"):
        read_command_line(Config, description="", arguments=per_rank)
    config = read_command_line(Config, description="", arguments=[*per_rank, "--images-per-node", "0"])
    assert (config.batch_size, config.images_per_node) == (64, 0)


def test_ranks_of_a_machine_share_its_images() -> None:
    world = SimpleNamespace(local_size=8)
    config = Config(images_per_node=256).resolved(world)  # type: ignore[arg-type]
    assert (config.batch_size, config.images_per_node) == (32, 0)
    assert Config(batch_size=7).resolved(world).batch_size == 7  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"got images_per_node=100 for 8 ranks on this machine, expected a multiple"):
        Config(images_per_node=100).resolved(world)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["recipe", "dataset", "model", "graph", "wire_dtype"])
def test_unknown_choices_are_named(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"got {name}='nonesuch', expected one of .*; (see --help|did you mean 'none'\?)"
    ):
        replace(Config(), **{name: "nonesuch"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"got recipe='spg', expected one of .*; did you mean 'sgp'\?$"):
        Config(recipe="spg")


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
        ({"max_workers": -1}, "got max_workers=-1, expected 0 or more; 0 takes all$"),
        ({"milestones": (0, 3)}, r"got milestones=\(0, 3\), expected epochs after the first; --lr is for it"),
        ({"milestones": (5, 3)}, r"got milestones=\(5, 3\), expected ascending epochs; sort them"),
    ):
        with pytest.raises(ValueError, match=message):
            Config(**options)
    with pytest.raises(ValueError, match=r"got batch_size=32 and accumulation_steps=5, .* divisor"):
        Config(accumulation_steps=5)


@pytest.mark.parametrize(
    ("config_type", "name", "meaning"),
    [
        (Config, "image_size", "is what the model is made for"),
        (Config, "warmup_epochs", "switches it off"),
        (LanguageModelConfig, "max_workers", "takes all"),
        (LanguageModelConfig, "steps_per_epoch", "is one pass over the training text"),
        (TranslationConfig, "num_test", "takes all"),
    ],
)
def test_an_error_explains_the_meaning_of_0(config_type: type[RunConfig], name: str, meaning: str) -> None:
    with pytest.raises(ValueError, match=f"got {name}=-1, expected 0 or more; 0 {meaning}$"):
        config_type(**{name: -1})  # type: ignore[arg-type]
    assert set(config_type.ZERO) <= set(config_type.NOT_NEGATIVE)


def test_recipes_that_are_laws_of_sgd_with_momentum_need_it() -> None:
    assert Config(recipe="decentlam", nesterov=False).recipe == "decentlam"
    assert Config(recipe="qgdsgdm").nesterov
    with pytest.raises(ValueError, match=r"got nesterov=True with recipe='decentlam', expected False.*--no-nesterov"):
        Config(recipe="decentlam")
    with pytest.raises(ValueError, match=r"got momentum=0.0 with recipe='qgdsgdm', expected more.*--momentum 0.9"):
        Config(recipe="qgdsgdm", momentum=0.0)


@pytest.mark.parametrize("config_type", [WrapperOptions, RunConfig, Config])
def test_every_option_has_a_help_text(config_type: type[WrapperOptions]) -> None:
    (source,) = ast.parse(inspect.getsource(config_type)).body
    assert isinstance(source, ast.ClassDef)
    silent = [
        ast.unparse(option)
        for option, text in pairwise(source.body)
        if isinstance(option, ast.AnnAssign)
        and not ast.unparse(option.annotation).startswith("ClassVar")
        and not (isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant))
    ]
    assert silent == []


HARMLESS = (
    *("out_dir", "resume", "overwrite", "data_dir", "download", "num_workers", "epochs", "backend", "comm_device"),
    *("timeout_seconds", "deterministic", "checkpoint_every", "checkpoint_every_steps", "keep_last"),
    *("elastic", "membership", "max_workers", "store", "min_deadline", "quorum", "grace"),
    *("validate_every", "log_every", "images_per_node"),  # the last is resolved into batch_size
    "delay",  # is in the text of the algorithm
)
"""Options that may differ between a run and the checkpoint that it goes on from, without a word."""
"""Options that may differ between a run and the checkpoint that it goes on from, without a word."""


def test_every_option_is_of_the_identity_a_setting_or_harmless() -> None:
    config = Config(milestones=(3, 5))
    values = {**config.identity, **config.settings}
    assert json.loads(json.dumps(values)) == values
    assert sorted([*config.identity, *config.settings, *HARMLESS]) == sorted(field.name for field in fields(Config))


def test_options_without_effect_make_no_other_run() -> None:
    assert Config(recipe="choco", wire_dtype="bfloat16").identity == Config(recipe="choco").identity
    assert Config(recipe="osgp", max_staleness=2).identity != Config(recipe="osgp").identity


def test_the_choices_of_a_run_are_those_that_its_recipe_uses() -> None:
    config = Config(recipe="choco", wire_dtype="bfloat16", peers_per_itr="2", milestones=(3, 5))
    used = config.used_choices
    expected = {"graph", "overlap", "max_staleness", "gossip_every", "average_every", "nprocs_per_node"}
    assert used.keys() & set(WRAPPER_OPTIONS) == expected
    assert used.keys() - set(WRAPPER_OPTIONS) == {option.name for option in fields(Config)} - set(WRAPPER_OPTIONS)
    assert used["milestones"] == (3, 5)
    assert config.unused_choices == {"peers_per_itr": "2", "wire_dtype": "bfloat16"}
    assert Config(recipe="ar").unused_choices == {}
    assert not Config(recipe="ar").used_choices.keys() & set(WRAPPER_OPTIONS)


def test_another_name_of_a_method_is_the_same_run() -> None:
    assert Config(recipe="allreduce") == Config(recipe="ar")
    assert Config(recipe="allreduce").identity["recipe"] == "ar"
    assert str(Config(recipe="allreduce").run_dir) == "runs/digits_ar"


def test_an_option_of_a_method_is_declared_once() -> None:
    assert not set(vars(RunConfig)["__annotations__"]) & set(WRAPPER_OPTIONS)
    assert set(WRAPPER_OPTIONS) <= set(Config.IDENTITY)
