"""How bytes move: point-to-point rounds and a few collectives over a torch.distributed process group."""

from __future__ import annotations

import contextlib
import copy
import re
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from .change_board import ChangeBoard
from .deadline import Deadline
from .exchange import LATE, ROUND_BITS, SIZE_BITS, PointToPoint, Staging, fail
from .failure_notes import GONE, SILENT, FailureNotes, describe
from .shared_group import CAN_RELEASE, CHANNEL_BITS, Use
from .stores import Records, is_of_job

DEFAULT_TIMEOUT = timedelta(minutes=5)
PROBE_TAG = 1 << ROUND_BITS + SIZE_BITS + CHANNEL_BITS  # no round has it
BARRIER_TAG = PROBE_TAG + 1
_AT_ONCE = timedelta(milliseconds=1)
_NAME_BYTES = 64  # of the name of an operation
_MIN_TRANSFER = timedelta(seconds=1)  # for a collective after all have come, however late they were
_NAMED = ("gloo", "mpi4py")  # backends whose collectives do not name missing ranks

calling: ContextVar[str] = ContextVar("calling", default="")
"""The method of a wrapper that calls collectives in this thread now, for errors; "": none."""


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the library that moves the group's tensors on this device: "gloo", "nccl", "mpi4py", ...

    [Note: names of NCCL] torch 2.15 has several backends over NCCL. "nccl" makes one that is called "nccl2"; beside it
    are "nccl-lazy", "nccl4py" and, by the name "nccl-legacy" or with TORCH_DIST_USE_NCCL2=0, the one that is called
    "nccl", which is all that older torch has. They differ in how they make connections; all carry CUDA tensors, order
    their work by streams and want a round as one batch. So they are one here: "nccl".

    Raises:
        RuntimeError: the group was made without a backend for that device.
    """
    name = group._get_backend(device).name().lower()
    return "nccl" if name.startswith("nccl") else name


class ProcessGroupTransport(PointToPoint):
    """A transport over one process group that carries nothing else while it is in use, but for other transports.

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
            memory that is kept from round to round.
        timeout: for every wait. NCCL waits are in stream order and end by the group's own timeout instead.
        names: the global rank of each member, for error messages; None = 0, 1, ...
        notes: where failing ranks say why; None: errors name what this rank sees itself.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        device: torch.device,
        timeout: timedelta,
        names: Sequence[int] | None = None,
        notes: FailureNotes | None = None,
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
        self.notes = notes
        # The context of each collective, by its name. An asynchronous engine ends the wait when any rank has failed.
        self.watch: Callable[[str], contextlib.AbstractContextManager[None]] = lambda what: contextlib.nullcontext()
        # At the exit of the interpreter groups end with the process.
        self._lost = weakref.finalize(self, self._use.lose)
        self._lost.atexit = False

    def __deepcopy__(self, memo: dict[int, object]) -> ProcessGroupTransport:
        """Another user of the same connection, see [Note: channels]; closed, and without a channel, if this one is."""
        if self.is_closed:
            return copy.copy(self)
        other = ProcessGroupTransport(
            self.group, device=self.device, timeout=self.timeout, names=self.names, notes=self.notes
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
        return self.group, peer

    @property
    def is_closed(self) -> bool:
        """Whether `close()` was called."""
        return not self._lost.alive

    @property
    def is_shared(self) -> bool:
        """Whether the group has other users, for whom `close()` leaves it open."""
        return not self.is_closed and self._use.shared.num_users > 1

    def own_group(self) -> None:
        """The group was made for this transport: release it with its last user, where torch can."""
        # Older torch can only where it has not named the group.
        self._use.shared.is_owned = CAN_RELEASE or self.group not in dist.distributed_c10d._world.pg_map

    def close(self) -> None:
        """Give back the channel, and the group if it was made for this transport; idempotent, waits for no rank.

        The group stays until its other users have closed. A rank that still waits for this one gets an error that
        names it.
        """
        if self._lost.detach() is None:
            return
        if self.board is not None:
            self.board.close()
        if self._use.shared.is_owned:
            self._group = None
        self._use.end()

    def all_reduce(self, x: Tensor, *, what: str) -> None:
        """See `Transport`. Counted as the 2 (n - 1) / n of its bytes that a ring sends."""
        message = self._staging.buffer_for(x, fill=True)
        self._collective(lambda options: self.group.allreduce([message], options), dist.AllreduceOptions(), what)
        self.num_bytes_sent += 2 * (self.world_size - 1) * x.nbytes // self.world_size
        Staging.copy_back([(x, message)])

    def broadcast(self, x: Tensor, *, source: int, what: str) -> None:
        """See `Transport`."""
        message = self._staging.buffer_for(x, fill=True)
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._collective(lambda options: self.group.broadcast([message], options), options, what)
        self.num_bytes_sent += x.nbytes * (self.rank == source)
        Staging.copy_back([(x, message)])

    def all_gather(self, out: Tensor, x: Tensor, *, what: str) -> None:
        """See `Transport`."""
        gathered, message = self._staging.buffer_for(out), self._staging.buffer_for(x, fill=True)
        chunks = list(gathered.view(self.world_size, -1).unbind())
        options = dist.distributed_c10d.AllgatherOptions()
        self._collective(lambda options: self.group.allgather([chunks], [message], options), options, what)
        self.num_bytes_sent += (self.world_size - 1) * x.nbytes
        Staging.copy_back([(out, gathered)])

    def barrier(self, *, what: str) -> None:
        """Return when every rank has come; blocking. Errors as of `all_reduce`."""
        if self.backend in _NAMED:
            self._meet(what, time.monotonic())
        else:
            self._collective(self.group.barrier, dist.BarrierOptions(), what)

    def _collective(self, post: Callable[[Any], dist.Work], options: Any, what: str) -> None:
        """Post a collective and wait for it; options: such as AllreduceOptions, which have a timeout."""
        with self.watch(what):
            self._run(post, options, what)

    def _run(self, post: Callable[[Any], dist.Work], options: Any, what: str) -> None:
        self._staging.synchronize()
        start = time.monotonic()
        left = self.timeout
        if self.backend in _NAMED and self.world_size > 1:
            self._meet(what, start)
            left = max(left - timedelta(seconds=time.monotonic() - start), _MIN_TRANSFER)
            options.timeout = left
        try:
            self.wait_for(post(options), left)
        except RuntimeError as error:
            doing = f"{_named(what)} among ranks {list(self.names)}"
            self.fail(error, doing, time.monotonic() - start, timeout=left)

    def _meet(self, what: str, start: float) -> None:
        """Return when all ranks have come to `what`, or raise an error that names the others."""
        if self.world_size == 1:
            return
        name = _named(what)
        doing = f"{name} among ranks {list(self.names)}"
        try:
            meet(self.group, name, timeout=self.timeout, tag=BARRIER_TAG, wait=self.wait_for)
        except NotMet as error:
            if error.found:
                if self.board is not None:
                    self.board.check(is_there=True)
                others = ", ".join(f"rank {self.names[j]} is in {text!r}" for j, text in error.found.items())
                raise RuntimeError(
                    f"rank {self.names[self.rank]}: {doing}: {others}; all ranks must call the same, in the same order"
                ) from error
            seconds = time.monotonic() - start
            seen = f"did not call {calling.get()}" if calling.get() else f"did not take part in {what}"
            missing = {self.names[j]: seen for j in error.missing}
            note = f": {describe(missing)}" if missing else ""
            if error.closed is not None:
                self.fail(error, doing, seconds, peers=[error.closed], note=note)
            note += "; all ranks must, at the same point of training" if missing else ""
            self.fail(error, doing, max(seconds, self.timeout.total_seconds()), note=note, blamed=missing)

    def watch_changes(
        self, *, step: Callable[[], int], tensors: Callable[[], list[str]], end_waits: Callable[[], None] | None = None
    ) -> None:
        """Let ranks change the tensors that they exchange: see `ChangeBoard`, which also has the arguments.

        end_waits: a bound method; None: `close_connections`.
        """
        number = self._use.number  # of the wrapper, the same on all ranks
        job_name = self.group.group_name if is_of_job(self.group) else ""
        records = Records.of(self.group, f"gossip_changes/{job_name}/{number}") if self.world_size > 1 else None
        if records is not None:
            self.board = ChangeBoard(
                records,
                self.rank,
                self.names,
                step=step,
                tensors=tensors,
                end_waits=end_waits or self.close_connections,
            )

    def close_connections(self) -> None:
        """See `PointToPoint`.

        Gloo has no call for this, but a wait that times out closes all connections of its rank.
        """
        for peer in range(self.world_size) if self.backend == "gloo" else ():
            if peer != self.rank:
                with contextlib.suppress(RuntimeError, ValueError):  # they are closed already
                    self._probe(peer).wait(_AT_ONCE)
        if self.waits is not None:
            self.waits.close()

    def closed_peers(self) -> list[int]:
        """After a failure on Gloo, the ranks whose connection is gone: posting a receive fails at once.

        Proves nothing after a wait of this rank has timed out, which closes all its connections.
        """
        closed = []
        for peer in range(self.world_size) if self.backend == "gloo" else ():
            try:
                if peer != self.rank:
                    self._probe(peer)
            except RuntimeError:
                closed.append(peer)
        return closed

    def _probe(self, peer: int) -> dist.Work:
        """A receive of a message that is never sent."""
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
    ) -> NoReturn:
        """Raise the error of a backend with the names of the late ranks, and of the rank that failed first.

        See [Note: who failed first].

        Args:
            error: of the backend.
            what: failed.
            seconds: that it took.
            timeout: that it had; None: the transport's own.
            note: what else is known.
            peers: of the group, which were waited for; none: all of them, and it is not known for which one.
            blamed: how they were seen, by global rank, where that is known.

        Raises:
            TimeoutError, ConnectionError: see the function `fail`.
            ValueError: ranks exchange other tensors; see `ChangeBoard`.
        """
        timeout = timeout or self.timeout
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
            cause = self.notes.explain(blamed, members=self.names)
            waited_for = {self.names[peer] for peer in peers} or blamed.keys()
            if cause.ranks and not cause.ranks & waited_for:  # the rank that failed first comes first
                what = f"{cause.text}: {what}"
            elif cause.text and cause.text not in note:
                note += f": {cause.text}"
        fail(error, rank=self.names[self.rank], what=what, seconds=seconds, timeout=timeout, note=note)


def _named(what: str) -> str:
    """A collective, and the method that calls it."""
    return f"{calling.get()}: {what}" if calling.get() else what


class NotMet(RuntimeError):
    """Ranks have not come to one operation.

    Attributes:
        missing: the ranks of the group that have not come.
        closed: one of them whose connection is closed; None: the time was over.
        found: the name of the other operation, by rank of the group that has come to one.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[int] = (),
        closed: int | None = None,
        found: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.missing, self.closed, self.found = missing, closed, found or {}


def meet(
    group: dist.ProcessGroup,
    what: str,
    *,
    timeout: timedelta,
    tag: int,
    wait: Callable[[dist.Work, timedelta], object] = dist.Work.wait,
    ranks: Sequence[int] = (),
) -> None:
    """Return when all ranks of a group over Gloo or MPI have come to `what`.

    Every rank tells all others, so that each knows by itself which one has not come. Gloo cannot be asked whether a
    message has arrived, but its buffer can: it is not zero any more. One deadline holds for all waits; the first wait
    that passes it closes this rank's connections over Gloo, so peers cannot be asked afterwards.

    Args:
        group: this rank's; all its ranks call this in the same order.
        what: the operation that follows; equal on all ranks up to numbers in it.
        timeout: for all to come.
        tag: of the messages; no other message has it.
        wait: waits for one of them.
        ranks: the ranks of the group that take part; none: all.

    Raises:
        NotMet: ranks have not come, or have come to another operation.
    """
    deadline = Deadline(timeout)
    peers = [j for j in ranks or range(group.size()) if j != group.rank()]
    ours = what.encode()[: _NAME_BYTES - 1]
    mine = torch.frombuffer(bytearray(ours.ljust(_NAME_BYTES - 1, b"\0") + b"\1"), dtype=torch.uint8)
    rows = {j: torch.zeros(_NAME_BYTES, dtype=torch.uint8, device="cpu") for j in peers}
    works: list[tuple[int, dist.Work]] = []
    peer = -1
    try:
        for peer in peers:
            works.append((peer, group.recv([rows[peer]], peer, tag)))
        for peer in peers:
            works.append((peer, group.send([mine], peer, tag)))
        for peer, work in works:  # noqa: B007 (names the peer whose wait failed)
            wait(work, deadline.left_for_gloo)
    except RuntimeError as error:
        missing = [j for j in peers if not rows[j][-1]]
        is_late = deadline.left < (1 - LATE) * deadline.seconds  # others may give up a little before
        raise NotMet(str(error), missing=missing, closed=None if is_late else peer) from error
    names = {j: bytes(row.numpy())[:-1].rstrip(b"\0") for j, row in rows.items()}
    different = {
        j: name for j, name in names.items() if name != ours and _without_numbers(name) != _without_numbers(ours)
    }
    if different:
        found = {j: name.decode(errors="ignore") for j, name in different.items()}
        raise NotMet("ranks are in another operation", found=found)


def _without_numbers(name: bytes) -> bytes:
    """The name of an operation without numbers: ranks may have begun to count rounds elsewhere."""
    return re.sub(rb"\d+", b"", name)
