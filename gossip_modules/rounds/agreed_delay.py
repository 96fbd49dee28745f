"""AgreedDelay: the number of steps for which outer steps travel under training, measured and equal on all ranks."""

from __future__ import annotations

import math

import torch

from ..state import Restart, State, leaf
from ..transport.agreement import rows_of_all
from ..transport.base import Transport

_NONE = -1.0  # no round has been measured


class AgreedDelay(State):
    """The delay of the next round, if `delay="auto"`: the steps that the round before took on the slowest rank.

    [Note: delay="auto"] When a reply has come, the gossip thread gathers a number of each rank: the steps from the
    begin of the round before until all ranks had its reply, plus one; half as many again as the delay if training has
    waited for it. The largest number is the delay of rounds that begin when this round is due, or later, at most
    H - 1. So a reply is applied in the first step in which all ranks have it, as far as the round before tells, and in
    the same step on all ranks: each rank computes the delays from the same numbers. The first rounds travel for half
    of the period.

    The training thread calls all methods but `agree`, which the gossip thread calls.

    Args:
        most: the largest delay, at least 1.

    Attributes:
        k: the number of optimizer steps so far; the training thread writes it.
    """

    _delays: list[tuple[int, int]] = leaf([], save=lambda delays: [list(pair) for pair in delays])
    _measured: float = leaf(_NONE, is_saved=False)

    def __init__(self, most: int) -> None:
        self.most, self.k = most, 0
        self.restarted(Restart.ALL)

    def restarted(self, event: Restart) -> None:
        """See `State`."""
        delays = self._delays or [(0, max(self.most // 2, 1))]
        self._delays = [(int(k), min(int(delay), self.most)) for k, delay in delays]

    def at(self, k: int) -> int:
        """Return the delay of a round that begins after k steps; k does not decrease."""
        while len(self._delays) > 1 and self._delays[1][0] <= k:
            self._delays.pop(0)
        return self._delays[0][1]

    def agree(self, transport: Transport, *, begun: int, due: int) -> float:
        """Gather the measurements of all ranks.

        Args:
            transport: over all ranks.
            begun: the step at which the round in this thread has begun.
            due: the step at which it is due.

        Returns:
            The delay for `land`; negative: no rank has measured a round.
        """
        own = torch.tensor([self._measured], dtype=torch.float64, device="cpu")
        what = f"the delay of outer steps, of the round after {begun} steps"
        measured = rows_of_all(transport, own, what=what)
        has_waited = self.k >= due
        self._measured = math.ceil(1.5 * (due - begun)) if has_waited else self.k - begun + 1
        return float(measured.max())

    def land(self, due: int, agreed: float) -> None:
        """Note the result of `agree` of the round that was due at this step."""
        if agreed > 0:
            self._delays.append((due, min(int(agreed), self.most)))

    @property
    def present(self) -> int:
        """The delay of the last rounds."""
        return self._delays[0][1]
