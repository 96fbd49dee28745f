"""The parts that you write an algorithm with: the base classes, the memory, the requests and the vectors."""

from ..checks import is_number
from ..schedule import Times
from .algorithm import Algorithm
from .memory import Memory
from .messages import MessageBuffer, Received, warn_of_little
from .outer_optimizer import SGD, MakeOptimizer, described_with, step, works_by_element
from .periodic import Fragments, Periodic
from .requests import Average, Exchange, Gather, Mix, Round, RoundLost, SGDStep, Share, Vectors
from .vector import Vector, wide

__all__ = [
    "SGD",
    "Algorithm",
    "Average",
    "Exchange",
    "Fragments",
    "Gather",
    "MakeOptimizer",
    "Memory",
    "MessageBuffer",
    "Mix",
    "Periodic",
    "Received",
    "Round",
    "RoundLost",
    "SGDStep",
    "Share",
    "Times",
    "Vector",
    "Vectors",
    "described_with",
    "is_number",
    "step",
    "warn_of_little",
    "wide",
    "works_by_element",
]
