"""Moniqua: gossip of the models modulo a bound on how much neighbours differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from ..compression.bit_packing import pack, packed_size, unpack
from ..compression.compressor import checked_seed, chunks, random_words
from .broadcast import BroadcastGossiper
from .compressed import State

_HEADER_BYTES = 8
_WORD = 1 << 32
_TOO_LARGE, _NOT_FINITE = 1 << 32, 1 << 33  # flags in a header, above the 32 bits of the checksum
_MAX_NUMBER = (1 << 31) * (1 - 1e-6)  # grid numbers are int32; a little less, so that rounding never exceeds it
_MULTIPLIER = 0x9E3779B1 - _WORD  # 2**32 over the golden ratio, odd, as int32


class Moniqua(BroadcastGossiper):
    """Moniqua: each rank sends its model on a grid, modulo L grid points; theta bounds how far neighbours differ.

    A round on rank i with the neighbours j, after the local SGD step; h = theta / (L / 2 - 1) and L = 2^bits:

        n_i = floor(x_i / h + u)                                           compress
        send n_i mod L to all neighbours, receive their n_j mod L          (broadcast.py)
        d_ij = (n_j - n_i) mod L, in [-L / 2, L / 2)                       apply
        x_i = x_i + step_size h sum_j W_ij d_ij

    The leading digits of n_i need not be sent: where the entries of neighbours differ by less than theta, the last
    `bits` bits of both numbers determine n_j - n_i. The dither u in [0, 1) is random and the same on all ranks, so
    equal entries have the difference zero, and other differences are right in expectation. Moniqua keeps no state and
    no copy of a model, and works on any undirected graph.

    Differences are whole numbers and opposite at the two ends of a link, so the mean is kept to float rounding. A
    message carries a checksum of all n_i with their leading digits. A neighbour compares it and raises an error where
    an entry differed by more than theta, instead of computing a wrong model.

    Lu, De Sa, "Moniqua: Modulo Quantized Communication in Decentralized SGD", ICML 2020, arXiv 2002.11787,
    Algorithm 1 with shared randomness.

    Args:
        theta: the bound on |x_i - x_j| for every entry of two neighbours' models.
        bits: the number of bits per entry; 2, 4 or 8.
        step_size: the consensus step size; 1 is right for 8 bits, fewer bits need less.
        seed: the seed of the dither, the same on all ranks.

    Raises:
        ValueError: an argument is out of range. In a round: an entry of this rank or of a neighbour is 2^31 grid
            spacings h or more from zero; raise theta, since neighbouring float32 numbers of that size differ by more
            than theta. All ranks that received the message raise it.
        RuntimeError: in a round: neighbours differ by more than theta in an entry, or an entry is not finite.

    Example:
        >>> model = GossipDataParallel(model, push_sum=False, gossiper=Moniqua(theta=0.5, bits=8))
    """

    is_elastic = True

    def __init__(self, theta: float, *, bits: int = 8, step_size: float = 1.0, seed: int = 0) -> None:
        super().__init__(step_size=step_size)
        if not (isinstance(theta, int | float) and 0 < theta < math.inf):
            raise ValueError(
                f"Moniqua: got theta={theta!r}, expected a positive number: more than any entry of two neighbours' "
                "models ever differs by"
            )
        if not isinstance(bits, int) or bits not in (2, 4, 8):
            raise ValueError(f"Moniqua: got bits={bits!r}, expected 2, 4 or 8; one bit cannot tell up from down")
        self.theta, self.bits, self.seed = float(theta), bits, checked_seed(seed)
        self.num_levels = 1 << bits
        self.spacing = self.theta / (self.num_levels // 2 - 1)
        self._limit = _MAX_NUMBER * self.spacing

    def init_state(self, x: Tensor) -> State:
        """See `BroadcastGossiper`; there is no state."""
        return {}

    def message_like(self, x: Tensor) -> Tensor:
        """See `BroadcastGossiper`."""
        return x.new_zeros(_HEADER_BYTES + packed_size(x.numel(), self.bits), dtype=torch.uint8)

    def compress(self, x: Tensor, state: State, message: Tensor) -> None:
        """message <- n mod L with n = floor(x / h + u), and the checksum of n."""
        dither = random_words(self.seed, self.num_messages, 1)[0] / 2**64
        checksum = torch.zeros(1, dtype=torch.int64, device=x.device)
        largest = torch.zeros(1, dtype=x.dtype, device=x.device)
        for start, stop, _ in chunks(x, 8):
            places = torch.floor(x[start:stop] / self.spacing + dither)
            largest = torch.maximum(largest, x[start:stop].abs().max())  # NaN stays
            numbers = places.int()
            checksum += _weighed_sum(numbers, start)
            pack((numbers & (self.num_levels - 1)).to(torch.uint8), self.bits, self._codes(message, start, stop))
        is_finite = largest.isfinite()
        is_too_large = is_finite & (largest >= self._limit)
        flags = is_too_large * _TOO_LARGE + ~is_finite * _NOT_FINITE
        message[:_HEADER_BYTES].copy_((checksum % _WORD + flags).view(torch.uint8))

    def apply(self, target: Tensor, state: State, messages: Sequence[tuple[Tensor, float]]) -> None:
        """target <- target + step_size h sum_j W_ij ((n_j - n_i) mod L)."""
        (own, _), *others = messages
        half = self.num_levels // 2
        is_wrong = _header(own) >= _WORD
        for message, weight in others:
            checksum = _header(own)
            for start, stop, _ in chunks(target, 8):
                mine, theirs = (unpack(self._codes(m, start, stop), self.bits, stop - start) for m in (own, message))
                # Bytes wrap around modulo 256, a multiple of the number of levels.
                numbers = ((theirs - mine + half) & (self.num_levels - 1)).int() - half
                checksum += _weighed_sum(numbers, start)
                target[start:stop] += numbers.to(target.dtype).mul_(self.step_size * weight * self.spacing)
            is_wrong |= checksum % _WORD != _header(message)
        if bool(is_wrong):
            self._fail([int(_header(message)) for message, _ in messages])

    def _fail(self, headers: Sequence[int]) -> NoReturn:
        """Raise the error that the headers of all messages tell, that of this rank first."""
        names = self.transport.names
        who = f"rank {names[self.transport.rank]}: round {self._t}"
        ranks = [names[rank] for rank in (self.transport.rank, *self._buffers)]
        if too_large := [rank for rank, header in zip(ranks, headers, strict=True) if header & _TOO_LARGE]:
            owners = ", ".join(map(str, too_large))
            raise ValueError(
                f"{who}: got a model of rank {owners} with an entry of {self._limit:.3g} or more, "
                f"expected less: Moniqua with theta={self.theta} and {self.bits} bits counts spacings of "
                f"{self.spacing:.3g}, fewer than 2^31; raise theta, or find out why entries are so large"
            )
        raise RuntimeError(
            f"{who}: got a neighbour's model that differs in an entry "
            f"by more than theta={self.theta}, or is not finite, expected less; raise theta, lower "
            "step_size or the learning rate, or start from equal models"
        )

    def _codes(self, message: Tensor, start: int, stop: int) -> Tensor:
        """The bytes of a message that hold entries [start, stop); start is a multiple of 8."""
        first = _HEADER_BYTES + start * self.bits // 8
        return message[first : first + packed_size(stop - start, self.bits)]

    def __repr__(self) -> str:
        return f"Moniqua(theta={self.theta}, bits={self.bits}, step_size={self.step_size}, seed={self.seed})"


def _weighed_sum(numbers: Tensor, start: int) -> Tensor:
    """The sum of the numbers, each times an odd factor that is a hash of its position; correct modulo 2**32.

    Overflow of int32 is therefore harmless. The factors have no pattern, so that differences which are wrong by
    multiples of the number of levels do not cancel.
    """
    places = torch.arange(numbers.numel(), dtype=torch.int32, device=numbers.device).add_(start % (_WORD // 2))
    factors = places.mul_(_MULTIPLIER)
    factors = factors.bitwise_xor_(factors >> 15).bitwise_or_(1)
    return factors.mul_(numbers).sum(dtype=torch.int64)


def _header(message: Tensor) -> Tensor:
    """The checksum, plus `_TOO_LARGE` if an entry was too large, or `_NOT_FINITE`: int64 [1], a copy."""
    return message[:_HEADER_BYTES].clone().view(torch.int64)
