"""The engine of AD-PSGD: pairs average in the background, training adds the corrections when it comes by."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import torch

from ..engine.background import Background
from ..engine.engine import Engine
from ..engine.gossip_thread import GossipThread
from ..engine.shared_model import Mailbox
from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingManager
from ..transport.listener import GOODBYE_TIMEOUT
from ..transport.process_group import ProcessGroupTransport
from .exchange import BilateralAverage

_SECONDS_TO_NAME = 0.5  # beyond the timeout, for an error that says who is missing


class BilateralEngine(Engine):
    """Active ranks ask a passive peer once per training step at most; passive ranks answer whenever they are asked.

    At the safe point: x <- x + mail, y <- x, and an active rank whose last exchange is complete starts the next one.
    Nothing there waits. See [Note: bilateral exchange]. A thread of every rank listens to its peers, so that training
    hears of a dead one at its next step: [Note: who died].

    `t` counts the exchanges that an active rank has started; its peers are those of the graph in its own round t.

    Args:
        mixing: weights over a bipartite graph with one peer per round.
        transport: over Gloo, with messages in CPU memory.
        x: the parameters.
        on_nonfinite: see `BilateralAverage`.
    """

    is_asynchronous = True

    def __init__(
        self,
        mixing: MixingManager,
        transport: ProcessGroupTransport,
        x: FlatVector,
        *,
        on_nonfinite: str = "raise",
    ) -> None:
        super().__init__()
        self.mixing = mixing
        self.transport = transport
        self.mailbox = Mailbox(x)
        self._step = 0  # training steps seen so far
        self._published_at = 0  # step
        self._bilateral = BilateralAverage(
            self.mailbox, transport, clock=lambda: self._published_at, on_nonfinite=on_nonfinite
        )
        self._failed = self._bilateral.presence.failed
        self._background = Background()
        self._failed.add_done_callback(self._on_failure)
        self._asking: Future[float] | None = None
        self._asker: GossipThread | None = None
        self._helper: GossipThread | None = None  # of `join_in`
        self._peers = self._reachable()
        self._gone: set[int] = set()  # those of them who have said so
        name = f"gossip-{transport.rank}"
        if not self._peers:
            return
        self._background.start(f"{name}-listener", lambda: self._bilateral.answer(self._peers))
        if not mixing.graph.is_passive(transport.rank):
            self._asker = GossipThread(name)

    def _reachable(self) -> set[int]:
        """All that this rank ever exchanges with, in some round."""
        graph, rank = self.mixing.graph, self.transport.rank
        if graph.is_passive(rank):
            return {i for i in range(graph.world_size) if not graph.is_passive(i) and rank in graph.phone_book(i)}
        return set(graph.phone_book(rank))

    @property
    def is_in_flight(self) -> bool:
        """See `Engine`."""
        return self._asking is not None or self.mailbox.has_mail or self._bilateral.is_serving

    def round(self, x: FlatVector) -> bool:
        """See `Engine`. Never waits.

        Raises:
            TimeoutError, ConnectionError: a peer is late or gone; names it.
        """
        self.raise_if_failed()
        if self._asking is not None and self._asking.done():
            self._take_answer()
        with torch.profiler.record_function("gossip.apply"), self.mailbox.lock:
            is_written = self._collect(x)
            self._step += 1
            if self._asking is None:  # else nobody but that exchange sees y before the next one
                self.mailbox.publish(x)
                self._published_at = self._step
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
        return self._collect(x)

    def withdraw(self) -> None:
        """Answer peers no more until the next round. With a `flush()` after it, nothing of the old y is on its way."""
        self.raise_if_failed()
        self.mailbox.withdraw()

    def raise_if_failed(self) -> None:
        """Raise the first failure of this rank, if it has one: a peer is dead or late, or a thread met an error."""
        if not self.is_closed:
            self._bilateral.check_time()
            if self._failed.done():
                self._asking = None  # nobody waits for it any more; what it delivers is mail
            self._background.raise_if_failed()

    def join_in(self, collective: Callable[[], None], what: str) -> None:
        """Run what all ranks run together; not longer than the timeout, and not when a peer has died.

        A thread of its own waits in there, so that this one hears of a death that others have seen.

        Args:
            collective: blocks until all ranks are there.
            what: names it in errors.

        Raises:
            TimeoutError, ConnectionError: a peer is late or gone; names who died first.
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
            # Connections may have closed because of a rank that others have seen die.
            wait([self._failed], _SECONDS_TO_NAME if isinstance(error, ConnectionError) else 0.0)
            self.raise_if_failed()
            raise error

    def close(self) -> None:
        """See `Engine`. Says goodbye and waits for those of the peers, for two seconds at most.

        What is delivered until then is mail, for a last `flush()`.
        """
        if self.is_closed:
            return
        self.is_closed = True
        deadline = time.monotonic() + GOODBYE_TIMEOUT.total_seconds()
        asking, self._asking = self._asking, None
        if asking is not None:
            self._wait_for(asking, GOODBYE_TIMEOUT.total_seconds())
            if not asking.done():
                asking = None
                if not self._failed.done():
                    warnings.warn("closed while a peer had not answered: its correction is lost", stacklevel=2)
        if not self._bilateral.stop_answering() and not self._failed.done():
            warnings.warn("closed while a peer was being answered: its correction is lost", stacklevel=2)
        self._bilateral.say_goodbye(sorted(self._peers))
        for thread in (self._asker, self._helper):
            if thread is not None:
                thread.close()
        self._background.close(max(deadline - time.monotonic(), 0.0))
        self._background.raise_if_unseen()
        if asking is not None:
            asking.result()

    def _ask(self) -> None:
        """Start the exchange of round t, with the first peer from there on that is still here."""
        graph, rank = self.mixing.graph, self.transport.rank
        for _ in range(max(graph.period, len(graph.phone_book(rank)))):
            t, self.t = self.t, self.t + 1
            peer = next(iter(graph.out_peers(rank, t)), None)
            if peer is not None and peer not in self._gone:
                break
        else:
            return  # all have said goodbye
        assert self._asker is not None
        assert peer is not None
        weight = self.mixing.weights(rank, t).inp[peer]

        def exchange() -> float:
            with torch.no_grad(), torch.profiler.record_function("gossip.round", f"t={t}"):
                if not self._bilateral.ask(peer, t, weight):
                    self._gone.add(peer)
            return weight

        self._asking = self._asker.submit(exchange)

    def _take_answer(self) -> None:
        """Wait for the answer; it is lost when this rank fails meanwhile."""
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

    def _collect(self, x: FlatVector) -> bool:
        with self.mailbox.lock:
            self.stats.num_skipped = self._bilateral.num_skipped
            if not self.mailbox.collect(x):
                return False
            while self._bilateral.delivered:
                self.stats.record(self._step - self._bilateral.delivered.popleft())
            return True

    def _wait_for(self, future: Future[float], seconds: float) -> None:
        """Until it is done, or this rank has failed."""
        either: list[Future[Any]] = [future, self._failed]
        wait(either, seconds, FIRST_COMPLETED)

    def _on_failure(self, failed: Future[None]) -> None:
        """Called by the thread that has met the failure."""
        error = failed.exception()
        assert error is not None
        self._background.fail(error)
