"""Tests of training loops: ranks as threads of one process, and faults at given training steps."""

from .backend import Worker
from .chaos import Chaos
from .events import Continue, Delay, Event, Join, Kill, Loss, Partition, Stop, StoreKill
from .ranks import CPU, TIMEOUT, HangUp, run_ranks, thread_group

__all__ = [
    "CPU",
    "TIMEOUT",
    "Chaos",
    "Continue",
    "Delay",
    "Event",
    "HangUp",
    "Join",
    "Kill",
    "Loss",
    "Partition",
    "Stop",
    "StoreKill",
    "Worker",
    "run_ranks",
    "thread_group",
]
