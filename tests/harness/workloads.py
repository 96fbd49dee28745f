"""What ranks do to an asynchronous engine in the sanitiser, and what must hold whatever they do."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta

from gossip_modules import BilatGossipDataParallel, GossipDataParallel, GroupAverageDataParallel, PairwiseDataParallel
from gossip_modules.extend import PushPull, PushSum
from gossip_modules.wrappers.base import GossipWrapper
from tests.harness.progress import take_corrections
from tests.harness.ranks_at_work import START, TOLERANCE, Rank


class Workload(ABC):
    """An engine, what its ranks do together, and what must hold then.

    Attributes:
        name: of the engine, on the command line.
        world_sizes: to draw from.
    """

    name: str
    world_sizes: Sequence[int] = (2, 2, 3, 4)
    local: Sequence[Callable[[Rank], None]] = (Rank.evaluate, Rank.save, Rank.copy)

    @abstractmethod
    def open(self, rank: Rank) -> GossipWrapper:
        """Wrap the rank's model."""

    @abstractmethod
    def meet(self, rank: Rank) -> None:
        """What all ranks do together after some steps, and the checks."""

    def live(self, rank: Rank) -> None:
        """From opening to closing."""
        rank.wrapper = self.open(rank)
        try:
            self.work(rank)
        except BaseException as error:
            rank.board.fail(error)  # before the others get errors because of it
            raise
        finally:
            rank.wrapper.close()  # peers of a rank that has failed must not wait for it
        rank.done("closing")
        self.check_hull(rank, rank.module.value())
        rank.board.count("exchanges", int(rank.wrapper.comm_stats()["num_rounds"]))

    def work(self, rank: Rank) -> None:
        """Steps on its own and meetings, until the time is over."""
        rank.gather(None)  # all have opened: a peer that does not listen yet would be missed
        while not any(rank.gather(rank.board.is_over)):
            self.work_alone(rank)
            self.meet(rank)
            rank.done("meeting")

    def work_alone(self, rank: Rank) -> None:
        """From one meeting to the next."""
        for _ in range(rank.draw.randrange(40)):
            action = rank.draw.choice(self.local) if rank.draw.random() < 0.15 else Rank.train
            action(rank)
            rank.done(action.__name__)

    def check_hull(self, rank: Rank, value: float) -> None:
        """Averages of models lie between them, so none is further out than all steps together have gone."""
        others = rank.gather((rank.rising, rank.falling))
        low = START + sum(down for _, down in others)
        high = START + rank.board.world_size - 1 + sum(up for up, _ in others)
        slack = TOLERANCE * (high - low + START)
        assert low - slack <= value <= high + slack, f"got a model of {value}, expected {low} to {high}"


class Collective(Workload):
    """Engines that know a state with nothing in flight anywhere."""

    def meet(self, rank: Rank) -> None:
        """See `Workload`: settle, check, and one thing more that all do together."""
        rank.wrapper.settle()
        rank.done("settling")
        values = rank.gather(rank.module.value())
        mean = sum(values) / len(values)
        self.check(rank, values)
        together = rank.plan.choice((self.average, self.lend, self.measure, self.rewind, self.go_on))
        together(rank, mean)
        rank.added, rank.before = 0.0, rank.gather(rank.module.value())
        rank.done(together.__name__)

    @abstractmethod
    def check(self, rank: Rank, values: Sequence[float]) -> None:
        """What must hold when all have settled on these values."""

    def draw_number(self, rank: Rank) -> int:
        """Of forwards, at a meeting."""
        return rank.draw.randrange(4)

    def average(self, rank: Rank, mean: float) -> None:
        """All ranks take the mean."""
        rank.wrapper.average_()
        assert abs(rank.module.value() - mean) <= TOLERANCE * (1 + abs(mean))

    def lend(self, rank: Rank, mean: float) -> None:
        """All ranks hold the mean for a while, some longer than others."""
        before = rank.module.value()
        with rank.wrapper.averaged():
            for _ in range(self.draw_number(rank)):
                rank.wrapper(1.0)
                assert abs(rank.module.value() - mean) <= TOLERANCE * (1 + abs(mean))
        assert rank.module.value() == before

    def measure(self, rank: Rank, mean: float) -> None:
        """The distance is that of the values."""
        values = rank.gather(rank.module.value())
        expected = (rank.board.length * sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
        got = rank.wrapper.consensus_distance()
        assert abs(got - expected) <= 1e-6 * (1 + expected), f"got {got}, expected {expected}"

    def rewind(self, rank: Rank, mean: float) -> None:
        """All ranks go back to a checkpoint, after a few steps that count for nothing then."""
        state, value = copy.deepcopy(rank.wrapper.state_dict()), rank.module.value()
        for _ in range(self.draw_number(rank)):
            rank.train()
        rank.wrapper.settle()
        rank.gather(None)
        rank.wrapper.load_state_dict(state)
        assert rank.module.value() == value
        rank.gather(None)

    def go_on(self, rank: Rank, mean: float) -> None:
        """Nothing more."""


class Conserving(Collective):
    """Engines that keep the law: the sum over ranks is that of all steps."""

    def check(self, rank: Rank, values: Sequence[float]) -> None:
        """See `Collective`."""
        assert not take_corrections(rank.wrapper), "in flight after settle()"
        expected, got = sum(rank.before) + sum(rank.gather(rank.added)), sum(values)
        assert abs(got - expected) <= TOLERANCE * (1 + abs(expected)), f"got a sum of {got}, expected {expected}"

    def check_hull(self, rank: Rank, value: float) -> None:
        """Corrections are of models some steps ago, so that one may be further out. But none is lost by closing."""
        self.check(rank, rank.gather(value))


class AdPsgd(Conserving):
    """`BilatGossipDataParallel`: ranks that step at their own pace."""

    name = "adpsgd"

    def open(self, rank: Rank) -> GossipWrapper:
        """See `Workload`."""
        return BilatGossipDataParallel(rank.module, process_group=rank.group, init_sync=False, timeout=rank.timeout)


class Osgp(Conserving):
    """`GossipDataParallel(overlap=True)`, in chunks: ranks take equally many steps, and are late within rounds."""

    name = "osgp"
    local = (Rank.evaluate, Rank.save)

    def open(self, rank: Rank) -> GossipWrapper:
        """See `Workload`."""
        kind = rank.plan.choice((PushSum, PushPull))
        return GossipDataParallel(
            rank.module,
            algorithm=kind(chunk_bytes=rank.board.length),  # eight chunks
            push_sum=kind is PushSum,
            overlap=True,
            max_staleness=rank.plan.choice((0, 0, 1, 3)),
            process_group=rank.group,
            init_sync=False,
            timeout=rank.timeout,
        )

    def work_alone(self, rank: Rank) -> None:
        """See `Workload`."""
        for _ in range(rank.plan.randrange(40)):
            if rank.draw.random() < 0.15:
                action = rank.draw.choice(self.local)
                action(rank)
                rank.done(action.__name__)
            rank.train()
            rank.done("train")

    def draw_number(self, rank: Rank) -> int:
        """See `Collective`: each forward is a round of all."""
        return rank.plan.randrange(4)


class Wagma(Collective):
    """`GroupAverageDataParallel`: all ranks end in one round, and no contribution is older than the period."""

    name = "wagma"

    def open(self, rank: Rank) -> GossipWrapper:
        """See `Workload`."""
        rank.period = rank.plan.choice((0, 2, 3, 5))
        return GroupAverageDataParallel(
            rank.module,
            group_size=rank.plan.choice((2, 4)) if rank.board.world_size == 4 else 2,
            sync_period=rank.period,
            process_group=rank.group,
            init_sync=False,
            timeout=rank.timeout,
        )

    def check(self, rank: Rank, values: Sequence[float]) -> None:
        """See `Collective`."""
        rounds = rank.gather(rank.wrapper.round)
        assert len(set(rounds)) == 1, f"ranks have settled in different rounds {rounds}"
        staleness = rank.wrapper.comm_stats()["max_staleness"]
        assert not rank.period or staleness < rank.period, f"got staleness {staleness} with a period of {rank.period}"
        self.check_hull(rank, rank.module.value())


class Dpwa(Workload):
    """`PairwiseDataParallel`: workers that come and go."""

    name = "dpwa"
    world_sizes = (2, 3, 4)

    def __init__(self) -> None:
        self.local = (*Workload.local, self.restart)

    def open(self, rank: Rank) -> GossipWrapper:
        """See `Workload`."""
        wrapper = self._wrap(rank, "tcp://127.0.0.1:*")
        rank.addresses = rank.gather(wrapper.address)
        self._introduce(rank, wrapper)
        return wrapper

    def restart(self, rank: Rank) -> None:
        """Go away and come back at the same address."""
        rank.wrapper.close()
        wrapper = self._wrap(rank, rank.addresses[rank.rank])
        self._introduce(rank, wrapper)
        rank.wrapper = wrapper

    def meet(self, rank: Rank) -> None:
        """See `Workload`: nothing is in flight after a flush, and no model has left the hull."""
        rank.wrapper.flush()
        self.check_hull(rank, rank.module.value())

    def _wrap(self, rank: Rank, address: str) -> PairwiseDataParallel:
        return PairwiseDataParallel(
            rank.module,
            name=f"w{rank.rank}",
            peers={f"w{rank.rank}": address},
            timeout=timedelta(seconds=1),
            seed=rank.board.seed,
            init_from_peers=False,
        )

    def _introduce(self, rank: Rank, wrapper: PairwiseDataParallel) -> None:
        for peer, address in enumerate(rank.addresses):
            if peer != rank.rank:
                wrapper.add_peer(f"w{peer}", address)


WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in (AdPsgd(), Osgp(), Wagma(), Dpwa())}
