"""The gossip of models in lockstep, in the module where Stochastic Gradient Push has it."""

from .compat.sgp import BilatPushPull, Gossiper, PushPull, PushSum

__all__ = ["BilatPushPull", "Gossiper", "PushPull", "PushSum"]
