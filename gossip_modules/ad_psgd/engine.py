"""BilateralEngine: AD-PSGD; pairs of ranks average in background threads, training adds the corrections to x."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Collection
from typing import Any

from ..engine.engine import Engine
from ..engine.liveness import Activity, Liveness
from ..engine.snapshots import SnapshotPool
from ..flat.nonfinite import is_finite, refuse
from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingManager
from ..profiling import span
from ..state import branch
from ..transport.deadline import Deadline
from ..transport.listener import SHUTDOWN_TIMEOUT
from ..transport.process_group import unwatched
from .exchange import BilateralAverage
from .momentum import ContinuousMomentum
from .shared_model import SharedModel

_GRACE = 1.0  # seconds beyond the timeout, for an error that names the rank that is missing


class BilateralEngine(Engine):
    """AD-PSGD (Lian, Zhang, Zhang, Liu, ICML 2018, arXiv 1710.06952, Algorithm 1). Once per step, on rank i:

        training thread, before the forward:
            x <- x + c;  c <- 0                       # the corrections of exchanges since the last step
            if i is passive: y <- x
            if i is active and its last exchange is complete:
                y <- x;  start an exchange with the passive peer j of round t;  t <- t + 1
        exchange threads of the active i and of the passive j, at any time:
            y_i, y_j <- y_i + w (y_j - y_i), y_j + w (y_i - y_j)            # w = 1/2: both get the average
            c_i <- c_i + w (y_j - y_i);  c_j <- c_j + w (y_i - y_j)         # with y as of before

    The exchange is `BilateralAverage._exchange`; x, y and c meet in `shared`. Active ranks ask at most once per step,
    passive ranks answer whenever they are asked; see [Note: bilateral exchange] of `BilateralAverage`. Nothing waits at
    the safe point. The listening thread of every rank also learns of dead peers, so training raises at its next step:
    [Note: one failure] of `Liveness`; or, with a membership, the exchange is withdrawn ([Note: lost peers of an
    exchange] of `BilateralAverage`) and the next generation follows.

    [Note: generations of an engine] A generation of a membership has links of its own, and each rank turns to them at
    its next training step, whenever that is (`rebind`). There it waits for the exchange under way, the only one that
    can be, and answers no more; then it shuts down towards its peers, whose listening threads answer that at once. So
    no exchange is cut in two, and a request over the new links before this rank has turned to them waits until it has.

    All methods belong to the training thread. It shares `shared` with the thread that exchanges, under `shared.lock`,
    and waits for that thread without any lock.

    Args:
        mixing: the weights over a bipartite graph with one peer per round.
        transport: a transport over Gloo, with messages in CPU memory.
        x: the parameters.
        on_nonfinite, max_relative_distance: see `BilateralAverage`.
        has_momentum: whether corrections have the momentum of A2CiD2; see `ContinuousMomentum`.

    Attributes:
        shared: y, and the correction that training has not applied yet.
        is_active: whether this rank asks; else it answers.
        t: the number of exchanges that an active rank has started; the graph has the peer of its own round t.
        step: training steps seen so far.
    """

    is_asynchronous = True
    is_in_lockstep = False
    adds_again = True

    momentum: ContinuousMomentum | None = branch(is_flat=True)

    def __init__(
        self,
        mixing: MixingManager,
        transport: Any,
        x: FlatVector,
        *,
        on_nonfinite: str = "raise",
        max_relative_distance: float | None = None,
        has_momentum: bool = False,
    ) -> None:
        super().__init__()
        if has_momentum:
            memory = SnapshotPool(x).vector()  # of the host, for a model on a GPU
            self.momentum = ContinuousMomentum(memory, mixing.graph, transport.rank)
        self.shared, self.on_nonfinite = SharedModel(x, self.momentum), on_nonfinite
        self._max_relative_distance = max_relative_distance
        self._is_refused = False
        self._begin_generation(mixing, transport)

    def _begin_generation(self, mixing: MixingManager, transport: Any) -> None:
        """Start the threads of a generation."""
        peers = self._peers_in(mixing, transport.rank)
        self._bilateral = BilateralAverage(
            self.shared,
            transport,
            peers,
            stats=self.stats,
            on_nonfinite=self.on_nonfinite,
            max_relative_distance=self._max_relative_distance,
        )
        if not transport.is_elastic:
            transport.watch = self.together

    def _peers_in(self, mixing: MixingManager, rank: int) -> Collection[int]:
        """Take these weights; returns all ranks with which this one exchanges in some round."""
        self.mixing, graph = mixing, mixing.graph
        self.is_active = not graph.is_passive(rank)
        if self.is_active:
            return set(graph.phone_book(rank))
        return {i for i in range(graph.world_size) if not graph.is_passive(i) and rank in graph.phone_book(i)}

    @property
    def liveness(self) -> Liveness:
        """The control messages and the failures of this rank."""
        return self._bilateral.liveness

    def rebind(self, weights: MixingManager, transport: Any, x: FlatVector) -> None:
        """See `Engine`: over links on which no exchange was; see [Note: generations of an engine].

        Waits for the exchange under way. Corrections stay for the next `round`.
        """
        before = self._left = self._bilateral  # kept until its last messages are sent
        before.is_closing = True
        self._wait()
        before.shut_down()
        before.close(0.0)
        if self.momentum is not None:
            self.momentum.turn_to(weights.graph, transport.rank)
        self._begin_generation(weights, transport)

    def go_to(self, x: FlatVector, t: int, step: int) -> None:
        """See `Engine`. A worker that joins again may be ahead of its donor: no step comes twice."""
        super().go_to(x, t, max(step, self.step))

    def give_up(self, x: FlatVector) -> bool:
        """See `Engine`."""
        self.shared.withdraw()
        self._collect(x)
        self.shared = SharedModel(x, self.momentum)  # which an exchange under way does not know
        return True

    @property
    def is_in_flight(self) -> bool:
        """See `Engine`."""
        is_asking = self.is_active and self._bilateral.under_way is not None
        return is_asking or self._bilateral.is_serving or self.shared.has_pending

    @property
    def can_leave_out(self) -> bool:
        """See `Engine`: corrections of peers belong to no state."""
        return True

    def round(self, x: FlatVector) -> bool:
        """See `Engine`. Never waits.

        Raises:
            TimeoutError, ConnectionError: a peer is late or gone; names it.
        """
        self.raise_if_failed()
        is_asking = self.is_active and self._bilateral.under_way is not None
        with span("gossip.apply"), self.shared.lock:
            is_written = self._collect(x)
            self.step += 1
            if not is_asking:  # else only that exchange, which has its snapshot, reads y before the next one
                self.shared.publish(x, step=self.step)
        self.liveness.round = self.step
        if self.is_active and not is_asking:
            self._ask()
        return is_written

    def flush(self, x: FlatVector) -> bool:
        """See `Engine`. Waits for the exchange that this rank has asked for, or for one that it answers.

        An error that has been raised before is not raised again, unlike by `round()`: so a last checkpoint can be
        taken of a model whose peers are lost.
        """
        if not self.is_closed:
            self.liveness.background.raise_if_unseen()
            start = time.perf_counter()
            with span("gossip.wait"):
                self._wait()
            self.stats.wait_seconds += time.perf_counter() - start
        return self._collect(x, is_kept=True)

    def add_again(self, x: FlatVector, *, after: int = 0) -> bool:
        """See `Engine`."""
        return self.shared.add_again(x, after=after)

    def check(self, x: FlatVector) -> None:
        """Raise FloatingPointError, once, where x is not finite, and no exchange has noticed."""
        if self.on_nonfinite == "raise" and not (self.liveness.has_failed or self._is_refused or is_finite(x)):
            self._is_refused = True
            transport = self._bilateral.transport
            refuse(transport.names[transport.rank], f"step {self.step}")

    def withdraw(self) -> None:
        """See `Engine`: the reply to peers is "not yet". After a `flush()`, no exchange with the old y is under way."""
        self.raise_if_failed()
        self.shared.withdraw()

    def raise_if_failed(self) -> None:
        """Raise the first failure of this rank, if there is one: a peer is dead or late, or a thread met an error."""
        if not self.is_closed:
            self.liveness.raise_if_failed()

    def together(self, what: str) -> contextlib.AbstractContextManager[None]:
        """A context of a collective, by its name; errors name the rank that failed first."""
        return self.liveness.waiting(what, activity=Activity.COLLECTIVE)

    def close(self) -> None:
        """See `Engine`. Sends SHUTDOWN to the peers and waits for theirs, at most for two seconds.

        Corrections that are delivered until then are applied by a last `flush()`.
        """
        if self.is_closed:
            return
        self.is_closed = True
        deadline, bilateral = Deadline(SHUTDOWN_TIMEOUT), self._bilateral
        bilateral.is_closing = True
        if not bilateral.wait(deadline.left) and not self.liveness.has_failed:
            warnings.warn(
                "closed while an exchange was under way, so its correction is lost; call settle() on all ranks first",
                stacklevel=2,
            )
        bilateral.shut_down()
        bilateral.close(deadline.left)
        transport: Any = bilateral.transport
        if not transport.is_elastic:
            transport.watch = unwatched  # else the two would hold each other, and the connections of the group
        self.liveness.background.raise_if_unseen()

    def _ask(self) -> None:
        """Start the exchange of round t, or of the first round after it whose peer has not closed."""
        graph, rank = self.mixing.graph, self._bilateral.transport.rank
        for _ in range(max(graph.period, len(graph.phone_book(rank)))):
            t, self.t = self.t, self.t + 1
            peer = next(iter(graph.out_peers(rank, t)), None)
            if peer is not None and peer not in self._bilateral.closed_peers:
                self._bilateral.ask(peer, t, self.mixing.weights(rank, t).inp[peer])
                return

    def _wait(self) -> None:
        """Wait for the exchange under way, unless this rank has failed."""
        if self.liveness.has_failed:
            return
        limit = self._bilateral.transport.timeout.total_seconds()
        if not self._bilateral.wait(limit + _GRACE):
            self.raise_if_failed()
            raise TimeoutError(
                f"the exchange under way has not ended after {limit:g} s, in a thread of this rank; check its peer"
            )
        self.raise_if_failed()

    def _collect(self, x: FlatVector, *, is_kept: bool = False) -> bool:
        """x <- x + c, and count the exchanges that c is made of. Returns whether there was any.

        is_kept: whether `add_again` may follow.
        """
        steps = self.shared.collect(x, is_kept=is_kept)
        for step in steps:
            self.stats.record(self.step - step)
        return bool(steps)
