"""WaitAvoidingEngine: WAGMA-SGD; the first rank of a round starts its group averages, late ranks merge their result."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..engine.engine import Engine
from ..engine.liveness import Activity, ControlMessage
from ..flat.nonfinite import is_finite, refuse
from ..flat.vector import FlatVector
from ..graph_manager.butterfly_groups import ButterflyGroups
from ..profiling import span
from ..rounds.mixer import GlobalAverage
from ..state import Restart
from ..transport.agreement import rows_of_all
from ..transport.process_group import unwatched
from ..worlds.all_or_none import MayBeLost
from .group_average import GroupAverage
from .group_result import LentModel
from .pace import RelativePace
from .worker import SETTLING, WaitAvoidingWorker

_PATIENCE = 1.0  # seconds without a generation until another one is asked for, though no worker is known to be dead


class WaitAvoidingEngine(Engine):
    """WAGMA-SGD (Li et al., IEEE TPDS 2021, arXiv 2005.00124, Algorithm 2). Round t on a rank, x = W'_t after step t:

        if (t + 1) % sync_period == 0:                      # all ranks wait for each other
            x <- mean of x over all ranks;  y <- x
        elif my worker has not started round t:             # on time
            y <- x;  tell all workers of round t            # each averages y over its group, in a thread
            x <- average                                    # (1 / S) * sum of y_j over my group of S ranks
        else:                                               # late: the group has used my previous y
            y <- x
            x <- (n * average + x) / (n + 1)                # of the newest average, over n members

    `_average_in_group` and `_average_globally` are these lines; `WaitAvoidingWorker` is the thread, and `GroupAverage`
    the mean over a group. See also:

    [Note: wait-avoiding average] All ranks count rounds alike. The worker of a rank runs every group average once, in
    order, with the last published model of its training. No round after a global average starts before it, so a
    contribution is less than `sync_period` rounds old.

    [Note: stragglers] In the paper every rank takes part in every round itself, if late, so all ranks wait at each
    global average for the slowest. Here a rank goes to the global average at its first safe point after some rank has
    arrived there. A rank with slow steps all the time (see `RelativePace`) skips rounds that others have passed. If its
    next step would end after the others have arrived at the global average, it waits for them instead. This wait is no
    longer than two such steps, in case they have stopped training.

    [Note: overlapped groups] With `overlap` a rank on time does not wait for the average. At its next safe point x has
    taken another step, and x <- x + (average - y): the update with the contribution y as s. A late rank merges the
    newest average, without waiting for a running round. Then only global averages wait.

    [Note: beginning] Before the first step, and before the first one after a load, ranks wait for each other. Otherwise
    a fast rank would average with models of other ranks just before they are replaced, in other rounds.

    [Note: settling] A settling rank waits until all ranks settle, and takes part in the global averages of ranks still
    in training. So loops of equal length and loops `while engine.t < n` both end together.

    [Note: generations of WAGMA] The threads of a rank, its connections and its groups belong to one generation, and
    all of them are in `worker`. A fixed world has one generation; its first failure ends training. With a membership:

        when a worker of the generation dies, or some rank has closed its connections because of that:
            close mine                                      # so all learn it, in at most log2 n hops
            end the round: x stays as it is
        at each step from then on, x is trained alone
        when the next generation is known:
            t <- its first round;  y <- x
            new connections, threads and ButterflyGroups(n); ranks wait for each other before the first round

    Without a link to the dead rank, a rank cannot tell an incomplete sum from a late one. So the rest do not complete a
    round: all abandon it. A rank with a complete average keeps it; the next average over all ranks makes them equal. If
    that average is cut short, all go back to their models from before it ([Note: all or none] of `all_or_none`). A rank
    behind the others at the next generation leaves out the steps up to its first one. A rank that stands still in a
    living process also ends a generation, after the timeout; the membership gets its number. Only an error of this rank
    itself is raised.

    All methods belong to the training thread. State shared with other threads is in `worker`, under `worker.state`.

    Args:
        groups: the groups of the first generation.
        transport: the first generation's, over Gloo, with messages in CPU memory; it carries nothing else.
        x: the parameters.
        sync_period: the number of rounds from one global average to the next; 0 = never.
        overlap: whether the average of the group is applied one step later instead of being waited for.
        on_nonfinite: see `WaitAvoidingWorker`.
    """

    is_asynchronous = True

    def __init__(
        self,
        groups: ButterflyGroups,
        transport: Any,
        x: FlatVector,
        *,
        sync_period: int,
        overlap: bool = False,
        on_nonfinite: str = "raise",
    ) -> None:
        super().__init__()
        self.on_nonfinite, self.overlap = on_nonfinite, overlap
        self._sync_period = sync_period
        self._round_in_flight: int | None = None  # with `overlap`: x as of then is y
        self._merged = -1  # the newest round whose average is in x
        self._is_reset = False
        self._device = x.raw.device
        self._begin_generation(groups, transport, x)

    def _begin_generation(self, groups: ButterflyGroups, transport: Any, x: FlatVector) -> None:
        """Start the threads of a generation."""
        whole = transport.whole if transport.is_elastic else transport
        average = GroupAverage(groups, whole)
        self._averager = GlobalAverage(transport, may_fail=True)
        options: dict[str, Any] = {"sync_period": self._sync_period, "on_nonfinite": self.on_nonfinite}
        self.worker = WaitAvoidingWorker(average, x, stats=self.stats, **options)
        self._pace, self._links, self._alone_since = RelativePace(), transport, 0.0
        whole.watch = self.together
        if transport.is_elastic:
            self.worker.liveness.on_late = transport.loses

    def rebind(self, weights: ButterflyGroups, transport: Any, x: FlatVector) -> None:
        """See `Engine` and [Note: generations of WAGMA]. Waits for no rank."""
        before = self.worker
        self._begin_generation(weights, transport, x)
        self.worker.control.num_round_bytes += before.control.num_bytes_sent
        self._set_round(self.t)
        threading.Thread(target=_leave, args=(before,), name="gossip-closing", daemon=True).start()

    def go_to(self, x: FlatVector, t: int, step: int) -> None:
        """See `Engine`: before the first round of a generation."""
        self._set_round(t)
        with self.worker.state:
            self.worker.publish(x, t=t - 1)

    @property
    def step(self) -> int:
        """See `Engine`: a step is a round."""
        return self.t

    @step.setter
    def step(self, value: int) -> None:
        self.t = value

    @property
    def is_cut_off(self) -> bool:  # type: ignore[override]
        """Whether a rank of this generation has left it, died or gone on, and another generation is to follow."""
        liveness = self.worker.liveness
        return bool(self._links.is_elastic) and (liveness.has_failed or bool(liveness.closed))

    @property
    def has_peers(self) -> bool:
        """See `Engine`. The connections of a membership may close before the threads have noticed."""
        return not (self.is_cut_off or self.worker.transport.is_closed)

    @property
    def is_in_flight(self) -> bool:
        """See `Engine`: only with `overlap`."""
        return self._round_in_flight is not None

    def flush(self, x: FlatVector) -> bool:
        """See `Engine`; an average without a failed rank is abandoned."""
        with MayBeLost(self._links), self.worker.state:
            try:
                return self._apply_in_flight(x)
            except Exception:  # of the average, which is lost; an interrupt instead leaves it in flight
                self._round_in_flight = None
                raise
        return False

    def round(self, x: FlatVector) -> bool:
        """See `Engine`, [Note: wait-avoiding average] and [Note: generations of WAGMA].

        Raises:
            TimeoutError, ConnectionError: a peer is late or gone; names it.
        """
        t = self.t
        if self.is_cut_off:
            is_written = self.flush(x)
            self._ask_for_a_generation()
        else:
            with MayBeLost(self._links) as attempt, self.worker.liveness.operation():
                is_written = self._run_round(x)
            if attempt.has_lost:
                is_written, self._round_in_flight = True, None  # maybe one average of two was complete
        self.t = max(self.t, t + 1)
        self.num_skipped_steps += self.t - t - 1
        return is_written

    def _run_round(self, x: FlatVector) -> bool:
        """Run a round of a generation without failures."""
        worker = self.worker
        worker.liveness.round = self.t
        worker.engage()
        self.begin()
        worker.liveness.check_present()
        with worker.state:
            due = worker.next_global(self.t)
            self._pace.finish_step(worker.num_started, is_halted=worker.num_started == due)
            is_written, is_there = self._apply_in_flight(x), self.t == due
            if due is None or not (is_there or worker.newest_arrival >= due):
                is_written = self._average_in_group(x) or is_written
            is_called = due is not None and (is_there or worker.newest_arrival >= due)
            if due is not None and not is_called and self._pace.would_be_late_for(due, newest=worker.num_started):
                is_called = worker.wait(lambda: worker.newest_arrival >= due, seconds=2 * self._pace.seconds)
        if due is not None and is_called:
            self._average_globally(x, due)
            is_written = True
        self._pace.start_step(worker.num_started)
        return is_written

    def begin(self) -> None:
        """Let rounds start once all ranks are here; collective. Later calls do nothing, until something is loaded.

        `round()` and `settle()` call it. See [Note: beginning].

        Raises:
            ValueError: ranks are in different rounds.
            TimeoutError, ConnectionError: a peer is late or gone; names it.
        """
        worker = self.worker
        if not worker.is_held:
            return
        with worker.state:
            worker.begin()
        rounds = self._gather_rounds("the beginning of training on all ranks")
        if min(rounds) != max(rounds):
            raise ValueError(
                f"got a model of round {self.t} among models of rounds {min(rounds)} to {max(rounds)} on other ranks, "
                "expected one round on all; load checkpoints of one moment on all ranks: call settle() before the "
                "checkpoint"
            )
        with worker.state:
            worker.release()

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """The context of collectives, also of an otherwise idle rank; errors name the first failed rank."""
        worker = self.worker
        was_idle, worker.liveness.round = worker.is_idle, self.t
        worker.engage()
        try:
            with worker.liveness.waiting(what, activity=Activity.COLLECTIVE):
                yield
        finally:
            worker.is_idle = was_idle

    def settle(self, x: FlatVector, *, is_patient: bool = False) -> bool:
        """Wait until all ranks settle, in one round and with no average under way; collective.

        See [Note: settling]. Raises as `round()`, also if a rank leaves the generation meanwhile.

        Args:
            x: the parameters.
            is_patient: whether to wait as long as missing ranks take a step, or settle, within the timeout.

        Returns:
            Whether x was written: by global averages of ranks still in training.
        """
        first, worker = self.t, self.worker
        worker.engage()
        try:
            with worker.liveness.operation():
                self.begin()
                newest = self._wait_until_all_settle(x, is_patient=is_patient)
                is_written = self.t != first
                with worker.state:
                    worker.arrive_at(newest - 1)  # the ARRIVED message may not have come yet
                self._wait_for_rounds_before(newest)
                self.t = newest
                self._gather_rounds("the end of all rounds")
        finally:
            self.num_skipped_steps += self.t - first
        worker.is_idle = True
        return is_written

    @property
    def is_settled(self) -> bool:
        """Whether no rank needs this one any more: nothing was done since it was made, loaded or settled."""
        return self.worker.is_idle

    def close(self, *, error: BaseException | None = None) -> None:
        """See `Engine`; does not settle. After an `error` in the code of this rank, the rank leaves at once."""
        self.is_closed = True
        with MayBeLost(self._links):
            self.worker.close(error=error)
        if not self._links.is_elastic:
            self._links.watch = unwatched  # else the two would hold each other, and the connections of the group
        t = self._round_in_flight
        if t is not None and self.worker.num_done <= t:
            warnings.warn(
                f"closed before the group average of round {t}, so it is lost; call settle() on all ranks first",
                stacklevel=2,
            )
            self._round_in_flight = None

    def state_dict(self, *, joins: bool = False, has_links: bool = True) -> dict[str, Any]:
        """See `State`. After `settle()`, so that all ranks are in one round."""
        state: dict[str, Any] = super().state_dict(joins=joins, has_links=has_links)
        if joins:
            return state
        with self.worker.published.reading() as y:
            assert y is not None, "a model is published from the beginning"
            return {**state, "published": y.vector.raw.clone(), "published_at": y.standing}

    def entry_names(self) -> set[str]:
        """See `State`."""
        return {*super().entry_names(), "published", "published_at"}

    def check_state(self, state: Mapping[str, Any], *, of: object = None) -> None:
        """See `State`."""
        super().check_state(state, of=of)
        y = self.worker.published.latest.vector  # of the layout of the model
        published = state.get("published")  # None: the state of a copy, which has published nothing
        if published is not None and (published.dtype, published.shape) != (y.raw.dtype, y.raw.shape):
            raise ValueError(
                f"got a published model of {published.numel()} elements of {published.dtype}, expected "
                f"{y.layout.num_bytes} bytes (torch.uint8); load the state of a wrapper around the same model"
            )

    def fill(self, state: Mapping[str, Any]) -> None:
        """See `State`, and [Note: beginning]."""
        super().fill(state)
        if (published := state.get("published")) is not None:
            layout = self.worker.published.latest.vector.layout
            with self.worker.state:
                self.worker.publish(FlatVector(layout, published.to(self._device)), t=state["published_at"])
            self._is_reset = False

    def restarted(self, event: Restart) -> None:
        """See `State`. `publish_loaded()` is to follow, unless a published model was loaded."""
        if event is Restart.ALL:
            self._set_round(self.t)
            self._is_reset = True

    def publish_loaded(self, x: FlatVector) -> None:
        """y <- x after a restart: y is another model, and no peer should get it."""
        if self._is_reset:
            with self.worker.state:
                self.worker.publish(x, t=self.t - 1)
            self._is_reset = False

    def _average_in_group(self, x: FlatVector) -> bool:
        """Run round t in the group.

        See [Note: wait-avoiding average] and [Note: vectors of WAGMA] of `WaitAvoidingWorker`.

        Call it with the lock; a wait releases the lock.
        """
        worker, t = self.worker, self.t
        is_late = worker.num_started > t
        is_in_place = not (is_late or self.overlap) and x.raw.device.type == "cpu"
        with worker.holding_back(t):
            if is_late and not self.overlap:
                self._wait_for_group(t)
            lent = None
            if is_in_place:
                lent = worker.lend(x, t=t)
            else:
                worker.publish(x, t=t)
            if not is_late:
                del worker.published.spare[1:]
                worker.arrive_at(t)
            if self.overlap and not is_late:
                self._round_in_flight, self.t = t, t + 1
                return False
            if lent is not None:
                self._wait_for_average_in_place(lent, t)
            elif not self.overlap:
                self._wait_for_group(t)
            newest = worker.num_done - 1
            if newest == self._merged:
                assert is_late, "a round that no rank has started has no result"
            elif is_late:
                n = worker.average.groups.num_members(worker.transport.rank, newest)
                worker.result.merge_to(x, weight=n / (n + 1))  # x <- (n * average + x) / (n + 1)
            elif lent is None:
                worker.result.merge_to(x, weight=1.0)  # x <- average
        is_written, self._merged = newest > self._merged, newest
        self.t = worker.num_started if is_late and self._pace.is_slow else t + 1
        return is_written

    def _wait_for_average_in_place(self, lent: LentModel, t: int) -> None:
        """Wait for the end of a round that writes to the model. Call it with the lock; a wait releases it."""
        try:
            self._wait_for_group(t)
        except BaseException:
            with contextlib.suppress(Exception):  # after an interrupt the round goes on; after a failure it does not
                self._wait_for_group(t)
            if self.worker.num_done > t:
                self._merged = t
            else:
                lent.take_back()
            raise

    def _apply_in_flight(self, x: FlatVector) -> bool:
        """See [Note: overlapped groups]. Call it with the lock; a wait releases it."""
        if self._round_in_flight is None:
            return False
        self._wait_for_group(self._round_in_flight)
        self._round_in_flight = None
        self._merged = self.worker.num_done - 1  # maybe a later round than that in flight: it has had the same y
        self.worker.result.correct(x)
        return True

    def _wait_for_group(self, t: int) -> None:
        """Call it with the lock; a wait releases it."""
        worker, transport = self.worker, self.worker.transport
        names = [transport.names[rank] for rank in worker.average.groups.members(transport.rank, t)]
        worker.wait_for(lambda: worker.num_done > t, f"waiting for the group average of ranks {names} in round {t}")

    def _wait_for_rounds_before(self, t: int) -> None:
        """Wait until this rank's worker has done all rounds before t. Takes the lock and releases it while it waits."""
        with self.worker.state:
            self.worker.wait_for(lambda: self.worker.num_done >= t, f"waiting for the group averages before round {t}")

    def _average_globally(self, x: FlatVector, t: int) -> None:
        """Round t: x <- the mean over all ranks; y too. Without the lock."""
        worker = self.worker
        with worker.state:
            worker.arrive_at(t)
        # The worker uses the same transport, so it has to be idle: its last round may still be under way.
        self._wait_for_rounds_before(t)
        start = time.perf_counter()
        if self.on_nonfinite == "raise" and not is_finite(x):
            refuse(worker.transport.names[worker.transport.rank], f"round {t}")
        with span("gossip.average", f"t={t}"):
            self._averager.mix(x, t)
        self.stats.wait_seconds += time.perf_counter() - start
        with worker.state:
            worker.publish(x, t=t)
            worker.finish_global(t)
            self.stats.record(0)
        self.t, self._merged = t + 1, t

    def _wait_until_all_settle(self, x: FlatVector, *, is_patient: bool) -> int:
        """Wait until all ranks settle; returns the newest round of any rank.

        A dissemination barrier in ceil(log2 n) stages (Hensgen, Finkel and Manber 1988). Meanwhile this rank takes part
        in the global averages of ranks still in training:

            for stage k = 0, 1, ..., while 2^k < n:
                send (the newest round known to this rank) to rank i + 2^k
                wait for the message of rank i - 2^k; newest <- max(newest, theirs)

        After the last stage each rank has heard, directly or through others, from all ranks.
        """
        worker, liveness = self.worker, self.worker.liveness
        barrier, worker.num_settled = worker.num_settled, worker.num_settled + 1
        newest, stage = self.t, 0
        what = f"waiting until all ranks settle after round {self.t}"
        waiting = liveness.waiting(
            what, lambda: worker.in_peers[stage], activity=Activity.SETTLING, is_patient=is_patient
        )
        with waiting:
            for stage, out_peer in enumerate(worker.out_peers):
                liveness.post(out_peer, ControlMessage(SETTLING, newest, barrier, stage))
                while (heard := self._receive_stage(barrier, stage, due := worker.next_global(self.t))) is None:
                    assert due is not None, "without global averages only a message ends the wait"
                    self._average_globally(x, due)
                newest = max(newest, heard, self.t)
        return newest

    def _receive_stage(self, barrier: int, stage: int, due: int | None) -> int | None:
        """Wait for the message of a stage; None where some rank comes to the global average of round `due` before."""
        worker, key = self.worker, (barrier, stage)
        worker.liveness.round = self.t
        with worker.state:
            worker.wait(lambda: key in worker.settling or (due is not None and worker.newest_arrival >= due))
            return worker.settling.pop(key, None)

    def _gather_rounds(self, what: str) -> list[int]:
        """The round of every rank."""
        rounds = rows_of_all(self.worker.transport, torch.tensor([self.t], device="cpu"), what=what)
        return [int(t) for t in rounds.flatten().tolist()]

    def _set_round(self, t: int) -> None:
        with self.worker.state:
            self.worker.set_round(t)
        self.t, self._merged, self._round_in_flight = t, t - 1, None

    def _ask_for_a_generation(self) -> None:
        now = time.monotonic()
        self._alone_since = self._alone_since or now
        if now - self._alone_since > _PATIENCE:
            self._links.ask_for_another()


def _leave(worker: WaitAvoidingWorker) -> None:
    """Close the worker of a finished generation, and drop its error."""
    with contextlib.suppress(Exception):
        worker.close()
    worker.liveness.background.forget()
