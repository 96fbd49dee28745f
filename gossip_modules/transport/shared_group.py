"""The channels of the transports over one process group, and the release of the group."""

from __future__ import annotations

import contextlib
import threading
import weakref
from dataclasses import dataclass, field

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


@dataclass
class SharedGroup:
    """The common state of all transports over one process group object; the object is one rank's end of the group.

    Each transport has a channel. The channel is part of the tags of its messages, so messages of two wrappers over one
    group never meet. Channels are given out in turn, so all ranks must make and close their wrappers over one group in
    the same order; where they have not, rounds end by the timeout. A channel is free again when its transport is
    closed, or was collected without ever having sent anything. If a wrapper was collected while in use, its channel
    stays taken, because its peers may still send to it.

    A group made by a transport is released when its last user is closed, or, after a collection of this user, at the
    next use of any group.

    Attributes:
        taken: the channels in use.
        next_channel: the one to try first.
        num_users: the number of open transports.
        num_joined: transports so far.
        is_owned: whether our own code has made the group, and torch can release it.
        peers: the connected ranks; None: all. See [Note: few connections] of `gloo.py`.
        thread: the thread that trains, as far as it is known.
    """

    taken: set[int] = field(default_factory=set)
    next_channel: int = 0
    num_users: int = 0
    num_joined: int = 0
    is_owned: bool = False
    peers: frozenset[int] | None = None
    thread: int = field(default_factory=threading.get_ident)


def shared_by(group: dist.ProcessGroup) -> SharedGroup:
    """The state of all transports over this group."""
    with _lock:
        return _shared.setdefault(group, SharedGroup())


class Use:
    """One transport's use of its group, apart from the transport, so that it can end when that was collected.

    Args:
        group: the process group.

    Attributes:
        shared: with the other users.
        channel: the channel of this transport.
        number: the number of this user; no later user has it.
        is_active: whether anything was ever sent or expected on the channel.

    Raises:
        ValueError: all channels are taken.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        with _lock:
            lost, _lost[:] = _lost[:], []
        for holder in lost:
            release(holder)
        self._holder = [group]  # the only reference, so that `release` can drop it
        self.is_active = False
        with _lock:
            shared = self.shared = shared_by(group)
            channels = (i % NUM_CHANNELS for i in range(shared.next_channel, shared.next_channel + NUM_CHANNELS))
            channel = next((i for i in channels if i not in shared.taken), None)
            if channel is None:
                raise ValueError(
                    f"got a process group that carries the messages of {NUM_CHANNELS} wrappers already, expected "
                    "fewer; close() wrappers that are not needed any more, on all ranks, or make another group"
                )
            shared.taken.add(channel)
            self.channel, shared.next_channel = channel, channel + 1
            shared.num_users += 1
            shared.num_joined += 1
            self.number = shared.num_joined

    def end(self) -> None:
        """Leave the channel; release the group if nobody else uses it. Called once, or `lose` is."""
        if self._leave(is_free=True):
            release(self._holder)
        self._holder.clear()

    def lose(self) -> None:
        """As `end`, for a collected transport: garbage collection must not wait."""
        if self._leave(is_free=not self.is_active):
            _lost.append(self._holder)  # until the next use of any group, or the end of the process

    def _leave(self, *, is_free: bool) -> bool:
        """Whether to release the group."""
        with _lock:
            self.shared.num_users -= 1
            if is_free:
                self.shared.taken.discard(self.channel)
            return self.shared.is_owned and self.shared.num_users == 0


def release(holder: list[dist.ProcessGroup]) -> None:
    """Give back the threads and connections of a group without users; without its other ranks.

    An MPI communicator stays, since all its ranks would have to free it together: its thread ends.

    Args:
        holder: a list of the group, and nothing else; empty afterwards.
    """
    group = holder.pop()
    backends = []
    for device in (torch.device("cpu"), torch.accelerator.current_accelerator()):
        with contextlib.suppress(RuntimeError):  # no backend for these tensors
            if device is not None:
                backends.append(group._get_backend(device))
    if any(backend.name() == "mpi4py" for backend in backends):
        for backend in backends:
            backend.abort()
        return
    if group in dist.distributed_c10d._world.pg_map:  # else the default group was destroyed, and this one with it
        dist.destroy_process_group(group)
    # A group that goes keeps the GIL while it joins its threads, which may want it; a backend lets go of it. It may
    # take until a collective that hangs in there has timed out, so another thread does it.
    del group
    threads.start(backends.clear, name="releasing-group").join(_RELEASE_SECONDS)


_shared: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedGroup] = weakref.WeakKeyDictionary()
_lock = threading.RLock()  # a transport may be collected, and leave, while another one joins in the same thread
