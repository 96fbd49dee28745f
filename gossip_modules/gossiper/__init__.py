"""The gossip algorithms in lockstep: D-PSGD, SGP, CHOCO-SGD, DeepSqueeze and Moniqua."""

from ..old_calls import BilatPushPull
from .choco import Choco
from .deep_squeeze import DeepSqueeze
from .gossiper import Gossiper
from .moniqua import Moniqua
from .push_pull import PushPull
from .push_sum import PushSum

__all__ = ["BilatPushPull", "Choco", "DeepSqueeze", "Gossiper", "Moniqua", "PushPull", "PushSum"]
