"""Rounds in chunks: a long vector is sent chunk by chunk, and each chunk is mixed while the next one is on its way.

Only for gossipers whose messages are the vectors themselves: s <- W_ii s + sum_j W_ij s_j, element by element. The bits
are those of whole messages, since every cut is where kernels on the whole vector start a new run ([Note: chunks]).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from ..flat.layout import FlatLayout
from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingWeights

_Method = TypeVar("_Method", bound=Callable[..., Any])
# Those that see messages, or s before all of it is there.
_METHODS = ("encode", "decode", "decode_difference", "start", "start_filling", "finish", "difference")


class PeersLost(Exception):
    """A peer has failed while chunks were mixed, which are unmixed then: the round goes on without it."""


def chunkwise(method: _Method) -> _Method:
    """Mark a method of a gossiper that does the same whether vectors travel whole or in chunks.

    For `encode` this means that messages are `(v.raw,)` or `(v.raw, v.push_sum_weight)` of vectors with the layout of
    s, and that it does not read s, which may be filled later; for `decode` that it is s <- W_ii s + sum_j W_ij s_j.
    """
    method.is_chunkwise = True  # type: ignore[attr-defined]
    return method


def piecewise(method: _Method) -> _Method:
    """Deprecated: `chunkwise`, its name now."""
    warnings.warn("piecewise is now chunkwise; the old name will go", DeprecationWarning, stacklevel=2)
    return chunkwise(method)


def is_chunkwise(gossiper: object) -> bool:
    """Whether all methods that see messages are marked. gossiper: a gossiper or its class."""
    return all(getattr(getattr(gossiper, name), "is_chunkwise", False) for name in _METHODS)


def cut(
    messages: Mapping[int, Sequence[Tensor]], layout: FlatLayout, *, num_bytes: int
) -> Mapping[int, Sequence[Tensor]]:
    """The messages with chunks of at most `num_bytes` in the place of their first tensor.

    Args:
        messages: by rank; the first tensor of each is the bytes of a vector.
        layout: of these vectors.
        num_bytes: of a chunk at most.
    """
    places = layout.chunks(num_bytes)
    return {peer: (*(raw[a:b] for a, b in places), *rest) for peer, (raw, *rest) in messages.items()}


def mix_(
    s: FlatVector,
    messages: Sequence[FlatVector],
    weights: MixingWeights,
    arrivals: Iterable[int],
    *,
    num_bytes: int,
) -> None:
    """s <- own * s + sum_j inp[j] * messages[j], chunk by chunk as they arrive, the push-sum weight last.

    If the round breaks off s is as before, to rounding: chunks that were mixed are unmixed.

    Args:
        s: mutated; what is still under way is not touched.
        messages: in the order of `weights.inp`.
        weights: this rank's row; own is not 0.
        arrivals: yields k when chunk k of s has left and those of the messages are there.
        num_bytes: of a chunk at most, as for `cut`.
    """
    own, coefficients = weights.own, list(weights.inp.values())
    mixed: list[tuple[FlatVector, list[FlatVector]]] = []
    try:
        for chunk, others in _arriving(s, messages, arrivals, num_bytes):
            chunk.combine_segments_(own, others, coefficients)
            mixed.append((chunk, others))
    except BaseException:  # also Control-C: who catches it must not find s torn, or chunks without their weight
        for chunk, others in mixed:
            chunk.combine_segments_(1 / own, others, [-weight / own for weight in coefficients])
        raise
    s.combine_weight_(own, messages, coefficients)


def difference_(
    s: FlatVector,
    messages: Sequence[FlatVector],
    weights: MixingWeights,
    arrivals: Iterable[int],
    *,
    num_bytes: int,
) -> float:
    """s <- c with alpha * c = (own - 1) * s + sum_j inp[j] * messages[j], chunk by chunk; returns alpha.

    If a peer is lost s is as before, to rounding.

    Args: as for `mix_`.
    """
    scale, coefficients = weights.own - 1, list(weights.inp.values())
    alpha = s.factor(coefficients)
    mixed: list[tuple[FlatVector, list[FlatVector]]] = []
    try:
        for chunk, others in _arriving(s, messages, arrivals, num_bytes):
            chunk.difference_segments_(scale, others, coefficients, alpha=alpha)
            mixed.append((chunk, others))
    except PeersLost:  # s <- (alpha c - sum_j inp[j] messages[j]) / scale
        for chunk, others in mixed:
            chunk.combine_segments_((alpha or 1.0) / scale, others, [-weight / scale for weight in coefficients])
        raise
    s.difference_weight_(scale, messages, coefficients, alpha=alpha)
    return 1.0 if alpha is None else alpha


def _arriving(
    s: FlatVector, messages: Sequence[FlatVector], arrivals: Iterable[int], num_bytes: int
) -> Iterator[tuple[FlatVector, list[FlatVector]]]:
    """Each chunk of s with those of the messages, when they are there; the weights are, at the end."""
    chunks, others = s.chunks(num_bytes), [message.chunks(num_bytes) for message in messages]
    for k in arrivals:
        if k < len(chunks):
            yield chunks[k], [other[k] for other in others]
