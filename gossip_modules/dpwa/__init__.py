"""dpwa: pairwise averaging; each worker pulls the model of a random peer that is alive.

`engine.PairwiseEngine` is the algorithm: its docstring shows one round, `flush` is the merge. `interpolation` has the
factor of the merge, `peer_scores` the choice of the peer, `server` and `fetcher` the two sides of a worker, and
`protocol` the frames that they exchange.
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
