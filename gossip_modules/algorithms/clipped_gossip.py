"""ClippedGossip: D-PSGD in which no neighbour moves a model by more than its weight times a radius."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ..flat.vector import in_chunks
from ..registry import Paper
from ..rounds import Algorithm, Memory, Round, Vector, Vectors, is_number
from .neighbour_models import exchange_models, log_refused


@dataclass(frozen=True)
class ClippedGossip(Algorithm):
    """ClippedGossip: x_i <- x_i + sum_j W_ij clip(x_j - x_i), after the local step of each rank.

    A round on rank i with the neighbours j; |.| is the Euclidean norm over all parameters:

        send x_i to all neighbours, receive their x_j
        x_i = x_i + sum_j W_ij min(1, radius / |x_j - x_i|) (x_j - x_i)

    So a neighbour that sends a wrong model, by a fault or on purpose, moves x_i by W_ij radius at most in a round. With
    an infinite radius it is D-PSGD. A model with infinities or NaN is left out, and a warning of the logger
    `gossip_modules.nonfinite` names its rank. W is symmetric, so the two ends of a link clip alike, and honest ranks
    keep their mean.

    Models travel in the dtypes of the parameters. Buffers, such as BatchNorm statistics, are not sent: a wrong one
    would not be clipped.

    He, Karimireddy, Jaggi, "Byzantine-Robust Decentralized Learning via ClippedGossip", 2022, arXiv 2202.01545. The
    radius is a constant here.

    Args:
        radius: the largest norm of a difference that is added whole; positive, in units of the parameters. Take a
            value of about the distance between honest neighbours: one that is too small lets honest ranks move apart,
            one that is too large lets wrong models in.

    Raises:
        ValueError: `radius` is not positive. When the model is wrapped: the weights are not symmetric, or several
            processes hold the model in shards.

    Example:
        >>> model = GossipDataParallel(model, algorithm=ClippedGossip(radius=1.0))
    """

    radius: float

    summary: ClassVar[str] = "gossips, and bounds the norm of the change by each neighbour"
    paper: ClassVar[Paper | None] = Paper(
        "He, Karimireddy, Jaggi",
        "Byzantine-Robust Decentralized Learning via ClippedGossip",
        "2022",
        "2202.01545",
    )
    takes_wire_dtype: ClassVar[bool] = False
    needs_symmetric_weights: ClassVar[bool] = True
    checks_messages: ClassVar[bool] = False
    mixes_buffers: ClassVar[bool] = False
    takes_rows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not (is_number(self.radius) and self.radius > 0):
            raise ValueError(
                f"ClippedGossip: got radius={self.radius!r}, expected a positive number, in units of the parameters; "
                "math.inf clips nothing"
            )

    def check_shards(self, nprocs_per_node: int) -> None:
        """See `Algorithm`."""
        raise ValueError(
            f"got {self} for a model that several processes hold in shards (nprocs_per_node={nprocs_per_node}, or "
            "fully_shard), expected a whole model in each: it clips by the norm of all parameters; leave "
            "nprocs_per_node out, or pass a membership, whose nodes gossip with one process"
        )

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        own, neighbours = yield from exchange_models(v)
        kept, factors = list[Vector](), list[float]()
        for theirs in neighbours:
            distance = theirs.x.distance_to(own.x)
            if math.isfinite(distance):
                kept.append(theirs.x)
                factors.append(theirs.weight * min(1.0, self.radius / (distance or 1.0)))
            else:
                log_refused(v, m, own, theirs)
        with v.x.adding() as x:
            for total, mine, *others in zip(x.parts, own.x.parts, *(each.parts for each in kept), strict=True):
                for place, base, *models in in_chunks(total, mine, *others):  # the chunks of all models stay in cache
                    for model, factor in zip(models, factors, strict=True):
                        place.add_(model.to(place.dtype) - base, alpha=factor)
