"""`AllReduceDataParallel`, in the module where Stochastic Gradient Push has it."""

from .compat.sgp import AllReduceDataParallel

__all__ = ["AllReduceDataParallel"]
