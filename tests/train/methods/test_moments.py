"""When moments of the optimizer are averaged, and where they cannot be."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from train.methods.moments import NAMES, MomentPeriods
from train.tasks.images.config import Config
from train.tasks.language_model.config import LanguageModelConfig


def test_each_moment_is_due_at_its_own_period() -> None:
    periods = MomentPeriods(first=3, second=6)
    due = {step: names for step in range(1, 13) if (names := periods.due("AdamW", step))}
    assert due == {
        3: ("exp_avg",),
        6: ("exp_avg", "exp_avg_sq"),
        9: ("exp_avg",),
        12: ("exp_avg", "exp_avg_sq"),
    }
    assert MomentPeriods(first=0, second=2).due("Adam", 4) == ("exp_avg_sq",)
    assert MomentPeriods(first=2, second=0).due("SGD", 4) == ("momentum_buffer",)
    assert MomentPeriods(first=0, second=0).due("Adagrad", 4) == ()


@pytest.mark.parametrize("name", NAMES)
def test_moments_have_the_names_that_torch_gives_them(name: str) -> None:
    model = nn.Linear(1, 1)
    options: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **options)
    model(torch.ones(1)).backward()
    optimizer.step()
    assert tuple(sorted(set(optimizer.state[model.weight]) - {"step"})) == NAMES[name]


@pytest.mark.parametrize(
    ("config_type", "options", "cause"),
    [
        (LanguageModelConfig, {"recipe": "adpsgd"}, "its ranks take steps of their own"),
        (LanguageModelConfig, {"recipe": "wagma"}, "its ranks take steps of their own"),
        (LanguageModelConfig, {"recipe": "ar"}, "its ranks have the same moments already"),
        (LanguageModelConfig, {"recipe": "qgdsgdm", "optimizer": "sgd"}, "its law writes the momentum in every step"),
        (LanguageModelConfig, {"amp": "float16"}, "with --amp float16 a rank may skip a step by itself"),
        (LanguageModelConfig, {"elastic": True}, "workers who come and go have no average of all optimizers"),
    ],
)
def test_recipes_without_such_an_average_are_refused(config_type: Any, options: dict[str, Any], cause: str) -> None:
    config_type(**options)
    with pytest.raises(
        ValueError, match=rf"got first_moment_period=4 and second.* expected 0 and 0: {re.escape(cause)}"
    ):
        config_type(**options, first_moment_period=4)


def test_moments_that_an_optimizer_lacks_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"second_moment_period=4 where SGD steps the model, expected a second_.* of 0"
    ):
        Config(second_moment_period=4)
    with pytest.raises(ValueError, match=r"where Adagrad steps the model, expected 0 and 0: first moments are those"):
        MomentPeriods(first=1, second=0).check("sgp", "Adagrad", is_elastic=False, amp="none")
    for make in (Config, partial(LanguageModelConfig, optimizer="sgd")):
        make(first_moment_period=4)
        with pytest.raises(ValueError, match=r"got first_moment_period=4 with momentum=0\.0, expected 0: there is no"):
            make(first_moment_period=4, momentum=0.0)
    with pytest.raises(ValueError, match=r"got first_moment_period=-1, expected 0 or more; 0 switches it off"):
        Config(first_moment_period=-1)


@pytest.mark.parametrize("period", [3.5, True])
def test_a_period_is_a_whole_number(period: Any) -> None:
    with pytest.raises(ValueError, match=rf"got first_moment_period={period} and second.*, expected whole numbers of"):
        Config(first_moment_period=period)
