"""At the door of a job: whether anybody lives there, and where nobody does, another life of the job."""

from __future__ import annotations

import time
from collections.abc import Mapping

from ...transport.deadline import Deadline
from .. import limits
from ..watching import Watching
from .background_log import log
from .contact import digest
from .probe import LifeSign, probe


class JobFullError(ConnectionError):
    """The job has as many workers as it takes; a later start may find a place."""


class LeftAtDoorError(ConnectionError):
    """`leave` was called before this worker took part."""


class Door(Watching):
    """The part of `Membership` for a worker that finds a job of which nobody may live.

    [Note: another life] A job whose workers have all died stays in its store as it was. A worker that comes asks for a
    sign of life: it connects with each member's listener, and knocks in the log, which members answer there. Only if
    none shows one, it begins the job anew, as the first founder, under the same name. It has waited until then for two
    seconds if the processes of all members have ended, as their machines refuse the connection, and for `timeout` if
    one is silent, since a machine that has lost its power looks like one that is stopped or cut off. A member that
    answers, or a generation that forms, before the event stands in the log makes it void.
    """

    def _is_abandoned(self, deadline: Deadline) -> bool:
        """Whether no member shows a sign of life; see [Note: another life]. False: that is not known in time."""
        with self._lock:
            life, members = self._life, self._roster.present()
        contacts = {member.id: member.contact for member in members}
        has_knocked, start = False, time.monotonic()
        while not (self._closed.is_set() or self.is_leaving):
            signs = probe(contacts, job=digest(self.name), seconds=limits.PROBE)
            if LifeSign.LIVES in signs.values() or self._life != life:
                return False
            if not has_knocked:
                has_knocked = True
                self._say({"event": "knock", "id": self.id})
            have_ended = set(signs.values()) == {LifeSign.ENDED}
            patience = limits.ENDED if have_ended else self.timeout.total_seconds()
            if not self._log.is_connected:  # an answer would not arrive
                start = time.monotonic()
            if time.monotonic() - start > patience:
                self._tell_of(signs)
                return True
            if deadline.is_over:
                return False
            self._closed.wait(limits.POLL)
        return False

    def _begin_anew(self, deadline: Deadline) -> None:
        """Say that the job begins anew, and wait until all have read what becomes of it."""
        life = self._life
        self._say({**self._coming, "event": "anew", "generation": life[0], "answers": life[1]})
        self._await(lambda: self.id not in self._roster.joiners or self._life != life, deadline)

    def _check_attached(self) -> None:
        if self._participant is None:
            raise RuntimeError("got join() of a membership without a wrapper, expected it after the model was wrapped")
        if self._closed.is_set():
            raise RuntimeError("got join() of a membership that is closed, expected it before close(); make another")

    def _raise_if_closed_in(self, step: int) -> None:
        if self._closed.is_set() and not self.must_leave:
            raise RuntimeError(
                f"job {self.name!r}: got close() of the wrapper or the membership in step {step}, expected it after "
                "the loop over steps(); to end early, break out of the loop, or call leave()"
            )

    def _raise_if_over(self) -> None:
        if self._closed.is_set():
            raise RuntimeError(f"job {self.name!r}: the membership was closed while this worker was joining")
        if self.is_leaving:
            raise LeftAtDoorError(f"job {self.name!r}: leave() was called while this worker was joining; close() it")

    def _raise_if_refused(self) -> None:
        joiner = self._roster.joiners.get(self.id)
        if joiner is not None and joiner.refusal:
            if joiner.is_full:
                raise JobFullError(
                    f"job {self.name!r} at {self._log.address} has as many workers as it takes ({joiner.refusal}): "
                    "this one is not needed; start it again when another has ended"
                )
            raise ValueError(
                f"job {self.name!r} at {self._log.address} refused this worker, which differs from it: "
                f"{joiner.refusal}; start it with the model and the options of the job"
            )

    @property
    def _life(self) -> tuple[int, int]:
        """What changes where anybody lives."""
        return self._roster.last_generation, self._roster.num_answers

    def _tell_of(self, signs: Mapping[int, LifeSign]) -> None:
        who = [f"worker {member.number} on {member.host} {signs[member.id].value}" for member in self._roster.present()]
        log.warning("job %s: nobody lives, so it begins anew under this name: %s", self.name, "; ".join(who))
