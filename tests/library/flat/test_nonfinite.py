"""Infinities and NaN in a flat vector are found, whatever its segments and their dtypes."""

from __future__ import annotations

import pytest
import torch

from gossip_modules.extend import FlatVector
from gossip_modules.flat.layout import FlatLayout
from gossip_modules.flat.nonfinite import FiniteCheck, is_finite

CPU = torch.device("cpu")
LAYOUT = FlatLayout.of([(torch.float32, 7), (torch.bfloat16, 5), (torch.float64, 3)])


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("segment", [0, 1, 2])
def test_one_bad_element_is_found(segment: int, bad: float) -> None:
    x = FlatVector.zeros(LAYOUT, CPU)
    assert is_finite(x)
    assert FiniteCheck()(x)
    x.segments[segment][-1] = bad
    assert not is_finite(x)
    assert not FiniteCheck()(x)


def test_a_total_that_overflows_is_no_bad_element() -> None:
    x = FlatVector.zeros(LAYOUT, CPU)
    x.segments[0].fill_(3e38)
    assert FiniteCheck()(x)


def test_the_empty_shard_of_a_process_is_finite() -> None:
    """A small model over several processes leaves some of them without any element."""
    layout = FlatLayout.of([(torch.float32, 15)], num_shards=2)
    shard = FlatVector.zeros(layout, CPU).shard(1, 2)
    assert not shard.segments
    assert is_finite(shard)
    assert FiniteCheck()(shard)
