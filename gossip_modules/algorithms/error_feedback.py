"""The mean of compressed messages, to which ranks add the entries that earlier messages left out; weights of ranks."""

from __future__ import annotations

from torch import Tensor

from ..compression.compressor import Compressor
from ..rounds import Gather, Memory, Round, Vector, Vectors


def compressed_average(
    v: Vectors, m: Memory, x: Vector, code: Compressor, decay: float, *, weight: float | None = None
) -> Round:
    """x <- 1/n sum_j q_j with q_i = C(decay e_i + x_i), and e_i <- decay e_i + x_i - q_i.

    With a `weight` w_i of this rank, x <- sum_j w_j q_j / sum_j w_j.

    Every rank receives the messages of all ranks and adds them up in the order of the ranks, so all ranks have the same
    mean, bit for bit. A rank sends its message n - 1 times, while an average sends the vector almost twice. So messages
    save bytes if they are smaller than 2 / n of the vector.
    """
    error = m.vector("error", join="zero")  # the entries that the messages of this rank have left out so far
    q = v.encode(code, x.add_(error, alpha=decay))
    received = yield Gather(q, () if weight is None else (weight,))
    shares = None if weight is None else received.numbers[:, 0] / total_weight(received.numbers)
    error.set_(x)
    q.add_to(error, alpha=-1.0)
    x.zero_()
    if shares is None:
        received.add_to(x)
        x.div_(v.num_ranks)
        return
    for share, (_, message) in zip(shares.tolist(), received, strict=True):
        message.add_to(x, alpha=share)


def total_weight(numbers: Tensor) -> float:
    """The sum of the weights of all ranks, which are the first of their numbers, float64 [n, k].

    Raises:
        ValueError: all weights are zero.
    """
    if not (total := float(numbers[:, 0].sum())) > 0:
        raise ValueError(
            "got weighted_by='tokens' and no tokens on any rank since the last outer step, expected a count; call "
            "`model.count_tokens(batch.numel())` in each step"
        )
    return total
