"""The gossip algorithms in lockstep: D-PSGD, SGP and PowerGossip."""

from ..old_calls import BilatPushPull
from .gossiper import Gossiper
from .power_gossip import PowerGossip
from .push_pull import PushPull
from .push_sum import PushSum

__all__ = ["BilatPushPull", "Gossiper", "PowerGossip", "PushPull", "PushSum"]
