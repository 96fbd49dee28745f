"""Base classes for your own algorithms, graphs, weights, compressors and transports, with their memory and requests."""

from .algorithms.outer_method import OuterMethod
from .algorithms.sgp import PushSum
from .compression.compressor import Compressor as Compressor
from .engine.engine import Engine
from .engine.lockstep import LockstepEngine, OverlapEngine, SyncEngine
from .flat.buffer import FlatBuffer
from .flat.selection import Selection
from .flat.vector import FlatVector
from .graph_manager.base import GraphManager as GraphManager
from .mixing_manager.base import MixingManager as MixingManager
from .mixing_manager.base import MixingWeights as MixingWeights
from .rounds.algorithm import Algorithm
from .rounds.memory import Memory
from .rounds.messages import Message as Message
from .rounds.messages import Received as Received
from .rounds.mixer import GlobalAverage, Mixer
from .rounds.push_pull import PushPull
from .rounds.requests import Average, Exchange, Gather, Mix, Round, RoundLost, SGDStep, Share, Vectors
from .rounds.vector import Vector, tensors_of
from .schedule import Times
from .transport.base import Transport
from .transport.process_group import ProcessGroupTransport
from .wrappers.base import GossipWrapper
from .wrappers.composable import GossipModule

__all__ = [
    "Algorithm",
    "Average",
    "Compressor",
    "Engine",
    "Exchange",
    "FlatBuffer",
    "FlatVector",
    "Gather",
    "GlobalAverage",
    "GossipModule",
    "GossipWrapper",
    "GraphManager",
    "LockstepEngine",
    "Memory",
    "Message",
    "Mix",
    "Mixer",
    "MixingManager",
    "MixingWeights",
    "OuterMethod",
    "OverlapEngine",
    "ProcessGroupTransport",
    "PushPull",
    "PushSum",
    "Received",
    "Round",
    "RoundLost",
    "SGDStep",
    "Selection",
    "Share",
    "SyncEngine",
    "Times",
    "Transport",
    "Vector",
    "Vectors",
    "tensors_of",
]
