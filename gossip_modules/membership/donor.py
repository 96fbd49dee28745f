"""Donor: gives the training state to joining workers, as tensors, and JSON for the rest; no pickle."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..flat.sharded import local_of
from ..transport import threads
from ..transport.deadline import Deadline
from ..transport.gloo import num_devices
from ..transport.state_tree import bytes_of, copied, decode, encode, pack, unpack
from ..transport.waits import Waits
from . import limits
from .addresses import connect_groups
from .background_log import log
from .liveness.contact import LifeSign
from .roster import Roster
from .shared_roster import SharedRoster
from .tracked import described
from .view import Joiner

_LOOK_SECONDS = 1.0
CHUNK_BYTES = 4 << 20
_MAX_HEADER = 64 << 20


class Donor:
    """The part of a `LocalWorker` for giving the training state.

    [Note: given weights] A donor gives half of its push-sum weight away. It remembers this half until the roster shows
    the joining worker in a generation. If the worker dies before, or gets its state from another donor, the first donor
    takes the half back, and no weight is lost.

    [Note: joiners that do not come] A worker has no connection to the others while it waits for a donor or loads the
    state, so none closes when it dies. It would take one of `max_workers` places for ever, and copies of the state. So
    where it has not come, or not loaded in `timeout`, its donor asks its machine. It is forgotten where that refuses,
    and where it is silent after more attempts than there are members. A refusal alone is not believed, because
    firewalls refuse too. A live worker comes again: [Note: coming again] of `LocalWorker`.

    Args:
        worker: the `LocalWorker` of this part; its lock guards all this.

    Attributes:
        snapshots: joiners for which the training thread must copy the state.
        given: by `Joiner.key`, the copies that a joiner may bring, and their deadlines.
        unclaimed: copies without a joiner.
    """

    def __init__(self, worker: Any) -> None:
        self.worker, self.job = worker, worker.job
        self.snapshots: list[Joiner] = []
        self.given: dict[tuple[int, int], tuple[float, Mapping[str, Any]]] = {}
        self.unclaimed: list[Mapping[str, Any]] = []
        self._serving: set[tuple[int, int]] = set()
        self._copied: dict[str, Any] | None = None

    @property
    def must_act(self) -> bool:
        """Whether the training thread is to call `take_back` and `take_snapshots`."""
        return bool(self.snapshots or self.unclaimed)

    def act(self) -> None:
        """Note joiners in need of the state, and copies without a joiner. The watcher calls it under the lock."""
        roster = self.worker.roster
        for key, (until, state) in list(self.given.items()):
            joiner = roster.joiners.get(key[0])
            has_come = roster.view is not None and roster.view.has(key[0])
            may_come = joiner is not None and joiner.key == key and not joiner.refusal
            if has_come or not (may_come and (joiner.is_loaded or time.monotonic() < until)):
                del self.given[key]
                self.unclaimed += [] if has_come else [state]
        self._serving &= {joiner.key for joiner in roster.joiners.values()}
        for joiner in roster.joiners.values():
            if joiner.donor == self.worker.id and not joiner.is_loaded and joiner.key not in self._serving:
                self._serving.add(joiner.key)
                self.snapshots.append(joiner)

    def take_snapshots(self) -> None:
        """Copy the state for joiners. If a copy fails, training goes on without an error."""
        together = self.job.together
        with self.worker.lock:
            joiners = [x for x in self.snapshots if self.worker.roster.joiners.get(x.member.id) == x]
            self.snapshots = []
        for joiner in joiners:
            try:
                together("copy", None, self.copy)
            except Exception as error:  # noqa: BLE001 (of memory, or of the user's objects: another donor gives)
                together("drop_copy", None, self.drop_copy)
                self._decline(joiner, error)
                continue
            assert self._copied is not None, "`copy` has made it"
            with self.worker.lock:
                self.given[joiner.key] = time.monotonic() + self.job.timeout.total_seconds(), self._copied["model"]
            together("serve", asdict(joiner), partial(self.serve, joiner))

    def copy(self) -> None:
        """Copy the state of training, and give half of the weight away."""
        participant, tracked = self.job.participant, self.job.tracked
        self._copied = None
        model = participant.give()
        try:
            states = {name: copied(x.state_dict(), _own_elements) for name, x in tracked.items()}
            encode(states)
            encode(model)
        except Exception:
            participant.take_back(model)
            raise
        kinds, clock = described(tracked), self.worker.generations.clock
        self._copied = {"model": model, "tracked": states, "kinds": kinds, "clock": clock}

    def drop_copy(self) -> None:
        """The copy is for nobody, as another process of this replica has none."""
        copied_state, self._copied = self._copied, None
        if copied_state is not None:
            self.job.participant.take_back(copied_state["model"])

    def serve(self, joiner: Joiner) -> None:
        """Send the copy to a joiner, in a thread of its own."""
        copied_state, self._copied = self._copied, None
        threads.start(self._serve, joiner, copied_state, name="gossip-donor")

    def take_back(self) -> None:
        """Take back what no joiner will bring."""
        with self.worker.lock:
            unclaimed, self.unclaimed = self.unclaimed, []
        for state in unclaimed:
            what = {"weight": state["weight"]}
            self.job.together("take_back", what, partial(self.job.participant.take_back, what))

    def _decline(self, joiner: Joiner, error: Exception) -> None:
        """Leave a worker to another donor, or refuse it where as many have tried as there are members.

        A value of a type that cannot be sent is the same on all.
        """
        log.warning("job %s: %s did not get the state of training: %r", self.job.name, joiner.member, error)
        view = self.worker.generations.active
        is_same_on_all = isinstance(error, TypeError) or view is None or joiner.attempt + 1 >= len(view.members)
        if is_same_on_all:
            self.worker.say(Roster.refuse, *joiner.key, why=f"{type(error).__name__}: {error}")
        else:
            self.worker.say(Roster.change_donor, *joiner.key)

    def _forget(self, joiner: Joiner) -> None:
        log.warning("job %s: %s does not come for the state of training: forgotten", self.job.name, joiner.member)
        self.worker.say(Roster.forget, *joiner.key)

    def _serve(self, joiner: Joiner, state: Mapping[str, Any]) -> None:
        """Send the state to a joiner, in a thread of its own; see [Note: joiners that do not come]."""
        name, store, over = meeting_of(joiner, self.job.shard), self.job.store, Deadline(limits.CONNECT)
        try:
            with meet(store, name, 0, is_void=lambda: over.is_over, host=self.job.link_host) as group:
                send(group, state, timeout=self.job.timeout)
        except (RuntimeError, OSError) as error:
            log.warning("job %s: %s did not get the state of training: %s", self.job.name, joiner.member, error)
            view, sign = self.worker.roster.view, self._sign_of(joiner)
            is_gone = sign is LifeSign.SILENT and view is not None and joiner.attempt >= len(view.members)
            if is_gone or sign is LifeSign.ENDED:
                self._forget(joiner)
            else:
                self.worker.say(Roster.change_donor, *joiner.key)
            return
        until = time.monotonic() + self.job.timeout.total_seconds()
        while self._is_loading(joiner):
            if time.monotonic() > until and self._sign_of(joiner) is not LifeSign.LIVES:
                self._forget(joiner)
                return

    def _is_loading(self, joiner: Joiner) -> bool:
        """Whether a worker has received the state, and reports no load within a second."""
        worker = self.worker
        with worker.moved:
            is_over = worker.moved.wait_for(
                lambda: self.job.closed.is_set() or worker.roster.joiners.get(joiner.member.id) != joiner, _LOOK_SECONDS
            )
        return not is_over

    def _sign_of(self, joiner: Joiner) -> LifeSign:
        """Where it cannot be asked, nothing shows that it has ended."""
        return self.worker.signs_of([joiner.member]).get(joiner.member.id, LifeSign.LIVES)


def meeting_of(joiner: Joiner, shard: int) -> str:
    """The name in the store where a donor and a joining worker meet; shard: see `JobState`."""
    return "/".join(["give", *map(str, joiner.key), *(["shard", str(shard)] if shard else [])])


def _own_elements(x: Tensor) -> Tensor:
    return local_of(x).detach().clone()


@contextlib.contextmanager
def meet(
    store: SharedRoster, name: str, rank: int, *, is_void: Callable[[], bool], host: str | None
) -> Iterator[dist.ProcessGroup]:
    """The Gloo group of a donor, rank 0, and a joining worker, rank 1, for one transfer.

    Raises:
        RuntimeError: the other one does not come before `is_void`, or does not connect.
    """

    def exchange(device: str, text: str) -> list[str]:
        return store.gather(f"{name}/{device}", rank, text, (0, 1), is_void=is_void)

    try:
        patience = timedelta(seconds=limits.CONNECT)
        (group,) = connect_groups({"": (rank, 2)}, exchange, patience=patience, host=host, key=store.key)
        yield group
    finally:  # a rank may be connected before the other one has read its address
        store.forget([f"{name}/{device}/{rank}" for device in range(num_devices(host))])


def send(group: dist.ProcessGroup, state: Any, *, timeout: timedelta) -> int:
    """Send a state to rank 1 of a group of two, in chunks; returns the bytes sent.

    Raises:
        RuntimeError: the other rank is gone, or late.
        TypeError: see `encode`.
    """
    text, tensors = pack(state)
    contents = (bytes_of(x.detach().cpu()) for x in tensors)
    total = 0
    for chunk in (torch.tensor([text.numel()], device="cpu"), text, *(chunk for x in contents for chunk in _chunks(x))):
        group.send([chunk], 1, chunk.nbytes).wait(timeout)
        total += chunk.nbytes
    return total


def receive(
    group: dist.ProcessGroup, *, deadline: Deadline, max_bytes: int = 1 << 40, waits: Waits | None = None
) -> Any:
    """Receive the state from rank 0.

    Args:
        group: a group of two ranks.
        deadline: the deadline of all waits; each received piece extends it by its own duration.
        max_bytes: the largest size of the state.
        waits: the means for another thread to end the wait.

    Raises:
        RuntimeError: the other rank is gone, or late.
        ValueError: it has sent anything else.
    """

    def await_chunk(chunk: Tensor) -> None:
        work, before = group.recv([chunk], 0, chunk.nbytes), deadline.passed  # see `PointToPoint.wire_tag`
        if waits is None:
            work.wait(deadline.left_for_gloo)
        else:
            waits.wait(work, deadline.left_for_gloo)
        deadline.extend(deadline.passed - before)

    size = torch.zeros(1, dtype=torch.int64, device="cpu")
    await_chunk(size)
    if not 0 < int(size) <= _MAX_HEADER:
        raise ValueError(f"got a state with a header of {int(size)} bytes, expected 1 to {_MAX_HEADER}")
    text = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    await_chunk(text)
    header, tensors = unpack(text, max_bytes=max_bytes)
    for x in tensors:
        for chunk in _chunks(bytes_of(x)):
            await_chunk(chunk)
    return decode(header, tensors)


def _chunks(x: Tensor) -> tuple[Tensor, ...]:
    return x.split(CHUNK_BYTES) if x.numel() else ()
