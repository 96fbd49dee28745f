"""Gossipers that do not suit an outer method are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gossip_modules import (
    DPSGD,
    Choco,
    GASLoC,
    GossipDataParallel,
    NoLoCo,
    PowerGossip,
    RelaySGD,
    RingGraph,
    Schedule,
    SignNorm,
    SlowMo,
    Sparta,
)
from gossip_modules.extend import Algorithm, OuterMethod
from gossip_modules.mixing_manager import MetropolisHastingsMixing
from gossip_modules.rounds.stacked import Stacked
from tests.harness.problems import mlp
from tests.harness.ranks import run_ranks, solo_group


def test_models_of_peers_do_not_go_with_exact_averages_between_them() -> None:
    message = r"got RelaySGD\(\) between the exact averages of SlowMo\(.*; leave it out, or pass gossip_every=0"
    with pytest.raises(ValueError, match=message):
        GossipDataParallel(mlp(), process_group=solo_group(), algorithm=SlowMo(4, gossip_every=1).over(RelaySGD()))


@pytest.mark.parametrize("outer", [NoLoCo(4), GASLoC(4)])
def test_models_of_peers_go_with_outer_steps_on_a_graph(outer: OuterMethod) -> None:
    GossipDataParallel(mlp(), process_group=solo_group(), algorithm=outer.over(RelaySGD())).close()


COMPRESSED: list[Callable[[], Algorithm]] = [PowerGossip, lambda: Sparta(0.1), lambda: Choco(SignNorm(), step_size=0.4)]
NAMES = ["PowerGossip", "Sparta", "Choco"]


@pytest.mark.parametrize("make_compressed", COMPRESSED, ids=NAMES)
@pytest.mark.parametrize("outer", [GASLoC(4), GASLoC(4, momentum=0.1), NoLoCo(4), NoLoCo(4, momentum=0.0, pull=1.2)])
def test_compressed_rounds_do_not_go_with_a_momentum_of_their_changes(
    outer: OuterMethod, make_compressed: Callable[[], Algorithm]
) -> None:
    with pytest.raises(
        ValueError,
        match=r"got .* with (GASLoC|NoLoCo)\(.*, expected plain gossip: the memory of the outer algorithm repeats",
    ):
        GossipDataParallel(
            mlp(), process_group=solo_group(), algorithm=outer.over(make_compressed()), graph=RingGraph(1)
        )


@pytest.mark.parametrize("make_compressed", COMPRESSED, ids=NAMES)
@pytest.mark.parametrize(
    "outer",
    [
        GASLoC(1, momentum=0.0),
        GASLoC(1, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)),
        NoLoCo(1, momentum=0.0, lr=0.7),
    ],
    ids=str,
)
def test_differences_shrink_where_compressed_rounds_are_allowed(
    outer: OuterMethod, make_compressed: Callable[[], Algorithm]
) -> None:
    """Models that were moved apart once and never train."""
    driver = Stacked(
        outer.over(make_compressed()), MetropolisHastingsMixing(RingGraph(5, peers_per_itr=2)), shapes=[(10, 20)]
    )
    x = torch.zeros(5, 200)
    driver.step(x, 0)
    x += torch.randn(5, 200, generator=torch.Generator().manual_seed(0))
    first = (x - x.mean(0)).norm()
    for k in range(1, 150):
        driver.step(x, k)
    assert (x - x.mean(0)).norm() < first / 3


def test_an_algorithm_of_ones_own_that_leaves_nothing_out_declares_it() -> None:
    class Own(DPSGD):
        is_plain = is_whole = False

    gossip = partial(GossipDataParallel, process_group=solo_group(), graph=RingGraph(1))
    with pytest.raises(
        ValueError, match=r"expected plain gossip: the memory of the outer algorithm .* declare is_whole = True"
    ):
        gossip(mlp(), algorithm=GASLoC(4).over(Own()))
    Own.is_whole = True
    gossip(mlp(), algorithm=GASLoC(4).over(Own())).close()


def test_public_copies_go_with_exact_averages() -> None:
    """They are behind the models after an average, as with Schedule(average_every=...), and keep the mean."""
    slowmo = SlowMo(4, gossip_every=1)
    choco = Choco(SignNorm(), step_size=0.4)
    GossipDataParallel(mlp(), process_group=solo_group(), algorithm=slowmo.over(choco), push_sum=False).close()


@pytest.mark.parametrize("overlap", [False, True], ids=["blocking", "overlap"])
@pytest.mark.parametrize("outer", [NoLoCo(3), GASLoC(3)])
def test_an_outer_step_does_not_undo_an_average_of_the_schedule(outer: OuterMethod, overlap: bool) -> None:
    """The anchors from before the average differ, and must not come back."""

    def body(group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = mlp(group.rank())
        options: dict[str, Any] = {"init_sync": False, "overlap": overlap, "algorithm": outer}
        schedule = Schedule(gossip_every=1, average_every=4)
        wrapper = GossipDataParallel(model, process_group=group, push_sum=False, schedule=schedule, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
        for _ in range(7):  # the average is before the fourth step, an outer step before the seventh
            wrapper(torch.ones(2, 3, device="cpu")).sum().backward()
            optimizer.step()
        wrapper.flush()
        wrapper.close()
        return [x.detach().clone() for x in model.parameters()]

    first, second = run_ranks(2, body)
    for x, y in zip(first, second, strict=True):
        torch.testing.assert_close(x, y)
