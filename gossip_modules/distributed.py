"""`GossipDataParallel`, in the module where Stochastic Gradient Push has it."""

from .compat.sgp import GossipDataParallel

__all__ = ["GossipDataParallel"]
