"""SharedGroup: what the transports over one process group share: its channels, and when the group is released."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist

from . import threads

CHANNEL_BITS = 5  # of a tag
NUM_CHANNELS = 1 << CHANNEL_BITS
_RELEASE_SECONDS = 1.0
# An older torch names a group after how many there are: a new one would take the name of one that was released, and
# find the addresses of its dead connections in the store. There, groups that torch has named stay until the job ends.
_naming = getattr(dist.distributed_c10d, "_hash_ranks_to_str", None)
CAN_RELEASE = _naming is None or "pg_names" not in _naming.__code__.co_names
_lost: list[list[dist.ProcessGroup]] = []


class SharedGroup:
    """Counts the users of one process group object, which is one rank's end of the group.

    Each user has a channel, which is part of the tags of its messages, so that the messages of two wrappers over one
    group never meet. Channels are given out in turn, so all ranks must make and close their wrappers over one group in
    the same order; where they have not, rounds end by the timeout. A channel is free again when its user is closed, or
    was collected without ever having sent anything; those of wrappers that were lost while in use stay taken, since
    their peers may still send to them.

    A group that a transport has made itself is released when its last user is closed, or at the next use of any group
    after that was collected.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a user may be collected, and leave, while another one joins in the same thread
        self._taken: set[int] = set()
        self._next = 0
        self.num_users = 0
        self.num_joined = 0  # users so far
        self.is_owned = False  # whether our own code has made the group, and torch can release it

    @staticmethod
    def of(group: dist.ProcessGroup) -> SharedGroup:
        """The one of this group object."""
        with _lock:
            shared = _shared.get(group)
            if shared is None:
                shared = _shared[group] = SharedGroup()
            return shared

    def join(self) -> int:
        """Another user; its channel.

        Raises:
            ValueError: all channels are taken.
        """
        with self._lock:
            for i in range(NUM_CHANNELS):
                channel = (self._next + i) % NUM_CHANNELS
                if channel not in self._taken:
                    self._taken.add(channel)
                    self._next = channel + 1
                    self.num_users += 1
                    self.num_joined += 1
                    return channel
        raise ValueError(
            f"got a process group that carries the messages of {NUM_CHANNELS} wrappers already, expected fewer; "
            "close() wrappers that are not needed any more, on all ranks, or make another group"
        )

    def leave(self, channel: int, *, is_free: bool) -> bool:
        """One user less, whose channel may be given out again if `is_free`; returns whether to release the group."""
        with self._lock:
            self.num_users -= 1
            if is_free:
                self._taken.discard(channel)
            return self.is_owned and self.num_users == 0


class Use:
    """One transport's use of its group, apart from the transport, so that it can end when that was lost.

    Attributes:
        shared: with the other users.
        channel: of this one.
        number: of this one among all users so far, which no later one has.
        is_active: whether anything was ever sent or expected on the channel.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        with _lock:
            lost, _lost[:] = _lost[:], []
        for holder in lost:
            release(holder)
        self._holder = [group]  # the only reference that `release` cannot drop is one that it is called with
        self.shared = SharedGroup.of(group)
        self.channel = self.shared.join()
        self.number = self.shared.num_joined
        self.is_active = False

    def end(self) -> None:
        """Leave the channel; release the group if nobody else uses it. Called once, or `lose` is."""
        if self.shared.leave(self.channel, is_free=True):
            release(self._holder)
        self._holder.clear()

    def lose(self) -> None:
        """As `end` when the transport was collected: whichever thread collects garbage waits for nobody."""
        if self.shared.leave(self.channel, is_free=not self.is_active):
            _lost.append(self._holder)  # until the next use of any group, or the end of the process


def release(holder: list[dist.ProcessGroup]) -> None:
    """Give back the threads and connections of a group that nobody uses any more; without its other ranks.

    An MPI communicator stays, since all its ranks would have to free it together: its thread ends.

    Args:
        holder: of the group, and nothing else; empty afterwards.
    """
    group = holder.pop()
    backends = {id(backend): backend for backend in _backends_of(group)}
    if any(backend.name() == "mpi4py" for backend in backends.values()):
        for backend in backends.values():
            backend.abort()
        return
    if group in dist.distributed_c10d._world.pg_map:  # else the default group was destroyed, and this one with it
        dist.destroy_process_group(group)
    # A group that goes keeps the GIL while it joins its threads, which may want it; a backend lets go of it. It may
    # take until a collective that hangs in there has timed out, so another thread does it.
    del group
    threads.start(backends.clear, name="releasing-group").join(_RELEASE_SECONDS)


def _backends_of(group: dist.ProcessGroup) -> Iterator[dist._Backend]:
    for name in ("cpu", "cuda"):
        try:
            yield group._get_backend(torch.device(name))
        except RuntimeError:  # no backend for these tensors
            continue


_shared: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedGroup] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
