"""A round is a transaction: wherever it ends, the model and the memory are as before it, and the next round works."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules import D2, RDA, DiLoCo, EagerDiLoCo, GASLoC, PowerGossip, RingGraph, Schedule, SlowMo
from gossip_modules.engine.lockstep import SyncEngine
from gossip_modules.extend import FlatBuffer, ProcessGroupTransport, PushPull
from gossip_modules.graph_manager import GraphManager
from gossip_modules.loop.hooks import Observer
from gossip_modules.mixing_manager import MetropolisHastingsMixing, MixingManager, default_mixing
from gossip_modules.rounds.algorithm import Algorithm
from gossip_modules.rounds.driver import Driver
from gossip_modules.rounds.requests import Average, Inner, Mix, Request, RoundLost, Vectors
from gossip_modules.rounds.rounds import Rounds
from gossip_modules.rounds.vector import Vector
from tests.harness.problems import net
from tests.harness.ranks import CPU, TIMEOUT, run_ranks
from tests.library.rounds.test_stacked import examples

NUM_RANKS = 3
COMPOSITIONS = [SlowMo(2, gossip_every=1).over(D2()), GASLoC(2, momentum=0).over(PowerGossip())]
ALGORITHMS = [*{type(a): a for a in examples() if not a.is_plain}.values(), DiLoCo(2, merge=RDA()), *COMPOSITIONS]
"""One of each class, as the codes of messages make no difference here, and a merge."""
TRANSACTIONS = [a for a in ALGORITHMS if not isinstance(a.parts[0], EagerDiLoCo | GASLoC)]
"""The others write vectors before the last reply, and mend them if the round is lost."""


class FailingDriver(Driver):
    """A driver whose answer number `at` ends in `failure`.

    Args:
        algorithm: what a round does.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        super().__init__(algorithm, PushPull())
        self.at, self.failure, self.requests = -1, "", list[Request]()

    def _reply_to(self, request: Request, v: Vectors) -> Any:
        self.requests.append(request)
        failure = self.failure if len(self.requests) == self.at + 1 else ""
        if failure == "connection":
            raise ConnectionError("rank 1 is gone")
        # The answer itself changes the model, or the memory of the inner algorithm.
        is_last = isinstance(request, Inner) or (isinstance(request, Mix | Average) and request.x is v.x)
        reply = None if is_last and failure in ("interrupt", "lost") else super()._reply_to(request, v)
        if failure == "interrupt":
            raise KeyboardInterrupt
        if failure == "lost" and isinstance(request, Average) and request.x is not v.x:
            request.x.parts[0].fill_(float("nan"))  # partial sums
        return RoundLost if failure == "lost" else reply

    def fail(self, at: int, failure: str) -> None:
        """Let the next round fail; "" = let it run."""
        self.at, self.failure, self.requests = at, failure, []


class Rank:
    """A model of one rank that takes steps of SGD, and has rounds.

    Args:
        group: of all ranks.
        algorithm: what a round does.
    """

    def __init__(self, group: dist.ProcessGroup, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.buffer = FlatBuffer(net())
        self.x = self.buffer.vector
        rounds = Rounds(algorithm, PushPull())
        self.driver = FailingDriver(algorithm)
        self.driver.plain = rounds.plain
        rounds.drivers, rounds._times = [self.driver], None  # rounds of fragments are rounds of the whole here
        rounds.bind(mixing_of(algorithm), ProcessGroupTransport(group, device=CPU, timeout=TIMEOUT))
        self.observer = Observer(self.buffer)
        rounds.bind_to_training(self.observer)
        self.engine = SyncEngine(rounds, Schedule())
        momentum = 0.9 if algorithm.needs_sgd else 0.0
        self.optimizer = torch.optim.SGD(self.buffer.parameters, lr=0.1, momentum=momentum)
        self._random = torch.Generator().manual_seed(group.rank())

    def train(self) -> None:
        """A step along a random direction."""
        for parameter in self.buffer.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=self._random)
        self.optimizer.step()

    @property
    def next_step(self) -> int:
        """The number of the next step with a round that sends messages."""
        own = self.algorithm
        return next(k for k in range(self.engine.step, 200) if own.is_due(k) and not own.is_silent(k))

    def round(self) -> None:
        """The next round that sends messages."""
        with torch.no_grad():
            self.engine.step = self.next_step
            self.engine.round(self.x)

    def kept(self) -> list[Any]:
        """Copies of all that must not change."""
        return [
            self.x.raw.clone(),
            self.x.push_sum_weight.clone(),
            copy.deepcopy(self.driver.memory.state_dict()),
        ]


def mixing_of(algorithm: Algorithm) -> MixingManager:
    graph: GraphManager | None = algorithm.default_graph(NUM_RANKS)
    own = algorithm.default_mixing(NUM_RANKS)
    if own is not None:
        return own
    if graph is not None:
        return default_mixing(graph, push_sum=False)
    return MetropolisHastingsMixing(RingGraph(NUM_RANKS, peers_per_itr=2))


def check_equal(one: Any, other: Any) -> None:
    """The same to the bit."""
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            check_equal(value, other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            check_equal(mine, theirs)
    else:
        assert one == other


def on_ranks(algorithm: Algorithm, check: Callable[[Rank, int], None]) -> None:
    """`check(rank, k)` on all ranks for each request k of a round, after three rounds that went well."""

    def body(group: dist.ProcessGroup) -> None:
        at, num_requests = 0, 1
        while at < num_requests:
            rank = Rank(group, algorithm)
            for _ in range(3):
                rank.train()
                rank.driver.fail(-1, "")
                rank.round()
            num_requests = len(rank.driver.requests)
            assert num_requests > 0
            rank.train()
            check(rank, at)
            at += 1
            rank.engine.close()

    run_ranks(NUM_RANKS, body)


@pytest.mark.parametrize("algorithm", TRANSACTIONS, ids=repr)
@pytest.mark.parametrize(
    ("failure", "error"), [("connection", ConnectionError), ("interrupt", KeyboardInterrupt)], ids=["gone", "ctrl-c"]
)
def test_an_answer_that_fails_changes_nothing(algorithm: Algorithm, failure: str, error: type[BaseException]) -> None:
    def check(rank: Rank, at: int) -> None:
        rank.driver.fail(at, failure)
        t, step, before = rank.engine.t, rank.engine.step, rank.kept()
        with pytest.raises(error):
            rank.round()
        check_equal(rank.kept(), before)
        rank.engine.t, rank.engine.step = t, step
        rank.driver.fail(-1, "")
        rank.round()
        with pytest.raises(AssertionError):
            check_equal(rank.kept(), before)
        assert bool(rank.x.raw.view(torch.float32).isfinite().all())

    on_ranks(algorithm, check)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_a_round_that_is_lost_changes_nothing(algorithm: Algorithm) -> None:
    """The next round does not read the partial sums that a lost average leaves."""

    def check(rank: Rank, at: int) -> None:
        rank.driver.fail(at, "lost")
        before = rank.kept()
        rank.round()
        assert rank.driver.has_failed
        if algorithm in TRANSACTIONS:
            check_equal(rank.kept(), before)
        rank.train()
        rank.driver.fail(-1, "")
        rank.round()
        assert not rank.driver.has_failed
        assert bool(rank.x.raw.view(torch.float32).isfinite().all())
        with pytest.raises(AssertionError):
            check_equal(rank.kept(), before)

    on_ranks(algorithm, check)


@pytest.mark.parametrize(
    ("weighted_by", "weights"), [("tokens", (27, 18)), ("num_tokens", (9, 6)), ("num_steps", (3, 2))]
)
@pytest.mark.parametrize("merge", [None, RDA()], ids=["mean", "rda"])
def test_a_rank_whose_reply_is_dropped_keeps_its_count_for_the_next_round(
    weighted_by: Any, weights: tuple[int, int], merge: RDA | None
) -> None:
    """Steps of three tokens: rank 1 has the count of three steps in its next round, the others of two."""

    def body(group: dist.ProcessGroup) -> float:
        rank = Rank(group, DiLoCo(1, weighted_by=weighted_by, merge=merge))
        for number, num_steps in enumerate((1, 2)):
            for _ in range(num_steps):
                rank.train()
                rank.driver.memory.count_tokens(3)
            rank.driver.fail(*((0, "lost") if group.rank() == 1 and number == 0 else (-1, "")))
            rank.round()
        (request,) = rank.driver.requests
        assert isinstance(request, Average)
        rank.engine.close()
        return request.numbers[0]

    late, others = weights
    assert run_ranks(NUM_RANKS, body) == [others, late, others]


@pytest.mark.parametrize("algorithm", TRANSACTIONS, ids=repr)
def test_a_generator_that_is_closed_changes_nothing(algorithm: Algorithm) -> None:
    def check(rank: Rank, at: int) -> None:
        driver = rank.driver
        driver.fail(-1, "interrupt")
        before = rank.kept()
        with torch.no_grad():
            driver.begin_round(Vector.of(rank.x), rank.engine.t, rank.next_step)
            for number in range(at + 1):
                opened = driver.open_round
                assert opened is not None
                request = opened.request
                assert request is not None
                if isinstance(request, Inner) or (isinstance(request, Mix | Average) and request.x is opened.v.x):
                    break  # the end of a round, which its answer writes
                reply = driver.answer(request)
                if number < at:
                    driver.go_on(reply)
            driver.close_round()
        check_equal(rank.kept(), before)

    on_ranks(algorithm, check)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_an_infinity_that_is_refused_changes_nothing(algorithm: Algorithm) -> None:
    def check(rank: Rank, at: int) -> None:
        t, step = rank.engine.t, rank.engine.step
        finite = rank.x.segments[0][0].clone()
        rank.x.segments[0][0] = float("nan")
        before = [x if isinstance(x, dict) else None for x in rank.kept()]
        with pytest.raises(FloatingPointError):
            rank.round()
        check_equal([x if isinstance(x, dict) else None for x in rank.kept()], before)
        rank.x.segments[0][0] = finite
        rank.engine.t, rank.engine.step = t, step
        rank.round()

    on_ranks(algorithm, check)
