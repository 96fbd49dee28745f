"""CodedAverage: an average over all ranks whose messages are codes, in two phases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..compression.compressor import Compressor
from ..flat.layout import FlatLayout, align
from ..transport.base import Transport
from .vector import Vector

_GRAIN = 64  # elements; the length of a run is a multiple of it
_ALIGNMENT = 8  # bytes, at which a message begins


class CodedAverage:
    """x <- A, the mean of x over all ranks up to a code, equal on all ranks; e <- the part of x that A leaves out.

    [Note: Coded averages] x is cut into n equal runs, and rank k averages run k. With a code C:

        q_i  <- C(x_i)                    # run by run; rank k gets run k of all ranks
        M_k  <- 1/n  sum_j q_j            # run k only
        A_k  <- C(M_k)                    # all ranks get all runs
        e_i  <- x_i - q_i
        e_k  <- e_k + n (M_k - A_k)       # run k of rank k only

    Both codes of a run make the same random choices, so entries that the first one draws are not lost in the second.
    The mean of A + e_i is the mean of x_i, and a rank that adds e_i to its next vector loses nothing. A rank sends
    2 (n - 1) / n times the bytes of C(x), as an all-reduce of x sends 2 (n - 1) / n times the bytes of x. Messages of
    whole vectors to all other ranks (`Gather`) are sent n - 1 times.

    Tang et al., "DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-Pass Error-Compensated Compression",
    ICML 2019, arXiv 1905.05957, compress twice, with one server. Tang et al., "1-bit Adam", ICML 2021, arXiv
    2102.02888, Section 5, make each rank the server of a run. The error of the server is part of e_k here.

    [Note: Coded moments] The moments of a `MixedMomentum` are averaged in the same way, without error feedback:
    m_i <- m_i + A - q_i. What the code leaves out stays on its rank, and fades with the moment. Running statistics are
    averaged exactly.

    Args:
        transport: the transport over the ranks.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def run(
        self,
        x: Vector,
        rest: Vector,
        code: Compressor,
        t: int,
        *,
        buffers: Sequence[Tensor] = (),
        layout: FlatLayout | None = None,
    ) -> None:
        """Average a vector, and the buffers of a model in the same messages; see `CodedAverage`.

        If it raises, x, rest and buffers are undefined.

        Args:
            x: the vector of this rank; becomes A.
            rest: becomes e of this rank.
            code: C, equal on all ranks.
            t: the number of the round; random choices are a function of it.
            buffers: the buffers of each segment that has some, float32 at least; mutated: see [Note: Coded moments].
            layout: the layout of the model with these buffers.

        Raises:
            ConnectionError, TimeoutError: a rank is gone or late.
        """
        parts = zip(x.parts, rest.parts, strict=True)
        vectors = [CodedVector(part, left) for part, left in parts if part.numel()]
        for b, segment in zip(buffers, () if layout is None else layout.buffer_segments, strict=True):
            for first, last, takes_code in segment.coded():
                own = b[first:last]
                if takes_code:
                    vectors.append(CodedVector(own, own))
                else:
                    self.transport.all_reduce(own, what=f"buffers in round {t}")
                    own.div_(self.transport.world_size)
        if vectors:
            self._average(vectors, code, t)

    def _average(self, vectors: Sequence[CodedVector], code: Compressor, t: int) -> None:
        transport, n, what = self.transport, self.transport.world_size, f"coded average in round {t}"
        sizes = [align(code.num_bytes(run_length(v.x.numel(), n), v.x.dtype), _ALIGNMENT) for v in vectors]
        sent, everyone = (torch.zeros(n, sum(sizes), dtype=torch.uint8, device=vectors[0].x.device) for _ in range(2))
        for v, messages in zip(vectors, sent.split(sizes, 1), strict=True):
            v.encode(messages, code, t)
        transport.all_to_all(everyone.view(-1), sent.view(-1), what=what)
        own = sent[0]
        for v, messages, message in zip(vectors, everyone.split(sizes, 1), own.split(sizes), strict=True):
            v.encode_mean(messages, message, code, t, rank=transport.rank)
        transport.all_gather(everyone.view(-1), own, what=what)
        for v, messages in zip(vectors, everyone.split(sizes, 1), strict=True):
            v.add(messages, code)


class CodedVector(NamedTuple):
    """A vector in a coded average.

    Attributes:
        x: the vector; becomes A, or x - q + A without error feedback.
        rest: becomes e; x itself without error feedback, as for moments.
    """

    x: Tensor
    rest: Tensor

    def encode(self, messages: Tensor, code: Compressor, t: int) -> None:
        """Write the codes of the runs into messages, uint8 [n, size], and rest <- x - q."""
        n, length = len(messages), run_length(self.x.numel(), len(messages))
        size = code.num_bytes(length, self.x.dtype)
        for run, rest, message in zip(runs(self.x, n), runs(self.rest, n), messages[:, :size], strict=True):
            if len(run) == length:
                code.compress(run, message, t=t, rest=run if self.rest is self.x else rest)
            else:
                whole = padded(run, length)
                code.compress(whole, message, t=t, rest=whole)
                rest.copy_(whole[: len(rest)])

    def encode_mean(self, messages: Tensor, own: Tensor, code: Compressor, t: int, *, rank: int) -> None:
        """Write the code of the mean of messages of the run `rank` into `own`, and add its error to the rest."""
        n, mean = len(messages), self.x.new_zeros(run_length(self.x.numel(), len(messages)))
        size = code.num_bytes(len(mean), self.x.dtype)
        for message in messages[:, :size]:
            code.add_decompressed(message, mean, alpha=1 / n)
        if self.rest is self.x:
            code.compress(mean, own[:size], t=t)
        else:
            code.compress(mean, own[:size], t=t, rest=mean)
            rest = list(runs(self.rest, n))[rank]
            rest.add_(mean[: len(rest)], alpha=n)

    def add(self, messages: Tensor, code: Compressor) -> None:
        """x <- the means of all runs; x <- x + the means without error feedback."""
        n, length = len(messages), run_length(self.x.numel(), len(messages))
        size = code.num_bytes(length, self.x.dtype)
        if self.rest is not self.x:
            self.x.zero_()
        for run, message in zip(runs(self.x, n), messages[:, :size], strict=True):
            if len(run) == length:
                code.add_decompressed(message, run)
            elif len(run):
                whole = run.new_zeros(length)
                code.add_decompressed(message, whole)
                run.add_(whole[: len(run)])


def coded_average(x: Tensor, e: Tensor, code: Compressor, t: int, *, has_feedback: bool = True) -> None:
    """Do the same for the vectors of all ranks in one process; see [Note: rows] of `Stacked`.

    Args:
        x, e: the vectors, [n, d]; written.
        code, t: see `CodedAverage.run`.
        has_feedback: whether e has the share of the mean that its code leaves out.
    """
    n, length = len(x), run_length(x.shape[1], len(x))
    e.copy_(x)
    for k, (run, left) in enumerate(zip(runs(x, n), runs(e, n), strict=True)):
        size = run.shape[1]
        q = code.decompressed(padded(run, length), t=t)
        mean = q.mean(0, keepdim=True)
        average = code.decompressed(mean, t=t)
        left.sub_(q[:, :size])
        if has_feedback:
            left[k].add_((mean - average)[0, :size], alpha=n)
        run.copy_(average[:, :size].expand_as(run))


def sent_bytes(d: int, dtype: torch.dtype, n: int, code: Compressor) -> int:
    """Return the bytes that one of n ranks sends in a coded average of a vector of d elements."""
    return 2 * (n - 1) * align(code.num_bytes(run_length(d, n), dtype), _ALIGNMENT)


def run_length(numel: int, n: int) -> int:
    """Return the length of a run of a vector, one for each of n ranks; the last ones may be shorter, or empty."""
    return align(-(-numel // n), _GRAIN)


def runs(x: Tensor, n: int) -> Iterator[Tensor]:
    """Yield the n runs of a vector [..., d], as views."""
    length = run_length(x.shape[-1], n)
    for k in range(n):
        yield x[..., k * length : (k + 1) * length]


def padded(x: Tensor, length: int) -> Tensor:
    """Return x, or a copy with zeros at its end if its last dimension is shorter than `length`."""
    return x if x.shape[-1] == length else torch.nn.functional.pad(x, (0, length - x.shape[-1]))
