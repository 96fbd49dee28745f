"""Gossiper: the base of gossipers of your own, which write `encode` and `decode`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingManager, MixingWeights
from ..transport.base import Transport
from .push_pull import Messages, PushPull


class Gossiper(PushPull):
    """A mixer that exchanges whole messages with its peers; an algorithm writes `encode` and `decode`."""

    is_whole = False
    num_phases: int = 1

    def bind(self, mixing: MixingManager, transport: Transport) -> None:
        """See `Mixer`."""
        PushPull.__init__(self)
        super().bind(mixing, transport)
        self._cut_bytes = 0

    def check(self, mixing: MixingManager) -> None:
        """See `Mixer`."""

    @abstractmethod
    def encode(self, s: FlatVector, out_peers: Sequence[int], in_peers: Sequence[int]) -> tuple[Messages, Messages]:
        """The tensors that each out-peer gets, and the tensors that the message of each in-peer fills."""

    @abstractmethod
    def decode(self, s: FlatVector, weights: MixingWeights) -> None:
        """s <- s + (W - I) s, with the messages in the tensors that `encode` gave."""

    def decode_difference(self, s: FlatVector, weights: MixingWeights) -> float:
        """See `PushPull`. Override it when `decode` reads s."""
        s.raw.zero_()
        s.push_sum_weight.zero_()
        self.decode(s, weights)
        return 1.0

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
