"""The models of the neighbours, one by one, for algorithms that trust no neighbour."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, TypeAlias

from ..flat.nonfinite import are_finite, log_left_out
from ..rounds import Memory, Received, Share, Vector, Vectors


class NeighbourModel(NamedTuple):
    """The model of a rank, as it was sent.

    Attributes:
        name: the name of the rank.
        weight: W_ij, the weight of the message; W_ii - 1 for the own one.
        x: the model, in the dtypes of the model; it shares memory with the message.
    """

    name: object
    weight: float
    x: Vector


Models: TypeAlias = tuple[NeighbourModel, list[NeighbourModel]]
"""The own model and the models of the neighbours."""


def exchange_models(v: Vectors) -> Generator[Share, Any, Models]:
    """Send v.x exactly to all neighbours, and return the own model as it was sent and the models of the neighbours."""
    message = v.message([(x.dtype, x.numel()) for x in v.x.parts], key="own")
    for field, x in zip(message.fields, v.x.parts, strict=True):
        field.copy_(x)
    received: Received = yield Share(message)
    models = [
        NeighbourModel(name, weight, Vector(each.fields))
        for name, (weight, each) in zip(received.names, received, strict=True)
    ]
    return models[0], models[1:]


def log_refused(v: Vectors, m: Memory, own: NeighbourModel, theirs: NeighbourModel) -> None:
    """Tell once for each neighbour that its model is left out, as it has infinities or NaN; not if the own has too."""
    if not are_finite(own.x.parts):
        return
    what = f"the model of rank {theirs.name} in round {v.t}"
    m.cached(("refused", theirs.name), lambda: log_left_out(own.name, what, [theirs.name]))
