"""`SimpleGossipDataParallel`, in the module where Stochastic Gradient Push has it."""

from .wrappers.composable import SimpleGossipDataParallel

__all__ = ["SimpleGossipDataParallel"]
