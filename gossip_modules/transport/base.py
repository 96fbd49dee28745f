"""The protocol of a network for gossip, and of messages under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

from .deadline import Deadline
from .traffic import PeerTraffic


class Pending(Protocol):
    """The messages of one round, under way.

    Attributes:
        lost: failed peers; their messages are missing. Over a transport that is not elastic, a failed peer is an error.
    """

    lost: frozenset[int]

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when all messages have been received and sent, or raise an error with the name of the peer.

        Args:
            timeout: None = the transport's own.

        Raises:
            TimeoutError, ConnectionError: a peer is late or gone.
        """

    def arrivals(self) -> Iterator[int]:
        """Wait chunk by chunk: yield 0, 1, ... once the tensors of that index may be touched again.

        A tensor is yielded once it was received from all in-peers and sent to all out-peers, because mixing in place
        overwrites sent tensors. NCCL orders streams, so all are yielded at once.
        """


class Transport(Protocol):
    """A network for gossip. Ranks count within the group, and tensors are contiguous.

    Attributes:
        rank: the rank of this process in the group.
        world_size: the number of its ranks.
        device: the device of sent messages.
        names: the global rank of each member, for error messages.
        timeout: the limit of every operation.
        is_elastic: whether rounds go on without failed peers.
        lost: failed peers; empty unless the transport is elastic.
        num_bytes_sent: the number of bytes sent by this rank.
        traffic: the counters of messages of rounds, by peer.
    """

    rank: int
    world_size: int
    device: torch.device
    names: Sequence[int]
    timeout: timedelta
    is_elastic: bool
    traffic: PeerTraffic

    @property
    def num_bytes_sent(self) -> int:
        """See the attributes."""

    @property
    def lost(self) -> frozenset[int]:
        """See the attributes."""

    def exchange(
        self,
        sends: Mapping[int, Sequence[Tensor]],
        recvs: Mapping[int, Sequence[Tensor]],
        *,
        tag: int,
        what: str = "",
        fill: Callable[[int], None] | None = None,
    ) -> Pending:
        """Post the messages of one round; non-blocking.

        Do not touch a tensor before `wait()` has returned, or `arrivals()` has yielded its index. Messages of equal
        tags meet in their order.

        Args:
            sends: the tensors for each out-peer, by rank.
            recvs: the tensors to receive from each in-peer, by rank; written.
            tag: a number, equal at both ends; so are the sizes of the tensors.
            what: names the exchange in errors; "round <tag>" by default.
            fill: called with 0, 1, ... to write the tensors of that index just before they are sent. Earlier tensors
                are being sent meanwhile.
        """

    def within(self, deadline: Deadline) -> AbstractContextManager[None]:
        """A context in which collectives share the deadline, in place of a timeout for each."""

    def all_reduce(self, x: Tensor, *, what: str) -> None:
        """x <- sum over all ranks, in place; blocking. `what` names the operation in errors."""

    def barrier(self, *, what: str) -> None:
        """Return when every rank has come; blocking. `what` names the operation in errors."""

    def broadcast(self, x: Tensor, *, source: int, what: str) -> None:
        """x <- x of rank `source`, in place; blocking. `what` names the operation in errors."""

    def all_to_all(self, out: Tensor, x: Tensor, *, what: str) -> None:
        """out <- run `rank` of x of every rank, in rank order; blocking. A run is one of world_size equal parts.

        Args:
            out: flat, as long as `x`; written.
            x: flat; its length is a multiple of world_size.
            what: names the operation in errors.
        """

    def all_gather(self, out: Tensor, x: Tensor, *, what: str) -> None:
        """out <- x of every rank, in rank order; blocking.

        Args:
            out: flat, world_size times as long as `x`; written.
            x: the tensor of this rank.
            what: names the operation in errors.
        """
