"""What an outer method needs of the gossiper and of the model; checked once, when a wrapper is made."""

from __future__ import annotations

from ..gossiper.mixer import Mixer
from ..mixing_manager.base import MixingManager
from ..outer.method import OuterMethod
from ..rounds.rounds import Rounds
from ..transport.base import is_elastic


def check_mixing(mixing: MixingManager, outer: OuterMethod) -> None:
    """Raise ValueError where the weights are not for this method."""
    if not outer.averages_exactly and not mixing.is_doubly_stochastic:
        raise ValueError(
            f"got {mixing} with {outer}, expected doubly stochastic weights, which keep the mean of the anchors; use "
            "an undirected graph, such as RingGraph, without mixing="
        )
    if not outer.averages_exactly:
        outer.check(mixing)


def check_weights(gossiper: Mixer, outer: OuterMethod, on_nonfinite: str) -> None:
    """Raise ValueError where the gossiper, which has its weights, does not suit this method."""
    check_mixing(gossiper.mixing, outer)
    if gossiper.keeps_models and outer.averages_exactly and outer.gossip_every:
        raise ValueError(
            f"got {gossiper} between the exact averages of {outer}, expected a gossiper that keeps no models of peers: "
            "it would relay those from before an average, and undo it; leave the gossiper out, or gossip_every=0"
        )
    is_whole = gossiper.is_whole or gossiper.keeps_models
    if not outer.averages_exactly and outer.needs_whole_rounds and not is_whole:
        raise ValueError(
            f"got {gossiper} with {outer}, expected no gossiper: the momentum repeats what a round has changed, and "
            "differences that compressed rounds leave out may grow by it from outer step to outer step; pass "
            "momentum=0 (NoLoCo: and pull <= 1), take GASLoC(optimizer=...), or compress exact averages: SparseLoCo(). "
            "A gossiper of your own that leaves nothing out says so by is_whole = True"
        )
    if gossiper.is_weighted and is_elastic(gossiper.transport):
        raise ValueError(
            f"got push_sum=True between the outer steps of {outer} with a membership, expected push_sum=False: where "
            "workers die and join, push-sum weights have no known sum, by which an outer step would average models"
        )
    if outer.gossip_every and gossiper.is_weighted and on_nonfinite == "skip":
        raise ValueError(
            f"got on_nonfinite='skip' with {outer} and {gossiper.mixing}, expected 'raise' or 'spread', or doubly "
            "stochastic weights: where rounds are left out, push-sum weights have no known sum"
        )


def check_fragments(gossiper: Mixer, outer: OuterMethod, *, has_places: bool) -> None:
    """Raise ValueError where the model cannot be cut as the method says."""
    if not has_places and not isinstance(outer.fragments, int):
        raise ValueError(
            f"got fragments={outer.fragments!r} where several processes share the vector of one model, expected the "
            "number of fragments: names are not known there"
        )
    keeps_links = isinstance(gossiper, Rounds) or not gossiper.is_elastic
    if outer.num_fragments > 1 and keeps_links and not outer.averages_exactly:
        raise ValueError(
            f"got {gossiper} with {outer}, expected fragments=1, or no gossiper: it keeps what it knows of its peers "
            "for one vector, and each fragment is another one"
        )
