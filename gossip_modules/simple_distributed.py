"""`SimpleGossipDataParallel`, in the module where Stochastic Gradient Push has it."""

from .compat.sgp import SimpleGossipDataParallel

__all__ = ["SimpleGossipDataParallel"]
