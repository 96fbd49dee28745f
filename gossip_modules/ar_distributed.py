"""`AllReduceDataParallel`, in the module where Stochastic Gradient Push has it."""

from .wrappers.all_reduce import AllReduceDataParallel

__all__ = ["AllReduceDataParallel"]
