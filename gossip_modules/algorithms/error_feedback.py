"""The mean of compressed messages, to which ranks add the entries that earlier messages left out."""

from __future__ import annotations

from ..compression.compressor import Compressor
from ..rounds import Average, Gather, Memory, Round, Vector, Vectors
from .token_weights import total_weight

COLLECTIVES = ("all_gather", "all_reduce")
"""The ways to average codes: whole messages of all ranks, or runs of them in two phases."""


def compressed_average(
    v: Vectors,
    m: Memory,
    x: Vector,
    code: Compressor,
    decay: float,
    *,
    weight: float | None = None,
    collective: str = "all_gather",
) -> Round:
    """x <- 1/n sum_j q_j with q_i = C(decay e_i + x_i), and e_i <- decay e_i + x_i - q_i.

    With a `weight` w_i of this rank, x <- sum_j w_j q_j / sum_j w_j.

    Every rank receives the messages of all ranks and adds them up in the order of the ranks, so all ranks have the same
    mean, bit for bit. A rank sends its message n - 1 times, while an average sends the vector almost twice. So messages
    save bytes if they are smaller than 2 / n of the vector.

    With collective="all_reduce" a rank sends the bytes of its message almost twice: see [Note: Coded averages] of
    `CodedAverage`. The mean is coded again, and e has the entries that both codes leave out. It takes no weight.
    """
    error = m.vector("error", join="zero")  # the entries that the messages of this rank have left out so far
    if collective == "all_reduce":
        assert weight is None, "the mean of codes has equal weights"
        rest = m.scratch("rest")
        yield Average(x.add_(error, alpha=decay), code=code, rest=rest)
        error.set_(rest)
        return
    q = v.encode(code, x.add_(error, alpha=decay), rest=x)
    received = yield Gather(q, () if weight is None else (weight,))
    shares = None if weight is None else received.numbers[:, 0] / total_weight(received.numbers)
    error.set_(x)
    x.zero_()
    if shares is None:
        received.add_to(x)
        x.div_(len(received))
        return
    for share, (_, message) in zip(shares.tolist(), received, strict=True):
        message.add_to(x, alpha=share)
