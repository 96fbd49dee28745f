"""How bytes move: point-to-point rounds and a few collectives over a torch.distributed process group."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .backend import backend_of
from .exchange import Exchange, fail, num_bytes_of, wait_for
from .staging import Staging

DEFAULT_TIMEOUT = timedelta(minutes=5)
FOREVER = timedelta(days=365)
ROUND_BITS, SIZE_BITS, CHANNEL_BITS = 16, 9, 5  # of a tag: torch has 31 bits; rounds and channels wrap around
PROBE_TAG = 1 << ROUND_BITS + SIZE_BITS + CHANNEL_BITS  # no round has it


class Pending(Protocol):
    """Bytes on their way."""

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when all have arrived and left, or raise TimeoutError or ConnectionError naming the peer.

        Args:
            timeout: None = the transport's own.
        """

    def arrivals(self) -> Iterator[int]:
        """As `wait()`, piece by piece: yields 0, 1, ... as the tensors of that index may be touched again.

        That is when those of all in-peers have arrived and those to all out-peers have left, since who mixes in place
        writes over what was sent. On NCCL, which orders streams, all are yielded at once.
        """


class Transport(Protocol):
    """What gossip needs of a network; ranks are those of the group, tensors are contiguous."""

    rank: int
    world_size: int
    device: torch.device  # where messages live on the wire
    names: Sequence[int]  # the global rank of each member, for error messages
    num_bytes_sent: int

    def exchange(
        self,
        sends: Mapping[int, Sequence[Tensor]],
        recvs: Mapping[int, Sequence[Tensor]],
        *,
        tag: int,
        what: str = "",
        fill: Callable[[int], None] | None = None,
    ) -> Pending:
        """Post one round: to each rank in `sends` its tensors, from each in `recvs` into its tensors; non-blocking.

        Neither may be touched before `wait()` returned, or `arrivals()` gave their index. Messages of equal tags meet
        in their order.

        Args:
            tag: the same at both ends, as are the sizes of the tensors.
            what: names the exchange in errors; "round <tag>" by default.
            fill: called with 0, 1, ... just before the tensors of that index are sent, and after those before them
                were: what it writes there is written while they are on the wire.
        """

    def all_reduce(self, x: Tensor, *, what: str) -> None:
        """x <- sum over all ranks, in place; blocking. `what` names the operation in errors."""

    def broadcast(self, x: Tensor, *, source: int, what: str) -> None:
        """x <- x of rank `source`, in place; blocking."""

    def all_gather(self, out: Tensor, x: Tensor, *, what: str) -> None:
        """out <- x of every rank, in rank order; `out` is flat, world_size times as long as `x`; blocking."""


class ProcessGroupTransport:
    """A transport over one process group that carries nothing else while it is in use.

    Sends and receives go to the group itself, not through `torch.distributed`'s global state, so that several ranks
    can live in one process. NCCL is the exception: its round must be one `batch_isend_irecv` or it deadlocks.

    Args:
        group: Gloo, NCCL or MPI; the calling process is a member.
        device: where messages live on the wire. Tensors elsewhere (GPU tensors over Gloo) are staged through pinned
            memory that is kept from round to round.
        timeout: for every wait. NCCL waits are in stream order and end by the group's own timeout instead.
        names: the global rank of each member, for error messages; None = 0, 1, ...
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        device: torch.device,
        timeout: timedelta,
        names: Sequence[int] | None = None,
    ) -> None:
        self.group = group
        self.device = device
        self.timeout = timeout
        self.rank = group.rank()
        self.world_size = group.size()
        self.names = range(self.world_size) if names is None else names
        self.num_bytes_sent = 0
        self.backend = backend_of(group, device)
        self._channels = itertools.count(1)
        self._channel = 0
        self._staging = Staging(device)

    def __deepcopy__(self, memo: dict[int, object]) -> ProcessGroupTransport:
        """Another user of the same connection, on a channel of its own: its messages never meet ours.

        All ranks must copy in the same order. NCCL has no channels: there, do not train both with overlap.
        """
        other = ProcessGroupTransport(self.group, device=self.device, timeout=self.timeout, names=self.names)
        other._channels = self._channels
        other._channel = next(self._channels)
        return other

    def exchange(
        self,
        sends: Mapping[int, Sequence[Tensor]],
        recvs: Mapping[int, Sequence[Tensor]],
        *,
        tag: int,
        what: str = "",
        fill: Callable[[int], None] | None = None,
    ) -> Pending:
        """See `Transport`.

        [Note: receives first] A one-peer round reaches 0.94 of a 1 Gbit/s link with receives posted before sends,
        0.69 the other way round: Gloo answers a send only once the receive is there.
        """
        staging = self._staging
        messages = (*recvs.values(), *sends.values())
        staging.expect(sum(map(len, messages)))
        inbox = [(peer, k, x, staging.twin(x, keep=True)) for peer, xs in recvs.items() for k, x in enumerate(xs)]
        staging.settle()
        num_pieces = max(map(len, messages), default=0)
        exchange = Exchange(self, num_pieces, tag=tag, what=what or f"round {tag}")
        coming, going = ({peer: sum(map(num_bytes_of, xs)) for peer, xs in side.items()} for side in (recvs, sends))
        for peer, k, x, twin in inbox:
            exchange.receive(k, peer, x, twin, total_bytes=coming[peer])
        for k in range(num_pieces):
            if fill is not None:
                fill(k)
            outbox = [(j, staging.twin(xs[k], fill=True, keep=True)) for j, xs in sends.items() if k < len(xs)]
            staging.settle()
            for peer, twin in outbox:
                exchange.send(k, peer, twin, total_bytes=going[peer])
                self.num_bytes_sent += num_bytes_of(twin)
        exchange.begin()
        return exchange

    def receive_any(self, x: Tensor, *, tag: int) -> int:
        """x <- the next message of that length and tag, from whichever rank; returns who sent it.

        Blocks without a limit of time: for a listener, who ends by a message too. Gloo only, CPU memory only.

        [Note: listeners] Gloo can neither poll nor abort such a receive, and one that times out would break its
        connections. A dead peer does not disturb it.
        """
        assert self.backend == "gloo", f"{self.backend} cannot receive from any rank"
        assert x.device.type == "cpu", "a listener's messages are in CPU memory"
        start = time.monotonic()
        try:
            work = self.group.recv_anysource([x], self.wire_tag(tag, num_bytes_of(x)))
            work.wait(FOREVER)
        except RuntimeError as error:  # who was sending has died over it
            note = f", connections to ranks {self._closed_peers()} are closed"
            self.fail(error, "receiving from any rank", time.monotonic() - start, timeout=FOREVER, note=note)
        return work._source_rank()

    def all_reduce(self, x: Tensor, *, what: str) -> None:
        """See `Transport`. Counted as the 2 (n - 1) / n of its bytes that a ring sends."""
        message = self._staging.twin(x, fill=True)
        self._collective(lambda: self.group.allreduce([message]), what)
        self.num_bytes_sent += 2 * (self.world_size - 1) * x.numel() * x.element_size() // self.world_size
        Staging.copy_back([(x, message)])

    def broadcast(self, x: Tensor, *, source: int, what: str) -> None:
        """See `Transport`."""
        message = self._staging.twin(x, fill=True)
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._collective(lambda: self.group.broadcast([message], options), what)
        self.num_bytes_sent += x.numel() * x.element_size() * (self.rank == source)
        Staging.copy_back([(x, message)])

    def all_gather(self, out: Tensor, x: Tensor, *, what: str) -> None:
        """See `Transport`."""
        gathered, message = self._staging.twin(out), self._staging.twin(x, fill=True)
        chunks = list(gathered.view(self.world_size, -1).unbind())
        self._collective(lambda: self.group.allgather([chunks], [message]), what)
        self.num_bytes_sent += (self.world_size - 1) * x.numel() * x.element_size()
        Staging.copy_back([(out, gathered)])

    def _collective(self, post: Callable[[], dist.Work], what: str) -> None:
        self._staging.settle()
        start = time.monotonic()
        try:
            if self.backend in ("gloo", "mpi4py") and self.world_size > 1:
                # A collective cannot say who is missing; this barrier can (rank 0 hears from every rank by name).
                self.group.monitored_barrier(self.timeout, True)  # type: ignore[attr-defined]
            wait_for(post(), self.timeout, backend=self.backend)
        except RuntimeError as error:
            names = list(self.names)
            numbered = "" if names == list(range(self.world_size)) else ", numbered from 0 in what follows"
            seconds = time.monotonic() - start
            closed = f", connections to ranks {gone} are closed" if (gone := self._closed_peers()) else ""
            self.fail(error, f"{what} among ranks {names}", seconds, note=closed + numbered)

    def _closed_peers(self) -> list[int]:
        """After a failure on Gloo, the global ranks whose connection is gone: posting a receive says so at once."""
        gone = []
        for peer in range(self.world_size) if self.backend == "gloo" else ():
            try:
                if peer != self.rank:
                    self.group.recv([torch.empty(1, dtype=torch.uint8)], peer, PROBE_TAG)
            except RuntimeError:
                gone.append(self.names[peer])
        return gone

    def wire_tag(self, tag: int, num_bytes: int, *, total_bytes: int | None = None) -> int:
        """The backend's tag of a message of round `tag` on this channel.

        It depends on the size, so that messages of two sizes do not meet: Gloo ends the process when a message is
        longer than what the receiver has room for. Such a receiver waits in vain instead, and says for whom. A piece's
        depends on the size of all pieces too: who expects fewer would take the first ones for the whole.

        Args:
            num_bytes: of what is sent at once.
            total_bytes: of the message that they are a piece of; None: they are all.
        """
        rest = 0 if total_bytes is None else total_bytes - num_bytes
        size = (num_bytes + 31 * rest) % ((1 << SIZE_BITS) - 3)  # a prime: lengths of vectors differ by powers of two
        channel = self._channel % (1 << CHANNEL_BITS)
        return (channel << SIZE_BITS | size) << ROUND_BITS | tag % (1 << ROUND_BITS)

    def fail(
        self, error: RuntimeError, what: str, seconds: float, *, timeout: timedelta | None = None, note: str = ""
    ) -> NoReturn:
        """See the function `fail`; the rank is this one."""
        fail(error, rank=self.names[self.rank], what=what, seconds=seconds, timeout=timeout or self.timeout, note=note)
