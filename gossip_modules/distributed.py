"""`GossipDataParallel`, in the module where Stochastic Gradient Push has it."""

from .wrappers.gossip import GossipDataParallel

__all__ = ["GossipDataParallel"]
