"""MATCHA's communicators, in the module where MATCHA has them."""

from .compat.communicator import ChocoCommunicator as ChocoCommunicator
from .compat.communicator import Communicator as Communicator
from .compat.communicator import FixedProcessor as FixedProcessor
from .compat.communicator import MatchaProcessor as MatchaProcessor
from .compat.communicator import centralizedCommunicator as centralizedCommunicator
from .compat.communicator import decenCommunicator as decenCommunicator
