"""Arguments of outer methods that are no numbers, or no fragments, are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from gossip_modules import DiLoCo, GASLoC, NoLoCo, SlowMo, SparseLoCo, StreamingDiLoCo
from gossip_modules.extend import OuterMethod

METHODS: list[type[OuterMethod]] = [DiLoCo, SlowMo, NoLoCo, GASLoC]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", ["0.5", None, [1], True])
def test_rates_are_numbers(method: Any, value: object) -> None:
    name = method.__name__
    with pytest.raises(ValueError, match=rf"{name}: got lr=.*, expected a number above 0"):
        method(lr=value)
    with pytest.raises(ValueError, match=rf"{name}: got momentum=.*, expected 0 <= momentum < 1"):
        method(momentum=value)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (DiLoCo, {"own_weight": "0.5"}, "DiLoCo: got own_weight='0.5', expected 0 <= own_weight < 1"),
        (GASLoC, {"step_size": "0.5"}, "GASLoC: got step_size='0.5', expected a number above 0"),
        (NoLoCo, {"pull": [1]}, r"NoLoCo: got pull=\[1\], expected a number above 0"),
        (NoLoCo, {"seed": 1.5}, "got seed=1.5, expected an integer"),
        (NoLoCo, {"seed": None}, "got seed=None, expected an integer"),
        (
            SlowMo,
            {"inner_lr": 0.1},
            "got inner_lr=0.1, expected 'optimizer', for the learning rate of the optimizer that",
        ),
        (
            SlowMo,
            {"inner_lr": "adam"},
            "got inner_lr='adam', expected 'optimizer'.*; leave it out if the rate is constant",
        ),
        (SparseLoCo, {"decay": "0.9"}, "SparseLoCo: got decay='0.9', expected 0 <= decay <= 1"),
    ],
)
def test_arguments_of_outer_methods_are_checked(method: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        method(**options)


@pytest.mark.parametrize("fragments", [["ab", "c"], "ab", 1.5, None, [1], [[1]], [], [["a"], []], True, 0])
def test_fragments_are_a_number_or_a_list_for_each(fragments: Any) -> None:
    message = r"got fragments=.*, expected their number, at least 1, or for each of them a list of names .* \['head'\]"
    with pytest.raises(ValueError, match=message):
        StreamingDiLoCo(fragments=fragments)
    assert StreamingDiLoCo(fragments=[["a", "b"], ("c",)]).num_fragments == 2
