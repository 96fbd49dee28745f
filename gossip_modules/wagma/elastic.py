"""WAGMA-SGD among workers that may die and join: an engine and a participant for each generation of a membership."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable

from ..flat.vector import FlatVector
from ..graph_manager.butterfly_groups import ButterflyGroups
from ..membership.links import LinkTransport
from ..membership.participant import ModelParticipant
from ..rounds.mixer import ElasticAverage
from ..wrappers.arguments import as_whole
from .engine import WaitAvoidingEngine
from .group_average import GroupAverage
from .pace import RelativePace
from .worker import WaitAvoidingWorker, control_peers

_PATIENCE = 1.0  # seconds without a generation until another one is asked for, though no worker is known to be dead


class ElasticGroupEngine(WaitAvoidingEngine):
    """`WaitAvoidingEngine` over the transports of a membership, one after the other.

    [Note: generations of WAGMA] The threads of a rank, its connections and its groups belong to one generation:

        when a worker of the generation dies, or some rank has closed its connections because of that:
            close mine                                      # so all learn it, in at most log2 n hops
            end the round: x stays as it is
        at each step from then on, x is trained alone
        when the next generation is known:
            t <- its first round;  y <- x
            new connections, threads and ButterflyGroups(n); ranks wait for each other before the first round

    A rank that is not next to the dead one cannot tell a sum that lacks a part from a sum that is late. So a round is
    not completed among the rest: all abandon it. A rank whose average was complete by then keeps it; the next average
    over all ranks makes them equal. Where that one is cut short, all go back to their models of before
    (`ElasticAverage`).

    A rank that is behind when the others begin the next generation leaves out the steps up to its first one, as it
    leaves out rounds that the others have passed ([Note: stragglers] of `WaitAvoidingEngine`).

    Only an error of this rank itself is raised. A rank that stands still while its process lives also ends a
    generation, after the timeout; the membership is told its number.

    Args:
        choose: the groups for a number of ranks; the same function on all.
        links: the first transport.
        x: the parameters.
        sync_period, overlap, on_nonfinite: see `WaitAvoidingEngine`.
    """

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
        average, averager = self._mixers(links)
        super().__init__(average, averager, x, sync_period=sync_period, overlap=overlap, on_nonfinite=on_nonfinite)
        self._watch(links)

    def _mixers(self, links: LinkTransport) -> tuple[GroupAverage, ElasticAverage]:
        return GroupAverage(self._choose(links.world_size), links.whole), ElasticAverage(links)

    def _watch(self, links: LinkTransport) -> None:
        self._links = links
        self._alone_since: float | None = None  # seconds (`time.monotonic()`)
        self.worker.liveness.on_late = links.loses

    @property
    def state_name(self) -> str:
        """See `Engine`."""
        return WaitAvoidingEngine.__name__

    @property
    def is_cut_off(self) -> bool:
        """Whether a rank of this generation has left it: died, or gone on to the next one."""
        return self.worker.liveness.has_failed or bool(self.worker.liveness.closed)

    @property
    def has_peers(self) -> bool:
        """See `Engine`."""
        return not self.is_cut_off

    def skipped(self) -> int:
        """How many training steps were left out since the last call, as the others had passed them."""
        num_steps, self._num_skipped_steps = self._num_skipped_steps, 0
        return num_steps

    def rebind(self, links: LinkTransport, x: FlatVector) -> None:
        """Turn to another generation; see [Note: generations of WAGMA]. Nothing is in flight. Waits for no rank."""
        before = self.worker
        self._pace = RelativePace()
        self._connect(*self._mixers(links), x)
        self._watch(links)
        self.worker.control.num_bytes_sent += before.control.num_bytes_sent
        self._set_round(self.t)
        threading.Thread(target=_leave, args=(before,), name="gossip-closing", daemon=True).start()

    def restart(self, x: FlatVector, t: int) -> None:
        """Go on with another model, in round t; before the first round of a generation."""
        self._set_round(t)
        with self.worker.state:
            self.worker.publish(x, t=t - 1)

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


def _leave(worker: WaitAvoidingWorker) -> None:
    """Close the worker of a generation that is over, and drop the error that has ended it."""
    with contextlib.suppress(Exception):
        worker.close()
    worker.liveness.background.forget()


class GroupParticipant(ModelParticipant):
    """The part of a `GroupAverageDataParallel` in its membership; see [Note: generations of WAGMA].

    Steps are rounds. All messages go over the group of all ranks, as a lost worker ends all rounds of a generation; a
    worker watches the ranks from which it gets control messages.
    """

    def _turn_to(self, transport: LinkTransport, growth: float) -> None:
        """See `ModelParticipant`."""
        self.wrapper._engine.rebind(transport, self.wrapper._buffer.vector)
        self.wrapper._averager.transport = transport

    def peers(self, rank: int, world_size: int) -> Iterable[int]:
        """See `ModelParticipant`."""
        out_peers, in_peers = control_peers(rank, world_size)
        return {*out_peers, *in_peers}

    def links(self, rank: int, world_size: int) -> Iterable[int]:
        """See `ModelParticipant`."""
        return ()

    @property
    def is_cut_off(self) -> bool:
        """See `ModelParticipant`."""
        return bool(self.wrapper._engine.is_cut_off)

    def skipped(self) -> int:
        """See `ModelParticipant`."""
        return int(self.wrapper._engine.skipped())

    @property
    def step(self) -> int:
        """See `ModelParticipant`."""
        return int(self.wrapper._engine.t)

    def advance(self, num_steps: int) -> None:
        """See `ModelParticipant`."""
        self.wrapper._engine.t += num_steps

    def _go_to(self, t: int, step: int) -> None:
        """See `ModelParticipant`."""
        self.wrapper._engine.restart(self.wrapper._buffer.vector, t)


def choose_groups(group_size: int | None) -> Callable[[int], ButterflyGroups]:
    """The groups for any number of workers: of `group_size`, or of as many as there are, down to a power of two.

    Args:
        group_size: a power of two; None: see `default_group_size`.

    Raises:
        ValueError: it is no power of two, or 1.
    """
    if group_size is not None and (as_whole(group_size, name="group_size") < 2 or group_size.bit_count() != 1):
        raise ValueError(
            f"got group_size={group_size!r} with a membership, expected a power of two from 2 on, or None; "
            "GossipDataParallel with schedule=Schedule(gossip_every=H, average_every=1) is local SGD, and takes one"
        )

    def choose(n: int) -> ButterflyGroups:
        return ButterflyGroups(n, group_size=group_size and min(group_size, 1 << n.bit_length() - 1))

    return choose
