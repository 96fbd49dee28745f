"""AD-PSGD: pairs of ranks average their models at any time, while both of them train.

`engine.BilateralEngine` is the algorithm: its docstring shows one step of training. `exchange.BilateralAverage` is one
exchange of a pair, and `_exchange` there the averaging. `engine.liveness` carries the requests, and names the rank that
failed first. With a membership `participant` turns the engine to the links of each generation.
"""

from .wrapper import BilatGossipDataParallel

__all__ = ["BilatGossipDataParallel"]
