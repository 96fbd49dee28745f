"""Moniqua: gossip of models modulo a bound on the differences between neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..checks import checked_seed
from ..compression.bit_packing import pack, packed_size, unpack
from ..compression.compressor import chunks, random_words
from ..mixing_manager.base import MixingManager
from ..mixing_manager.spectra import checked_step_size
from ..registry import Paper
from ..rounds import Algorithm, Memory, Received, Round, Share, Vectors

_HEADER_BYTES = 8
_WORD = 1 << 32
_TOO_LARGE, _NOT_FINITE = 1 << 32, 1 << 33  # flags in a header, above the 32 bits of the checksum
_MAX_NUMBER = (1 << 31) * (1 - 1e-6)  # the range of int32 grid numbers, with a margin for rounding
_MULTIPLIER = 0x9E3779B1 - _WORD  # 2**32 over the golden ratio, odd, as int32


@dataclass(frozen=True)
class Moniqua(Algorithm):
    """Moniqua: each rank sends its model on a grid, modulo L grid points; theta bounds differences of neighbours.

    A round on rank i with the neighbours j, after the local SGD step; h = theta / (L / 2 - 1) and L = 2^bits:

        n_i = floor(x_i / h + u)
        send n_i mod L to all neighbours, receive their n_j mod L
        d_ij = (n_j - n_i) mod L, in [-L / 2, L / 2)
        x_i = x_i + step_size h sum_j W_ij d_ij

    The leading digits of n_i need not be sent: if the entries of neighbours differ by less than theta, the last `bits`
    bits of both numbers determine n_j - n_i. The dither u in [0, 1) is random and equal on all ranks. So equal entries
    have the difference zero, and other differences are correct in expectation. Moniqua has no state and no copy of a
    model, and works on any undirected graph.

    Differences are whole numbers and opposite at the two ends of a link, so the mean is kept up to float rounding. A
    message has a checksum of all n_i with their leading digits. A neighbour compares it before its model changes. If an
    entry differs by more than theta, the neighbour raises an error instead of computing a wrong model.

    Lu, De Sa, "Moniqua: Modulo Quantized Communication in Decentralized SGD", ICML 2020, arXiv 2002.11787,
    Algorithm 1 with shared randomness.

    Args:
        theta: the bound on |x_i - x_j| for every entry of two neighbours' models.
        bits: the number of bits per entry; 2, 4 or 8.
        step_size: the consensus step size; 1 is right for 8 bits, fewer bits need less.
        seed: the seed of the dither, equal on all ranks.

    Raises:
        ValueError: an argument is out of range. In a round: an entry of this rank or of a neighbour is 2^31 grid
            spacings h or more from zero. Pass a larger theta, since neighbouring float32 numbers of that size differ by
            more than theta. All ranks that received the message raise the error.
        RuntimeError: in a round: neighbours differ by more than theta in an entry, or an entry is not finite.

    Example:
        >>> model = GossipDataParallel(model, push_sum=False, algorithm=Moniqua(theta=0.5, bits=8))
    """

    theta: float
    _: KW_ONLY
    bits: int = 8
    step_size: float = 1.0
    seed: int = 0

    summary: ClassVar[str] = "sends parameters modulo a bound on the differences of neighbours, in a few bits each"
    paper: ClassVar[Paper | None] = Paper(
        "Lu, De Sa", "Moniqua: Modulo Quantized Communication in Decentralized SGD", "ICML 2020", "2002.11787"
    )
    is_skippable: ClassVar[bool] = False  # a message with numbers that are not finite raises an error
    takes_wire_dtype: ClassVar[bool] = False
    needs_symmetric_weights: ClassVar[bool] = True
    takes_rows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "step_size", checked_step_size(self))
        if not (isinstance(self.theta, int | float) and 0 < self.theta < math.inf):
            raise ValueError(
                f"Moniqua: got theta={self.theta!r}, expected a positive number: more than any entry of two "
                "neighbours' models ever differs by"
            )
        object.__setattr__(self, "theta", float(self.theta))
        if not isinstance(self.bits, int) or self.bits not in (2, 4, 8):
            raise ValueError(f"Moniqua: got bits={self.bits!r}, expected 2, 4 or 8; one bit cannot tell up from down")
        object.__setattr__(self, "seed", checked_seed(self.seed))

    @property
    def num_levels(self) -> int:
        """L, the number of levels of a code."""
        return 1 << self.bits

    @property
    def spacing(self) -> float:
        """h, the distance between grid points."""
        return self.theta / (self.num_levels // 2 - 1)

    def step_size_on(self, mixing: MixingManager) -> float:
        """See `Algorithm`."""
        return self.step_size

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        received = yield Share(v.encode(self, v.x))  # n_i mod L
        self._check(v, received)
        with v.x.adding() as x:
            for index, part in enumerate(x.parts):
                if part.numel():
                    self._add_differences(part, [(weight, message.fields[index]) for weight, message in received])

    # The code of a model, see `Code`.

    def message_like(self, x: Tensor) -> Tensor:
        """Make a message for vectors like x: uint8 [num_bytes]."""
        return x.new_zeros(_HEADER_BYTES + packed_size(x.numel(), self.bits), dtype=torch.uint8)

    def compress(self, x: Tensor, message: Tensor, *, t: int) -> None:
        """message <- n mod L with n = floor(x / h + u), and the checksum of n; u is a function of the round t."""
        dither = random_words(self.seed, t, 1)[0] / 2**64
        checksum = torch.zeros(1, dtype=torch.int64, device=x.device)
        largest = torch.zeros(1, dtype=x.dtype, device=x.device)
        for start, stop, _ in chunks(x, 8):
            places = torch.floor(x[start:stop] / self.spacing + dither)
            largest = torch.maximum(largest, x[start:stop].abs().max())  # NaN stays
            numbers = places.int()
            checksum += _factors(numbers, start).mul_(numbers).sum(dtype=torch.int64)
            pack((numbers & (self.num_levels - 1)).to(torch.uint8), self.bits, self._codes(message, start, stop))
        is_finite = largest.isfinite()
        is_too_large = is_finite & (largest >= self._limit)
        flags = is_too_large * _TOO_LARGE + ~is_finite * _NOT_FINITE
        message[:_HEADER_BYTES].copy_((checksum % _WORD + flags).view(torch.uint8))

    def _check(self, v: Vectors, received: Received) -> None:
        """Raise an error if the differences from a message do not reproduce its checksum."""
        messages = [message.fields for _, message in received]
        for index, part in enumerate(v.x.parts):
            if part.numel():
                own, *others = (fields[index] for fields in messages)
                is_wrong = _header(own) >= _WORD
                sums = [_header(own) for _ in others]
                for start, stop, _ in chunks(part, 8):
                    mine = unpack(self._codes(own, start, stop), self.bits, stop - start)
                    factors = _factors(mine, start)
                    for total, message in zip(sums, others, strict=True):
                        numbers = self._levels(message, mine, start, stop).int() - self.num_levels // 2
                        total += numbers.mul_(factors).sum(dtype=torch.int64)
                for total, message in zip(sums, others, strict=True):
                    is_wrong |= total % _WORD != _header(message)
                if bool(is_wrong):
                    self._fail(v, received.names, [int(_header(fields[index])) for fields in messages])

    def _add_differences(self, x: Tensor, messages: Sequence[tuple[float, Tensor]]) -> None:
        """x <- x + step_size h sum_j W_ij d_ij."""
        (_, own), *others = messages
        for start, stop, _ in chunks(x, 8):
            mine = unpack(self._codes(own, start, stop), self.bits, stop - start)
            for weight, message in others:
                difference = self._levels(message, mine, start, stop).to(x.dtype).sub_(self.num_levels // 2)
                x[start:stop].add_(difference.mul_(self.step_size * weight * self.spacing))

    def _levels(self, message: Tensor, mine: Tensor, start: int, stop: int) -> Tensor:
        """Return d_ij + L / 2 in [0, L) for entries [start, stop), where `mine` is n_i mod L of these entries."""
        theirs = unpack(self._codes(message, start, stop), self.bits, stop - start)
        # Bytes wrap around modulo 256, a multiple of the number of levels.
        return (theirs - mine + self.num_levels // 2) & (self.num_levels - 1)

    def _fail(self, v: Vectors, names: Sequence[object], headers: Sequence[int]) -> None:
        """Raise the error that the headers of all messages indicate; the first header belongs to this rank."""
        who = f"rank {names[0]}: round {v.t}"
        if too_large := [name for name, header in zip(names, headers, strict=True) if header & _TOO_LARGE]:
            owners = ", ".join(map(str, too_large))
            raise ValueError(
                f"{who}: got a model of rank {owners} with an entry of {self._limit:.3g} or more, "
                f"expected less: Moniqua with theta={self.theta} and {self.bits} bits counts spacings of "
                f"{self.spacing:.3g}, fewer than 2^31; pass a larger theta, or find out why entries are so large"
            )
        raise RuntimeError(
            f"{who}: got a neighbour's model that differs in an entry "
            f"by more than theta={self.theta}, or is not finite, expected less; pass a larger theta, a smaller "
            "step_size or learning rate, or start from equal models"
        )

    @property
    def _limit(self) -> float:
        return _MAX_NUMBER * self.spacing

    def _codes(self, message: Tensor, start: int, stop: int) -> Tensor:
        """Return the bytes of a message for the entries [start, stop); start is a multiple of 8."""
        first = _HEADER_BYTES + start * self.bits // 8
        return message[first : first + packed_size(stop - start, self.bits)]


def _factors(numbers: Tensor, start: int) -> Tensor:
    """Return an odd factor for each number, a hash of its position: int32.

    The checksum is the sum of all numbers times their factors, modulo 2**32, so overflow of int32 is harmless. The
    factors have no pattern, so that errors by multiples of the number of levels do not cancel.
    """
    places = torch.arange(numbers.numel(), dtype=torch.int32, device=numbers.device).add_(start % (_WORD // 2))
    factors = places.mul_(_MULTIPLIER)
    return factors.bitwise_xor_(factors >> 15).bitwise_or_(1)


def _header(message: Tensor) -> Tensor:
    """Return a copy of the header, int64 [1]: the checksum, and the flags `_TOO_LARGE` or `_NOT_FINITE`."""
    return message[:_HEADER_BYTES].clone().view(torch.int64)
