"""Rounds between pairs of ranks, posted and waited for chunk by chunk; errors name both ranks."""

from __future__ import annotations

import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from datetime import timedelta
from operator import attrgetter
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..devices import host_zeros, wait_for_queue
from .base import Pending
from .change_board import ChangeBoard
from .deadline import AT_ONCE
from .failure_notes import FailureNotes
from .shared_group import Use
from .traffic import PeerTraffic
from .waits import InTurn, Posted, Waits

ROUND_BITS, SIZE_BITS = 10, 15  # of a tag, beside those of the channel: torch has 31 bits; rounds wrap around

FOREVER = timedelta(days=365)
STREAM_ORDERED = ("nccl", "xccl")  # backends that order messages by streams, ignore tags and want a round as one batch
LATE = 0.95  # of the timeout: an error after so long a time is a timeout
SHUTDOWN = "shutdown"  # the name of the last message to a peer, which may have ended already

MAX_STAGED = 64  # staging buffers kept, and more where a round has more; else addresses change from call to call

_SAME_GPU = re.compile(r"duplicate gpu|ranks are using the same gpu", re.IGNORECASE)  # NCCL's words

_num_bytes = attrgetter("nbytes")  # of a tensor on the wire


class Staging:
    """A buffer for each tensor of another device, kept from round to round: pinned memory for GPU tensors.

    Args:
        device: the device of messages on the wire; a tensor there needs no buffer.

    Attributes:
        source: the device of tensors with buffers whose copies may not have ended; None: there are no such copies.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[tuple[int, torch.dtype, torch.Size], Tensor] = {}
        self._max_buffers = MAX_STAGED
        self.source: torch.device | None = None

    def expect(self, num_tensors: int) -> None:
        """A round of so many tensors begins: the buffers of a few such rounds are kept."""
        self._max_buffers = max(self._max_buffers, 4 * num_tensors)

    def buffer_for(self, x: Tensor, *, fill: bool = False, keep: bool = False) -> Tensor:
        """`x` itself where it can go on the wire, else a buffer like it.

        Args:
            x: the tensor to send, or to receive into.
            fill: whether x is copied into the buffer.
            keep: whether the buffer is kept for the next round.
        """
        if x.device.type == self.device.type:
            return x
        self.source = x.device
        key = (x.data_ptr(), x.dtype, x.shape)
        buffer = self._buffers.get(key)
        if buffer is None:
            if self.device.type == "cpu":
                buffer = host_zeros(x.shape, x.dtype, beside=x.device)
            else:
                buffer = torch.empty_like(x, device=self.device)
            if keep:
                if len(self._buffers) >= self._max_buffers:
                    self._buffers.clear()
                self._buffers[key] = buffer
        return buffer.copy_(x, non_blocking=True) if fill else buffer

    def synchronize(self) -> None:
        """Return when the copies between buffers and tensors since the last call have ended."""
        if self.source is not None:
            # Copies into buffers must end before a send reads them, copies out before a receive overwrites them.
            wait_for_queue(self.source)
        self.source = None

    @staticmethod
    def copy_back(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Each tensor <- its buffer."""
        for x, buffer in pairs:
            if x is not buffer:
                x.copy_(buffer, non_blocking=x.device.type != "cpu")  # the host waits for what it reads


class LinkClosedError(ValueError):
    """A message to or from a peer with a closed link."""


class Chunk(NamedTuple):
    """A chunk of a message: the peer, the tensor in a list, as backends take it, and its size as bits of the tag."""

    peer: int
    tensors: list[Tensor]
    size_bits: int


class Messages(dict[int, Sequence[Tensor]]):
    """The messages of one direction of an exchange, by peer, with the numbers that each exchange needs.

    Make them once where many exchanges have the same tensors, as the rounds of plain gossip do. Do not change them.

    Args:
        messages: the tensors to or from each peer, one for each chunk.

    Attributes:
        chunks: the messages by chunk, in the order in which they are posted.
        num_bytes: the number of bytes to or from each peer.
        total_bytes: the number of bytes to or from all peers.
        devices: the types of the tensors' devices.
    """

    def __init__(self, messages: Mapping[int, Sequence[Tensor]]) -> None:
        super().__init__(messages)
        self.num_bytes = {peer: sum(map(_num_bytes, xs)) for peer, xs in self.items()}
        self.total_bytes = sum(self.num_bytes.values())
        self.devices = {x.device.type for xs in self.values() for x in xs}
        self.chunks: list[list[Chunk]] = [[] for _ in range(max(map(len, self.values()), default=0))]
        for peer, xs in self.items():
            for k, x in enumerate(xs):
                self.chunks[k].append(Chunk(peer, [x], _size_bits(x.nbytes, self.num_bytes[peer] - x.nbytes)))

    @classmethod
    def of(cls, messages: Mapping[int, Sequence[Tensor]]) -> Messages:
        """Return messages of this class: the same object, or new messages with these tensors."""
        return messages if isinstance(messages, cls) else cls(messages)

    def without(self, peers: Set[int]) -> Messages:
        """Return the messages of other peers."""
        return Messages({peer: xs for peer, xs in self.items() if peer not in peers})


def _size_bits(num_bytes: int, rest: int) -> int:
    """Return the bits of a tag for a chunk of so many bytes, with `rest` bytes in the other chunks of its message."""
    size = (num_bytes + 31 * rest) % (
        (1 << SIZE_BITS) - 19
    )  # a prime with 2 as a primitive root: lengths differ by powers of 2
    return size << ROUND_BITS


class PendingExchange:
    """One posted round; a `Pending` of the link.

    Args:
        link: the link of the messages.
        sends, recvs: the messages of all peers.
        tag: the tag of the round.
        what: names it in errors.

    Attributes:
        sends, recvs: the messages of peers that had not failed before the round.
        num_chunks: the largest number of chunks of a message, of failed peers too.
        lost: failed peers; the round is complete without them.
    """

    def __init__(self, link: PointToPoint, sends: Messages, recvs: Messages, *, tag: int, what: str) -> None:
        self.link, self.sends, self.recvs, self.tag, self.what = link, sends, recvs, tag, what
        self.num_chunks = max(len(sends.chunks), len(recvs.chunks))
        self.lost: frozenset[int] = frozenset()
        self._tag = link.wire_tag(tag)
        self._works: list[list[Posted]] = [[] for _ in range(self.num_chunks)]
        self._staged: dict[int, list[tuple[Tensor, Tensor]]] = {}  # tensors and their buffers, by chunk
        self._num_done = 0  # chunks
        self._batch: list[dist.P2POp] = []
        self._waited: dict[int, float] = {}  # seconds, by peer
        self._start = 0.0

    def post(self, k: int, chunks: Iterable[Chunk], *, is_send: bool) -> None:
        """Send the chunks with index k, or receive them.

        Args:
            k: their index.
            chunks: the chunks, with tensors on the wire's device.
            is_send: whether they are sent.
        """
        link = self.link
        for peer, tensors, size_bits in chunks:
            if peer in self.lost:
                continue
            group, rank = link.routes.get(peer) or link.find_route(peer)
            if link.is_stream_ordered:
                operation = dist.isend if is_send else dist.irecv
                self._batch.append(dist.P2POp(operation, tensors[0], link.names[peer], group))
                continue
            try:
                work = (group.send if is_send else group.recv)(tensors, rank, self._tag | size_bits)
            except RuntimeError as error:
                self._fail(error, k, peer, is_send=is_send, seconds=0.0)
            else:
                self._works[k].append(Posted(work, k, peer, is_send))

    def copy_back(self, k: int, chunks: Sequence[Chunk], staged: Sequence[Chunk]) -> None:
        """When the chunks with index k have arrived, their tensors <- the staging buffers."""
        self._staged[k] = [(x, buffer) for (_, (x,), _), (_, (buffer,), _) in zip(chunks, staged, strict=True)]

    def begin(self) -> None:
        """All is posted: the time of the waits runs from now."""
        if self._batch:
            self._works[0].extend(map(Posted, dist.batch_isend_irecv(self._batch)))
        self._start = time.monotonic()

    def wait(self, timeout: timedelta | None = None) -> None:
        """See `Pending`."""
        if self._num_done < self.num_chunks:
            self._wait(self.num_chunks, timeout)

    def arrivals(self) -> Iterator[int]:
        """See `Pending`."""
        while self._num_done < self.num_chunks:
            self._wait(self._num_done + 1, None)
            yield self._num_done - 1

    def _wait(self, stop: int, timeout: timedelta | None) -> None:
        """Wait until the chunks before `stop` have been received from, and sent to, all peers."""
        link = self.link
        works = [work for chunk in self._works[self._num_done : stop] for work in chunk]
        if link.waits is None:
            self._wait_here(works, timeout)
        else:
            self._wait_in_thread(works, timeout)
        for k in range(self._num_done, stop):
            if k in self._staged:
                Staging.copy_back(self._staged.pop(k))
            self._works[k].clear()
        self._num_done = stop
        if stop == self.num_chunks:
            if link.agrees_on_lost:
                self.lost = link.agree_lost(self.lost)
            arrived = self.recvs.num_bytes
            if self.lost:
                arrived = {peer: number for peer, number in arrived.items() if peer not in self.lost}
            link.traffic.arrived(arrived, self._waited, sent=self.sends.num_bytes)

    def _wait_here(self, works: Sequence[Posted], timeout: timedelta | None) -> None:
        """Wait for messages, one after the other."""
        link, now = self.link, time.monotonic()
        for work, k, peer, is_send in works:
            if peer in self.lost:
                continue
            before, left = now, (timeout or link.timeout) - timedelta(seconds=now - self._start)
            try:
                link.wait_for(work, max(left, AT_ONCE))
            except RuntimeError as error:
                seconds = time.monotonic() - self._start
                self._fail(error, k, peer, is_send=is_send, seconds=seconds, timeout=timeout)
            now = time.monotonic()
            if peer is not None and timeout is None:
                self._waited[peer] = self._waited.get(peer, 0.0) + now - before

    def _wait_in_thread(self, works: Sequence[Posted], timeout: timedelta | None) -> None:
        """Wait for messages that may never end.

        One thread waits for all of them: see [Note: waits that do not end] of `Waits`.
        """
        link = self.link
        while works := [work for work in works if work.peer not in self.lost] if self.lost else works:
            turn = InTurn(works)
            left = (timeout or link.timeout) - timedelta(seconds=time.monotonic() - self._start)
            try:
                link.wait_for(turn, max(left, AT_ONCE))
                works = []
            except RuntimeError as error:
                seconds, (_, k, peer, is_send) = time.monotonic() - self._start, works[turn.present]
                self._fail(error, k, peer, is_send=is_send, seconds=seconds, timeout=timeout)
                works = works[turn.present + 1 :]
            for peer, seconds in turn.seconds.items() if timeout is None else ():
                if peer is not None:
                    self._waited[peer] = self._waited.get(peer, 0.0) + seconds

    def _fail(
        self,
        error: RuntimeError,
        k: int,
        peer: int | None,
        *,
        is_send: bool,
        seconds: float,
        timeout: timedelta | None = None,
    ) -> None:
        """Raise an error with the name of the peer, unless rounds go on without it: then it is in `lost`."""
        link, what = self.link, self.what or f"round {self.tag}"
        if link.board is not None:
            link.board.raise_if_known()
        if peer is not None and link.loses(peer, error, seconds):
            self.lost |= {peer}
            return
        if peer is not None:
            which = f", chunk {k + 1} of {self.num_chunks}" if self.num_chunks > 1 else ""
            what = f"{what}{which}: {'send to' if is_send else 'receive from'} rank {link.names[peer]}"
        # A wait that is shorter than a peer may take says nothing about the peer.
        if timeout is not None or self.what == SHUTDOWN:
            fail(error, rank=link.names[link.rank], what=what, seconds=seconds, timeout=timeout or link.timeout)
        link.fail(error, what, seconds, peers=() if peer is None else (peer,))


class PointToPoint(ABC):
    """The rounds of a transport: messages between pairs of ranks; see `ProcessGroupTransport`.

    Args:
        rank, world_size, device, names: see `Transport`.
        timeout: for every wait.
        backend: the name of the library for the transfer.
        use: the use of the process group.
    """

    is_elastic = False
    lost: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()  # peers that this process cannot reach, before all processes of it agree
    has_listener = False  # a `Listener` waits for messages without a limit
    board: ChangeBoard | None = None  # see [Note: changes that not all ranks make] of `ChangeBoard`
    agrees_on_lost: bool = False  # whether several processes of one rank have links of their own
    notes: FailureNotes | None = None  # where failing ranks say why
    waits: Waits | None = None  # which can be given up; see [Note: waits that do not end] of `Waits`

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout: timedelta,
        names: Sequence[int],
        backend: str,
        use: Use,
    ) -> None:
        self.rank, self.world_size, self.names = rank, world_size, names
        self.device, self.timeout, self.backend = device, timeout, backend
        self.is_stream_ordered = backend in STREAM_ORDERED
        self.num_round_bytes, self.traffic = 0, PeerTraffic()
        self.routes: dict[int, tuple[dist.ProcessGroup, int]] = {}  # by peer, as `route` has given them; until `close`
        self.waiting: dict[int, float] = {}  # the threads that wait for messages, and since when: for `ChangeBoard`
        self.use, self._staging = use, Staging(device)

    @property
    @abstractmethod
    def num_bytes_sent(self) -> int:
        """The number of bytes sent by this rank, collectives included."""

    @property
    def thread(self) -> int:
        """The thread that trains over this group (`threading.get_ident()`): the maker, until a wrapper says another."""
        return self.use.shared.thread

    @thread.setter
    def thread(self, thread: int) -> None:
        self.use.shared.thread = thread

    @abstractmethod
    def route(self, peer: int) -> tuple[dist.ProcessGroup, int]:
        """Return the group for messages to and from a peer, and its rank there."""

    def loses(self, peer: int, error: RuntimeError, seconds: float) -> bool:
        """Return whether rounds go on without a peer; called when a message to or from it has failed.

        Args:
            peer: the rank of the peer.
            error: the error of the backend.
            seconds: the duration of the wait.
        """
        return False

    def agree_lost(self, lost: frozenset[int]) -> frozenset[int]:
        """Return the peers that all processes of this rank leave out; called at the end of each round.

        It is called only if `agrees_on_lost`.

        Args:
            lost: the peers with missing or unsent messages.
        """
        return lost

    def wait_for(self, work: dist.Work | InTurn, timeout: timedelta) -> None:
        """Wait for messages, or for a collective.

        On NCCL the current stream waits instead of the caller; the group's watchdog has the timeout.

        Args:
            work: the messages or the collective.
            timeout: the longest wait.
        """
        thread = threading.get_ident()
        self.waiting[thread] = time.monotonic()
        try:
            if self.waits is not None:
                self.waits.wait(work, timeout)
            elif self.is_stream_ordered:
                work.wait()
            else:
                work.wait(timeout)
        finally:
            del self.waiting[thread]

    @abstractmethod
    def close_connections(self) -> None:
        """Close the connections of this rank and end every wait on them; from any thread."""

    @abstractmethod
    def fail(self, error: RuntimeError, what: str, seconds: float, *, peers: Sequence[int] = ()) -> NoReturn:
        """Raise an error with the names of the peers, and of the rank that failed first.

        Args:
            error: the error of the backend.
            what: names the operation.
            seconds: the duration of the wait.
            peers: the ranks of the awaited peers; empty: all ranks.
        """

    def exchange(
        self,
        sends: Mapping[int, Sequence[Tensor]],
        recvs: Mapping[int, Sequence[Tensor]],
        *,
        tag: int,
        what: str = "",
        fill: Callable[[int], None] | None = None,
    ) -> Pending:
        """See `Transport`; lost peers get and give nothing.

        [Note: receives first] A one-peer round reaches 0.94 of a 1 Gbit/s link with receives posted before sends,
        0.69 the other way round: Gloo answers a send only once the receive is there.
        """
        sends, recvs = Messages.of(sends), Messages.of(recvs)
        exchange = PendingExchange(self, sends, recvs, tag=tag, what=what)
        if lost := self.failed.intersection((*sends, *recvs)):
            exchange.sends = sends = sends.without(lost)
            exchange.recvs = recvs = recvs.without(lost)
            exchange.lost = lost
        is_staged = bool((sends.devices | recvs.devices) - {self.device.type})
        if is_staged:
            self._staging.expect(sum(map(len, (*recvs.values(), *sends.values()))))
        self.use.is_active = True
        for k, chunks in enumerate(recvs.chunks):
            inbox = self._in_staging(chunks) if is_staged else chunks
            exchange.post(k, inbox, is_send=False)
            if is_staged:
                exchange.copy_back(k, chunks, inbox)
        for k in range(exchange.num_chunks):
            if fill is not None:
                fill(k)
            if k < len(sends.chunks):
                chunks = sends.chunks[k]
                exchange.post(k, self._in_staging(chunks, fill=True) if is_staged else chunks, is_send=True)
        self.num_round_bytes += sends.total_bytes
        exchange.begin()
        return exchange

    def _in_staging(self, chunks: Sequence[Chunk], *, fill: bool = False) -> list[Chunk]:
        """Return chunks with staging buffers in place of tensors of another device; `fill`: with their values."""
        buffer_for = self._staging.buffer_for
        staged = [chunk._replace(tensors=[buffer_for(chunk.tensors[0], fill=fill, keep=True)]) for chunk in chunks]
        self._staging.synchronize()
        return staged

    def find_route(self, peer: int) -> tuple[dist.ProcessGroup, int]:
        """Return `route(peer)`, and keep it in `routes`."""
        self.routes[peer] = self.route(peer)
        return self.routes[peer]

    def wire_tag(self, tag: int, num_bytes: int = 0, *, total_bytes: int | None = None) -> int:
        """The backend's tag of a message of round `tag` on this channel.

        It depends on the size, so that messages of two sizes do not meet: Gloo ends the process when a message is
        longer than what the receiver has room for. Such a receiver waits in vain instead, and says for whom. A chunk's
        depends on the size of all chunks too: a receiver of fewer chunks would take the first ones for the whole.

        Args:
            tag: the round.
            num_bytes: the number of bytes of the chunk; 0: the tag of any chunk, without the bits of its size.
            total_bytes: the bytes of the whole message; None: the chunk is the message.
        """
        size = _size_bits(num_bytes, 0 if total_bytes is None else total_bytes - num_bytes)
        return self.use.channel << SIZE_BITS + ROUND_BITS | size | tag % (1 << ROUND_BITS)


def fail(error: RuntimeError, *, rank: int, what: str, seconds: float, timeout: timedelta, note: str = "") -> NoReturn:
    """Raise the error of a backend with the names of the ranks, and the seconds of the wait.

    Raises:
        TimeoutError: about `timeout` had passed.
        ConnectionError: sooner.
    """
    limit = timeout.total_seconds()
    if _SAME_GPU.search(str(error)):
        note += (
            " (NCCL takes one GPU per rank: call torch.accelerator.set_device_index(int(os.environ['LOCAL_RANK'])) "
            "before you make the model, or let ranks that share a GPU send from host memory with comm_device='cpu')"
        )
    message = f"rank {rank}: {what} failed after {seconds:.1f} s (timeout {limit:g} s){note}: {error}"
    raise (TimeoutError if seconds > LATE * limit else ConnectionError)(message) from error
