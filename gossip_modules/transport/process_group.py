"""How bytes move: point-to-point rounds and a few collectives over a torch.distributed process group."""

from __future__ import annotations

import contextlib
import copy
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from .barrier import Attendance, NotMet, meet, meet_in_turns
from .change_board import ChangeBoard
from .deadline import AT_ONCE, Deadline
from .exchange import LATE, ROUND_BITS, SIZE_BITS, PointToPoint, Staging, fail
from .failure_notes import GONE, MAYBE_BEHIND, MAYBE_CLOSED, SILENT, FailureNotes, describe, reason_of
from .shared_group import CAN_RELEASE, CHANNEL_BITS, Use
from .stores import BoundedStore, Records, store_of
from .traffic import down_tree, on_ring
from .uncaught_errors import leave_at_error, stay

DEFAULT_TIMEOUT = timedelta(minutes=5)
PROBE_TAG = 1 << ROUND_BITS + SIZE_BITS + CHANNEL_BITS  # no round has it
BARRIER_TAG = PROBE_TAG + 1  # and the one above
SUM_TAG = BARRIER_TAG + 2
_FEW = 4  # ranks that tell each other directly that they have come
_MIN_TRANSFER = 1.0  # seconds
_MANY, _SHORT = 16, 4096  # more ranks than that add up short messages in log2 n steps; bytes
_NAMED = ("gloo", "mpi4py")  # backends whose collectives do not name missing ranks

calling: ContextVar[str] = ContextVar("calling", default="")
"""The method of a wrapper that calls collectives in this thread now, for errors; "": none."""


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the library for the group's tensors on this device: "gloo", "nccl", "mpi4py", ...

    [Note: names of NCCL] torch 2.15 has several backends over NCCL. "nccl" makes one that is called "nccl2"; beside it
    are "nccl-lazy", "nccl4py" and, by the name "nccl-legacy" or with TORCH_DIST_USE_NCCL2=0, the one that is called
    "nccl", which is all that older torch has. They differ in how they make connections; all carry CUDA tensors, order
    their work by streams and want a round as one batch. So they are one here: "nccl".

    Raises:
        RuntimeError: the group was made without a backend for that device.
    """
    name = group._get_backend(device).name().lower()
    return "nccl" if name.startswith("nccl") else name


def unwatched(what: str) -> contextlib.AbstractContextManager[None]:
    """The context of a collective if no engine watches it."""
    return contextlib.nullcontext()


class ProcessGroupTransport(PointToPoint):
    """A transport over one process group. Only other transports may use the group meanwhile.

    Sends and receives go to the group itself, not through `torch.distributed`'s global state, so that several ranks
    can live in one process. NCCL is the exception: its round must be one `batch_isend_irecv` or it deadlocks.

    [Note: channels] Transports over one group object have channels of their own, so their messages never meet, and
    listeners hear their own peers only. All ranks must make (and close) them in the same order; there is room for 32
    at a time. Collectives have no channels: all ranks call them in the same order, whichever transport they belong to.
    NCCL has none at all, it matches messages by their order: over one NCCL group use transports one after the other,
    from one thread, so without overlap.

    Args:
        group: Gloo, NCCL or MPI; the calling process is a member.
        device: where messages live on the wire. Tensors elsewhere (GPU tensors over Gloo) are staged through pinned
            memory, kept from round to round.
        timeout: for every wait. NCCL waits are in stream order and end by the group's own timeout instead.
        names: the global rank of each member, for error messages; None = 0, 1, ...
        notes: where failing ranks say why; None: errors name this rank's own observations.
        key: the key of the job, which all ranks have shown each other when they connected; None: they have not. Their
            values in a key-value store then have the codes of GOSSIP_JOB_KEY, if it is set.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        device: torch.device,
        timeout: timedelta,
        names: Sequence[int] | None = None,
        notes: FailureNotes | None = None,
        key: bytes | None = None,
    ) -> None:
        super().__init__(
            rank=group.rank(),
            world_size=group.size(),
            device=device,
            timeout=timeout,
            names=range(group.size()) if names is None else names,
            backend=backend_of(group, device),
            use=Use(group),
        )
        self._group: dist.ProcessGroup | None = group
        self._num_collective_bytes = 0
        self.notes, self._key = notes, key
        self._reason = ""  # why this rank has left the others, if it has
        self._deadline: Deadline | None = None
        self._is_whole = self.use.shared.peers is None  # connected with all ranks
        connected = range(self.world_size) if self._is_whole else sorted(self.use.shared.peers or ())
        self._peers = [peer for peer in connected if peer != self.rank]
        self._attendance: Attendance | None = None
        if notes is not None and self.world_size > _FEW:
            store = store_of(group, f"gossip_barriers/{self.use.number}")
            self._attendance = None if store is None else Attendance(store, self.rank)
        # The context of each collective, by its name. An asynchronous engine ends the wait when any rank has failed and
        # tells the others of an error in the context; its listener may be at another transport over the group.
        self.watch: Callable[[str], contextlib.AbstractContextManager[None]] = unwatched
        if notes is not None:
            leave_at_error(self)
        # At the exit of the interpreter groups end with the process.
        self._lost = weakref.finalize(self, self.use.lose)
        self._lost.atexit = False

    @property
    def num_bytes_sent(self) -> int:
        """See `PointToPoint`."""
        return self.num_round_bytes + self._num_collective_bytes

    def forget_bytes(self) -> None:
        """Count the sent bytes from zero."""
        self.num_round_bytes = self._num_collective_bytes = 0
        self.traffic.forget_collectives()

    def __deepcopy__(self, memo: dict[int, object]) -> ProcessGroupTransport:
        """Another user of the same connection, see [Note: channels]; closed, and without a channel, if this one is."""
        if self.is_closed:
            return copy.copy(self)
        other = ProcessGroupTransport(
            self.group,
            device=self.device,
            timeout=self.timeout,
            names=self.names,
            notes=self.notes,
            key=self._key,
        )
        other.waits = self.waits
        return other

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group.

        Raises:
            ValueError: it was released by `close()`.
        """
        if self._group is None:
            raise ValueError(
                f"rank {self.names[self.rank]}: got an operation among ranks {list(self.names)} after close(), which "
                "has released their process group, expected it before; or pass a process group of your own"
            )
        return self._group

    def route(self, peer: int) -> tuple[dist.ProcessGroup, int]:
        """See `PointToPoint`."""
        if peer not in self._peers:
            raise ValueError(
                f"rank {self.names[self.rank]}: got a message to or from rank {self.names[peer]}, expected one of "
                f"{[self.names[j] for j in self._peers]}, with which it is connected; name all peers when you make the "
                "group"
            )
        return self.group, peer

    @property
    def is_closed(self) -> bool:
        """Whether `close()` was called."""
        return not self._lost.alive

    @property
    def is_shared(self) -> bool:
        """Whether the group has other users. Then `close()` leaves it open."""
        return not self.is_closed and self.use.shared.num_users > 1

    def own_group(self) -> None:
        """The group was made for this transport: release it with its last user, where torch can."""
        # Older torch can only where it has not named the group.
        self.use.shared.is_owned = CAN_RELEASE or self.group not in dist.distributed_c10d._world.pg_map

    def close(self) -> None:
        """Give back the channel, and the group if it was made for this transport; idempotent, waits for no rank.

        The group stays until its other users have closed. A rank still waiting for this one gets an error with its
        name.
        """
        if self._lost.detach() is None:
            return
        stay(self)
        if self.board is not None:
            self.board.close()
        if self.use.shared.is_owned:
            self._group = None
            self.routes.clear()
        self.use.end()

    @contextlib.contextmanager
    def within(self, deadline: Deadline) -> Iterator[None]:
        """See `Transport`; an outer deadline stays in force."""
        outer, self._deadline = self._deadline, self._deadline or deadline
        try:
            yield
        finally:
            self._deadline = outer

    def all_reduce(self, x: Tensor, *, what: str) -> None:
        """See `Transport`. Counted as 2 (n - 1) / n of its bytes, as in a ring."""
        message = self._on_wire(x)
        is_short = self.backend == "gloo" and self.world_size > _MANY and x.nbytes <= _SHORT

        def post(options: Any) -> dist.Work | None:
            if not is_short:
                return self.group.allreduce([message], options)
            self._sum(message, options.timeout)
            return None

        self._collective(post, dist.AllreduceOptions(), what, x.nbytes)
        self.count_on_ring(2 * (self.world_size - 1) * x.nbytes // self.world_size)
        Staging.copy_back([(x, message)])

    def _sum(self, x: Tensor, timeout: timedelta) -> None:
        """x <- sum over all ranks, in log2 n exchanges of all of x; Gloo's ring has 2 (n - 1) steps of n-th parts.

        In step k two ranks exchange their sums if their numbers differ in bit k. A rank above the largest power of two
        gives x to the rank so far below, and gets the sum from there.
        """
        deadline = Deadline(timeout)
        half = 1 << self.world_size.bit_length() - 1
        inbox = torch.empty_like(x)

        def exchange(peer: int, *, receives: bool = True, sends: bool = True) -> None:
            works = [self.group.recv([inbox], peer, SUM_TAG)] if receives else []
            if sends:
                works.append(self.group.send([x], peer, SUM_TAG))
            for work in works:
                self.wait_for(work, deadline.left_for_gloo)

        if self.rank >= half:
            exchange(self.rank - half, receives=False)
            exchange(self.rank - half, sends=False)
            x.copy_(inbox)
            return
        has_another = self.rank + half < self.world_size
        if has_another:
            exchange(self.rank + half, sends=False)
            x += inbox
        for k in range(half.bit_length() - 1):
            exchange(self.rank ^ 1 << k)
            x += inbox
        if has_another:
            exchange(self.rank + half, receives=False)

    def broadcast(self, x: Tensor, *, source: int, what: str) -> None:
        """See `Transport`."""
        message = self._on_wire(x)
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._collective(lambda options: self.group.broadcast([message], options), options, what, x.nbytes)
        to = down_tree(self.rank, self.world_size, x.nbytes, source=source)
        self._count(x.nbytes * (self.rank == source), to)  # once for all ranks, whose tree sends it n - 1 times
        Staging.copy_back([(x, message)])

    def all_to_all(self, out: Tensor, x: Tensor, *, what: str) -> None:
        """See `Transport`."""
        received, message = self._on_wire(out, fill=False), self._on_wire(x)
        options = dist.distributed_c10d.AllToAllOptions()
        self._collective(
            lambda options: self.group.alltoall_base(received, message, [], [], options), options, what, x.nbytes
        )
        part = x.nbytes // self.world_size
        to = {peer: part for peer in range(self.world_size) if peer != self.rank}
        self._count((self.world_size - 1) * part, to)
        Staging.copy_back([(out, received)])

    def all_gather(self, out: Tensor, x: Tensor, *, what: str) -> None:
        """See `Transport`."""
        gathered, message = self._on_wire(out, fill=False), self._on_wire(x)
        chunks = list(gathered.view(self.world_size, -1).unbind())
        options = dist.distributed_c10d.AllgatherOptions()
        self._collective(lambda options: self.group.allgather([chunks], [message], options), options, what, x.nbytes)
        self.count_on_ring((self.world_size - 1) * x.nbytes, up=True)
        Staging.copy_back([(out, gathered)])

    def barrier(self, *, what: str) -> None:
        """See `Transport`; raises the errors of `all_reduce`."""
        if self.backend in _NAMED:
            self._wait_for_all(what, self._limit(), 0)
        else:
            self._collective(self.group.barrier, dist.BarrierOptions(), what, 0)

    def count_on_ring(self, num_bytes: int, *, up: bool = False) -> None:
        """Count a collective along a ring; for collectives of torch over this group too.

        Args:
            num_bytes: the bytes that this rank sends.
            up: see `on_ring`.
        """
        self._count(num_bytes, on_ring(self.rank, self.world_size, num_bytes, up=up))

    def _count(self, num_bytes: int, to: Mapping[int, int]) -> None:
        """Count the bytes of a collective; to: the bytes that this rank sends, by the rank that gets them."""
        self._num_collective_bytes += num_bytes
        self.traffic.sent_together(to)

    def _on_wire(self, x: Tensor, *, fill: bool = True) -> Tensor:
        """Return x itself, or a buffer on the device of messages; `fill`: with the values of x."""
        return x if x.device.type == self.device.type else self._staging.buffer_for(x, fill=fill)

    def _collective(self, post: Callable[[Any], dist.Work | None], options: Any, what: str, num_bytes: int) -> None:
        """Post a collective and wait for it, unless it is done.

        options: options with a timeout, such as AllreduceOptions.
        num_bytes: the size of the tensor; equal on all ranks: see [Note: sizes meet first] of `meet`.
        """
        with self.watch(what):
            self._run(post, options, what, num_bytes)

    def _run(self, post: Callable[[Any], dist.Work | None], options: Any, what: str, num_bytes: int) -> None:
        if self._staging.source is not None:
            self._staging.synchronize()
        deadline = self._limit()
        is_named = self.backend in _NAMED and self.world_size > 1
        if is_named:
            self._wait_for_all(what, deadline, num_bytes)
            deadline.leave(_MIN_TRANSFER)  # after all have come, however late they were
        start, left = time.monotonic(), deadline.left_for_gloo
        if is_named:
            options.timeout = left
        try:
            work = post(options)
            if work is not None:
                self.wait_for(work, left)
        except RuntimeError as error:
            doing = f"{_named(what)} among ranks {list(self.names)}"
            self.fail(error, doing, time.monotonic() - start, timeout=left, is_collective=True)

    def _limit(self) -> Deadline:
        """The deadline of a collective. A shared one leaves time for it after successful collectives."""
        deadline = self._deadline or Deadline(self.timeout)
        deadline.leave(min(_MIN_TRANSFER, deadline.seconds))
        return deadline

    def _wait_for_all(self, what: str, deadline: Deadline, num_bytes: int) -> None:
        """Return when all ranks have come to `what`, or raise an error with the names of the others."""
        if self.world_size == 1:
            return
        name = _named(what)
        doing = f"{name} among ranks {list(self.names)}"
        try:
            if self._attendance is None and self._is_whole:
                meet(self.group, name, deadline=deadline, tag=BARRIER_TAG, num_bytes=num_bytes, wait=self.wait_for)
            else:
                meet_in_turns(
                    self.group,
                    name,
                    deadline=deadline,
                    tag=BARRIER_TAG,
                    num_bytes=num_bytes,
                    wait=self.wait_for,
                    attendance=self._attendance,
                    peers=self._peers,
                )
        except NotMet as error:
            if error.peer is None:
                if self.board is not None:
                    self.board.check(is_there=True)
                others = ", ".join(f"rank {self.names[j]} is in {text}" for j, text in error.found.items())
                others = others or "other ranks are in different operations, or have tensors of other sizes"
                raise RuntimeError(
                    f"rank {self.names[self.rank]}: {doing}: {others}; all ranks must call the same, in the same order"
                ) from error
            limit = timedelta(seconds=deadline.seconds)
            seen = f"did not call {calling.get()}" if calling.get() else f"did not take part in {what}"
            missing = {self.names[j]: seen for j in error.missing}
            note = f": {describe(missing)}" if missing else ""
            if not error.is_late:  # the rank may have failed because of another, and more may still be on their way
                blamed = {self.names[error.peer]: seen}
                note = f", connections to ranks {sorted(self.names[j] for j in self.closed_peers())} are closed"
                note += "" if self.notes is not None else f": {describe(blamed)}"
                self.fail(error, doing, deadline.passed, timeout=limit, note=note, blamed=blamed, is_collective=True)
            note += "; all ranks must, at the same point of training" if missing else ""
            blamed = missing or {self.names[error.peer]: SILENT}
            seconds = max(deadline.passed, deadline.seconds)
            self.fail(error, doing, seconds, timeout=limit, note=note, blamed=blamed)

    def store(self, prefix: str) -> BoundedStore | None:
        """Return the key-value store of the group, with keys of this transport alone; None: one rank, or no store.

        Args:
            prefix: the begin of all keys.
        """
        number = self.use.number  # of the wrapper, the same on all ranks
        return store_of(self.group, f"{prefix}/{number}", key=self._key) if self.world_size > 1 else None

    def watch_changes(
        self, *, step: Callable[[], int], tensors: Callable[[], list[str]], end_waits: Callable[[], None] | None = None
    ) -> None:
        """Let ranks change their exchanged tensors: see `ChangeBoard`.

        Args:
            step: see `ChangeBoard`.
            tensors: see `ChangeBoard`.
            end_waits: a bound method to end waits of this rank; None: `close_connections`.
        """
        store = self.store("gossip_changes")
        if store is not None:
            self.board = ChangeBoard(
                Records(store, skips_foreign=self._key is not None),
                self.rank,
                self.names,
                step=step,
                tensors=tensors,
                end_waits=end_waits or self.close_connections,
                waiting=self.waiting,
            )

    def close_connections(self) -> None:
        """See `PointToPoint`.

        Gloo has no call for this, but the timeout of a wait closes all connections of its rank.
        """
        for peer in self._peers if self.backend == "gloo" else ():
            with contextlib.suppress(RuntimeError, ValueError):  # they are closed already
                self._probe(peer).wait(AT_ONCE)
        if self.waits is not None:
            self.waits.close()

    def end_by(self, error: BaseException) -> None:
        """See `Leaver`: the ranks of the job find the reason in the notes, and closed connections."""
        self._reason = reason_of(error)
        if self.notes is not None:
            self.notes.leave_for(error)
        self.close_connections()

    def closed_peers(self) -> list[int]:
        """After a failure on Gloo, the ranks without a connection: posting a receive fails at once.

        Proves nothing after a timeout of this rank, because its connections are closed then.
        """
        closed = []
        for peer in self._peers if self.backend == "gloo" else ():
            try:
                self._probe(peer)
            except RuntimeError:
                closed.append(peer)
        return closed

    def _probe(self, peer: int) -> dist.Work:
        """A receive without a message."""
        return self.group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, PROBE_TAG)

    def fail(
        self,
        error: RuntimeError,
        what: str,
        seconds: float,
        *,
        timeout: timedelta | None = None,
        note: str = "",
        peers: Sequence[int] = (),
        blamed: Mapping[int, str] | None = None,
        is_collective: bool = False,
    ) -> NoReturn:
        """Raise the error of a backend with the names of the late ranks, and of the rank that failed first.

        See [Note: who failed first] of `FailureNotes`.

        Args:
            error: the error of the backend.
            what: the failed operation.
            seconds: its duration.
            timeout: its timeout; None: the transport's own.
            note: other known facts.
            peers: the awaited ranks of the group; none: all of them, and it is not known for which one.
            blamed: how they were seen, by global rank, where that is known.
            is_collective: whether other ranks may wait for this one: its connections are closed, so that they fail too.

        Raises:
            TimeoutError, ConnectionError: see the function `fail`.
            ValueError: ranks exchange other tensors; see `ChangeBoard`.
        """
        timeout = timeout or self.timeout
        if self._reason:  # a peer is not to blame for the connections that this rank has closed
            note = f": this rank {self._reason}, and has left the others"
            fail(error, rank=self.names[self.rank], what=what, seconds=seconds, timeout=timeout, note=note)
        if self.board is not None:
            self.board.check()
        if blamed is None:
            is_late = seconds > LATE * timeout.total_seconds()
            closed = [] if is_late else self.closed_peers()
            blamed = {self.names[peer]: SILENT if is_late else GONE for peer in {*peers, *closed}}
            if closed:
                note += f", connections to ranks {sorted(self.names[peer] for peer in closed)} are closed"
        if self.notes is not None:
            self.notes.leave(blamed, what)
        # Beside a listener, or inside `watch`, `Liveness` tells the others the cause before it closes the connections.
        if is_collective and not self.has_listener and self.watch is unwatched:
            self.close_connections()
        if self.notes is not None:
            cause = self.notes.explain(blamed, members=self.names)
            waited_for = {self.names[peer] for peer in peers} or blamed.keys()
            if cause.ranks and not cause.ranks & waited_for:  # the rank that failed first comes first
                what = f"{cause.text}: {what}"
            elif cause.text and cause.text not in note:
                note += f": {cause.text}"
            if GONE in cause.text or SILENT in cause.text:
                note += f" ({MAYBE_CLOSED})"
            elif "did not call" in note + cause.text:
                note += f" ({MAYBE_BEHIND})"
        fail(error, rank=self.names[self.rank], what=what, seconds=seconds, timeout=timeout, note=note)


def _named(what: str) -> str:
    """A collective, and the method that calls it."""
    return f"{calling.get()}: {what}" if calling.get() else what
