"""MATCHA's communicators, in the module where MATCHA has them."""

from .compat.communicator import (
    ChocoCommunicator,
    FixedProcessor,
    MatchaProcessor,
    centralizedCommunicator,
    decenCommunicator,
)
from .compat.communicator import Communicator as Communicator

__all__ = ["ChocoCommunicator", "FixedProcessor", "MatchaProcessor", "centralizedCommunicator", "decenCommunicator"]
