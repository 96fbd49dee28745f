"""Letters: models on their way from one worker to another, each of which counts at one of its two ends."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..flat.layout import FlatLayout
from ..flat.vector import FlatVector
from ..transport.change_board import digest_of
from .job import MailJob
from .sealed import pack, unpack

_EXTRA = 1 << 16  # bytes of a letter beside its vector
_TAKEN = ".taken"
_PATH = re.compile(r"mail/\d{6}/(\d{6})/(\d{10})(\.taken)?")


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


@dataclass(eq=False)
class SentLetter:
    """A letter of this worker that nobody has taken, as far as it knows.

    Attributes:
        receiver: the number of its receiver.
        number: the number of letters to this receiver before it.
        path: its path.
        data: the object, until the medium has confirmed it; then None.
    """

    receiver: int
    number: int
    path: str
    data: bytes | None


class Letters:
    """The letters of one worker. One thread at a time calls it.

    [Note: Letters] A letter has two objects, both of them written once:

        mail/<to>/<from>/<n>          a header and a vector
        mail/<to>/<from>/<n>.taken    the number of the worker at which the letter counts

    The receiver takes a letter whenever it comes, and then deletes the first object. If the receiver is silent or has
    left, the sender takes the letter back. Each of them creates the second object before, and only the end whose create
    was first has the letter. An end that did not get the answer to its create reads the object in a later round. So a
    letter counts once, whatever happens, and if an end dies, all else that it did not hold is still there.

    A receiver remembers the numbers of the letters that it has taken, since a list may be old. Each letter says below
    which number all letters of its sender are settled. The receiver forgets those numbers, and deletes their objects.
    If the answer to the write of a letter was lost, its sender writes the same bytes again in the next round.

    A worker that starts again has a new number, and its mail is empty. Letters to its old number go back.

    Args:
        job: this worker in the run.
        layout: the layout of all vectors. A letter with another one stays where it is.

    Attributes:
        arrived: the letters that count here, and that the owner of this object has not applied yet.
        posted: the letters of this worker that nobody has taken, as far as it knows, by age.
    """

    def __init__(self, job: MailJob, layout: FlatLayout) -> None:
        self.job, self.layout = job, layout
        self.arrived: list[Letter] = []
        self.posted: list[SentLetter] = []
        self._about = digest_of([str(layout)])
        self._max_bytes = layout.num_bytes + _EXTRA
        self._numbers: dict[int, int] = {}  # by receiver: the number of the next letter
        self._settled: dict[int, int] = {}  # by sender: letters with lower numbers are settled
        self._taken: dict[int, dict[int, bool]] = {}  # by sender: for other decided letters, whether they count here

    def num_unread(self, receiver: int) -> int:
        """The number of letters to a worker that it has not taken, as far as this one knows."""
        return sum(letter.receiver == receiver for letter in self.posted)

    def post(self, receiver: int, header: Mapping[str, Any], vector: FlatVector) -> None:
        """Copy a letter; `deliver` writes it.

        Args:
            receiver: the number of its receiver.
            header: values for JSON.
            vector: a vector of the layout, in CPU memory.
        """
        number = self._numbers.get(receiver, 0)
        settled = min((letter.number for letter in self.posted if letter.receiver == receiver), default=number)
        data = pack({**header, "layout": self._about, "settled": settled}, [vector.raw])
        path = f"mail/{receiver:06d}/{self.job.number:06d}/{number:010d}"
        self._numbers[receiver] = number + 1
        self.posted.append(SentLetter(receiver, number, path, data))

    def deliver(self, *, deadline: float) -> None:
        """Write the letters that the medium has not confirmed.

        Raises:
            MailboxError: see `Medium.create`; here and below, nothing is lost by it, and a later call goes on.
        """
        for letter in self.posted:
            if letter.data is not None:
                self.job.medium.create(letter.path, letter.data, deadline=deadline)
                letter.data = None

    def collect(self, *, deadline: float) -> None:
        """Take the letters to this worker: they are in `arrived` then."""
        listed = sorted(self.job.medium.list(f"mail/{self.job.number:06d}", deadline=deadline))
        places = [(path, int(found[1]), int(found[2])) for path in listed if (found := _PATH.fullmatch(path))]
        for path, sender, number in places:
            if not (path.endswith(_TAKEN) or self._is_decided(sender, number)):
                self._receive(path, sender, number, deadline)
        self.job.medium.delete(self._done(places), deadline=deadline)

    def _is_decided(self, sender: int, number: int) -> bool:
        return number < self._settled.get(sender, 0) or number in self._taken.get(sender, ())

    def _done(self, places: Collection[tuple[str, int, int]]) -> Iterator[str]:
        """The objects that nobody needs any more.

        The decision of a letter stays until its sender knows it, and a letter that goes back until its sender has it.
        """
        for path, sender, number in places:
            is_settled = number < self._settled.get(sender, 0)
            is_read = self._taken.get(sender, {}).get(number, False)
            if is_settled or (is_read and not path.endswith(_TAKEN)):
                yield path

    def _receive(self, path: str, sender: int, number: int, deadline: float) -> None:
        """Take a letter, unless its sender has taken it back."""
        data = self.job.medium.get(path, max_bytes=self._max_bytes, deadline=deadline)
        header, tensors = ({}, []) if data is None else unpack(data, max_bytes=self._max_bytes)
        if header.get("layout") != self._about or (by := self._claim(path, deadline)) is None:
            return
        settled = max(self._settled.get(sender, 0), int(header["settled"]))
        self._settled[sender], is_here = settled, by == self.job.number
        decided = {**self._taken.get(sender, {}), number: is_here}
        self._taken[sender] = {n: counts for n, counts in decided.items() if n >= settled}
        if is_here:
            self.arrived.append(Letter(sender, header, FlatVector(self.layout, *tensors)))
            self.job.heard(sender)

    def settle(self, live: Collection[int], *, deadline: float) -> None:
        """Take the letters to all workers but the live ones back, into `arrived`, and forget letters that were taken.

        Args:
            live: the numbers of the live workers.
            deadline: see `Medium`.
        """
        waiting: set[int] = set()  # the live workers with an unread letter; later ones need no look
        for letter in list(self.posted):
            if letter.receiver in waiting:
                continue
            is_live = letter.receiver in live
            by = self._taker(letter.path, deadline) if is_live else self._claim(letter.path, deadline)
            if by == self.job.number:
                self._take_back(letter, deadline)
            elif by is not None:
                self.posted.remove(letter)
            elif is_live:
                waiting.add(letter.receiver)

    def _take_back(self, letter: SentLetter, deadline: float) -> None:
        medium = self.job.medium
        data = letter.data or medium.get(letter.path, max_bytes=self._max_bytes, deadline=deadline)
        if data is not None:  # else the medium shows an old state
            header, tensors = unpack(data, max_bytes=self._max_bytes)
            self.posted.remove(letter)
            self.arrived.append(Letter(self.job.number, header, FlatVector(self.layout, *tensors)))
            medium.delete([letter.path], deadline=deadline)

    def _claim(self, path: str, deadline: float) -> int | None:
        """Take the letter if nobody has. Returns the worker that has it; None: that is not known yet."""
        own = self.job.number
        is_own = self.job.medium.create(path + _TAKEN, pack({"by": own}), deadline=deadline)
        return own if is_own else self._taker(path, deadline)

    def _taker(self, path: str, deadline: float) -> int | None:
        by: int | None = self.job.header(path + _TAKEN, deadline=deadline).get("by")
        return by


def in_host_memory(s: FlatVector) -> FlatVector:
    """A copy of a vector in CPU memory, with a weight of one."""
    return FlatVector(s.layout, s.raw.to(torch.device("cpu"), copy=True))
