"""Classes under the names that Stochastic Gradient Push gives to them."""

from __future__ import annotations

from ..algorithms.sgp import PushSum
from ..rounds.push_pull import PushPull
from ..wrappers.all_reduce import AllReduceDataParallel
from ..wrappers.gossip import GossipDataParallel

__all__ = [
    "AllReduceDataParallel",
    "BilatPushPull",
    "GossipDataParallel",
    "Gossiper",
    "PushPull",
    "PushSum",
    "SimpleGossipDataParallel",
]

SimpleGossipDataParallel = GossipDataParallel
"""The one without overlap there, which is the default here."""
Gossiper = PushPull
"""The base of both gossipers there; a method of your own is an `Algorithm` here."""


class BilatPushPull:
    """The gossiper of AD-PSGD in Stochastic Gradient Push; here its rounds belong to a wrapper.

    Raises:
        TypeError: (construction) always; tells the line to write.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise TypeError(
            "got BilatPushPull, expected the wrapper of AD-PSGD, in which the exchanges of pairs run: write "
            "BilatGossipDataParallel(module)"
        )
