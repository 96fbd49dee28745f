"""dpwa: pairwise averaging; each worker pulls the model of a random peer that is alive.

The algorithm stands in `engine.PairwiseEngine`: its docstring shows one round, `flush` is the merge. `interpolation`
has the factor of the merge, `wire.peer_scores` the choice of the peer, `network` the sockets and threads of a worker,
and `wire` the protocol.
"""

from .averager import PairwiseAverager
from .config import PairwiseConfig
from .interpolation import ClockInterpolation, ConstantInterpolation, Interpolation, LossInterpolation
from .wrapper import PairwiseDataParallel

__all__ = [
    "ClockInterpolation",
    "ConstantInterpolation",
    "Interpolation",
    "LossInterpolation",
    "PairwiseAverager",
    "PairwiseConfig",
    "PairwiseDataParallel",
]
