"""Error feedback: the mean of compressed messages, to which ranks add the entries that earlier messages left out."""

from __future__ import annotations

from ..compression.compressor import Compressor
from ..rounds import Gather, Memory, Round, Vector, Vectors


def compressed_average(v: Vectors, m: Memory, x: Vector, code: Compressor, decay: float) -> Round:
    """x <- 1/n sum_j q_j with q_i = C(decay e_i + x_i), and e_i <- decay e_i + x_i - q_i.

    Every rank receives the messages of all ranks and adds them up in the order of the ranks, so all ranks have the same
    mean, bit for bit. A rank sends its message n - 1 times, while an average sends the vector almost twice. So messages
    save bytes if they are smaller than 2 / n of the vector.
    """
    error = m.vector("error", join="zero")  # the entries that the messages of this rank have left out so far
    q = v.encode(code, x.add_(error, alpha=decay))
    received = yield Gather(q)
    error.set_(x)
    q.add_to(error, alpha=-1.0)
    received.add_to(x.zero_())
    x.div_(v.num_ranks)
