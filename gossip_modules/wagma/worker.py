"""The background half of WAGMA-SGD: runs the group average of each version, when somebody has arrived there."""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import record_function

from ..engine.background import Background
from ..engine.engine import EngineStats
from ..engine.shared_model import Mailbox
from ..flat.nonfinite import check_policy, is_finite, refuse
from ..flat.vector import FlatVector
from ..transport.process_group import ProcessGroupTransport
from .control import Kind, Word, Words
from .group_average import GroupAverage
from .watch import Watch

_CLOSE_SECONDS = 2.0


class WaitAvoidingWorker:
    """A worker thread, listening threads, a watch, and what they share with training behind one lock, `state`.

    The worker runs versions strictly in order and each once, whoever arrived there first and however many did. It
    copies y, what training has published last, under the lock and averages it with what the other workers of its
    group copied. Then it waits for the next version: for its own training to arrive there, or for the word that
    somebody has, which it passes on. At a version that is averaged globally it passes on the word and waits for
    training to say that it is done.

    [Note: daemons at exit] A thread that wakes inside C++ code while the interpreter ends would abort the process. So
    at exit this rank hangs up, which brings its threads home.

    All attributes and methods are for who holds `state`, if not said otherwise.

    Args:
        average: of the groups, over Gloo, with messages in CPU memory; `average.transport` carries nothing else.
        x: the parameters; published at version -1.
        sync_period: versions from one global average to the next; 0 = never.
        stats: mutated: one round per version, with the versions since the publication of what was contributed.
        on_nonfinite: "raise" at the rank whose y is not finite, before others get it; "skip" takes y itself in the
            place of an average that is not finite; "spread".
    """

    def __init__(
        self,
        average: GroupAverage,
        x: FlatVector,
        *,
        sync_period: int,
        stats: EngineStats,
        on_nonfinite: str = "raise",
    ) -> None:
        transport = average.transport
        assert isinstance(transport, ProcessGroupTransport), "words take a channel of a process group"
        self.transport = transport
        self.on_nonfinite = check_policy(on_nonfinite)
        self.words = Words(transport)
        self.mailbox = Mailbox(x)
        self.state = threading.Condition(self.mailbox.lock)
        self.meetings: dict[tuple[Kind, int, int], Word] = {}  # (kind, meeting, stage): what was said there
        self.num_beginnings = 0
        self.result = self.mailbox.host_vector()  # the group average of version num_done - 1
        self._accumulator = self.mailbox.host_vector()
        self._correction: FlatVector | None = None  # made when it is first needed, with its bounds
        self._bounds: list[tuple[Tensor, Tensor]]
        self._first_buffers = [segment.numel for segment in x.layout.where(is_buffer=False).segments]
        self._average, self._sync_period, self._stats = average, sync_period, stats
        self._background = Background()
        self.watch = Watch(self.words, self.state, self._background, timeout=transport.timeout)
        self.watch.partner = lambda: average.partner
        self._is_closing = False
        self._worker_ended = threading.Event()
        self._is_on_gpu = x.raw.is_cuda
        if self._is_on_gpu:
            self._arrived, self._taken = x.like(), torch.cuda.Event()
        self.set_version(0)
        for peer in self.words.neighbours:
            self._start(f"gossip-listener-{transport.rank}-{peer}", functools.partial(self._listen, peer))
        self._start(f"gossip-worker-{transport.rank}", self._work)
        self._start(f"gossip-watch-{transport.rank}", self.watch.run)
        atexit.register(self._exit)

    def set_version(self, t: int) -> None:
        """Training is at version t and no worker is at work; nor will this one be before `release()`."""
        self._next = self.num_started = self.num_done = t
        self.newest_arrival = self.published_at = t - 1
        self.is_held = True

    def begin(self) -> int:
        """From now on words of arrival count that are of this beginning, and no others; returns which it is."""
        self.num_beginnings += 1
        self.newest_arrival = self.num_done - 1
        return self.num_beginnings

    def release(self) -> None:
        """All ranks are known to be at one version, and this one's model to be what peers should get."""
        self.is_held = False
        self.state.notify_all()

    def next_global(self, t: int) -> int | None:
        """The first version from t on that is averaged globally; None = none is."""
        return (t // self._sync_period + 1) * self._sync_period - 1 if self._sync_period else None

    def publish(self, x: FlatVector, *, version: int) -> None:
        """y <- x, which is of that version."""
        self.mailbox.publish(x)
        self.published_at = version

    def arrive_at(self, version: int) -> None:
        """Somebody is at that version."""
        self.newest_arrival = max(self.newest_arrival, version)
        self.state.notify_all()

    def finish_global(self, version: int) -> None:
        """Training has averaged that version over all ranks."""
        self.num_started = self.num_done = version + 1
        self.state.notify_all()

    def merge_to(self, x: FlatVector, *, weight: float) -> None:
        """x <- (1 - weight) x + weight * the newest result."""
        result = self.result
        if self._is_on_gpu:
            self._arrived.raw.copy_(result.raw, non_blocking=True)
            self._taken.record(torch.cuda.current_stream(x.raw.device))
            result = self._arrived
        if weight == 1.0:
            x.raw.copy_(result.raw)
        else:
            x.combine_(1 - weight, [result], [weight])

    def correct(self, x: FlatVector) -> None:
        """x <- x + (the newest result - y), where y is what this rank contributed: steps taken since then are kept.

        [Note: statistics] That sum can leave the range of what ranks have: a variance that decayed since y was
        published would become negative. So buffers stay between the result and what they are now.
        """
        if self._correction is None:
            self._correction = self.mailbox.host_vector()
            self._bounds = [(torch.empty_like(part), torch.empty_like(part)) for part in self._buffers(x)]
        elif self._is_on_gpu:
            self._taken.synchronize()  # the last correction has left
        correction = self._correction
        self.mailbox.snapshot(correction)
        for c, result in zip(correction.segments, self.result.segments, strict=True):
            torch.sub(result, c, out=c)
        for (average, _), part in zip(self._bounds, self._buffers(self.result), strict=True):
            average.copy_(part, non_blocking=True)
        if self._is_on_gpu:
            self._arrived.raw.copy_(correction.raw, non_blocking=True)
            self._taken.record(torch.cuda.current_stream(x.raw.device))
            correction = self._arrived
        for (average, low), part in zip(self._bounds, self._buffers(x), strict=True):
            torch.minimum(part, average, out=low)
            torch.maximum(part, average, out=average)
        x.add_segments_(correction, alpha=1.0)
        for (high, low), part in zip(self._bounds, self._buffers(x), strict=True):
            torch.clamp(part, low, high, out=part)

    def _buffers(self, x: FlatVector) -> list[Tensor]:
        return [part[first:] for part, first in zip(x.segments, self._first_buffers, strict=True)]

    def wait_for(self, is_over: Callable[[], bool], what: str) -> None:
        """Let go of the lock until `is_over()`. Raises an error that names who is at fault, see `Watch`."""
        with self.watch.waiting(what, self.watch.partner):
            self.wait(is_over)

    def wait(self, is_over: Callable[[], bool], *, seconds: float | None = None) -> bool:
        """Let go of the lock until `is_over()`, for so long at most; returns whether it is."""

        def is_over_or_failed() -> bool:
            if is_over():
                return True
            self.raise_if_failed()
            return False

        start = time.perf_counter()
        with record_function("gossip.wait"):
            is_in_time = self.state.wait_for(is_over_or_failed, seconds)
        self._stats.wait_seconds += time.perf_counter() - start
        return is_in_time

    def raise_if_failed(self) -> None:
        """Raise the error that ended a thread, if any did."""
        self._background.raise_if_failed()

    def close(self, *, error: BaseException | None = None) -> None:
        """End the threads when versions that somebody has arrived at are done; within seconds, whatever peers do.

        Without the lock. Idempotent. Raises the error that ended a thread, if nobody has seen it. A listener of a
        neighbour that is stopped stays behind, as a daemon.

        Args:
            error: of this rank's own code, for which it leaves at once: others fail, and name this rank.
        """
        if self._is_closing:
            return
        if error is not None:
            self.watch.leave(error)
        with self.state:
            self._is_closing = True
            self.state.notify_all()
        if self._worker_ended.wait(_CLOSE_SECONDS):
            self.words.wait_until_parted()
        else:
            self.words.part(Word(Kind.GOODBYE))
        self.watch.end()
        if not self._background.close() and self.watch.has_failed:
            self.words.hang_up()
            self._background.close()
        atexit.unregister(self._exit)
        self.words.transport.close()
        if error is None:
            self._background.raise_if_unseen()

    def _exit(self) -> None:
        """[Note: daemons at exit]"""
        with contextlib.suppress(Exception):
            self.close(error=SystemExit("the program ended"))
        self.words.hang_up()
        self._background.close()

    def _start(self, name: str, body: Callable[[], None]) -> None:
        def run() -> None:
            try:
                body()
            except BaseException as error:  # noqa: BLE001 (raised in the training thread, which is woken for it)
                self.watch.leave(error)

        self._background.start(name, run)

    def _listen(self, peer: int) -> None:
        try:
            self.words.listen(peer, self._hear)
        except ConnectionError as error:
            if not self._is_closing:
                self.watch.lose(peer, error)

    def _hear(self, sender: int, word: Word) -> None:
        if word.kind in (Kind.ASKING, Kind.STANDING, Kind.FAILED):
            self.watch.hear(sender, word)
            return
        with self.state:
            if word.kind is Kind.ARRIVED:
                if word.meeting == self.num_beginnings:  # else of before something was loaded
                    self.arrive_at(word.version)
                return
            if word.kind is not Kind.GOODBYE:
                self.meetings[word.kind, word.meeting, word.stage] = word
            self.state.notify_all()

    def _work(self) -> None:
        try:
            while (word := self._next_word()) is not None:
                with self.watch.waiting(f"telling others of round {word.version}", self.watch.partner):
                    self.words.say(word)
                version = word.version
                if version != self.next_global(version):
                    self._run(version)
        except (ConnectionError, TimeoutError):
            assert self.watch.has_failed, "waiting() makes it the failure"
        finally:
            if not self.watch.has_failed:
                self.words.part(Word(Kind.GOODBYE))
            self._worker_ended.set()

    def _next_word(self) -> Word | None:
        """Wait for the next version to run; the word of it. None = closing, nothing is left to do."""

        def is_runnable() -> bool:
            return not self.is_held and self.newest_arrival >= self._next <= self.num_done

        with self.state:
            self.state.wait_for(lambda: self._is_closing or self.watch.has_failed or is_runnable())
            if self.watch.has_failed or not is_runnable():
                return None
            self._next += 1
            return Word(Kind.ARRIVED, self._next - 1, self.num_beginnings)

    def _run(self, version: int) -> None:
        with self.state:
            if self._is_on_gpu:
                self._taken.synchronize()  # the accumulator was a result, which may be on its way to the GPU
            self.mailbox.snapshot(self._accumulator)
            self.num_started = version + 1
            self._stats.record(version - self.published_at)
        what = f"the group average in round {version}"
        waiting = self.watch.waiting(what, self.watch.partner)
        if self.on_nonfinite == "raise" and not is_finite(self._accumulator):
            refuse(self.transport.names[self.transport.rank], f"round {version}")
        with waiting, torch.no_grad(), record_function("gossip.round", f"t={version}"):
            self._average.mix(self._accumulator, version)
        is_skipped = self.on_nonfinite == "skip" and not is_finite(self._accumulator)
        with self.state:
            if is_skipped:
                self.mailbox.snapshot(self._accumulator)
                self._stats.num_skipped += 1
            self.result, self._accumulator = self._accumulator, self.result
            self.num_done = version + 1
            self.state.notify_all()
