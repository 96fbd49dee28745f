"""The gossip of models in lockstep, under the name that Stochastic Gradient Push gives to it."""

from .old_calls import BilatPushPull
from .rounds.gossiper import Gossiper
from .rounds.push_pull import PushPull, PushSum

__all__ = ["BilatPushPull", "Gossiper", "PushPull", "PushSum"]
