"""Rounds between pairs of ranks, posted and waited for chunk by chunk; errors name both ranks."""

from __future__ import annotations

import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from datetime import timedelta
from functools import partial
from operator import attrgetter
from queue import SimpleQueue
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..devices import host_zeros, wait_for_queue
from .base import Pending
from .change_board import ChangeBoard
from .shared_group import Use
from .threads import CallThread
from .traffic import PeerTraffic

ROUND_BITS, SIZE_BITS = 16, 9  # of a tag, beside those of the channel: torch has 31 bits; rounds wrap around

FOREVER = timedelta(days=365)
STREAM_ORDERED = ("nccl", "xccl")  # backends that order messages by streams, ignore tags and want a round as one batch
LATE = 0.95  # of the timeout: an error after so long a time is a timeout
_AT_ONCE = timedelta(milliseconds=1)
SHUTDOWN = "shutdown"  # the name of the last message to a peer, which may have ended already

MAX_STAGED = 64  # staging buffers kept, and more where a round has more; else addresses change from call to call

_SAME_GPU = re.compile(r"duplicate gpu|ranks are using the same gpu", re.IGNORECASE)  # NCCL's words

_num_bytes = attrgetter("nbytes")  # of a tensor on the wire


class Staging:
    """A buffer for each tensor of another device, kept from round to round: pinned memory for GPU tensors.

    Args:
        device: the device of messages on the wire; a tensor there needs no buffer.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[tuple[int, torch.dtype, torch.Size], Tensor] = {}
        self._max_buffers = MAX_STAGED
        self._source: torch.device | None = None

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
        self._source = x.device
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
        if self._source is not None:
            # Copies into buffers must end before a send reads them, copies out before a receive overwrites them.
            wait_for_queue(self._source)
        self._source = None

    @staticmethod
    def copy_back(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Each tensor <- its buffer."""
        for x, buffer in pairs:
            if x is not buffer:
                x.copy_(buffer, non_blocking=x.device.type != "cpu")  # the host waits for what it reads


class LinkClosedError(ValueError):
    """A message to or from a peer with a closed link."""


class Posted(NamedTuple):
    """A posted message, or a chunk of one; without a peer: a collective, or all messages of a round on NCCL."""

    work: dist.Work
    chunk: int = 0
    peer: int | None = None
    is_send: bool = False


class InTurn:
    """Several messages as one; waits for them run one after the other.

    A wait that was given up may still be inside a message in its thread, and goes on to no other message. So the caller
    can wait for the messages after it.

    Args:
        works: the messages.

    Attributes:
        closed: the peers with closed connections; their messages need no wait.
        present: the index of the message of the present, failed or abandoned wait.
        seconds: the time of the waits, by peer.
    """

    def __init__(self, works: Sequence[Posted]) -> None:
        self._works, self._lock, self._is_given_up = works, threading.Lock(), False
        self.closed: Set[int | None] = frozenset()
        self.present = 0
        self.seconds: dict[int | None, float] = {}
        self._ends: SimpleQueue[BaseException | None] = SimpleQueue()

    @property
    def peer(self) -> int | None:
        """The peer of the present wait."""
        return self._works[self.present].peer

    def give_up(self, peers: Collection[int] | None = None) -> bool:
        """Let the wait end with the present message, if it is of one of these peers; returns whether it is."""
        with self._lock:
            self._is_given_up |= peers is None or self.peer in peers
        if self._is_given_up:
            why = "the wait was given up, since its connection was closed by this process"
            self._ends.put(RuntimeError(why))
        return self._is_given_up

    def run(self, timeout: timedelta) -> None:
        """As `wait`, in another thread, for the caller of `join`."""
        try:
            self.wait(timeout)
        except BaseException as error:  # noqa: BLE001 (`join` raises it)
            self._ends.put(error)
        else:
            self._ends.put(None)

    def join(self) -> BaseException | None:
        """Wait until `run` has ended, or until the wait is given up; returns the error."""
        return self._ends.get()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for all messages.

        Args:
            timeout: the timeout of all waits together; None: the waits have no timeout.

        Raises:
            RuntimeError: the message `present` has failed.
        """
        start = now = time.monotonic()
        left = timeout
        for k, (work, _, peer, _) in enumerate(self._works):
            with self._lock:
                if self._is_given_up:
                    return
                self.present = k
            if left is None:
                work.wait()
            elif peer in self.closed:
                work.wait(_AT_ONCE)
            else:
                work.wait(left)
            before, now = now, time.monotonic()
            self.seconds[peer] = self.seconds.get(peer, 0.0) + now - before
            if timeout is not None:
                left = max(timeout - timedelta(seconds=now - start), _AT_ONCE)


class Waits:
    """Waits that another thread can end.

    [Note: waits that do not end] When a connection closes, Gloo ends the waits for messages before their first byte.
    Its lists do not contain half sent or half received messages, nor messages posted while the connection was closing.
    A wait for such a message lasts for its whole timeout, whatever becomes of the connection, and cannot be
    interrupted. So a thread of its own makes each wait, and stays in it when the wait is given up; no byte is written
    to its buffer any more, as the connection is closed. When the wait of a thread has ended, it makes the next one.
    Handing a wait over takes some 20 us.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[CallThread] = []
        self._under_way: set[InTurn] = set()
        self._given_up: set[int | None] = set()
        self._is_closed = False

    def wait(self, work: dist.Work | InTurn, timeout: timedelta, *, of: int | None = None) -> None:
        """Return when `work` is done.

        Args:
            work: a message, several of them, or a collective, of Gloo.
            timeout: the timeout of the wait.
            of: the peer of one message; None: a collective.

        Raises:
            RuntimeError: the operation has failed, was late or was given up.
        """
        turn = work if isinstance(work, InTurn) else InTurn([Posted(work, peer=of)])
        with self._lock:
            is_over, turn.closed = self._is_closed, self._given_up
            if not is_over:
                thread = self._idle.pop() if self._idle else CallThread("gossip-wait")
                self._under_way.add(turn)
                thread.post(partial(turn.run, timeout))
        if is_over:  # the connections are closed: the operation is done already, or never will be
            turn.wait(_AT_ONCE)
            return
        error = turn.join()  # an interrupt leaves the wait under way
        with self._lock:
            if turn in self._under_way:
                self._under_way.remove(turn)
                self._idle.append(thread)
            else:  # it was given up
                thread.end()
        try:
            if error is not None:
                raise error
        finally:
            del error  # it holds this frame, and so the caller's objects

    def give_up(self, *of: int) -> None:
        """End the waits for these peers, present and future, with an error; from any thread.

        Close their connections before, so that no byte is written to a buffer afterwards.
        """
        with self._lock:
            self._given_up.update(of)
            self._under_way -= {turn for turn in self._under_way if turn.give_up(of)}

    def under_way(self) -> set[int]:
        """The peers of the present waits."""
        with self._lock:
            return {turn.peer for turn in self._under_way if turn.peer is not None}

    @property
    def is_waiting(self) -> bool:
        """Whether anything is waited for now."""
        return bool(self._under_way)

    def close(self) -> None:
        """End all waits, and the threads. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._under_way -= {turn for turn in self._under_way if turn.give_up()}
            for thread in self._idle:
                thread.end()
            self._idle.clear()


class Chunk(NamedTuple):
    """A chunk of a message: the peer, the tensor in a list, as backends take it, and its size as bits of the tag."""

    peer: int
    tensors: list[Tensor]
    size: int


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
        """Return the messages themselves if they are of this class."""
        return messages if isinstance(messages, cls) else cls(messages)

    def without(self, peers: Set[int]) -> Messages:
        """Return the messages of other peers."""
        return Messages({peer: xs for peer, xs in self.items() if peer not in peers})


def _size_bits(num_bytes: int, rest: int) -> int:
    """Return the bits of a tag for a chunk of so many bytes, with `rest` bytes in the other chunks of its message."""
    size = (num_bytes + 31 * rest) % ((1 << SIZE_BITS) - 3)  # a prime: lengths of vectors differ by powers of two
    return size << ROUND_BITS


class PendingExchange:
    """One posted round; a `Pending` of the link.

    Args:
        link: the link of the messages.
        sends, recvs: the messages.
        tag: the tag of the round.
        what: names it in errors.

    Attributes:
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
        for peer, tensors, size in chunks:
            if peer in self.lost:
                continue
            group, rank = link.routes.get(peer) or link.find_route(peer)
            if link.is_stream_ordered:
                operation = dist.isend if is_send else dist.irecv
                self._batch.append(dist.P2POp(operation, tensors[0], link.names[peer], group))
                continue
            try:
                work = (group.send if is_send else group.recv)(tensors, rank, self._tag | size)
            except RuntimeError as error:
                self._fail(error, k, peer, is_send=is_send, seconds=0.0)
            else:
                self._works[k].append(Posted(work, k, peer, is_send))

    def copy_back(self, k: int, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """When chunk k has arrived, each tensor <- its staging buffer."""
        self._staged[k] = pairs

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
        while works := [work for work in works if work.peer not in self.lost] if self.lost else works:
            turn = InTurn(works)
            left = (timeout or link.timeout) - timedelta(seconds=time.monotonic() - self._start)
            try:
                link.wait_for(turn, max(left, _AT_ONCE))
                works = []
            except RuntimeError as error:
                seconds, (_, k, peer, is_send) = time.monotonic() - self._start, works[turn.present]
                self._fail(error, k, peer, is_send=is_send, seconds=seconds, timeout=timeout)
                works = works[turn.present + 1 :]
            for peer, seconds in turn.seconds.items() if timeout is None else ():
                if peer is not None:
                    self._waited[peer] = self._waited.get(peer, 0.0) + seconds
        for k in range(self._num_done, stop):
            if k in self._staged:
                Staging.copy_back(self._staged.pop(k))
            self._works[k].clear()
        self._num_done = stop
        if stop == self.num_chunks:
            self.lost = link.agree_lost(self.lost)
            arrived = self.recvs.num_bytes
            if self.lost:
                arrived = {peer: number for peer, number in arrived.items() if peer not in self.lost}
            link.traffic.arrived(arrived, self._waited, sent=self.sends.num_bytes)

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
    board: ChangeBoard | None = None  # see [Note: changes that not all ranks make]
    waits: Waits | None = None  # which can be given up; see [Note: waits that do not end]

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
        self.num_bytes_sent, self.traffic = 0, PeerTraffic()
        self.routes: dict[int, tuple[dist.ProcessGroup, int]] = {}  # by peer, as `route` has given them; until `close`
        self.waiting: dict[int, float] = {}  # the threads that wait for messages, and since when: for `ChangeBoard`
        self._use, self._staging = use, Staging(device)

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
        self._use.is_active = True
        for k, chunks in enumerate(self._staged(recvs.chunks) if is_staged else recvs.chunks):
            exchange.post(k, chunks, is_send=False)
            if is_staged:
                exchange.copy_back(k, [(x, buffer) for (_, (x,), _), (_, (buffer,), _) in zip(recvs.chunks[k], chunks)])
        for k in range(exchange.num_chunks):
            if fill is not None:
                fill(k)
            if k < len(sends.chunks):
                (chunks,) = self._staged(sends.chunks[k : k + 1], fill=True) if is_staged else (sends.chunks[k],)
                exchange.post(k, chunks, is_send=True)
        self.num_bytes_sent += sends.total_bytes
        exchange.begin()
        return exchange

    def _staged(self, chunks: Sequence[Sequence[Chunk]], *, fill: bool = False) -> list[list[Chunk]]:
        """Return chunks with staging buffers in place of tensors of another device; `fill`: with their values."""
        staged = [
            [Chunk(peer, [self._staging.buffer_for(x, fill=fill, keep=True)], size) for peer, (x,), size in each]
            for each in chunks
        ]
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
        return self._use.channel << SIZE_BITS + ROUND_BITS | size | tag % (1 << ROUND_BITS)


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
