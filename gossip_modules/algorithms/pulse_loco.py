"""PULSELoCo: ranks send the entries of their drifts that change the anchor in bfloat16, and keep the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..compression.bit_packing import pack, packed_size, unpack
from ..compression.masks import nonzero
from ..flat.layout import align
from ..registry import Paper
from ..rounds import SGD, Gather, Memory, Round, Vector, Vectors, step
from ..rounds.messages import Message
from .outer_method import OuterMethod


@dataclass(frozen=True)
class PULSELoCo(OuterMethod):
    """PULSELoCo: DiLoCo whose ranks send the entries that change the anchor in 16 bits, as the next forward rounds it.

    Every `sync_every` = H optimizer steps, with c = `lr`, b = `momentum` and R = rounding to `visible_in`, on rank i
    of n; e_i is zero at first:

        s_i <- e_i + phi - x_i
        M_i <- [R(phi) != R(phi - s_i)]     # the visible entries
        send M_i, and s_i on M_i in float32
        e_i <- s_i off M_i, and 0 on M_i    # the rest is sent when it has become visible
        D   <- 1/n  sum_j (s_j on M_j, and 0 off M_j)
        m   <- b m + D
        phi <- phi - c (D + b m)            # torch.optim.SGD(nesterov=True), to the bit
        x_i <- phi

    All ranks keep equal anchors phi, and each rank has its own e_i. The smaller the learning rate of the inner steps,
    the fewer entries are visible. A message has a bit for each entry, then its values; all ranks send as many bytes as
    the rank with the most visible entries, which they agree on first. It goes to n - 1 ranks, while an average sends
    the vector almost twice. So bytes are saved if the share of visible entries is below about 2 / n - 1 / 32.

    Miahi, Belilovsky, "Understanding and Exploiting Weight Update Sparsity for Communication-Efficient Distributed RL",
    2026, arXiv 2602.03839.

    Args:
        sync_every: H, the number of optimizer steps from one outer step to the next.
        lr: c, the learning rate of the outer optimizer.
        momentum: b, its momentum; 0 <= b < 1.
        visible_in: the dtype of R: torch.bfloat16 or torch.float16.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> model = GossipDataParallel(model, algorithm=PULSELoCo(sync_every=30))
    """

    sync_every: int = 30
    _: KW_ONLY
    lr: float = 0.7
    momentum: float = 0.9
    visible_in: torch.dtype = torch.bfloat16

    summary: ClassVar[str] = "is DiLoCo that sends the entries of drifts that change the anchor in bfloat16"
    paper: ClassVar[Paper | None] = Paper(
        "Miahi, Belilovsky",
        "Understanding and Exploiting Weight Update Sparsity for Communication-Efficient Distributed RL",
        "2026",
        "2602.03839",
    )
    averages_exactly: ClassVar[bool] = True
    has_equal_memory: ClassVar[bool] = True
    takes_rows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_rates(lr=self.lr, momentum=self.momentum)
        if self.visible_in not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"PULSELoCo: got visible_in={self.visible_in}, expected torch.bfloat16 or torch.float16, the dtype of "
                "the forward; take DiLoCo() to send all entries"
            )

    def make_optimizer(self, parameters: Sequence[Tensor]) -> Optimizer:
        """Make the outer optimizer.

        Args:
            parameters: the anchor, one flat tensor for each dtype; float32 or wider.
        """
        return SGD(parameters, lr=self.lr, momentum=self.momentum)

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        """See `Algorithm`."""
        phi, error = self.anchor(m), m.vector("error", join="zero")
        s = m.scratch().sum_(phi, v.x, alpha=-1).add_(error)
        q = self._message(v, phi, s)
        received = yield Gather(q)
        error.set_(s)
        for part, places, _ in _visible(q, error):
            part[places] = 0
        s.zero_()
        for _, message in received:
            for part, places, values in _visible(message, s):
                part[places] += values
        s.div_(len(received))
        step(m.optimizer("outer", self.make_optimizer, phi), phi, s)
        self.arrive(v, phi)

    def _message(self, v: Vectors, phi: Vector, s: Vector) -> Message:
        """Return M and the entries of s on M: a field of bits for each part of s, then the bytes of all values."""
        bits = [(torch.uint8, packed_size(part.numel(), 1)) for part in s.parts]
        q = v.message([*bits, (torch.uint8, sum(align(part.nbytes, 8) for part in s.parts))], key="own")
        stop = 0
        for anchor, part, field in zip(phi.parts, s.parts, q.fields, strict=False):
            mask = anchor.to(self.visible_in) != (anchor - part).to(self.visible_in)
            pack(mask.to(torch.uint8), 1, field)
            values, start = part[mask], stop
            stop = start + align(values.nbytes, 8)
            q.fields[-1][start : start + values.nbytes] = values.view(torch.uint8)
        q.trim(stop)
        return q


def _visible(message: Message, like: Vector) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield each part of `like` with the places of its visible entries in a message, int64, and their values."""
    *bits, values = message.fields
    start = 0
    for part, field in zip(like.parts, bits, strict=True):
        places = nonzero(unpack(field, 1, part.numel()))
        stop = start + len(places) * part.element_size()
        yield part, places, values[start:stop].view(part.dtype)
        start = align(stop, 8)
