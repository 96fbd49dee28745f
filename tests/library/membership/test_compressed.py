"""Compressed gossip goes on without workers that die within a round, and takes others in: what links keep of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules import Choco, PowerGossip, SignNorm, TopK
from gossip_modules.extend import PushPull
from gossip_modules.flat.layout import FlatLayout, TensorSpec
from gossip_modules.membership.links import LinkTransport
from gossip_modules.mixing_manager.base import MixingManager
from gossip_modules.rounds.algorithm import Algorithm
from gossip_modules.rounds.memory import Memory
from gossip_modules.rounds.requests import Mix, Round, Vectors
from gossip_modules.rounds.rounds import Rounds
from tests.library.algorithms.contract import ALGORITHMS, STATIC, vector_of
from tests.library.algorithms.test_choco import top
from tests.library.algorithms.test_compressed import RESIDUES, rounds_of
from tests.library.membership.scripted import Ended, ScriptedWorker, mixing_of, run_workers
from tests.library.membership.test_membership import Job, close

SMALL = FlatLayout.of([(torch.float64, [TensorSpec((3, 4)), TensorSpec((5,))])])


Make = Callable[[], Algorithm | PushPull]


class Worker(ScriptedWorker):
    """A vector, and the rounds of an algorithm."""

    def __init__(self, name: int, store: dist.Store, made: Algorithm | PushPull, layout: FlatLayout) -> None:
        super().__init__(name, store)
        self.gossiper = Rounds(made.for_membership(), PushPull()) if isinstance(made, Algorithm) else made
        self.s = vector_of(name, layout)
        self.seen: dict[int, Tensor] = {}  # the vector after each round

    def turn_to(self, mixing: MixingManager, transport: LinkTransport, *, is_first: bool) -> None:
        (self.gossiper.bind if is_first else self.gossiper.rebind)(mixing, transport)

    def rounds(self, *ts: int, late: bool = False) -> None:
        for t in ts:
            if late:
                correction = self.s.clone()
                self.gossiper.start(correction, t)
                self.s.add_(correction, alpha=self.gossiper.difference(correction))
            else:
                self.gossiper.mix(self.s, t)
            self.seen[t] = self.s.segments[0].clone()


def run_gossip(bodies: Sequence[Callable[[Worker], Any]], make: Make, layout: FlatLayout) -> Any:
    """Each body in a thread of its own, on the worker of its index; the workers."""
    return run_workers(bodies, lambda name, store: Worker(name, store, make(), layout))


# How a worker dies in a round.


def before(worker: Worker, t: int) -> None:
    raise Ended


def between(worker: Worker, t: int) -> None:
    """Its headers have come and gone, and its messages have not."""
    assert isinstance(worker.gossiper, Rounds)
    messages = worker.gossiper.drivers[0].messages

    def post_headers(checksums: Mapping[int, int]) -> None:
        type(messages).post_headers(messages, checksums)
        messages.message_check.arrive(messages.transport)
        raise Ended

    messages.post_headers = post_headers  # type: ignore[method-assign]
    worker.gossiper.mix(worker.s, t)


def posted(worker: Worker, t: int) -> None:
    """Its messages are on their way."""
    if isinstance(worker.gossiper, Rounds):
        worker.gossiper.drivers[0].messages.wait = hang_up  # type: ignore[method-assign]
        with contextlib.suppress(Ended):
            worker.gossiper.mix(worker.s, t)
    else:
        worker.gossiper.start(worker.s, t)
    assert worker.transport is not None
    for peer in (0, 2):  # what is posted would keep the connections open
        worker.transport.break_link(peer)
    raise Ended


def hang_up() -> None:
    raise Ended


def four_three_four(die: Callable[[Worker, int], None], *, late: bool = False, last: int = 31) -> list[Any]:
    """Workers 0 to 3, of which 1 dies in round 3; from round 5 on without it; from round 9 on with 4."""

    def survivor(worker: Worker) -> None:
        worker.begin(1, [0, 1, 2, 3])
        worker.rounds(*range(5), late=late)
        worker.begin(2, [0, 2, 3])
        worker.rounds(*range(5, 9), late=late)
        worker.begin(3, [0, 2, 3, 4])
        worker.rounds(*range(9, last), late=late)

    def dying(worker: Worker) -> None:
        worker.begin(1, [0, 1, 2, 3])
        worker.rounds(*range(3), late=late)
        die(worker, 3)

    def newcomer(worker: Worker) -> None:
        worker.begin(3, [0, 2, 3, 4])
        worker.rounds(*range(9, last), late=late)

    return [survivor, dying, survivor, survivor, newcomer]


CASES = [
    ("Choco SignNorm", between, False),
    ("Choco TopK", posted, True),
    ("PowerGossip rank 2, twice", between, True),
    ("PowerGossip cold", posted, False),
    ("PowerGossip", before, True),
    ("DeepSqueeze SignNorm", between, False),
    ("Moniqua", between, True),
    ("Sparta", posted, True),
    ("bfloat16", posted, False),
    ("bfloat16 deltas", posted, True),
]


@pytest.mark.parametrize(("name", "die", "late"), CASES)
def test_four_three_four_workers_keep_their_mean_and_come_to_agree(
    name: str, die: Callable[[Worker, int], None], late: bool
) -> None:
    make = ALGORITHMS.get(name, lambda: PushPull(wire_dtype=torch.bfloat16, deltas="deltas" in name))
    workers = run_gossip(four_three_four(die, late=late), make, SMALL)
    survivors, all_four = [workers[k] for k in (0, 2, 3)], [workers[k] for k in (0, 2, 3, 4)]
    for group, first, last in ((survivors, 3, 8), (all_four, 9, 30)):
        mean = torch.stack([worker.seen[first] for worker in group]).mean(0)
        for t in range(first, last + 1):
            now = torch.stack([worker.seen[t] for worker in group]).mean(0)
            torch.testing.assert_close(now, mean, rtol=0, atol=1e-12)
    kept = torch.stack([*(worker.seen[8] for worker in survivors), vector_of(4, SMALL).segments[0]]).mean(0)
    end = torch.stack([worker.seen[30] for worker in all_four])
    torch.testing.assert_close(end.mean(0), kept, rtol=0, atol=1e-12)
    start = torch.stack([vector_of(k, SMALL).segments[0] for k in (0, 2, 3, 4)])
    spread = [float((x - x.mean(0)).norm()) for x in (start, end)]
    assert spread[1] < RESIDUES.get(name, 0.2) * spread[0]


@pytest.mark.parametrize("make", [ALGORITHMS["Choco TopK"], PowerGossip], ids=["Choco", "PowerGossip"])
def test_a_link_is_kept_where_both_ends_have_the_same_and_else_begins_anew(
    make: Make,
) -> None:
    """Worker 0 applies a message of 1 in round 2 which does not apply that of 0, and both live."""
    ages: dict[int, dict[int, int]] = {}

    def body(worker: Worker) -> None:
        worker.begin(1, [0, 1, 2])
        worker.rounds(0, 1)
        assert isinstance(worker.gossiper, Rounds)
        messages = worker.gossiper.drivers[0].messages

        def wait() -> None:
            messages._lost.add(0)  # as if the wait had ended before the message came
            type(messages).wait(messages)

        if worker.name == 1:
            messages.wait = wait  # type: ignore[method-assign]
        worker.rounds(2)
        messages.__dict__.pop("wait", None)
        worker.begin(2, [2, 0, 1])  # in another order
        worker.rounds(3, 4)
        peers = [k for k in range(3) if k != messages.transport.rank]
        ages[worker.name] = {(2, 0, 1)[k]: messages.message_check.numbers.get(k, 0) for k in peers}
        worker.rounds(5, 6)

    run_gossip([body] * 3, make, SMALL)
    assert ages == {0: {1: 2, 2: 5}, 1: {0: 2, 2: 5}, 2: {0: 5, 1: 5}}


def top_choco() -> Choco:
    return Choco(TopK(0.3), step_size=0.3)


def test_choco_is_that_of_the_paper_on_every_link() -> None:
    """Each end of a link has two public copies for it, zero when it begins; those of the dead leave with it."""
    workers = run_gossip(four_three_four(before, last=14), top_choco, SMALL)
    x = {k: vector_of(k, SMALL).segments[0] for k in range(5)}
    public: dict[tuple[int, int], Tensor] = {}  # of the first, as the second knows it
    for t in range(14):
        members = [0, 1, 2, 3] if t < 5 else [0, 2, 3] if t < 9 else [0, 2, 3, 4]
        W = mixing_of(len(members)).matrix(0)
        live = [k for k in members if t < 3 or k != 1]
        weights = {(i, j): float(W[members.index(i), members.index(j)]) for i in live for j in live if i != j}
        weights = {edge: weight for edge, weight in weights.items() if weight}
        public = {edge: public.get(edge, torch.zeros_like(x[0])) for edge in weights}
        public = {(i, j): copy + top(x[i] - copy) for (i, j), copy in public.items()}
        step = {k: torch.zeros_like(x[k]) for k in live}
        for (i, j), weight in weights.items():
            step[i] += 0.3 * weight * (public[j, i] - public[i, j])
        for k in live:
            x[k] = x[k] + step[k]
            torch.testing.assert_close(workers[k].seen[t], x[k], rtol=0, atol=1e-12)


def test_while_no_worker_leaves_choco_is_the_same() -> None:
    rounds = [rounds_of(make, STATIC["star"], 8, SMALL) for make in (top_choco, top_choco().for_membership)]
    for plain, elastic in zip(*rounds, strict=True):
        torch.testing.assert_close(elastic, plain, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"algorithm": Choco(SignNorm(), step_size=0.4), "overlap": True}, id="Choco, overlapped"),
        pytest.param({"algorithm": PowerGossip()}, id="PowerGossip"),
    ],
)
def test_wrappers_lose_a_worker_and_take_one_in(options: dict[str, Any]) -> None:
    job = Job(dist.HashStore(), min_workers=3, **options)
    founders = job.start(3)
    job.until_live(founders)
    founders[0].is_killed.set()
    job.until_live(founders[1:])
    newcomer, *_ = job.start(1, seed=1)
    job.until_live([*founders[1:], newcomer])
    before = min(worker.step for worker in job.workers[1:])
    job.until(lambda: min(worker.step for worker in job.workers[1:]) > before + 20, "rounds go on")
    alive = job.end()
    assert len(alive) == 3
    with ThreadPoolExecutor(3) as pool:
        distances = list(pool.map(lambda worker: worker.wrapper.consensus_distance(), alive))
    assert max(distances) < 1.0
    close(alive)


def test_a_choco_of_ones_own_is_refused() -> None:
    class Half(Choco):
        def round(self, v: Vectors, m: Memory, k: int) -> Round:
            yield Mix(v.x)

    with pytest.raises(ValueError, match="got a Half with a membership, expected a Choco, since the base class has"):
        Half(TopK(0.3), step_size=0.3).for_membership()


def test_checkpoints_have_nothing_of_links_to_peers_that_may_fail() -> None:
    """Nor does a checkpoint of a job without a membership, whose public copies are of no use, change that."""
    state: dict[int, Any] = {}

    def body(worker: Worker) -> None:
        worker.begin(1, [0, 1])
        worker.rounds(0, 1)
        assert isinstance(worker.gossiper, Rounds)
        state[worker.name] = worker.gossiper.state_dict()
        worker.gossiper.load_state_dict(
            {"algorithm": "Choco", "memory": {"vectors": {"public": [torch.ones(17)]}, "num_rounds": 2}}
        )
        assert "vectors" not in worker.gossiper.state_dict()["memory"]
        worker.begin(2, [0, 1])
        worker.rounds(2, 3)
        assert worker.gossiper.drivers[0].messages.message_check.numbers[1 - worker.name] == 2

    run_gossip([body] * 2, top_choco, SMALL)
    for each in state.values():
        assert (each["algorithm"], each["memory"], each["messages"]) == ("Choco", {"num_rounds": 2}, {})
