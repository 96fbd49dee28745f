"""Gossipers that do not suit an outer method are refused."""

from __future__ import annotations

import pytest

from gossip_modules import Choco, GASLoC, GossipDataParallel, NoLoCo, OuterMethod, RelaySGD, SignNorm, SlowMo
from tests.harness.problems import mlp
from tests.harness.ranks import solo_group


def test_models_of_peers_do_not_go_with_exact_averages_between_them() -> None:
    message = r"got RelaySGD\(\) between the exact averages of SlowMo\(.*; leave the gossiper out, or gossip_every=0"
    with pytest.raises(ValueError, match=message):
        GossipDataParallel(mlp(), process_group=solo_group(), outer=SlowMo(4, gossip_every=1), gossiper=RelaySGD())


@pytest.mark.parametrize("outer", [NoLoCo(4), GASLoC(4)])
def test_models_of_peers_go_with_outer_steps_on_a_graph(outer: OuterMethod) -> None:
    GossipDataParallel(mlp(), process_group=solo_group(), outer=outer, gossiper=RelaySGD()).close()


def test_public_copies_go_with_exact_averages() -> None:
    """They are behind the models after an average, as with Schedule(average_every=...), and keep the mean."""
    slowmo = SlowMo(4, gossip_every=1)
    gossiper = Choco(SignNorm(), step_size=0.4)
    GossipDataParallel(mlp(), process_group=solo_group(), outer=slowmo, gossiper=gossiper, push_sum=False).close()
