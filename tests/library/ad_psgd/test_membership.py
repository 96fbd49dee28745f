"""AD-PSGD with a membership: pairs go on when workers die, and take new ones in."""

from __future__ import annotations

import gc
import json
import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gossip_modules import BilatGossipDataParallel, Membership
from gossip_modules.ad_psgd.exchange import BilateralAverage
from gossip_modules.ad_psgd.shared_model import SharedModel
from gossip_modules.engine.engine import EngineStats
from gossip_modules.flat.vector import FlatVector
from gossip_modules.graph_manager import DynamicBipartiteCompleteGraph, DynamicBipartiteExponentialGraph
from gossip_modules.membership import limits
from gossip_modules.membership.links import LinkTransport, alone, connect_links
from gossip_modules.testing import Chaos, Join, Kill, Worker
from gossip_modules.wrappers.participant import Participant
from tests.harness.progress import engine_of, local_of
from tests.harness.ranks import TIMEOUT
from tests.library.membership.stores import exchange_over

SECONDS = 60.0  # of any wait: nothing here should take as long
PATIENT = 20.0  # of silence, so that a loaded machine declares nobody dead
X = torch.ones(2, 4)


@dataclass(frozen=True)
class Averaging:
    """A loop that trains nothing: workers only average, from a model of their own each, until all have done enough.

    Args:
        folder: for the models of who dies, which is at rest then, and of who joins.
        dying: ranks that an event kills.
        alive: those that remain.
        num_workers: that begin.
    """

    folder: str
    dying: tuple[int, ...]
    alive: tuple[int, ...]
    num_workers: int

    def __call__(self, worker: Worker) -> dict[str, Any]:
        membership = worker.membership(min_workers=self.num_workers, timeout=SECONDS, min_deadline=PATIENT)
        net = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)).double()
        model = BilatGossipDataParallel(net, membership=membership, gossip_buffers=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        membership.track(optimizer=optimizer)
        is_new = membership.generation == 0
        first = membership.join()
        if is_new:
            self.write("joined", worker.rank, mean_of(net))
            assert optimizer.state, "the donor's momentum"
        else:
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.fill_(float(worker.rank))
        num_rounds = -1.0  # when the last generation began
        for _ in membership.steps(1 << 30):
            loss = model(torch.randn(3, 4).double()).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if worker.rank in self.dying:  # so that it is known what it takes along
                local_of(model).engine.withdraw()
                model.flush()
                self.write("died", worker.rank, mean_of(net))
            stats = model.comm_stats()
            if membership.world_size == len(self.alive) and (is_new or stats["deaths"] == len(self.dying)):
                num_rounds = stats["num_rounds"] if num_rounds < 0 else num_rounds
                if stats["num_rounds"] >= num_rounds + 10 and self.is_enough(worker.rank):
                    break
            time.sleep(0.001)  # lets go of the interpreter, as kernels do
        model.settle()
        result = {"mean": mean_of(net), "first": first, "spread": model.consensus_distance(), **model.comm_stats()}
        self.wait_for_all(worker.rank)
        model.close()
        return result

    def write(self, what: str, rank: int, mean: float) -> None:
        """For the test."""
        (Path(self.folder) / f"{what}-{rank}").write_text(json.dumps(mean))

    def read(self, what: str) -> float:
        """The sum of what was written."""
        return sum(json.loads(path.read_text()) for path in Path(self.folder).glob(f"{what}-*"))

    def is_enough(self, rank: int) -> bool:
        """Whether all have averaged often enough: an active rank that stops would leave passive ones without a peer."""
        self.write("enough", rank, 0.0)
        return self.count("enough") == len(self.alive)

    def count(self, what: str) -> int:
        """How many have written it."""
        return len(list(Path(self.folder).glob(f"{what}-*")))

    def wait_for_all(self, rank: int) -> None:
        """Nobody leaves before all have their results."""
        self.write("done", rank, 0.0)
        deadline = time.monotonic() + SECONDS
        while self.count("done") < len(self.alive):
            assert time.monotonic() < deadline, "not all have come to the end"
            time.sleep(0.01)


def mean_of(module: nn.Module) -> float:
    """Of all parameters, which are equal."""
    return float(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).mean())


def check(body: Averaging, events: list[Any], backend: Literal["threads", "processes"]) -> None:
    """Run it, and look at what is left."""
    results = Chaos(events, backend=backend, seconds=3 * SECONDS).run(body, body.num_workers)
    assert tuple(results) == body.alive
    total = sum(range(body.num_workers)) - body.read("died") + body.read("joined")
    assert body.count("died") == len(body.dying)
    assert sum(result["mean"] for result in results.values()) == pytest.approx(total, abs=1e-9)
    for rank, result in results.items():
        assert (result["first"] > 0) == (rank >= body.num_workers), "who joins goes on from the donor's step"
        assert result["spread"] < 0.05, "they come together"


@pytest.mark.parametrize(
    ("events", "body"),
    [
        ([Kill(step=20, rank=0)], {"dying": (0,), "alive": (1, 2), "num_workers": 3}),
        (
            [Kill(step=20, rank=0), Kill(step=40, rank=2), Join(step=60)],
            {"dying": (0, 2), "alive": (1, 3, 4), "num_workers": 4},
        ),
    ],
    ids=["the first of three dies", "two of four die and one joins"],
)
def test_the_sum_of_the_living_models_is_kept(
    events: list[Any], body: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum of the models of those who live is what it was, less what the dead held, and what a newcomer brings."""
    for name, seconds in (("FORMING", 25.0), ("CONNECT", 25.0)):  # a loaded machine may take long
        monkeypatch.setattr(limits, name, seconds)
    check(Averaging(str(tmp_path), **body), events, "threads")
    gc.collect()


@pytest.mark.soak
def test_processes_that_are_killed_and_one_that_joins(tmp_path: Path) -> None:
    body = Averaging(str(tmp_path), dying=(0, 2), alive=(1, 3, 4), num_workers=4)
    check(body, [Kill(step=50, rank=0), Kill(step=100, rank=2), Join(step=150)], "processes")


@pytest.mark.parametrize("is_ready", [True, False])
def test_an_exchange_whose_other_end_is_lost_changes_nothing(is_ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the reply or after it; the next one is not begun, nobody raises, and the membership is told."""
    store = dist.HashStore()
    lost: list[list[int]] = [[], []]
    asked: list[bool] = []
    is_changed: list[bool] = []
    is_mortal, is_closed = threading.Event(), threading.Event()

    def connect(rank: int) -> LinkTransport:
        return connect_links(
            exchange_over(store, rank, 2),
            rank,
            2,
            [1 - rank],
            store=store,
            names=range(2),
            timeout=TIMEOUT,
            patience=TIMEOUT,
            on_lost=lambda peer, error, is_closed: lost[rank].append(peer),
        )

    def run(rank: int) -> None:
        transport = connect(rank)
        x = FlatVector.over(torch.full((4,), 8.0 * rank))
        shared = SharedModel(x)
        shared.publish(x, step=0)
        bilateral = BilateralAverage(shared, transport, [1 - rank], stats=EngineStats())
        if rank == 0:

            def die(*_: object) -> Any:
                transport.close()
                is_closed.set()
                return nullcontext()

            if is_ready:
                monkeypatch.setattr(bilateral, "_exchange", die)
            else:
                monkeypatch.setattr(bilateral, "_answer", die)
            is_mortal.set()
            assert is_closed.wait(SECONDS)
        else:
            assert is_mortal.wait(SECONDS)
            for t in range(2):
                bilateral.ask(0, t, 0.5)
                assert bilateral.wait(SECONDS)
                asked.append(0 not in bilateral.closed_peers)
        is_changed.append(shared.has_pending)
        transport.close()
        bilateral.shut_down()
        bilateral.close(SECONDS)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert asked == [is_ready, False]
    assert is_changed == [False, False]
    assert lost == [[], [0]]


class HalfReceived:
    """In the place of a link whose other end has died in the middle of a message."""

    def __init__(self) -> None:
        self.is_waited_for, self.may_end = threading.Event(), threading.Event()

    def send(self, *_: object) -> Any:
        return Done()

    def recv(self, *_: object) -> HalfReceived:
        return self

    def wait(self, timeout: timedelta) -> None:
        self.is_waited_for.set()
        if not self.may_end.wait(timeout.total_seconds()):
            raise RuntimeError("timed out")


class Done:
    """A message that has gone."""

    def wait(self, timeout: timedelta) -> None: ...


def test_an_exchange_is_given_up_with_its_peer_where_gloo_does_not_end_the_wait() -> None:
    """See [Note: waits that do not end] of `Waits`: at its next generation the worker would wait for the timeout."""
    transport, link = alone(timedelta(days=1)), HalfReceived()
    transport._links, transport.names = {1: link}, [0, 1]  # type: ignore[dict-item]
    x = FlatVector.over(torch.ones(4))
    shared = SharedModel(x)
    shared.publish(x, step=0)
    bilateral = BilateralAverage(shared, transport, [], stats=EngineStats())
    bilateral.ask(1, 0, 0.5)
    assert link.is_waited_for.wait(SECONDS)
    transport.break_link(1)
    assert bilateral.wait(SECONDS)
    assert bilateral.closed_peers == {1}
    link.may_end.set()
    transport.close()
    bilateral.close(SECONDS)


def test_one_exchange_at_most_is_waited_for_where_a_generation_begins() -> None:
    """Peers that ask again and again would hold it up for a timeout each."""
    membership = Membership(dist.HashStore(), min_workers=1, timeout=SECONDS)
    model = BilatGossipDataParallel(nn.Linear(4, 1), membership=membership)
    engine: Any = engine_of(model)
    model(X)
    assert engine.shared.snapshots.is_open
    world = local_of(model).world
    assert isinstance(world, Participant)
    world.flush()
    assert not engine.shared.snapshots.is_open, "peers that ask now get the reply: not yet"
    under_way, later = Future[float](), Future[float]()
    engine._bilateral._exchanges.extend([under_way, later])
    ending = threading.Timer(0.1, under_way.set_result, [0.0])
    ending.start()
    engine.rebind(engine.mixing, alone(membership.timeout), local_of(model).vector)
    assert under_way.done()
    model(X)
    assert engine.shared.snapshots.is_open
    model.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"graph": DynamicBipartiteExponentialGraph},
            r"that does not exist for \[3, 5, .* e.g. None or DynamicBipartiteCompleteGraph: ",
        ),
        (
            {"graph": DynamicBipartiteCompleteGraph(4)},
            r"got graph=DynamicBipartiteCompleteGraph.* with a membership, expected a class, .* e.g. graph=None or",
        ),
        ({"process_group": object()}, "got process_group with a membership, expected None"),
        ({"init_sync": False}, "got init_sync=False with a membership, expected True: its workers begin"),
        ({"timeout": 7}, "got timeout=7 s with a membership, which has a timeout of 60 s, expected none"),
        ({"membership": "node0:29400"}, r"expected a Membership; pass Membership\('node0:29400', min_workers="),
        ({"membership": 4}, r"got membership=4, expected a Membership; pass Membership\('host:port', min_workers="),
    ],
)
def test_options_that_do_not_fit_a_membership_are_refused(options: dict[str, Any], message: str) -> None:
    membership = Membership(dist.HashStore(), min_workers=2, timeout=SECONDS)
    with pytest.raises(ValueError, match=message):
        BilatGossipDataParallel(nn.Linear(4, 1), **{"membership": membership, **options})


def test_a_worker_alone_trains_and_its_steps_have_no_turn() -> None:
    membership = Membership(dist.HashStore(), min_workers=1, timeout=SECONDS)
    model = BilatGossipDataParallel(nn.Linear(4, 1), membership=membership, graph=DynamicBipartiteCompleteGraph)
    for step in membership.steps(2):
        model(X)
        with pytest.raises(ValueError, match=r"got turn\(\d\) of workers that take steps at their own pace"):
            membership.turn(step)
    assert model.comm_stats()["live"] == 1
    model.close()
