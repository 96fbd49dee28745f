"""An exchange takes effect on all ranks or on none, and training goes on without an exchange that a lost rank ends."""

from __future__ import annotations

import pytest
import torch

from gossip_modules.flat.vector import FlatVector
from gossip_modules.worlds.all_or_none import LOST, MayBeLost, all_or_none


class Ranks:
    """A transport whose barrier fails with the error, if there is one."""

    def __init__(self, *, is_elastic: bool, error: BaseException | None = None) -> None:
        self.is_elastic, self.error = is_elastic, error
        self.met: list[str] = []

    def barrier(self, *, what: str) -> None:
        """See `Transport`."""
        self.met.append(what)
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("is_elastic", [True, False])
def test_elastic_ranks_confirm_the_exchange(is_elastic: bool) -> None:
    ranks, x = Ranks(is_elastic=is_elastic), FlatVector.over(torch.ones(3))
    with all_or_none(ranks, what="a sum", restores=x):
        x.segments[0].fill_(2.0)
    assert ranks.met == ["end of a sum"] * is_elastic
    assert x.segments[0].tolist() == [2.0] * 3


@pytest.mark.parametrize("error", [ConnectionError("gone"), KeyboardInterrupt()])
def test_a_vector_gets_its_values_back_without_the_confirmation(error: BaseException) -> None:
    ranks, x = Ranks(is_elastic=True, error=error), FlatVector.over(torch.ones(3))
    x.push_sum_weight.fill_(0.5)
    other = FlatVector.over(torch.full((3,), 2.0))
    with pytest.raises(type(error)), all_or_none(ranks, what="a sum", restores=x):
        x.copy_(other)
    assert x.segments[0].tolist() == [1.0] * 3
    assert x.push_sum_weight.item() == 0.5


@pytest.mark.parametrize("kind", LOST)
def test_training_goes_on_without_an_exchange_that_a_lost_rank_ends(kind: type[Exception]) -> None:
    with MayBeLost(Ranks(is_elastic=True)) as exchange:
        raise kind
    assert exchange.has_lost
    with pytest.raises(kind), MayBeLost(Ranks(is_elastic=False)):
        raise kind


def test_other_errors_are_raised() -> None:
    with pytest.raises(ValueError, match="mine"), MayBeLost(Ranks(is_elastic=True)) as exchange:
        raise ValueError("mine")
    assert not exchange.has_lost
