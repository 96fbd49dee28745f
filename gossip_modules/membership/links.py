"""LinkTransport: a process group of its own for every link, so that a failed rank breaks no other link."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup

from ..transport import threads
from ..transport.deadline import Deadline
from ..transport.exchange import LATE, LinkClosedError, PointToPoint, fail
from ..transport.gloo import CPU, as_group, gloo_group
from ..transport.process_group import PROBE_TAG, ProcessGroupTransport
from ..transport.waits import Waits
from ..worlds.all_or_none import LOST
from .addresses import Exchange, connect_groups

_BREAK = timedelta(milliseconds=1)


class Vote:
    """The agreement of the processes with shards of one model; each process has links of its own.

    [Note: one replica, one row] Shards of one model must be averaged with the same weights. So the processes agree at
    the end of each round, before anything is applied. If a peer fails for one process, all processes leave its message
    out. If a collective fails for one process, it fails for all.

    Args:
        rounds, collectives: the transports of these processes; the two may run at the same time.

    Attributes:
        why: the reason for errors, if it is known.
    """

    def __init__(self, rounds: ProcessGroupTransport, collectives: ProcessGroupTransport) -> None:
        self._rounds, self._collectives = rounds, collectives
        self.why = ""

    def union(self, lost: Iterable[int], failed: Iterable[int], size: int) -> tuple[frozenset[int], frozenset[int]]:
        """Return the union of each set over the processes; ranks are below `size`."""
        bits = torch.zeros(2, size, dtype=torch.int32, device="cpu")
        for row, ranks in zip(bits, (lost, failed), strict=True):
            row[list(ranks)] = 1
        self._sum(self._rounds, bits, what="comparing lost peers")
        of_round, of_all = (frozenset(row.nonzero().flatten().tolist()) for row in bits)
        return of_round, of_all

    def any(self, has_failed: bool) -> bool:
        """Whether a collective has failed for any of the processes."""
        count = torch.tensor([int(has_failed)], device="cpu")
        self._sum(self._collectives, count, what="comparing whether a collective has failed")
        return bool(count.item())

    def _sum(self, transport: ProcessGroupTransport, x: Tensor, *, what: str) -> None:
        try:
            transport.all_reduce(x, what=f"{what} in a replica")
        except LOST as error:
            if not self.why:
                raise
            raise ConnectionError(f"{self.why}: {error}") from error

    def close_connections(self) -> None:
        """End all waits, with an error; from any thread."""
        for transport in (self._rounds, self._collectives):
            transport.close_connections()

    def close(self) -> None:
        """Give back the groups. Idempotent."""
        self._rounds.close()
        self._collectives.close()


class LinkTransport(PointToPoint):
    """A transport over Gloo; rounds go on without failed ranks.

    [Note: one group per link] Where a wait on a Gloo group ends by its timeout, or a rank of it dies, no rank can tell
    what becomes of the group's other connections. So each link has a group of its own with two ranks. A failed link
    closes alone, and no late message can arrive in a reused buffer.

    A round with a lost peer is complete without it: `PendingExchange.lost` names it, and the mixer leaves what would
    have travelled with its sender ([Note: lost peers] of `Neighbours`). Collectives run over a group of all ranks. Once
    a rank has failed, they fail with an error. A failed rank closes its connections, so no other rank waits for it. The
    next attempt asks for another generation.

    Args:
        whole: a transport over all ranks, for collectives.
        links: by rank, the group of this rank and that one.
        on_lost: called with the rank, the error, and whether its connection was closed rather than late; once for each
            rank, in the thread of the round.

    Attributes:
        failed: failed ranks, as seen by this process.
        lost: failed ranks; with `vote` those on which all processes of the replica have agreed.
        vote: see [Note: one replica, one row]; None: this process has the whole model.
        on_broken: called once, where a collective is tried after another one has failed; None: nobody is.
    """

    is_elastic = True

    def __init__(
        self,
        whole: ProcessGroupTransport,
        links: Mapping[int, dist.ProcessGroup],
        *,
        on_lost: Callable[[int, str, bool], None],
    ) -> None:
        self._whole, self._links = whole, dict(links)
        super().__init__(
            rank=whole.rank,
            world_size=whole.world_size,
            device=whole.device,
            timeout=whole.timeout,
            names=whole.names,
            backend=whole.backend,
            use=whole.use,
        )
        self.waiting = whole.waiting  # which the board of `whole` looks at
        self._on_lost = on_lost
        self.on_broken: Callable[[], None] | None = None
        self._is_whole_broken = False
        self._lock = threading.Lock()
        self._own_waits, self._whole_waits = Waits(), Waits()
        self.waits, whole.waits = self._own_waits, self._whole_waits
        self.failed: frozenset[int] = frozenset()
        self.vote: Vote | None = None
        self._is_one = False  # inside `as_one_collective`

    def __deepcopy__(self, memo: dict[int, object]) -> LinkTransport:
        """Keep the same links: copies of a wrapper are snapshots and send nothing over them."""
        return self

    @property
    def num_bytes_sent(self) -> int:
        """See `PointToPoint`."""
        return self.num_round_bytes + self._whole.num_bytes_sent

    def vote_by(self, vote: Vote) -> None:
        """Leave out the peers on which all processes of a replica have agreed: see [Note: one replica, one row]."""
        self.vote, self.agrees_on_lost, self.lost = vote, True, frozenset()

    def agree_lost(self, lost: frozenset[int]) -> frozenset[int]:
        """See `PointToPoint`."""
        if self.vote is not None:
            lost, self.lost = self.vote.union(lost, self.failed, self.world_size)
            for peer in self.lost - self.failed:
                self.break_link(peer)
        return lost

    def route(self, peer: int) -> tuple[dist.ProcessGroup, int]:
        """See `PointToPoint`."""
        if peer not in self._links:
            raise LinkClosedError(
                f"worker {self.names[self.rank]}: got a round after its membership was closed, expected none; close "
                "the wrapper, which closes its membership"
            )
        return self._links[peer], int(self.rank < peer)

    def loses(self, peer: int, error: RuntimeError, seconds: float) -> bool:
        """See `PointToPoint`."""
        is_new = self._mark_lost(peer)
        self._own_waits.give_up(peer)  # of other threads; the link has closed
        if is_new:
            self._on_lost(peer, str(error), seconds < LATE * self.timeout.total_seconds())
        return True

    def break_link(self, peer: int) -> None:
        """Declare a peer lost, and end the waits for it and the waits of collectives; from any thread.

        The timeout of a wait closes the connections of its group; the group belongs to this link alone.
        """
        self._break_whole()  # first, since a peer reports this rank as soon as its link is closed
        if self._mark_lost(peer):
            self._end_waits(peer)

    def _mark_lost(self, peer: int) -> bool:
        """Whether it was not lost before."""
        with self._lock:
            is_new = peer not in self.failed
            self.failed |= {peer}
            if self.vote is None:
                self.lost = self.failed
        return is_new

    def _end_waits(self, peer: int) -> None:
        with contextlib.suppress(RuntimeError, LinkClosedError):  # it is closed already, or was never open
            group, other = self.route(peer)
            group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], other, PROBE_TAG).wait(_BREAK)
        self._own_waits.give_up(peer)

    def end_waits(self) -> None:
        """Close the group over all ranks, and the links with a wait now; from any thread."""
        self._break_whole()
        for peer in self._own_waits.under_way():
            self._end_waits(peer)

    def close_connections(self) -> None:
        """Close all links; from any thread."""
        for peer in list(self._links):
            self._end_waits(peer)

    def watch_changes(self, *, step: Callable[[], int], tensors: Callable[[], list[str]]) -> None:
        """See `ProcessGroupTransport`; the group over all ranks has the board."""
        self._whole.watch_changes(step=step, tensors=tensors, end_waits=self.end_waits)
        self.board = self._whole.board

    def _break_whole(self) -> None:
        """Close the connections of the group over all ranks, by the timeout of a wait."""
        with self._lock:
            is_broken, self._is_whole_broken = self._is_whole_broken, True
        if not is_broken:
            self._whole.close_connections()

    def fail(self, error: RuntimeError, what: str, seconds: float, *, peers: Sequence[int] = ()) -> NoReturn:
        """See `PointToPoint`."""
        fail(error, rank=self.names[self.rank], what=what, seconds=seconds, timeout=self.timeout)

    @property
    def is_alone(self) -> bool:
        """Whether no link is left: rounds change nothing."""
        return self.lost.issuperset(self._links)

    # Collectives.

    @property
    def whole(self) -> ProcessGroupTransport:
        """The transport over all ranks; a failed rank ends it for all of them."""
        return self._whole

    def ask_for_another(self) -> None:
        """Ask for another generation, unless this one has done so."""
        with self._lock:
            ask, self.on_broken = self.on_broken, None
        if ask is not None:
            ask()

    def within(self, deadline: Deadline) -> contextlib.AbstractContextManager[None]:
        """See `Transport`."""
        return self._whole.within(deadline)

    def all_reduce(self, x: Tensor, *, what: str) -> None:
        """See `Transport`."""
        with self._collective() as whole:
            whole.all_reduce(x, what=what)

    def barrier(self, *, what: str) -> None:
        """See `Transport`."""
        with self._collective() as whole:
            whole.barrier(what=what)

    def broadcast(self, x: Tensor, *, source: int, what: str) -> None:
        """See `Transport`."""
        with self._collective() as whole:
            whole.broadcast(x, source=source, what=what)

    def all_to_all(self, out: Tensor, x: Tensor, *, what: str) -> None:
        """See `Transport`."""
        with self._collective() as whole:
            whole.all_to_all(out, x, what=what)

    def all_gather(self, out: Tensor, x: Tensor, *, what: str) -> None:
        """See `Transport`."""
        with self._collective() as whole:
            whole.all_gather(out, x, what=what)

    @contextlib.contextmanager
    def _collective(self) -> Iterator[ProcessGroupTransport]:
        """The group over all ranks; where a collective fails its connections close, and the next asks for another."""
        if self._is_whole_broken:
            self.ask_for_another()
        with self.as_one_collective():
            try:
                yield self._whole
            except LOST:
                self._break_whole()
                raise

    @contextlib.contextmanager
    def as_one_collective(self) -> Iterator[None]:
        """A context in which collectives succeed for all processes of a replica, or fail for all.

        Each process may run another number of them, such as for shards of other sizes.
        """
        if self.vote is None or self._is_one:
            yield
            return
        self._is_one = True
        try:
            yield
        except Exception:
            self.vote.any(True)
            raise
        finally:
            self._is_one = False
        if self.vote.any(False):
            self._break_whole()
            raise ConnectionError(
                f"worker {self.names[self.rank]}: a collective has failed for another process of this replica"
            )

    def close(self) -> None:
        """End the waits of listeners, and release the groups; waits for no rank. Idempotent."""
        self._on_lost, self.on_broken = _ignore, None
        for peer in self._links if self.has_listener else self._own_waits.under_way():
            self._end_waits(peer)
        links, self._links = list(self._links.values()), {}
        self.routes.clear()
        if self._whole.is_shared:  # with threads that wait for messages
            self._break_whole()
        self._whole.close()
        self._own_waits.close()
        self._whole_waits.close()
        threads.start(links.clear, name="releasing-group").join(1.0)


def _ignore(peer: int, error: str, is_closed: bool) -> None:
    """Nobody listens any more."""


def connect_links(
    exchange: Exchange,
    rank: int,
    world_size: int,
    peers: Iterable[int],
    *,
    store: dist.Store,
    names: Sequence[int],
    timeout: timedelta,
    patience: timedelta,
    on_lost: Callable[[int, str, bool], None],
    host: str | None = None,
    key: bytes | None = None,
) -> LinkTransport:
    """A transport over new links to these ranks, and a group over all; all ranks call it.

    Args:
        exchange: gives the addresses of this rank to all: see `connect_groups`.
        rank: the rank of the caller.
        world_size: the number of ranks.
        peers: the ranks to have links with; these have this rank among theirs.
        store: the key-value store of the group over all ranks.
        names: the names of the ranks, for errors.
        timeout: the timeout of the waits of rounds.
        patience: the longest time to connect.
        on_lost, host, key: see `LinkTransport`, `gloo_backend` and `connect_groups`.

    Raises:
        RuntimeError: a rank does not come within `patience`, or a stranger comes in its place.
    """
    peers = sorted(set(peers) - {rank})
    pairs = {f"{min(rank, peer)}-{max(rank, peer)}": (int(rank > peer), 2) for peer in peers}
    places = {"all": (rank, world_size), **pairs}
    whole, *groups = connect_groups(places, exchange, patience=patience, host=host, key=key)
    transport = ProcessGroupTransport(as_group(whole, store), device=CPU, timeout=timeout, names=names, key=key)
    transport.own_group()
    return LinkTransport(transport, dict(zip(peers, groups, strict=True)), on_lost=on_lost)


def alone(timeout: timedelta) -> LinkTransport:
    """The transport of a world of one. It has no socket, so a worker of a mailbox has no port.

    The collectives of torch's backend "fake" leave tensors as they are, as those among one rank do. With a torch whose
    backend "fake" has no name, such as 2.7, it is a Gloo group, which listens on a port that nobody connects to.
    """
    store = dist.HashStore()
    make = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)  # torch 2.8 and older have a constructor
    backend = make(0, 1)
    try:
        backend.name()
    except RuntimeError:
        group = gloo_group(store, 0, 1, timeout)
    else:
        group = as_group(backend, store)
    transport = ProcessGroupTransport(group, device=CPU, timeout=timeout, names=[0])
    transport.own_group()
    return LinkTransport(transport, {}, on_lost=_ignore)
