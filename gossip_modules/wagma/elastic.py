"""ElasticGroupEngine: WAGMA-SGD among workers that may die and join; each generation has threads of its own."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from ..flat.vector import FlatVector
from ..graph_manager.butterfly_groups import ButterflyGroups
from ..membership.links import LinkTransport
from ..rounds.mixer import ElasticAverage
from .engine import WaitAvoidingEngine
from .failure_detector import FailureDetector
from .failure_reason import FailureReason
from .group_average import GroupAverage
from .pace import RelativePace
from .worker import WaitAvoidingWorker

_PATIENCE = 1.0  # seconds without a generation until another one is asked for, though nobody is known to be dead


class ElasticGroupEngine(WaitAvoidingEngine):
    """`WaitAvoidingEngine` over the transports of a membership, one after the other.

    [Note: generations of WAGMA] The threads of a rank, its connections and its groups belong to one generation:

        when a worker of the generation dies, or some rank has closed its connections because of that:
            close mine                                      # so all learn it, in at most log2 n hops
            end the round: x stays as it is
        at each step from then on, x is trained alone
        when the next generation is known:
            t <- its first round;  y <- x
            connections, threads and ButterflyGroups(n) anew; ranks wait for each other before the first round

    A sum of which a part is missing cannot be told from a sum that is late by those who are not next to the dead rank.
    So a round is not completed among the rest: all abandon it. A rank whose average was complete by then keeps it; the
    next average over all ranks makes them equal. Where that one is cut short, all go back to what they had
    (`ElasticAverage`).

    A rank that is behind when the others begin the next generation leaves out the steps up to its first one, as it
    leaves out rounds that the others have passed ([Note: stragglers] of `WaitAvoidingEngine`).

    Nothing raises but what is wrong on this rank itself. Also a rank that stands still while its process lives ends a
    generation, after the timeout; the membership is told who it is.

    Args:
        choose: the groups for a number of ranks; the same function on all.
        links: the first transport.
        x: the parameters.
        sync_period, overlap, on_nonfinite: see `WaitAvoidingEngine`.
    """

    worker: GenerationWorker

    def __init__(
        self,
        choose: Callable[[int], ButterflyGroups],
        links: LinkTransport,
        x: FlatVector,
        *,
        sync_period: int,
        overlap: bool,
        on_nonfinite: str,
    ) -> None:
        self._choose = choose
        self._num_skipped_steps = 0
        self._alone_since: float | None = None  # seconds (`time.monotonic()`)
        self._links = links
        policies = {"overlap": overlap, "on_nonfinite": on_nonfinite}
        super().__init__(*self._mixers(links), x, sync_period=sync_period, **policies)  # type: ignore[arg-type]

    def _mixers(self, links: LinkTransport) -> tuple[GroupAverage, ElasticAverage]:
        return GroupAverage(self._choose(links.world_size), links.whole), ElasticAverage(links)

    def _make_worker(self, average: GroupAverage, x: FlatVector, **options: Any) -> GenerationWorker:
        return GenerationWorker(self._links, average, x, **options)

    @property
    def state_name(self) -> str:
        """See `Engine`."""
        return WaitAvoidingEngine.__name__

    @property
    def is_cut_off(self) -> bool:
        """Whether a rank of this generation has left it: died, or gone on to the next one."""
        return self.worker.detector.has_failed or bool(self.worker.channel.closed_peers)

    @property
    def has_peers(self) -> bool:
        """See `Engine`."""
        return not self.is_cut_off

    def skipped(self) -> int:
        """How many training steps were left out since the last call, as the others had passed them."""
        num_steps, self._num_skipped_steps = self._num_skipped_steps, 0
        return num_steps

    def rebind(self, links: LinkTransport, x: FlatVector) -> None:
        """Turn to another generation; see [Note: generations of WAGMA]. Nothing is in flight. Waits for nobody."""
        before = self.worker
        self._links, self._alone_since, self._pace = links, None, RelativePace()
        self._connect(*self._mixers(links), x)
        self.worker.channel.transport.num_bytes_sent += before.channel.transport.num_bytes_sent
        self._set_round(self.t)
        before.leave_in_a_thread()

    def restart(self, x: FlatVector, t: int) -> None:
        """Go on with another model, in round t; before the first round of a generation."""
        self._set_round(t)
        with self.worker.state:
            self.worker.published.publish(x, t=t - 1)

    def round(self, x: FlatVector) -> bool:
        """See `Engine` and [Note: generations of WAGMA]."""
        t = self.t
        if self.is_cut_off:
            is_written = self.flush(x)
            self._ask_for_a_generation()
        else:
            try:
                is_written = super().round(x)
            except (ConnectionError, TimeoutError):
                is_written, self._round_in_flight = True, None  # maybe one average of two was complete
        self.t = max(self.t, t + 1)
        self._num_skipped_steps += self.t - t - 1
        return is_written

    def flush(self, x: FlatVector) -> bool:
        """See `Engine`; an average that lacks a rank is abandoned."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            return super().flush(x)
        return False

    def settle(self, x: FlatVector, *, is_patient: bool = False) -> bool:
        """See `WaitAvoidingEngine`; raises where a rank leaves the generation meanwhile."""
        t = self.t
        try:
            return super().settle(x, is_patient=is_patient)
        finally:
            self._num_skipped_steps += self.t - t

    def close(self, *, error: BaseException | None = None) -> None:
        """See `WaitAvoidingEngine`; others that have left are no error."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            super().close(error=error)

    def _ask_for_a_generation(self) -> None:
        now = time.monotonic()
        self._alone_since = self._alone_since or now
        if now - self._alone_since > _PATIENCE:
            self._links.ask_for_another()


class GenerationDetector(FailureDetector):
    """Ends the waits of a generation: connections close at once, and tell the neighbours more than any message.

    Who has died is noticed by the membership itself. It is told only who stands still, after the timeout.

    Args:
        links: the transport of the generation.
        arguments, options: see `FailureDetector`.
    """

    def __init__(self, links: LinkTransport, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._links = links

    def fail(self, error: BaseException, rank: int = -1, reason: FailureReason = FailureReason.UNKNOWN) -> None:
        """See `FailureDetector`; there is nothing to watch then."""
        super().fail(error, rank, reason)
        self.end()

    def explain(self, error: BaseException) -> NoReturn:
        """See `FailureDetector`; waits for nobody who may know more."""
        self.fail(error)
        self._background.raise_if_failed()
        raise error

    def _announce(self, rank: int, reason: FailureReason) -> None:
        """See `FailureDetector`."""
        if reason in (FailureReason.SILENT, FailureReason.ABSENT) and rank not in (-1, self._rank):
            self._links.loses(rank, RuntimeError(reason.sentence(self._names[rank])), self.timeout)

    def _fail_or_defer(self, error: BaseException, rank: int, reason: FailureReason) -> None:
        """At once, since nothing is raised."""
        self.fail(error, rank, reason)


class GenerationWorker(WaitAvoidingWorker):
    """The threads of one generation; they end with it.

    Args:
        links: the transport of the generation.
        average, x, options: see `WaitAvoidingWorker`.
    """

    def __init__(self, links: LinkTransport, average: GroupAverage, x: FlatVector, **options: Any) -> None:
        self._links = links
        super().__init__(average, x, **options)

    def _make_detector(self) -> FailureDetector:
        """See `WaitAvoidingWorker`."""
        timeout = self.transport.timeout
        return GenerationDetector(self._links, self.channel, self.state, self._background, timeout=timeout)

    def _watch(self) -> None:
        """See `WaitAvoidingWorker`; nobody need be there who would close a worker that has failed."""
        super()._watch()
        if self.detector.has_failed:
            self.leave()

    def leave(self) -> None:
        """Close; rounds at which some rank has arrived are done first, within seconds."""
        with contextlib.suppress(Exception):  # of a generation that is over
            self.close()

    def leave_in_a_thread(self) -> None:
        """Leave, and let go of what has ended the generation; training has turned to another one."""

        def run() -> None:
            self.leave()
            self._background.forget()

        threading.Thread(target=run, name="gossip-closing", daemon=True).start()
