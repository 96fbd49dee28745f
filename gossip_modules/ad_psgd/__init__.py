"""AD-PSGD: pairs of ranks average their models at any time, while both of them train.

The algorithm stands in `engine.BilateralEngine`, whose docstring shows one step of training, and in
`exchange.BilateralAverage`, whose docstring shows one exchange; `_exchange` there is the averaging. `presence` lets all
ranks learn which of them failed first, and `watched_transport` ends collectives because of that. With a membership
`participant` turns the engine to the links of each generation.
"""

from .wrapper import BilatGossipDataParallel

__all__ = ["BilatGossipDataParallel"]
