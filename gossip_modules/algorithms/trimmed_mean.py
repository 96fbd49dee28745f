"""TrimmedMean: gossip by the mean of each entry without its largest and its smallest values at the neighbours."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..flat.nonfinite import are_finite
from ..flat.vector import SCRATCH_NUMEL
from ..registry import Paper
from ..rounds import Algorithm, Memory, Round, Vectors, is_number
from .neighbour_models import exchange_models, log_refused

_log = logging.getLogger("gossip_modules.robust")
_ROUNDING = 1e-9  # of a share times a number of neighbours


@dataclass(frozen=True)
class TrimmedMean(Algorithm):
    """TrimmedMean: each entry of x_i becomes its mean over rank i and its neighbours, without the extreme values.

    A round on rank i with d neighbours j, after the local step; b = floor(share d):

        send x_i to all neighbours, receive their x_j
        in each entry: leave out the b largest and the b smallest of the x_j
        x_i = (x_i + sum of the other x_j) / (1 + d - 2 b)

    So b neighbours that send wrong models, by a fault or on purpose, give no entry a value outside the values of the
    other neighbours. All that remain have equal weights, whatever W is. Different ranks leave out different values, so
    the mean of the models is not kept. Where b = 0, as with two neighbours, the round is a plain mean, and the logger
    `gossip_modules.robust` warns of it, once for each number of neighbours.

    A model with infinities or NaN is left out before d is counted, and a warning of the logger
    `gossip_modules.nonfinite` names its rank. Models travel in the dtypes of the parameters. Buffers, such as BatchNorm
    statistics, are not sent. If several processes hold the model in shards, each leaves out the shards that are not
    finite.

    Fang, Yang, Bajwa, "BRIDGE: Byzantine-resilient Decentralized Gradient Descent", IEEE Transactions on Signal and
    Information Processing over Networks 2022, arXiv 1908.08098, BRIDGE-T; a share of the neighbours in place of their
    number, as in Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning", ICML 2018, arXiv
    1803.01498.

    Args:
        share: the share of the neighbours that is left out at each end, 0 <= share < 1/2; the largest share of them
            that may be wrong.

    Raises:
        ValueError: `share` is out of range. When the model is wrapped: the graph is directed.

    Example:
        >>> graph = CompleteGraph(8, peers_per_itr=7)
        >>> model = GossipDataParallel(model, graph=graph, algorithm=TrimmedMean(share=0.3))
    """

    share: float = 0.3

    title: ClassVar[str] = "Trimmed mean"
    summary: ClassVar[str] = "takes the mean of each entry over neighbours, without the largest and smallest values"
    paper: ClassVar[Paper | None] = Paper(
        "Fang, Yang, Bajwa",
        "BRIDGE: Byzantine-resilient Decentralized Gradient Descent",
        "IEEE TSIPN 2022",
        "1908.08098",
    )
    takes_wire_dtype: ClassVar[bool] = False
    needs_symmetric_weights: ClassVar[bool] = True
    checks_messages: ClassVar[bool] = False
    mixes_buffers: ClassVar[bool] = False
    takes_rows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not (is_number(self.share) and 0 <= self.share < 0.5):
            raise ValueError(
                f"TrimmedMean: got share={self.share!r}, expected 0 <= share < 1/2, the share of the neighbours that "
                "is left out at each end; 1/2 would leave out all"
            )

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        own, neighbours = yield from exchange_models(v)
        kept = []
        for theirs in neighbours:
            if are_finite(theirs.x.parts):
                kept.append(theirs.x)
            else:
                log_refused(v, m, own, theirs)
        b = math.floor(self.share * len(kept) + _ROUNDING)
        if not b and kept and self.share:
            m.cached(("trims none", len(kept)), lambda: self._log_none(own.name, len(kept)))
        count = len(kept) - 2 * b
        with v.x.adding() as x:
            for total, mine, *others in zip(x.parts, own.x.parts, *(each.parts for each in kept), strict=True):
                size = max(1, SCRATCH_NUMEL // (len(others) or 1))  # of a copy of all values
                for place, base, *values in zip(*(each.split(size) for each in (total, mine, *others)), strict=True):
                    change = base.to(place.dtype) * -count
                    for value in without_extremes([value.to(place.dtype) for value in values], b):
                        change.add_(value)
                    place.add_(change, alpha=1 / (1 + count))

    def _log_none(self, rank: object, num_neighbours: int) -> None:
        _log.warning(
            "rank %s: %s leaves out none of %d neighbours, so one of them may move the model as in D-PSGD; take a "
            "graph with at least %d neighbours, such as CompleteGraph",
            *(rank, self, num_neighbours, math.ceil(1 / self.share)),
        )


def without_extremes(values: list[Tensor], b: int) -> list[Tensor]:
    """Return, entry by entry, the values without the b largest and the b smallest ones.

    Passes of comparisons between two tensors take a tenth of the time of a sort, since few values are left out of few.

    Args:
        values: at least 2b finite tensors of one shape and dtype; the list is changed, the tensors are not.
        b: the number of values that are left out at each end.
    """
    for _ in range(b):
        for k in range(len(values) - 1):  # the largest one comes to the last place
            values[k : k + 2] = torch.minimum(*values[k : k + 2]), torch.maximum(*values[k : k + 2])
        values.pop()
        for k in range(len(values) - 1, 0, -1):  # and the smallest one to the first place
            values[k - 1 : k + 1] = torch.minimum(*values[k - 1 : k + 1]), torch.maximum(*values[k - 1 : k + 1])
        values.pop(0)
    return values
