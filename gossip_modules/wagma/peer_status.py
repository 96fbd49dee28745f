"""PeerStatus: what the neighbours of a rank are doing, and which rank keeps it waiting."""

from __future__ import annotations

import threading
import time
from enum import IntEnum

from .control import ControlChannel, ControlKind, ControlMessage
from .failure_reason import FailureReason

_SILENT_AFTER = 0.2  # part of the timeout


class Activity(IntEnum):
    """What the training thread of a rank is doing."""

    TRAINING = 0
    GROUP = 1
    GLOBAL = 2
    BEGINNING = 3
    SETTLING = 4

    @property
    def phrase(self) -> str:
        """The predicate for errors."""
        return ("trains", "waits for its group", "waits for all ranks", "waits to begin", "settles")[self]


class PeerStatus:
    """The last STATUS of each neighbour, and since when a neighbour has not answered a request for it.

    Any thread may use it: a listening thread records answers, the detector's thread and the training thread ask and
    read. All attributes are guarded by `state`, which is never held while a message is sent.

    Args:
        channel: the control channel of this rank.
        state: the condition of the worker; notified when an answer comes.
        timeout: the timeout of every wait, in seconds.

    Attributes:
        statuses: the last STATUS message of each neighbour that has sent one.
    """

    def __init__(self, channel: ControlChannel, state: threading.Condition, *, timeout: float) -> None:
        self.statuses: dict[int, ControlMessage] = {}
        self._channel, self._state, self._timeout = channel, state, timeout
        self._rank, self._names = channel.transport.rank, channel.transport.names
        self._asked: dict[int, float] = {}  # neighbours that owe an answer: since when (`time.monotonic()`)

    def request(self) -> None:
        """Ask every neighbour that owes no answer what it is doing. Does not wait."""
        now = time.monotonic()
        with self._state:
            closed = self._channel.closed_peers
            peers = [peer for peer in self._channel.neighbours if peer not in self._asked and peer not in closed]
            self._asked.update(dict.fromkeys(peers, now))
        for peer in peers:
            self._channel.post(ControlMessage(ControlKind.STATUS_REQUEST), peer)

    def record(self, peer: int, status: ControlMessage) -> None:
        """Keep the answer of a neighbour. Called by its listening thread."""
        with self._state:
            self._asked.pop(peer, None)
            self.statuses[peer] = status
            self._state.notify_all()

    def is_silent(self, peer: int) -> bool:
        """Whether that neighbour has owed an answer for a fifth of the timeout."""
        asked = self._asked.get(peer)
        return asked is not None and time.monotonic() - asked > _SILENT_AFTER * self._timeout

    @property
    def has_silent_peer(self) -> bool:
        """Whether `is_silent` holds for some neighbour."""
        return any(map(self.is_silent, self._channel.neighbours))

    def culprit(self, peer: int, *, activity: Activity, t: int) -> tuple[int, FailureReason, str]:
        """The rank that keeps this one waiting, what it did, and more about it for the error.

        Args:
            peer: the rank that was waited for; -1 = unknown.
            activity: what this rank is doing.
            t: its round.
        """
        with self._state:
            closed = self._channel.closed_peers
            silent = [i for i in self._channel.neighbours if self.is_silent(i) and i not in closed]
            if silent:
                return (peer if peer in silent else silent[0]), FailureReason.SILENT, ""
            suspects = [peer] if peer >= 0 else []
            if peer < 0 and activity is Activity.GLOBAL:
                suspects = [i for i in self._channel.neighbours if self._is_behind(i, t)]
            for suspect in suspects:
                status = self.statuses.get(suspect)
                if status is None:
                    continue
                if status.oldest not in (-1, self._rank):
                    note = f" (rank {self._names[suspect]} waits for it too)"
                    return status.oldest, FailureReason.ABSENT, note
                return suspect, FailureReason.ABSENT, f"; it {Activity(status.stage).phrase}, in round {status.round}"
            return (peer, FailureReason.ABSENT, "") if peer >= 0 else (-1, FailureReason.UNKNOWN, "")

    def _is_behind(self, peer: int, t: int) -> bool:
        """Whether that neighbour is not at the global average of round t."""
        status = self.statuses.get(peer)
        return status is not None and not (status.stage == Activity.GLOBAL and status.round >= t)
