"""The optimizer of tasks that predict tokens: their own Adam, or SGD, which lets every recipe train."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gossip_modules.methods import METHODS
from train.command_line import read_command_line
from train.job.errors import UsageError
from train.tasks.language_model.config import LanguageModelConfig
from train.tasks.language_model.task import LanguageModelTask
from train.tasks.token_config import TokenConfig
from train.tasks.translation.config import TranslationConfig
from train.tasks.translation.task import TranslationTask

ANYWHERE: Any = None
"""A world, which nothing here depends on."""


@pytest.mark.parametrize(
    ("task", "config", "own"),
    [
        (LanguageModelTask, LanguageModelConfig(), torch.optim.AdamW),
        (TranslationTask, TranslationConfig(), torch.optim.Adam),
    ],
)
def test_a_task_trains_by_its_adam_or_by_sgd_with_momentum(
    task: Any, config: TokenConfig, own: type[torch.optim.Optimizer]
) -> None:
    module = nn.Linear(2, 2)
    for name, expected in ((config.optimizer, own), ("sgd", torch.optim.SGD)):
        chosen = replace(config, optimizer=name).resolved(ANYWHERE)
        optimizer = task.make_optimizer(SimpleNamespace(config=chosen), module)
        assert type(optimizer) is expected
        assert chosen.optimizer_class == expected.__name__
        assert chosen.lr == type(config).RATES[name] > 0
    assert optimizer.defaults["momentum"] == 0.9
    assert not optimizer.defaults["nesterov"]
    assert all(group["weight_decay"] == 0 for group in optimizer.param_groups)
    given = replace(config, optimizer="sgd", momentum=0.5, lr=0.2).resolved(ANYWHERE)
    assert task.make_optimizer(SimpleNamespace(config=given), module).defaults["momentum"] == 0.5
    assert given.lr == 0.2


@pytest.mark.parametrize(
    ("options", "size", "num_ranks"),
    [
        ({}, 8, 8),
        ({"recipe": "ar"}, 8, 1),
        ({"nprocs_per_node": 4}, 8, 2),
        ({"nprocs_per_node": 8}, 8, 1),
        ({"elastic": True, "min_workers": 4}, 1, 4),  # its world is of one process
        ({"elastic": True, "min_workers": 4, "recipe": "ar"}, 1, 1),
    ],
)
def test_gossip_adamw_knows_how_many_gradients_all_reduce_would_average(
    options: Any, size: int, num_ranks: int
) -> None:
    config = LanguageModelConfig(optimizer="gossip-adamw", weight_decay=0.1, **options)
    task = SimpleNamespace(config=config, world=SimpleNamespace(size=size))
    optimizer = LanguageModelTask.make_optimizer(task, nn.Linear(2, 2))  # type: ignore[arg-type]
    assert type(optimizer).__name__ == config.optimizer_class == "GossipAdamW"
    assert {group["num_ranks"] for group in optimizer.param_groups} == {num_ranks}
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, config.weight_decay}


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_a_weight_decay_that_is_given_stays(decay: float) -> None:
    assert LanguageModelConfig(weight_decay=decay).resolved(ANYWHERE).weight_decay == decay
    assert LanguageModelConfig().resolved(ANYWHERE).weight_decay == 0.1


@pytest.mark.parametrize("config_type", [LanguageModelConfig, TranslationConfig])
@pytest.mark.parametrize("recipe", [name for name, method in METHODS.items() if method.needs_sgd])
def test_recipes_that_need_sgd_take_it_and_name_it_where_they_do_not_get_it(config_type: Any, recipe: str) -> None:
    config_type(recipe=recipe, optimizer="sgd")
    with pytest.raises(ValueError, match=rf"got recipe='{recipe}' where Adam.* expected .*; pass --optimizer sgd, or"):
        config_type(recipe=recipe)
    with pytest.raises(ValueError, match=r"got momentum=0\.0 with recipe=.*, expected more: .* pass --momentum 0\.9"):
        config_type(recipe=recipe, optimizer="sgd", momentum=0.0)


@pytest.mark.parametrize("config_type", [LanguageModelConfig, TranslationConfig])
def test_a_momentum_without_effect_is_refused(config_type: Any) -> None:
    with pytest.raises(ValueError, match=r"got momentum=0\.5 with optimizer='adamw?', expected 0\.9, which has no"):
        config_type(momentum=0.5)
    with pytest.raises(ValueError, match=r"got optimizer='lion', expected one of adam"):
        config_type(optimizer="lion")


def test_a_preset_for_another_optimizer_needs_rates_beside_it() -> None:
    read = partial(read_command_line, LanguageModelConfig, description=None)
    arguments = ["--preset", "gpt2", "--optimizer", "sgd"]
    with pytest.raises(UsageError, match=r"got --optimizer sgd with a preset for adamw, .*; pass --lr and --wei"):
        read(arguments=arguments)
    with pytest.raises(UsageError, match=r"in place of weight_decay=0\.1; pass --weight-decay, where"):
        read(arguments=[*arguments, "--lr", "0.3"])
    config = read(arguments=[*arguments, "--lr", "0", "--weight-decay", "-1"]).resolved(ANYWHERE)
    assert (config.lr, config.weight_decay) == (LanguageModelConfig.RATES["sgd"], 0.0)
    assert read(arguments=arguments[:2]).lr == LanguageModelConfig.PRESETS["gpt2"]["lr"]


def test_no_number_is_nan() -> None:
    config_type: Any = LanguageModelConfig
    with pytest.raises(ValueError, match="got weight_decay=nan, expected a number"):
        config_type(weight_decay=math.nan)


def test_a_summary_has_the_momentum_where_it_has_an_effect() -> None:
    assert "momentum" not in LanguageModelConfig().used_choices
    assert LanguageModelConfig(optimizer="sgd").used_choices["momentum"] == 0.9
