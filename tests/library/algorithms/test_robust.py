"""ClippedGossip and the trimmed mean compute their laws, and keep wrong models of neighbours out."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gossip_modules import ClippedGossip, GossipDataParallel, RingGraph, TrimmedMean
from gossip_modules.algorithms.d_psgd import DPSGD
from gossip_modules.algorithms.trimmed_mean import without_extremes
from gossip_modules.extend import Algorithm, FlatBuffer, PushPull
from gossip_modules.graph_manager import CompleteGraph, DynamicBipartiteExponentialGraph, GraphManager
from gossip_modules.lab import Digits
from gossip_modules.mixing_manager import MetropolisHastingsMixing, MixingManager
from gossip_modules.rounds import message_rounds
from gossip_modules.rounds.messages import MessageBuffer
from gossip_modules.rounds.rounds import Rounds
from gossip_modules.rounds.stacked import Stacked
from tests.harness.ranks import run_ranks

Array = npt.NDArray[np.float64]
Oracle = Callable[[Array, MixingManager, int], Array]
N, D = 6, 7


def clipped(radius: float) -> Oracle:
    """The matrix of models after a round of ClippedGossip, as its formula says."""

    def after(x: Array, mixing: MixingManager, t: int) -> Array:
        w, new = mixing.matrix(t).double().numpy(), x.copy()
        for i in range(len(x)):
            for j in range(len(x)):
                if i != j and w[i, j]:
                    length = np.linalg.norm(x[j] - x[i])
                    new[i] += w[i, j] * min(1.0, radius / length) * (x[j] - x[i])
        return new

    return after


def trimmed(share: float) -> Oracle:
    """The matrix of models after a round of the trimmed mean: equal weights for each value that is not left out."""

    def after(x: Array, mixing: MixingManager, t: int) -> Array:
        w, new = mixing.matrix(t).double().numpy(), x.copy()
        for i in range(len(x)):
            values = np.sort(x[[j for j in range(len(x)) if i != j and w[i, j]]], axis=0)
            b = math.floor(share * len(values) + 1e-9)
            new[i] = np.concatenate([x[i : i + 1], values[b : len(values) - b]]).mean(0)
        return new

    return after


LAWS: dict[str, tuple[Algorithm, GraphManager, Oracle]] = {
    "clipped, ring": (ClippedGossip(1.5), RingGraph(N, peers_per_itr=2), clipped(1.5)),
    "clipped, pairs": (ClippedGossip(2.0), DynamicBipartiteExponentialGraph(N), clipped(2.0)),
    "trimmed, all": (TrimmedMean(0.2), CompleteGraph(N, peers_per_itr=N - 1), trimmed(0.2)),
    "trimmed, all but one": (TrimmedMean(0.4), CompleteGraph(N, peers_per_itr=N - 1), trimmed(0.4)),
    "trimmed, ring": (TrimmedMean(0.3), RingGraph(N, peers_per_itr=2), trimmed(0.3)),
}


def start(seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((N, D))


def by_lab(algorithm: Algorithm, mixing: MixingManager, x: Array, num_rounds: int, *, overlap: bool = False) -> Array:
    models, driver = torch.from_numpy(x.copy()), Stacked(algorithm, mixing, overlap=overlap)
    for k in range(num_rounds):
        driver.step(models, k)
    driver.settle(models)
    return models.numpy()


def by_threads(
    algorithm: Algorithm, graph: GraphManager, x: Array, num_rounds: int, *, dtype: torch.dtype = torch.float64
) -> Array:
    def body(group: dist.ProcessGroup) -> Array:
        module = nn.Linear(x.shape[1], 1, bias=False).to(dtype)
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(x[group.rank()]))
        options: dict[str, Any] = {"graph": graph, "on_nonfinite": "spread", "init_sync": False}
        model = GossipDataParallel(module, process_group=group, algorithm=algorithm, **options)
        for _ in range(num_rounds):
            model(torch.ones(1, x.shape[1], dtype=dtype))
        model.flush()
        found = module.weight.detach()[0].double().numpy().copy()
        model.close()
        return found

    return np.stack(run_ranks(len(x), body))


@pytest.mark.parametrize("name", LAWS)
def test_ranks_and_the_lab_are_the_law(name: str) -> None:
    algorithm, graph, oracle = LAWS[name]
    mixing, expected = MetropolisHastingsMixing(graph), start()
    for t in range(5):
        expected = oracle(expected, mixing, t)
    np.testing.assert_allclose(by_lab(algorithm, mixing, start(), 5), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(by_lab(algorithm, mixing, start(), 5, overlap=True), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(by_threads(algorithm, graph, start(), 5), expected, rtol=0, atol=1e-12)


def test_clipped_gossip_moves_a_rank_by_the_radius_of_a_far_neighbour_at_most() -> None:
    """Rank 0 sees 1 and 30: 0 + (1 + 1) / 3. Rank 3 sees 2 and 0: 30 - (1 + 1) / 3. The others keep balanced."""
    graph = RingGraph(4, peers_per_itr=2)
    x = np.array([[0.0], [1.0], [2.0], [30.0]])
    expected = [[2 / 3], [1.0], [2.0], [29 + 1 / 3]]
    np.testing.assert_allclose(by_lab(ClippedGossip(1.0), MetropolisHastingsMixing(graph), x, 1), expected, atol=1e-12)
    np.testing.assert_allclose(by_threads(ClippedGossip(1.0), graph, x, 1), expected, atol=1e-12)


def test_clipped_gossip_keeps_the_mean_and_is_d_psgd_with_an_infinite_radius() -> None:
    mixing = MetropolisHastingsMixing(RingGraph(N, peers_per_itr=2))
    found = by_lab(ClippedGossip(0.3), mixing, start(), 9)
    np.testing.assert_allclose(found.mean(0), start().mean(0), rtol=0, atol=1e-12)
    plain = by_lab(DPSGD(), mixing, start(), 9)
    np.testing.assert_allclose(by_lab(ClippedGossip(math.inf), mixing, start(), 9), plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LAWS)
def test_narrow_models_travel_as_they_are_and_are_rounded_once(name: str) -> None:
    algorithm, graph, oracle = LAWS[name]
    x = torch.from_numpy(start()).bfloat16().double().numpy()
    found = by_threads(algorithm, graph, x, 1, dtype=torch.bfloat16)
    expected = torch.from_numpy(oracle(x, MetropolisHastingsMixing(graph), 0)).bfloat16().double().numpy()
    np.testing.assert_allclose(found, expected, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("name", LAWS)
def test_a_model_that_is_not_finite_is_left_out_and_named_once(
    name: str, wrong: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 2 sends infinities or NaN: all others are finite after four rounds, and its peers name it."""
    algorithm, graph, _ = LAWS[name]
    x = start()
    x[2, 3] = wrong
    with caplog.at_level(logging.WARNING, logger="gossip_modules.nonfinite"):
        found = by_threads(algorithm, graph, x, 4)
    assert np.isfinite(np.delete(found, 2, axis=0)).all()
    told = [record.getMessage() for record in caplog.records if record.name == "gossip_modules.nonfinite"]
    assert told
    assert all("the model of rank 2 in round" in text for text in told)
    assert len(told) == len({text.partition(":")[0] for text in told}), "a rank names it once"


class Statistics(nn.Module):
    """A weight, and a buffer that each rank has a value of its own in."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), float(rank)))
        self.register_buffer("running", torch.full((3,), float(rank) if rank != 2 else math.nan))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", LAWS)
def test_buffers_of_neighbours_stay_out(name: str, overlap: bool) -> None:
    algorithm, graph, _ = LAWS[name]

    def body(group: dist.ProcessGroup) -> tuple[float, float]:
        module, rank = Statistics(group.rank()), float(group.rank())
        options: dict[str, Any] = {"graph": graph, "on_nonfinite": "spread", "init_sync": False, "overlap": overlap}
        model = GossipDataParallel(module, process_group=group, algorithm=algorithm, **options)
        for _ in range(3):
            model(torch.ones(3))
        model.flush()
        model.close()
        assert isinstance(module.running, Tensor)
        return float(module.running[0]) - rank, float(module.weight.detach()[0]) - rank

    for rank, (of_buffer, of_weight) in enumerate(run_ranks(N, body)):
        assert math.isnan(of_buffer) if rank == 2 else of_buffer == 0.0
        assert of_weight != 0.0 or 0 < rank < N - 1, "differences to both neighbours of a ring cancel but at its ends"


class Echo:
    """A transport between two ranks, of which the other sends each message back, or fails."""

    rank, world_size, names, device, is_elastic = 0, 2, (0, 1), torch.device("cpu"), False

    def __init__(self) -> None:
        self.lost: frozenset[int] = frozenset()

    def exchange(self, sends: Any, recvs: Any, **_: Any) -> Echo:
        for peer, tensors in sends.items():
            for x, y in zip(tensors, recvs[peer], strict=True):
                y.copy_(x)
        return self

    def wait(self) -> None:
        """Return at once."""


@pytest.mark.parametrize(("m", "b"), [(1, 0), (2, 1), (3, 1), (5, 2), (6, 1), (7, 3), (12, 5)])
def test_extremes_of_each_entry_are_left_out(m: int, b: int) -> None:
    """Also with equal values; the tensors stay as they are."""
    draw = torch.Generator().manual_seed(m)
    given = [torch.randint(-3, 4, (1000,), generator=draw).double() for _ in range(m)]
    copies = [x.clone() for x in given]
    kept = without_extremes(list(given), b)
    assert len(kept) == m - 2 * b
    if kept:
        expected = torch.stack(given).sort(0).values[b : m - b]
        torch.testing.assert_close(torch.stack(kept).sort(0).values, expected, rtol=0, atol=0)
    assert all(map(torch.equal, given, copies))


@pytest.mark.parametrize("algorithm", [ClippedGossip(1.0), TrimmedMean(0.3)], ids=repr)
def test_messages_keep_their_memory_unless_a_peer_may_still_write(
    algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The own message and one reply are made in the first round, and in the round after one in which a peer failed."""
    made = list[Any]()

    def counted(*args: Any) -> MessageBuffer:
        made.append(args)
        return MessageBuffer(*args)

    monkeypatch.setattr(message_rounds, "MessageBuffer", counted)
    vector, echo = FlatBuffer(nn.Linear(3, 2)).vector, Echo()
    rounds = Rounds(algorithm, PushPull())
    rounds.bind(MetropolisHastingsMixing(RingGraph(2)), echo)  # type: ignore[arg-type]
    counts = list[int]()
    for t in range(5):
        echo.lost = frozenset({1}) if t == 2 else frozenset()
        rounds.mix(vector, t)
        counts.append(len(made))
    assert counts == [2, 2, 2, 4, 4]


# Training with a rank that lies.

LIAR, NUM_WORKERS, NUM_STEPS, LR = 3, 8, 80, 0.5
LIES: dict[str, Callable[[Tensor], object]] = {
    "x -5": lambda x: x.mul_(-5.0),
    "noise": lambda x: x.add_(torch.randn(x.shape, generator=torch.Generator().manual_seed(1)), alpha=10.0),
    "NaN": lambda x: x.fill_(math.nan),
}


def lying(algorithm: Algorithm, lie: Callable[[Tensor], object]) -> Algorithm:
    """The same algorithm, but for one rank, which sends a lie."""

    class Lying(type(algorithm)):  # type: ignore[misc]
        def round(self, v: Any, m: Any, k: int) -> Any:
            honest = super().round(v, m, k)
            request = next(honest)
            if v.rank == LIAR:
                for field in request.message.fields:
                    lie(field)
            reply = yield request
            with contextlib.suppress(StopIteration):
                honest.send(reply)

    return Lying(**{field.name: getattr(algorithm, field.name) for field in fields(algorithm)})


@lru_cache
def digits() -> Digits:
    return Digits(batch_size=32)


@lru_cache
def accuracy(algorithm: Algorithm, lie: str = "") -> float:
    """The share of digits that the worst honest worker knows after training with all as neighbours."""
    graph = CompleteGraph(NUM_WORKERS, peers_per_itr=NUM_WORKERS - 1)
    chosen = lying(algorithm, LIES[lie]) if lie else algorithm
    driver, task = Stacked(chosen, MetropolisHastingsMixing(graph)), digits()
    x = torch.zeros(NUM_WORKERS, task.images.shape[1] * 10)
    for k in range(NUM_STEPS):
        driver.step(x, k)
        images, labels = task.batches(NUM_WORKERS, k, 0)
        w = x.view(NUM_WORKERS, -1, 10).clone().requires_grad_()
        loss = cross_entropy((images @ w).flatten(0, 1), labels.flatten(), reduction="sum") / images.shape[1]
        (gradient,) = torch.autograd.grad(loss, w)
        x -= LR * gradient.flatten(1)
    honest = [rank for rank in range(NUM_WORKERS) if rank != LIAR]
    scores = task.images @ x.view(NUM_WORKERS, -1, 10)[honest]
    return min(float((score.argmax(1) == task.labels).float().mean()) for score in scores)


ROBUST = [ClippedGossip(0.05), TrimmedMean(0.3)]


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("algorithm", ROBUST, ids=repr)
def test_training_beside_a_rank_that_lies_is_within_a_point_of_training_without(algorithm: Algorithm, lie: str) -> None:
    plain, best = ClippedGossip(math.inf), accuracy(DPSGD())
    assert best > 0.8
    assert accuracy(algorithm) > best - 0.01
    assert accuracy(algorithm, lie) > best - 0.01
    if lie != "NaN":  # which an infinite radius leaves out, too
        assert accuracy(plain, lie) < best - 0.05


@pytest.mark.parametrize("radius", [0.0, -1.0, math.nan, True, "1"])
def test_a_radius_is_a_positive_number(radius: Any) -> None:
    with pytest.raises(ValueError, match=r"got radius=.*, expected a positive number"):
        ClippedGossip(radius)


@pytest.mark.parametrize("share", [-0.1, 0.5, math.nan, True, "1"])
def test_a_share_is_below_a_half(share: Any) -> None:
    with pytest.raises(ValueError, match=r"got share=.*, expected 0 <= share < 1/2"):
        TrimmedMean(share)


def test_a_rank_tells_once_that_it_leaves_out_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="gossip_modules.robust"):
        by_threads(TrimmedMean(0.3), RingGraph(4, peers_per_itr=2), start()[:4], 3)
        by_threads(TrimmedMean(0.3), CompleteGraph(5, peers_per_itr=4), start()[:5], 3)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 4
    assert "TrimmedMean(share=0.3) leaves out none of 2 neighbours" in told[0]
    assert "at least 4 neighbours" in told[0]


def test_a_rank_without_a_finite_neighbour_does_not_tell_of_neighbours(caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0 of two hears NaN only: nobody is left that may move it."""
    x = start()[:2]
    x[1] = math.nan
    with caplog.at_level(logging.WARNING, logger="gossip_modules.robust"):
        found = by_lab(TrimmedMean(0.3), MetropolisHastingsMixing(RingGraph(2)), x, 2)
    np.testing.assert_array_equal(found[0], x[0])
    told = [record.getMessage() for record in caplog.records if record.name == "gossip_modules.robust"]
    assert not [text for text in told if text.startswith("rank 0:")]


def test_two_wrong_neighbours_of_seven_leave_each_entry_in_the_range_of_the_others() -> None:
    """b = 2 of 7: ranks 0 and 1 send numbers that no honest rank has, of both signs."""
    x = np.random.default_rng(1).standard_normal((8, D))
    x[0], x[1] = 1e6, -1e6
    graph = CompleteGraph(8, peers_per_itr=7)
    honest = by_lab(TrimmedMean(0.3), MetropolisHastingsMixing(graph), x, 1)[2:]
    assert (honest <= x[2:].max(0)).all()
    assert (honest >= x[2:].min(0)).all()
