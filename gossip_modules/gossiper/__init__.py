"""The gossip of models themselves in lockstep: D-PSGD and SGP; and the base of gossipers of your own."""

from ..old_calls import BilatPushPull
from .gossiper import Gossiper
from .push_pull import PushPull
from .push_sum import PushSum

__all__ = ["BilatPushPull", "Gossiper", "PushPull", "PushSum"]
