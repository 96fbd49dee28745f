"""BilateralEngine: AD-PSGD; pairs of ranks average in background threads, training adds the corrections to x."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import torch

from ..engine.background import Background
from ..engine.engine import Engine
from ..engine.shared_model import SharedModel
from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingManager
from ..rounds.gossip_thread import GossipThread
from ..transport.exchange import PointToPoint
from ..transport.listener import SHUTDOWN_TIMEOUT
from .exchange import BilateralAverage

_SECONDS_TO_NAME = 0.5  # beyond the timeout, for an error that names who is missing


class BilateralEngine(Engine):
    """AD-PSGD (Lian, Zhang, Zhang, Liu, ICML 2018, arXiv 1710.06952, Algorithm 1). Once per step, on rank i:

        training thread, before the forward:
            x <- x + c;  c <- 0                       # the corrections of exchanges since the last step
            if i is passive: y <- x
            if i is active and its last exchange is complete:
                y <- x;  start an exchange with the passive peer j of round t;  t <- t + 1
        exchange thread of the active i and listening thread of the passive j, at any time:
            y_i, y_j <- y_i + w (y_j - y_i), y_j + w (y_i - y_j)            # w = 1/2: both get the average
            c_i <- c_i + w (y_j - y_i);  c_j <- c_j + w (y_i - y_j)         # with y as of before

    The exchange is `BilateralAverage._exchange`; x, y and c meet in `shared`. Active ranks ask at most once per step,
    passive ranks answer whenever they are asked; see [Note: bilateral exchange]. Nothing waits at the safe point. The
    listening thread of every rank also learns of dead peers, so training raises at its next step: [Note: who died]; or,
    with a membership, the exchange is withdrawn ([Note: lost peers of an exchange]) and the next generation follows.

    [Note: generations of an engine] A generation of a membership has links of its own, and each rank turns to them at
    its next training step, whenever that is (`rebind`). There it waits for the exchange under way, the only one that
    can be, and answers no more; then it shuts down towards its peers, whose listening threads answer that at once. So
    no exchange is cut in two, and who is asked over the new links before it has turned to them answers when it has.

    All methods belong to the training thread, except `_on_failure`, which the thread that met the failure calls. It
    shares `shared` with the thread that exchanges, under `shared.lock`, and waits for that thread without any lock.

    Args:
        mixing: the weights over a bipartite graph with one peer per round.
        transport: a transport over Gloo, with messages in CPU memory.
        x: the parameters.
        on_nonfinite: see `BilateralAverage`.

    Attributes:
        shared: y, and the correction that training has not applied yet.
        t: the number of exchanges that an active rank has started; the peer is that of the graph in its own round t.
        step: training steps seen so far.
    """

    is_asynchronous = True

    def __init__(
        self,
        mixing: MixingManager,
        transport: PointToPoint,
        x: FlatVector,
        *,
        on_nonfinite: str = "raise",
    ) -> None:
        super().__init__()
        self.shared = SharedModel(x)
        self.step = 0
        self._published_at = 0  # step
        self._background = Background()
        self._asking: Future[float] | None = None
        self._helper: GossipThread | None = None  # of `join_in`
        options: dict[str, Any] = {"clock": lambda: self._published_at, "on_nonfinite": on_nonfinite}
        self._turn_to(mixing, BilateralAverage(self.shared, transport, **options))

    def _turn_to(self, mixing: MixingManager, bilateral: BilateralAverage) -> None:
        """Begin to ask, or to answer, over links on which nobody has done so."""
        self.mixing, self.transport, self._bilateral = mixing, bilateral.transport, bilateral
        self._failed = bilateral.presence.failed
        self._failed.add_done_callback(self._on_failure)
        self._asker: GossipThread | None = None
        peers = self._peers = self._reachable()
        self._closed_peers: set[int] = set()  # those of them that have replied so, or were lost
        name = f"gossip-{self.transport.rank}"
        if not peers:
            return
        self._background.start(f"{name}-listener", lambda: bilateral.answer(peers))
        if not mixing.graph.is_passive(self.transport.rank):
            self._asker = GossipThread(name)

    def rebind(self, mixing: MixingManager, transport: PointToPoint) -> None:
        """Exchange with other ranks from now on, over links on which no exchange was: [Note: generations of an engine].

        Waits for the exchange under way. Corrections stay for the next `round`.
        """
        if self._asking is not None:
            self._take_answer()
        before = self._left = self._bilateral  # kept until its last messages are sent
        before.stop_answering(before.seconds_left)  # of the exchange under way
        before.shut_down(sorted(self._peers))
        if self._asker is not None:
            self._asker.close()
        self._turn_to(mixing, before.over(transport, self.shared))

    def give_up(self, x: FlatVector) -> None:
        """x becomes another model: x <- x + the corrections that are there; what still comes is dropped."""
        self.shared.withdraw()
        self._collect(x)
        self.shared = SharedModel(x)  # which an exchange under way does not know

    def _reachable(self) -> set[int]:
        """All ranks with which this one exchanges in some round."""
        graph, rank = self.mixing.graph, self.transport.rank
        if graph.is_passive(rank):
            return {i for i in range(graph.world_size) if not graph.is_passive(i) and rank in graph.phone_book(i)}
        return set(graph.phone_book(rank))

    @property
    def is_in_flight(self) -> bool:
        """See `Engine`."""
        return self._asking is not None or self.shared.has_pending or self._bilateral.is_serving

    def round(self, x: FlatVector) -> bool:
        """See `Engine`. Never waits.

        Raises:
            TimeoutError, ConnectionError: a peer is late or gone; names it.
        """
        self.raise_if_failed()
        if self._asking is not None and self._asking.done():
            self._take_answer()
        with torch.profiler.record_function("gossip.apply"), self.shared.lock:
            is_written = self._collect(x)
            self.step += 1
            if self._asking is None:  # else only that exchange, which has its snapshot, reads y before the next one
                self.shared.publish(x)
                self._published_at = self.step
        if self._asker is not None and self._asking is None:
            self._ask()
        return is_written

    def flush(self, x: FlatVector) -> bool:
        """See `Engine`. Waits for the exchange that this rank has asked for, or for one that it answers.

        An error that has been raised before is not raised again, unlike by `round()`: so a last checkpoint can be
        taken of a model whose peers are lost.
        """
        if not self.is_closed:
            self._background.raise_if_unseen()
        start = time.perf_counter()
        with torch.profiler.record_function("gossip.wait"):
            if self._asking is not None:
                self._take_answer()
            elif self._asker is None and not self.is_closed:
                self._bilateral.wait_until_served()
        self.stats.wait_seconds += time.perf_counter() - start
        return self._collect(x, is_kept=True)

    def add_again(self, x: FlatVector) -> bool:
        """See `Engine`."""
        return self.shared.add_again(x)

    def withdraw(self) -> None:
        """Reply "not yet" to peers until the next round. After a `flush()`, no exchange with the old y is under way."""
        self.raise_if_failed()
        self.shared.withdraw()

    def raise_if_failed(self) -> None:
        """Raise the first failure of this rank, if there is one: a peer is dead or late, or a thread met an error."""
        if not self.is_closed:
            self._bilateral.check_time()
            if self._failed.done():
                self._asking = None  # not waited for any more; what it still delivers is applied by a later `flush`
            self._background.raise_if_failed()

    def join_in(self, collective: Callable[[], None], what: str) -> None:
        """Run a collective that all ranks call; at most for the timeout, and not after a peer has died.

        The collective blocks a thread of its own, so that this one can raise a failure that other ranks report.

        Args:
            collective: what to run; it blocks until all ranks have called it.
            what: its name, for errors.

        Raises:
            TimeoutError, ConnectionError: a peer is late or gone; names the rank that died first.
        """
        if self.is_closed or not self._peers:
            collective()
            return
        if self._helper is None:
            self._helper = GossipThread(f"gossip-{self.transport.rank}-collective")

        def job() -> float:
            collective()
            return 0.0

        start, limit = time.monotonic(), self.transport.timeout.total_seconds()
        running = self._helper.submit(job)
        self._wait_for(running, limit + _SECONDS_TO_NAME)
        if not running.done():
            self.raise_if_failed()
            name, seconds = self.transport.names[self.transport.rank], time.monotonic() - start
            after = f"after {seconds:.1f} s (timeout {limit:g} s)"
            raise TimeoutError(f"rank {name}: {what}: not all ranks have come {after}")
        if (error := running.exception()) is not None:
            # Connections may have closed because of a rank whose death other ranks report.
            wait([self._failed], _SECONDS_TO_NAME if isinstance(error, ConnectionError) else 0.0)
            self.raise_if_failed()
            raise error

    def close(self) -> None:
        """See `Engine`. Sends SHUTDOWN to the peers and waits for theirs, at most for two seconds.

        Corrections that are delivered until then are applied by a last `flush()`.
        """
        if self.is_closed:
            return
        self.is_closed = True
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT.total_seconds()
        asking, self._asking = self._asking, None
        if asking is not None:
            self._wait_for(asking, SHUTDOWN_TIMEOUT.total_seconds())
            if not asking.done():
                asking = None
                if not self._failed.done():
                    warnings.warn("closed while a peer had not answered: its correction is lost", stacklevel=2)
        if not self._bilateral.stop_answering() and not self._failed.done():
            warnings.warn("closed while a peer was being answered: its correction is lost", stacklevel=2)
        self._bilateral.shut_down(sorted(self._peers))
        for thread in (self._asker, self._helper):
            if thread is not None:
                thread.close()
        self._background.close(max(deadline - time.monotonic(), 0.0))
        self._background.raise_if_unseen()
        if asking is not None:
            asking.result()

    def _ask(self) -> None:
        """Start the exchange of round t, or of the first round after it whose peer has not closed."""
        graph, rank = self.mixing.graph, self.transport.rank
        for _ in range(max(graph.period, len(graph.phone_book(rank)))):
            t, self.t = self.t, self.t + 1
            peer = next(iter(graph.out_peers(rank, t)), None)
            if peer is not None and peer not in self._closed_peers:
                break
        else:
            return  # all peers have closed
        assert self._asker is not None
        assert peer is not None
        weight = self.mixing.weights(rank, t).inp[peer]

        def exchange() -> float:
            with torch.no_grad(), torch.profiler.record_function("gossip.round", f"t={t}"):
                if not self._bilateral.ask(peer, t, weight):
                    self._closed_peers.add(peer)
            return weight

        self._asking = self._asker.submit(exchange)

    def _take_answer(self) -> None:
        """Wait for the exchange that this rank has asked for; its result is lost if this rank fails meanwhile."""
        asking = self._asking
        assert asking is not None
        try:
            while not asking.done():
                self._wait_for(asking, max(self._bilateral.seconds_left, 0.0))
                if not asking.done():
                    self.raise_if_failed()
            asking.result()
        except Exception:  # of the exchange; an interrupt instead leaves it in flight, done or not
            self._asking = None
            raise
        self._asking = None

    def _collect(self, x: FlatVector, *, is_kept: bool = False) -> bool:
        """x <- x + c, and count the exchanges that c is made of. Returns whether there was any.

        is_kept: whether `add_again` may follow.
        """
        with self.shared.lock:
            self.stats.num_skipped = self._bilateral.num_skipped
            if not self.shared.collect(x, is_kept=is_kept):
                return False
            while self._bilateral.delivered:
                self.stats.record(self.step - self._bilateral.delivered.popleft())
            return True

    def _wait_for(self, future: Future[float], seconds: float) -> None:
        """Wait until the future is done, or this rank has failed; at most for `seconds`."""
        either: list[Future[Any]] = [future, self._failed]
        wait(either, seconds, FIRST_COMPLETED)

    def _on_failure(self, failed: Future[None]) -> None:
        """Called by the thread that has met the failure."""
        error = failed.exception()
        assert error is not None
        self._background.fail(error)
