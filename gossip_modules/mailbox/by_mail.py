"""ByMail: a mixer whose messages are letters, which wait for their receiver."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection

from ..flat.vector import FlatVector
from ..membership.background_log import log
from ..mixing_manager.base import MixingManager
from ..rounds.mixer import Mixer
from ..state import transient
from .background import BackgroundCall
from .errors import MailboxError, Unavailable
from .job import MailJob, check_layout
from .letters import Letter, Letters, in_host_memory
from .saved_models import SavedModels

MailNotes = Callable[[Collection[int], int | None], None]
"""A call after an exchange, with the live workers and the number of a model that is to be saved, or None."""


class ByMail(Mixer):
    """Rounds without a common round: a worker sends letters to its peers, and takes the letters that have come to it.

    [Note: An exchange] All requests of a round run in a thread under the next steps: a look for live workers, for
    letters that have come and for own ones to take back, and the new letters, with a copy of the model of the round.
    The first step after the end of the thread applies the letters that have come. A round that finds the thread at work
    is left out, so training waits for no request. A medium that does not answer for `grace` seconds ends the exchange,
    and the next one goes on there. The thread and the training thread never use `letters`, or the state of a subclass,
    at the same time.

    The live worker with the smallest number saves its model every `save_every` of its rounds.
    """

    job: MailJob
    letters: Letters | None = transient(None)
    _call: BackgroundCall[None] | None = transient(None)
    _live: Collection[int] = ()  # as of the last exchange
    _save_as: int | None = None
    notes: MailNotes | None = transient(None)

    def join_run(self, job: MailJob, choose: Callable[[int], MixingManager], notes: MailNotes | None = None) -> None:
        """Send letters through a run.

        Args:
            job: this worker in the run.
            choose: the weights for a number of workers.
            notes: called after exchanges.
        """
        self.job, self._choose, self.notes = job, choose, notes

    def begin(self, s: FlatVector, k: int = 0) -> bool:
        """See `Mixer`: apply the letters that have come, if an exchange has ended.

        Raises:
            MailboxError: the medium has refused a request.
            ValueError: other tensors are trained than before.
        """
        has_ended = self._call is not None and self._call.is_done
        if has_ended:
            self._land(s)
        return has_ended

    def start(self, s: FlatVector, t: int) -> None:
        """See `Mixer`: all happens in `finish`."""
        self._t = t

    def finish(self, s: FlatVector) -> None:
        """See `Mixer` and [Note: An exchange]. Errors: see `begin`."""
        if self._call is None:
            letters, sent, t = self._letters_of(s), in_host_memory(s), self._t
            self._call = BackgroundCall(self.job.clock, lambda: self._exchange(letters, sent, t), name="mailbox-mail")

    def _letters_of(self, s: FlatVector) -> Letters:
        if self.letters is None:
            self.letters = Letters(self.job, s.layout)
        check_layout(self, self.letters.layout, s.layout)
        return self.letters

    def _exchange(self, letters: Letters, sent: FlatVector, t: int) -> None:
        """The requests of a round, in a thread."""
        job = self.job
        deadline = job.clock.now() + job.settings.grace
        try:
            self._live = live = self._fetch(letters, sent, deadline)
            self._write(letters, sent, t, sorted(live))
            letters.deliver(deadline=deadline)
            if (t + 1) % job.settings.save_every == 0:
                self._choose_saver(live, deadline)
        except Unavailable as error:
            log.warning("worker %d: the rest of round %d by mail is left out: %s", job.number, t, error)

    def _fetch(self, letters: Letters, sent: FlatVector, deadline: float) -> set[int]:
        """Get all that has come, and answer it; returns the live workers."""
        try:
            live = self.job.live(deadline=deadline)
            letters.settle(live, deadline=deadline)
            letters.deliver(deadline=deadline)
            letters.collect(deadline=deadline)
        finally:  # the letters that have come until an error count
            self._answer(letters, sent)
        return live

    def _choose_saver(self, live: Collection[int], deadline: float) -> None:
        """Save the model of the live worker with the smallest number."""
        if all(self.job.number <= number for number in live):
            self._save_as = (SavedModels(self.job.medium).newest(deadline=deadline) or 0) + 1

    def _land(self, s: FlatVector) -> None:
        """Apply the letters that have come. The exchange has ended."""
        call, self._call = self._call, None
        if call is not None:
            call.result()
        letters = self._letters_of(s)
        arrived, letters.arrived = letters.arrived, []
        for letter in arrived:
            vector = FlatVector(s.layout, letter.vector.raw.to(s.raw.device))
            self._apply(letter._replace(vector=vector), s)
        if self.notes is not None and self._live:
            save_as, self._save_as = self._save_as, None
            self.notes(self._live, save_as)

    def leave(self, s: FlatVector, *, is_sound: bool = True) -> None:
        """Apply the letters that have come, and end: other workers send no more.

        The exchange under way ends first, as its thread uses the live workers and the letters.

        Args:
            s: the model, mutated.
            is_sound: whether others may get anything of this model, which has changed since the last exchange.
        """
        job, letters = self.job, self.letters or self._letters_of(s)
        try:
            if self._call is not None and not self._call.wait(job.settings.timeout):
                raise Unavailable(f"{job.medium.address}: an exchange did not end within {job.settings.timeout:g} s")
            deadline = job.clock.now() + job.settings.grace
            if not is_sound or letters.layout != s.layout:
                log.warning(
                    "worker %d leaves with infinities, NaN or other tensors than before, so nobody gets its model",
                    job.number,
                )
                job.leave(deadline=deadline)
                letters.deliver(deadline=deadline)
                return
            self._land(s)  # what has come counts here, also if the medium does not answer any more
            job.leave(deadline=deadline)
            self._choose_saver(self._fetch(letters, in_host_memory(s), deadline), deadline)
            self._land(s)
            letters.deliver(deadline=deadline)
            self._hand_over(letters, s, deadline)
        except MailboxError as error:
            log.warning("worker %d left before its last letters were sent and read: %s", job.number, error)

    @abstractmethod
    def _write(self, letters: Letters, sent: FlatVector, t: int, live: list[int]) -> None:
        """Post the letters of a round, in the thread.

        Args:
            letters: see `Letters`.
            sent: the model of the round, in CPU memory.
            t: the round of this worker.
            live: the numbers of the live workers, ascending; this one is among them.
        """

    def _answer(self, letters: Letters, sent: FlatVector) -> None:
        """Post answers to letters that have come, where a method has answers; `sent` may be mutated."""

    @abstractmethod
    def _apply(self, letter: Letter, s: FlatVector) -> None:
        """Apply a letter to the model s; the vector of the letter is on the device of s."""

    def _hand_over(self, letters: Letters, s: FlatVector, deadline: float) -> None:
        """Give to others the state that must not leave with this worker; s is mutated."""
