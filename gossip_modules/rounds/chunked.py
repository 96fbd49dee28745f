"""Rounds in chunks: a long vector is sent chunk by chunk, and each chunk is mixed while the next one is on its way.

s <- W_ii s + sum_j W_ij s_j, element by element. The bits are those of whole messages, since every cut is where kernels
on the whole vector start a new run ([Note: chunks]).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from ..flat.layout import FlatLayout
from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingWeights


class PeersLost(Exception):
    """A peer has failed while chunks were mixed, which are unmixed then: the round goes on without it."""


def cut_messages(
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
    is_difference: bool = False,
) -> float:
    """s <- own * s + sum_j inp[j] * messages[j], chunk by chunk as they arrive, the push-sum weight last.

    If the round breaks off s is as before, to rounding: chunks that were mixed are unmixed.

    Args:
        s: mutated; what is still under way is not touched.
        messages: in the order of `weights.inp`.
        weights: this rank's row; own is not 0.
        arrivals: yields k when chunk k of s has left and those of the messages are there.
        num_bytes: of a chunk at most, as for `cut_messages`.
        is_difference: s <- c with alpha * c = (own - 1) * s + sum_j inp[j] * messages[j]; own is not 1.

    Returns:
        alpha.
    """
    own, coefficients = weights.own - is_difference, list(weights.inp.values())
    alpha = s.factor(coefficients) if is_difference else None
    mixed: list[tuple[FlatVector, list[FlatVector]]] = []
    try:
        for chunk, others in _arriving(s, messages, arrivals, num_bytes):
            if is_difference:
                chunk.difference_segments_(own, others, coefficients, alpha=alpha)
            else:
                chunk.combine_segments_(own, others, coefficients)
            mixed.append((chunk, others))
    except BaseException:  # also Control-C: who catches it must not find s torn, or chunks without their weight
        for chunk, others in mixed:
            chunk.combine_segments_((alpha or 1.0) / own, others, [-weight / own for weight in coefficients])
        raise
    if is_difference:
        s.difference_weight_(own, messages, coefficients, alpha=alpha)
    else:
        s.combine_weight_(own, messages, coefficients)
    return 1.0 if alpha is None else alpha


def _arriving(
    s: FlatVector, messages: Sequence[FlatVector], arrivals: Iterable[int], num_bytes: int
) -> Iterator[tuple[FlatVector, list[FlatVector]]]:
    """Each chunk of s with those of the messages, when they are there; the weights are, at the end."""
    chunks, others = s.chunks(num_bytes), [message.chunks(num_bytes) for message in messages]
    for k in arrivals:
        if k < len(chunks):
            yield chunks[k], [other[k] for other in others]
