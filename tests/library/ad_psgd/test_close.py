"""AD-PSGD at its end: close(), errors of threads, and peers that die or do not answer."""

from __future__ import annotations

import copy
import gc
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules import BilatGossipDataParallel, GossipDataParallel
from gossip_modules.flat.vector import FlatVector
from gossip_modules.graph_manager import (
    DynamicBipartiteCompleteGraph,
    DynamicBipartiteExponentialGraph,
    DynamicBipartiteLinearGraph,
)
from gossip_modules.transport.gloo import gloo_group
from gossip_modules.transport.listener import Listener
from gossip_modules.transport.shared_group import Use
from tests.harness.problems import mlp, sgd, train_step
from tests.harness.processes import Outcome, run_processes
from tests.harness.progress import local_of
from tests.harness.ranks import TIMEOUT, assert_no_gossip_threads, run_ranks, solo_group
from tests.harness.reference import flatten
from tests.library.ad_psgd.pairs import PATIENCE, Gate, Meeting, X, engine_of, is_active, wrap

# The end.


@pytest.mark.filterwarnings("ignore:got a training forward")
def test_close_is_quick_idempotent_and_final() -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(group.rank()), group)
        wrapper(X)
        for _ in range(2):
            wrapper.close()
        values = flatten(wrapper.module)
        rounds = wrapper.comm_stats()["num_rounds"]
        wrapper(X)
        wrapper.eval()
        wrapper.state_dict()
        assert wrapper.comm_stats()["num_rounds"] == rounds
        assert torch.equal(flatten(wrapper.module), values)

    run_ranks(4, body)


def test_a_passive_rank_that_closes_early_is_no_error_for_the_others() -> None:
    has_begun = threading.Barrier(4)

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor, int]:
        wrapper = wrap(mlp(group.rank()).double(), group)
        start = flatten(wrapper.module)
        wrapper(X.double())
        has_begun.wait(PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while is_active(wrapper) and len(engine_of(wrapper)._bilateral.closed_peers) < 2:
            assert time.monotonic() < deadline
            wrapper(X.double())
            wrapper.flush()
        t = engine_of(wrapper).t
        for _ in range(5 * is_active(wrapper)):
            wrapper(X.double())
            wrapper.flush()
            assert engine_of(wrapper)._bilateral.under_way is None  # nobody is left to ask
        wrapper.close()
        return start, flatten(wrapper.module), t

    results = run_ranks(4, body)
    starts, ends, _ = zip(*results, strict=True)
    torch.testing.assert_close(sum(starts), sum(ends), rtol=0, atol=1e-13)


@pytest.mark.filterwarnings("ignore:got a training forward")
def test_an_active_rank_that_closes_early_is_no_error_for_the_others() -> None:
    meeting = Meeting(3)

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        wrapper = wrap(mlp(group.rank()).double(), group, graph=DynamicBipartiteCompleteGraph(3))
        start = flatten(wrapper.module)
        for _ in range(5):
            wrapper(X.double())
        meeting.wait()
        if is_active(wrapper):
            wrapper.close()
        meeting.wait()
        for _ in range(5):
            wrapper(X.double())
        wrapper.close()
        return start, flatten(wrapper.module)

    starts, ends = zip(*run_ranks(3, body), strict=True)
    torch.testing.assert_close(sum(starts), sum(ends), rtol=0, atol=1e-13)


def test_an_error_of_the_listener_is_raised_in_training() -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(group.rank()), group)
        if group.rank() == 0:

            def fail(correction: FlatVector, **how: Any) -> None:
                raise MemoryError("no room for a correction")

            engine_of(wrapper).shared.deliver = fail  # type: ignore[method-assign]
            wrapper(X)
            with pytest.raises(MemoryError):
                engine_of(wrapper).liveness.failed.result(PATIENCE)
            for _ in range(2):
                with pytest.raises(MemoryError, match="no room for a correction"):
                    wrapper(X)
            assert wrapper.state_dict()  # a last checkpoint
            with pytest.raises(MemoryError, match="no room for a correction"):
                wrapper.settle()
        else:
            deadline = time.monotonic() + PATIENCE
            while wrapper.comm_stats()["num_rounds"] < 1:
                assert time.monotonic() < deadline
                wrapper(X)
                wrapper.flush()
        wrapper.close()

    run_ranks(2, body)


def test_an_unseen_error_of_the_listener_is_raised_on_close() -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(group.rank()), group)
        if group.rank() == 0:
            engine_of(wrapper).liveness.background.fail(MemoryError("no room for a correction"))
            with pytest.raises(MemoryError, match="no room"):
                wrapper.close()
        wrapper.close()

    run_ranks(2, body)


def test_an_interrupted_flush_loses_nothing() -> None:
    may_answer = threading.Event()

    def body(group: dist.ProcessGroup) -> Tensor:
        wrapper = wrap(mlp(group.rank()).double(), group)
        start = flatten(wrapper.module)
        if group.rank() == 0:
            wrapper(X.double())
            may_answer.set()
        else:
            assert may_answer.wait(PATIENCE)
            wrapper(X.double())
            bilateral = engine_of(wrapper)._bilateral
            assert bilateral.under_way is not None

            def interrupt(seconds: float) -> bool:
                del bilateral.wait
                raise KeyboardInterrupt

            bilateral.wait = interrupt  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                wrapper.flush()
        wrapper.settle()
        wrapper.close()
        return flatten(wrapper.module) - start

    first, second = run_ranks(2, body)
    assert first.abs().max() > 0
    torch.testing.assert_close(first, -second, rtol=0, atol=1e-13)


def test_a_passive_rank_that_closes_while_it_answers_names_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossip_modules.ad_psgd.engine.SHUTDOWN_TIMEOUT", timedelta(milliseconds=100))
    is_answering, is_over = threading.Event(), threading.Event()

    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(group.rank()), group)
        bilateral = engine_of(wrapper)._bilateral
        if group.rank() == 0:
            exchange = bilateral._exchange

            def late(*what: Any) -> None:
                is_answering.set()
                assert is_over.wait(PATIENCE)
                exchange(*what)

            bilateral._exchange = late  # type: ignore[assignment]
            wrapper(X)
            assert is_answering.wait(PATIENCE)
            with pytest.warns(UserWarning, match="closed while an exchange was under way"):
                engine_of(wrapper).close()
            is_over.set()
        else:
            while not is_answering.is_set():
                wrapper(X)
                is_answering.wait(1e-3)
            assert is_over.wait(PATIENCE)
            wrapper.flush()
        wrapper.close()

    run_ranks(2, body)


def test_a_rank_that_closes_waits_until_its_last_message_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the peer may listen for it later than it sends its own last message."""
    may_listen, read = threading.Event(), Listener._read

    def read_late(self: Listener, peer: int, handle: Any) -> None:
        if self.transport.rank == 1:
            assert may_listen.wait(PATIENCE)
        read(self, peer, handle)

    monkeypatch.setattr(Listener, "_read", read_late)

    def body(group: dist.ProcessGroup) -> bool:
        wrapper = wrap(mlp(group.rank()), group)
        liveness = engine_of(wrapper).liveness
        if group.rank() == 1:
            threading.Timer(0.2, may_listen.set).start()
        wrapper.close()
        return 1 - group.rank() in liveness.closed

    assert run_ranks(2, body) == [True, True]


def test_a_wrapper_that_is_lost_leaves_its_peers() -> None:
    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(group.rank()), group)
        wrapper(X)
        wrapper.settle()
        if group.rank() == 0:
            with pytest.warns(ResourceWarning, match=r"a BilatGossipDataParallel was lost without close\(\)"):
                del wrapper
            return
        deadline = time.monotonic() + PATIENCE
        while not engine_of(wrapper)._bilateral.closed_peers:
            assert time.monotonic() < deadline
            wrapper(X)
            wrapper.flush()
        wrapper.close()

    run_ranks(2, body)


@pytest.mark.skipif(sys.platform != "linux", reason="the open descriptors are counted on Linux")
@pytest.mark.filterwarnings("ignore:a BilatGossipDataParallel was lost")
@pytest.mark.parametrize("is_closed", [True, False])
def test_the_connections_of_a_wrapper_go_with_it_without_a_garbage_collection(is_closed: bool) -> None:
    """As in several folds of one process."""
    meeting, counts = Meeting(2), list[int]()

    def fold(store: dist.Store, rank: int) -> None:
        own = gloo_group(store, rank, 2, TIMEOUT, host="127.0.0.1")
        wrapper = wrap(mlp(rank), own)
        local_of(wrapper).transport.own_group()
        del own
        wrapper(X)
        meeting.wait()
        wrapper(X)
        wrapper.settle()
        if is_closed:
            wrapper.close()

    def body(group: dist.ProcessGroup) -> None:
        for store in stores:
            fold(store, group.rank())
            meeting.wait()
            for thread in threading.enumerate():
                # One that the other rank is starting just now is not alive yet, and cannot be joined.
                if thread.name in ("gossip-closing", "releasing-group") and thread.is_alive():
                    thread.join(PATIENCE)
            Use(group).end()  # the next fold, which releases the groups of lost wrappers
            meeting.wait()
            if group.rank() == 0:  # a list needs a descriptor, which two threads would count for each other
                counts.append(len(os.listdir("/proc/self/fd")))
            meeting.wait()

    stores = [dist.HashStore() for _ in range(3)]
    gc.collect()
    gc.disable()
    try:
        run_ranks(2, body)
    finally:
        gc.enable()
    assert len(counts) == len(stores)
    assert len(set(counts)) == 1, counts


# Who dies or does not answer is named, by all.


def hang_up(wrapper: BilatGossipDataParallel) -> None:
    """What the others see at the end of a process: all connections of this rank close."""
    engine_of(wrapper).liveness.fail(ConnectionError("it dies"))  # its threads say nothing while connections close
    local_of(wrapper).transport.close_connections()
    with pytest.raises(ConnectionError):
        wrapper.close()


def error_of(call: Callable[[], object]) -> BaseException:
    """What it raises in the end, called again and again."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            call()
        except (ConnectionError, TimeoutError) as error:
            return error
        threading.Event().wait(1e-3)
    raise AssertionError("no error")


# Each pair of an action of the ranks, a dying rank and a graph occurs together.
@pytest.mark.parametrize(
    ("doing", "victim", "graph"),
    [
        ("training", 0, DynamicBipartiteLinearGraph),
        ("training", 1, DynamicBipartiteExponentialGraph),
        ("settling", 0, DynamicBipartiteExponentialGraph),
        ("settling", 1, DynamicBipartiteLinearGraph),
        ("averaging", 0, DynamicBipartiteLinearGraph),
        ("averaging", 1, DynamicBipartiteExponentialGraph),
    ],
)
def test_all_name_a_rank_that_has_died_at_once(
    victim: int, graph: type[DynamicBipartiteExponentialGraph], doing: str
) -> None:
    """Also those who never talk to it, and no other, although all who know end too; no wait ends by its timeout."""
    meeting = Meeting(4)

    def body(group: dist.ProcessGroup) -> None:
        # A collective that is given up stays with its thread until this time is over.
        wrapper = wrap(mlp(group.rank()), group, graph=graph(4), timeout=timedelta(seconds=10))
        for _ in range(3):
            wrapper(X)
        wrapper.settle()
        meeting.wait()
        if group.rank() == victim:
            hang_up(wrapper)
            return
        calls = {
            "training": lambda: wrapper(X),
            "settling": wrapper.settle,
            "averaging": wrapper.consensus_distance,
        }
        error = error_of(calls[doing])
        assert isinstance(error, ConnectionError)
        assert re.match(rf"rank {group.rank()}: in round \d+, rank {victim} died: ", str(error)), error
        with pytest.raises(ConnectionError, match=f"rank {victim} died"):
            wrapper(X)
        assert wrapper.state_dict()  # a last checkpoint
        wrapper.close()

    run_ranks(4, body)


def test_an_exchange_has_the_timeout_and_all_name_the_silent_rank() -> None:
    """Rank 0 has stopped in the middle of an exchange; the others hear of it from rank 1, or 3.

    The timeout is 300 s where none is given, which is more than this test has. A watch that stands still for a second,
    as on a busy machine, still asks rank 0 before it gives it up.
    """
    gates: list[Gate] = []
    meeting, is_over = Meeting(4), Meeting(4)

    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(group.rank()), group, timeout=timedelta(seconds=2.5))
        wrapper(X)
        wrapper.settle()
        if group.rank() == 0:
            wrapper(X)
            gates.append(Gate(wrapper))
            # A process that is stopped neither measures its own waits nor answers.
            engine_of(wrapper).liveness._ended.set()
            engine_of(wrapper).liveness.post = lambda peer, message: None  # type: ignore[method-assign]
        meeting.wait()
        if group.rank() == 0:
            is_over.wait()
            gates[0].opened.set()
            error = error_of(lambda: wrapper(X))
            assert re.search(r"^rank 0: in round \d, rank [13] has given this rank up", str(error)), error
            wrapper.close()
            return

        def step() -> None:
            wrapper(X)
            wrapper.flush()

        error = error_of(step)
        assert isinstance(error, TimeoutError)
        assert re.search(r"rank 0 does not answer", str(error)), error
        is_over.wait()
        wrapper.close()

    run_ranks(4, body)


@pytest.mark.filterwarnings("ignore:got a training forward")
def test_a_copy_does_not_outlive_the_threads() -> None:
    """After a failure and a close no thread is left, the wrapper can still be copied, and nothing keeps it."""
    wrappers: list[weakref.ref[BilatGossipDataParallel]] = []

    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(group.rank()), group)
        if group.rank() == 1:
            hang_up(wrapper)
            return
        error_of(lambda: wrapper(X))
        twin = copy.deepcopy(wrapper)
        twin(X)
        wrapper.close()
        wrappers.append(weakref.ref(wrapper))

    run_ranks(2, body)
    assert_no_gossip_threads()
    gc.collect()
    assert [wrapper() for wrapper in wrappers] == [None]


def test_the_state_of_another_engine_is_refused() -> None:
    other = GossipDataParallel(mlp(), process_group=solo_group())
    wrapper = wrap(mlp(), solo_group())
    with pytest.raises(ValueError, match="got the state of a LockstepEngine, expected the state of a BilateralEngine"):
        wrapper.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="got gossip state without a push-sum weight, expected that of a GossipData"):
        other.load_state_dict(wrapper.state_dict())
    wrapper.close()
    other.close()


# Processes: a peer that dies or hangs.

NUM_RANKS = 4


FIRST_STEPS = 10


MISSED_NOBODY = "missed nobody"


SECONDS = 8.0


def lose_a_peer(rank: int, victim: int, how: int, seconds: float) -> str:
    """Train; one rank gets a signal when all have met. Returns after so many seconds, unless somebody is missed."""
    wrapper = BilatGossipDataParallel(mlp(), timeout=timedelta(seconds=SECONDS))
    optimizer = sgd(wrapper)
    for step in range(FIRST_STEPS):
        train_step(wrapper, optimizer, rank, step)
        wrapper.flush()
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), how)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        train_step(wrapper, optimizer, rank, 0)
    wrapper.close()
    return MISSED_NOBODY


def outcomes_of(victim: int, how: signal.Signals) -> list[Outcome]:
    """How the ranks ended; all of them did, by themselves (a stopped one is killed by the helper)."""
    hung = (victim,) if how is signal.SIGSTOP else ()
    body_seconds = SECONDS + 1.5 if (victim, how) != (1, signal.SIGSTOP) else 0.5
    return run_processes(NUM_RANKS, lose_a_peer, victim, int(how), body_seconds, expect_result=False, hung=hung)


@pytest.mark.e2e
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_rank_that_is_killed_is_named_by_all(victim: int) -> None:
    outcomes = outcomes_of(victim, signal.SIGKILL)
    for rank in {*range(NUM_RANKS)} - {victim}:
        pattern = rf"^ConnectionError: rank {rank}: in round \d+, rank {victim} died: "
        assert re.search(pattern, outcomes[rank].error), outcomes[rank]
        assert outcomes[rank].exit_code == 1


@pytest.mark.soak
@pytest.mark.e2e
def test_a_passive_rank_that_stops_is_named_by_all() -> None:
    outcomes = outcomes_of(0, signal.SIGSTOP)
    for rank in (1, 2, 3):
        pattern = rf"^TimeoutError: rank {rank}: .*rank 0 does not answer"
        assert re.search(pattern, outcomes[rank].error), outcomes[rank]
        assert outcomes[rank].exit_code == 1


@pytest.mark.soak
@pytest.mark.e2e
def test_an_active_rank_that_stops_between_exchanges_is_not_missed() -> None:
    outcomes = outcomes_of(1, signal.SIGSTOP)
    for rank in (0, 2, 3):
        assert (outcomes[rank].result, outcomes[rank].exit_code) == (MISSED_NOBODY, 0), outcomes[rank]


@pytest.mark.parametrize("ends", ["close", "settle"])
def test_a_model_that_is_not_finite_is_never_silent(ends: str) -> None:
    """A rank whose steps are faster than its exchanges may end before any exchange has the NaN."""

    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(mlp(group.rank()), group)
        wrapper(X)
        wrapper.flush()
        with torch.no_grad():
            next(wrapper.parameters()).fill_(float("nan"))
        with pytest.raises(FloatingPointError, match=rf"rank {group.rank()}: .* infinities or NaN"):
            getattr(wrapper, ends)()
        wrapper.close()

    run_ranks(1, body)
