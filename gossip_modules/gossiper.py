"""The gossip of models in lockstep, under the names that Stochastic Gradient Push gives to it."""

from .old_calls import BilatPushPull
from .rounds.push_pull import PushPull, PushSum

Gossiper = PushPull
"""The base of both there; a method of your own is an `Algorithm` here."""

__all__ = ["BilatPushPull", "Gossiper", "PushPull", "PushSum"]
