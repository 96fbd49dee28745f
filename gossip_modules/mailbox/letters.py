"""Letters: models on their way from one worker to another; each model counts at one of its two ends."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from ..flat.layout import FlatLayout
from ..flat.vector import FlatVector
from ..transport.change_board import digest_of
from .job import MailJob
from .sealed import pack, unpack

_EXTRA = 1 << 16  # bytes of a letter beside its vector
_TAKEN = ".taken"
_PATH = re.compile(r"mail/\d{6,}/(\d{6,})/(\d{10})(\.taken)?")


class Letter(NamedTuple):
    """A letter that counts at this end.

    Attributes:
        sender: the number of its sender; the own number: its receiver is silent, so it has come back.
        header: values of the sender.
        vector: a vector of the sender, in CPU memory.
    """

    sender: int
    header: Mapping[str, Any]
    vector: FlatVector


class Letters:
    """The letters of one worker. One thread at a time calls it.

    [Note: Letters] A letter has two objects, both of them written once:

        mail/<to>/<from>/<n>          a header and a vector
        mail/<to>/<from>/<n>.taken    the decision: the number of the worker at which the letter counts

    The receiver reads a letter whenever it comes, and then creates the decision. If the receiver is silent or has left,
    the sender creates the decision, to take the letter back. The letter counts at the end whose create was first. An
    end that did not get the answer to its create asks again in a later round.

    A letter counts once, whatever answers are lost, for these reasons:

    - The sender keeps a letter in `posted` until it has read the decision. A letter that counts at the receiver leaves
      `posted` then, and a letter that counts at the sender moves to `arrived`.
    - The receiver keeps each letter that it has read in memory until it has read the decision, whatever it finds in the
      medium meanwhile. So a letter with a decision for the receiver is in its memory, or in `arrived`.
    - Each letter says in its header below which number its sender has no letter in `posted`: these are settled. The
      receiver deletes a decision when its letter is settled and not in memory any more. So neither end asks for a
      decision that was deleted.
    - The receiver deletes a letter that counts here, or is settled, and no other one. So a letter that goes back is
      there until its sender has read it.
    - A settled letter is not read again. So a list of an old state, or a write that takes effect late, changes nothing.

    If an end dies, the letters that count there are lost with it, and no others. If the answer to the write of a letter
    was lost, its sender writes the same bytes again in the next round. A worker that starts again has a new number, and
    its mail is empty. Letters to its old number go back.

    Args:
        job: this worker in the run.
        layout: the layout of all vectors. A letter with another one stays where it is.

    Attributes:
        arrived: the letters that count here, and that the owner of this object has not applied yet.
        posted: the letters of this worker without a decision, as far as it knows, by receiver and number, the oldest
            one first. Each is the object to write; None: the medium has confirmed it.
    """

    def __init__(self, job: MailJob, layout: FlatLayout) -> None:
        self.job, self.layout = job, layout
        self.arrived: list[Letter] = []
        self.posted: dict[tuple[int, int], bytes | None] = {}
        self._about = digest_of([str(layout)])
        self._max_bytes = layout.num_bytes + _EXTRA
        self._numbers: dict[int, int] = {}  # by receiver: the number of the next letter
        self._settled: dict[int, int] = {}  # by sender: letters with lower numbers are settled
        self._read: dict[tuple[int, int], Letter] = {}  # by sender and number: letters without a decision
        self._decided: dict[tuple[int, int], bool] = {}  # for letters that are not settled: whether they count here

    def num_unread(self, receiver: int) -> int:
        """The number of letters to a worker that it has not taken, as far as this one knows."""
        return sum(to == receiver for to, _ in self.posted)

    def post(self, receiver: int, header: Mapping[str, Any], vector: FlatVector) -> None:
        """Copy a letter; `deliver` writes it.

        Args:
            receiver: the number of its receiver.
            header: values for JSON.
            vector: a vector of the layout, in CPU memory.
        """
        number = self._numbers.get(receiver, 0)
        settled = min((n for to, n in self.posted if to == receiver), default=number)
        data = pack({**header, "layout": self._about, "settled": settled}, [vector.raw])
        self._numbers[receiver], self.posted[receiver, number] = number + 1, data

    def deliver(self, *, deadline: float) -> None:
        """Write the letters that the medium has not confirmed.

        Raises:
            MailboxError: see `Medium.create`; here and below, nothing is lost by it, and a later call goes on.
        """
        for (to, number), data in self.posted.items():
            if data is not None:
                self.job.medium.create(path_of(to, self.job.number, number), data, deadline=deadline)
                self.posted[to, number] = None

    def collect(self, *, deadline: float) -> None:
        """Take the letters to this worker: they are in `arrived` then. Deadline: see `Medium.create`."""
        medium = self.job.medium
        listed = medium.list(f"mail/{self.job.number:06d}", deadline=deadline)
        places = {path: (int(found[1]), int(found[2])) for path in listed if (found := _PATH.fullmatch(path))}
        letters = {place for path, place in places.items() if not path.endswith(_TAKEN)}
        for place in sorted(letters | self._read.keys()):
            if not self.is_decided(*place):
                self._receive(*place, deadline)
        self._decided = {place: is_here for place, is_here in self._decided.items() if not self._is_settled(*place)}
        # The decision of a letter stays until its sender knows it, and a letter that goes back until its sender has it.
        done = [
            path
            for path, place in places.items()
            if self._is_settled(*place) or (self._decided.get(place) and not path.endswith(_TAKEN))
        ]
        medium.delete(done, deadline=deadline)

    def is_decided(self, sender: int, number: int) -> bool:
        """Whether this worker knows at which end a letter to it counts."""
        return (sender, number) in self._decided or self._is_settled(sender, number)

    def _is_settled(self, sender: int, number: int) -> bool:
        """Whether neither end asks for the decision of a letter any more."""
        return number < self._settled.get(sender, 0) and (sender, number) not in self._read

    def _receive(self, sender: int, number: int, deadline: float) -> None:
        """Read a letter, and take it, unless its sender has taken it back."""
        place, path = (sender, number), path_of(self.job.number, sender, number)
        letter = self._read.get(place) or self._open(path, sender, deadline)
        if letter is None:
            return
        self._read[place] = letter  # first of all: the answer to the create may be lost
        self._settled[sender] = max(self._settled.get(sender, 0), int(letter.header["settled"]))
        if (by := self._claim(path, deadline)) is not None:
            self._decided[place] = is_here = by == self.job.number
            del self._read[place]
            if is_here:
                self.arrived.append(letter)

    def _open(self, path: str, sender: int, deadline: float, data: bytes | None = None) -> Letter | None:
        """The letter in an object; None: it cannot be read now, or has another layout.

        Args:
            path: the path of the object.
            sender: see `Letter`.
            deadline: see `Medium`.
            data: the object, if it is known.
        """
        data = data or self.job.medium.get(path, max_bytes=self._max_bytes, deadline=deadline)
        header, tensors = ({}, []) if data is None else unpack(data, max_bytes=self._max_bytes)
        fits = header.get("layout") == self._about
        return Letter(sender, header, FlatVector(self.layout, *tensors)) if fits else None

    def settle(self, live: Collection[int], *, deadline: float) -> None:
        """Take the letters to all workers but the live ones back, into `arrived`, and forget letters that were taken.

        Args:
            live: the numbers of the live workers.
            deadline: see `Medium.create`.
        """
        own = self.job.number
        for (receiver, number), data in list(self.posted.items()):
            path = path_of(receiver, own, number)
            by = self._taker(path, deadline) if receiver in live else self._claim(path, deadline)
            letter = self._open(path, own, deadline, data) if by == own else None
            if letter is not None or by not in (own, None):
                del self.posted[receiver, number]
            if letter is not None:
                self.arrived.append(letter)
                self.job.medium.delete([path], deadline=deadline)

    def _claim(self, path: str, deadline: float) -> int | None:
        """Take the letter if nobody has. Returns the worker that has it; None: that is not known yet."""
        own = self.job.number
        is_own = self.job.medium.create(path + _TAKEN, pack({"by": own}), deadline=deadline)
        return own if is_own else self._taker(path, deadline)

    def _taker(self, path: str, deadline: float) -> int | None:
        by: int | None = self.job.header(path + _TAKEN, deadline=deadline).get("by")
        return by


def path_of(receiver: int, sender: int, number: int) -> str:
    """The path of a letter: see [Note: Letters] of `Letters`."""
    return f"mail/{receiver:06d}/{sender:06d}/{number:010d}"


def in_host_memory(s: FlatVector) -> FlatVector:
    """A copy of the vector s in CPU memory, with a weight of one."""
    return FlatVector(s.layout, s.raw.to(torch.device("cpu"), copy=True))
