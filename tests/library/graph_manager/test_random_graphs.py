"""Graphs drawn from a seed: rounds follow their law, contract as theory says, and are the same on all ranks."""

from __future__ import annotations

import copy
import doctest
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, product

import numpy as np
import numpy.typing as npt
import pytest

from gossip_modules.graph_manager import (
    EquiDynGraph,
    EquiStaticGraph,
    RandomGraph,
    RandomMatchingGraph,
    RandomPushGraph,
    StaticExponentialGraph,
    random_graphs,
)
from gossip_modules.graph_manager.random_graphs import distinct_below, random_bits
from gossip_modules.mixing_manager import UniformMixing, default_mixing

Matrix = npt.NDArray[np.float64]
Peers = tuple[tuple[int, ...], ...]
"""The out-peers of each rank in one round."""

KINDS: dict[str, Callable[[int, int], RandomGraph]] = {
    "matching": lambda n, seed: RandomMatchingGraph(n, seed=seed),
    "equi-dyn": lambda n, seed: EquiDynGraph(n, seed=seed),
    "equi-dyn, 2 peers": lambda n, seed: EquiDynGraph(n, 2, seed=seed),
    "equi-dyn, undirected": lambda n, seed: EquiDynGraph(n, directed=False, seed=seed),
    "push": lambda n, seed: RandomPushGraph(n, seed=seed),
    "push, 2 peers": lambda n, seed: RandomPushGraph(n, 2, seed=seed),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def matrix(graph: RandomGraph, t: int) -> Matrix:
    return np.asarray(default_mixing(graph, push_sum=not graph.is_symmetric).matrix(t))


# All rounds of a law, as likely one as the other, the long way round.


def matchings(ranks: tuple[int, ...]) -> Iterator[dict[int, int]]:
    """All matchings that leave at most one rank alone."""
    if len(ranks) < 2:
        yield {}
        return
    first, *others = ranks
    for peer in others:
        rest = tuple(rank for rank in others if rank != peer)
        yield from ({first: peer, peer: first, **pairs} for pairs in matchings(rest))
    if len(ranks) % 2:
        yield from matchings(tuple(others))


def walk(n: int, shift: int, start: int) -> dict[int, int]:
    """The undirected round of the paper, rank by rank."""
    pairs: dict[int, int] = {}
    for i in range(start, start + n):
        one, other = i % n, (i + shift) % n
        if one not in pairs and other not in pairs:
            pairs |= {one: other, other: one}
    return pairs


def as_peers(pairs: dict[int, int], n: int) -> Peers:
    return tuple((pairs[rank],) if rank in pairs else () for rank in range(n))


def law(kind: str, n: int) -> list[Peers]:
    num_peers = 2 if "2 peers" in kind else 1
    if kind == "matching":
        return [as_peers(pairs, n) for pairs in matchings(tuple(range(n)))]
    if kind == "equi-dyn, undirected":
        return [as_peers(walk(n, shift, start), n) for shift in range(1, n) for start in range(n)]
    if kind.startswith("equi-dyn"):
        sets = combinations(range(1, n), num_peers)
        return [tuple(tuple((rank + shift) % n for shift in shifts) for rank in range(n)) for shifts in sets]
    choices = [combinations([peer for peer in range(n) if peer != rank], num_peers) for rank in range(n)]
    return list(product(*choices))


def mixed(peers: Peers, num_peers: int) -> Matrix:
    """W of a round: a rank gives the same share to each peer and to itself, or keeps all."""
    n = len(peers)
    W = np.zeros((n, n))
    for rank, row in enumerate(peers):
        W[list(row), rank] = 1 / (num_peers + 1)
        W[rank, rank] = 1 - len(row) / (num_peers + 1)
    return W


def largest_eigenvalue(gram: Matrix) -> float:
    """On vectors that sum to zero."""
    n = len(gram)
    away = np.eye(n) - 1 / n
    return float(np.linalg.eigvalsh(away @ gram @ away)[-1])


@pytest.mark.parametrize(
    ("kind", "n"), [(kind, n) for kind in KINDS for n in range(3, 5 if kind.startswith("push") else 8)]
)
def test_rho_is_the_expectation_over_all_rounds_of_the_law(kind: str, n: int) -> None:
    graph = KINDS[kind](n, 0)
    rounds = [mixed(peers, graph.num_peers(0)) for peers in law(kind, n)]
    expected = largest_eigenvalue(np.mean([W.T @ W for W in rounds], axis=0))
    assert graph.rho == pytest.approx(expected, abs=1e-12)


def test_rho_is_that_of_the_published_figures() -> None:
    for kind in ("matching", "equi-dyn"):
        rhos = [KINDS[kind](n, 0).rho for n in (8, 16, 32)]
        assert rhos == pytest.approx([0.4286, 0.4667, 0.4839], abs=5e-5)
        assert [KINDS[kind](n, 0).rho for n in (2, 1)] == [0, 0]


@pytest.mark.parametrize(("kind", "n"), [(kind, 4) for kind in KINDS] + [("matching", 6), ("equi-dyn, undirected", 6)])
def test_rounds_are_as_likely_as_the_law_says(kind: str, n: int) -> None:
    """Pearson's statistic has the mean m - 1 and the variance 2 (m - 1) for m rounds."""
    graph, num_rounds = KINDS[kind](n, 11), 1000
    expected = Counter(tuple(map(frozenset, peers)) for peers in law(kind, n))
    drawn = Counter(tuple(frozenset(graph.out_peers(rank, t)) for rank in range(n)) for t in range(num_rounds))
    assert set(drawn) <= set(expected)
    total, degrees = sum(expected.values()), len(expected) - 1
    means = {peers: num_rounds * count / total for peers, count in expected.items()}
    statistic = sum((drawn[peers] - mean) ** 2 / mean for peers, mean in means.items())
    assert abs(statistic - degrees) < 4 * np.sqrt(2 * degrees)


@EVERY_KIND
def test_three_rounds_contract_by_rho_cubed(kind: str) -> None:
    """Random starts that sum to zero, over seeds and rounds; the undirected EquiDyn's rho is for the worst start."""
    ratios = []
    for seed in range(4):
        graph = KINDS[kind](8, seed)
        x = np.random.default_rng(seed).normal(size=(8, 5))
        x -= x.mean(axis=0)
        for t in range(0, 120, 3):
            y = matrix(graph, t + 2) @ matrix(graph, t + 1) @ matrix(graph, t) @ x
            ratios.append((y**2).sum() / (x**2).sum())
    if kind == "equi-dyn, undirected":
        assert 0.6 * graph.rho**3 < np.mean(ratios) < graph.rho**3
    else:
        assert np.mean(ratios) == pytest.approx(graph.rho**3, rel=0.12)


@EVERY_KIND
def test_the_same_rounds_in_any_order_copy_and_thread(kind: str) -> None:
    rounds = [*range(30), 10**6, 2**40]

    def draw(graph: RandomGraph, order: list[int]) -> dict[int, Peers]:
        return {t: tuple(graph.out_peers(rank, t) + graph.in_peers(rank, t) for rank in range(7)) for t in order}

    graph = KINDS[kind](7, 5)
    expected = draw(graph, rounds)
    np.random.seed(3)  # noqa: NPY002 (what other code does to the global generators must not matter)
    for copied in (KINDS[kind](7, 5), copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):  # noqa: S301
        assert repr(copied) == repr(graph)
        assert draw(copied, rounds[::-1]) == expected
    with ThreadPoolExecutor(4) as pool:  # one graph, as a training thread and a gossip thread share it
        assert all(drawn == expected for drawn in pool.map(lambda _: draw(graph, rounds), range(4)))
    assert draw(KINDS[kind](7, 6), rounds) != expected


@EVERY_KIND
def test_random_rounds_have_no_period_and_are_never_scanned(kind: str) -> None:
    graph = KINDS[kind](6, 0)
    assert (graph.period, graph.is_dynamic, graph.canonical_round(7)) == (0, True, 7)
    assert not graph.in_every_round(lambda t: pytest.fail("looked at a round"))
    assert list(graph.phone_book(2)) == [0, 1, 3, 4, 5]
    mixing = default_mixing(graph, push_sum=True)
    assert mixing.is_column_stochastic
    assert mixing.is_doubly_stochastic == (not kind.startswith("push"))
    assert mixing.is_symmetric == (kind in ("matching", "equi-dyn, undirected"))
    with pytest.raises(ValueError, match=r"a schedule of period 0, expected at least one round. Give num_rounds"):
        mixing.spectral_gap()
    assert 0 < mixing.spectral_gap(num_rounds=50) < 1


@pytest.mark.parametrize("n", [10**6, 999_983])
def test_a_query_among_a_million_ranks_takes_little(n: int) -> None:
    """Both ends of a link name each other; only for the senders of a push all ranks are drawn."""
    for kind in KINDS:
        graph = KINDS[kind](n, 1)
        for rank in (0, 1, n // 2, n - 1):
            (*peers,) = graph.out_peers(rank, 123_456_789)
            assert len(peers) == graph.out_degree(rank, 123_456_789)
            for peer in peers:
                assert peer != rank
                assert kind.startswith("push") or rank in graph.in_peers(peer, 123_456_789)
        assert len(graph.phone_book(n // 2)) == n - 1


@pytest.mark.parametrize("n", [2, 3, 8, 41])
def test_a_partner_alone_is_that_of_the_whole_round(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    together, alone = RandomMatchingGraph(n, seed=4), RandomMatchingGraph(n, seed=4)
    expected = [[together.out_peers(rank, t) for rank in range(n)] for t in range(3)]
    monkeypatch.setattr(random_graphs, "_MAX_KEPT_RANKS", 0)
    assert [[alone.out_peers(rank, t) for rank in range(n)] for t in range(3)] == expected
    with pytest.raises(ValueError, match="got round t=-1"):
        alone.out_peers(0, -1)


@pytest.mark.parametrize("num_peers", [1, 3])
def test_the_targets_of_a_push_alone_are_those_of_the_whole_round(num_peers: int) -> None:
    alone, together = RandomPushGraph(9, num_peers, seed=2), RandomPushGraph(9, num_peers, seed=2)
    for t in range(4):
        senders = [together.in_peers(rank, t) for rank in range(9)]
        targets = [alone.out_peers(rank, t) for rank in range(9)]
        assert targets == [together.out_peers(rank, t) for rank in range(9)]
        assert all((rank in senders[peer]) == (peer in targets[rank]) for rank in range(9) for peer in range(9))


@pytest.mark.parametrize("n", range(2, 14))
def test_undirected_rounds_are_those_of_the_papers_walk(n: int) -> None:
    for shift, start in product(range(1, n), range(n)):
        graph = EquiDynGraph(n, directed=False)
        graph._last = (0, (shift, start))  # as if it was drawn
        pairs = walk(n, shift, start)
        assert tuple(graph.out_peers(rank, 0) for rank in range(n)) == as_peers(pairs, n)
        assert random_graphs._num_paired(n, shift) == len(pairs)


def test_all_words_are_the_same_from_any_start() -> None:
    np.testing.assert_array_equal(random_bits(3, 5, 4, start=6), random_bits(3, 5, 10)[6:])
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(3, spawn_key=(5,))))
    assert random_graphs.unit_interval(random_bits(3, 5, 10)).tolist() == generator.random(10).tolist()


def test_distinct_draws_are_distinct_and_all_sets_alike_likely() -> None:
    drawn = distinct_below(random_bits(0, 0, 3000).reshape(-1, 2), 4)
    counts = Counter(map(frozenset, drawn.tolist()))
    assert set(counts) == set(map(frozenset, combinations(range(4), 2)))
    assert max(abs(count - 250) for count in counts.values()) < 4 * np.sqrt(250)
    assert np.sort(distinct_below(random_bits(0, 1, 50).reshape(10, 5), 5)).tolist() == 10 * [[0, 1, 2, 3, 4]]


# Static graphs.


def singular_value(graph: EquiStaticGraph | StaticExponentialGraph) -> float:
    """The second largest one of W, which is circulant."""
    row = np.zeros(graph.world_size)
    own, inp = default_mixing(graph, push_sum=True).weights(0, 0)
    row[[0, *inp]] = [own, *inp.values()]
    return float(np.abs(np.fft.fft(row)[1:]).max())


@pytest.mark.parametrize("directed", [True, False])
def test_equi_static_has_the_weights_of_the_paper(directed: bool) -> None:
    graph = EquiStaticGraph(10, 4, directed=directed, seed=2)
    W = np.asarray(default_mixing(graph, push_sum=False).matrix(0))
    shifts = graph.shifts(4)
    assert len(set(shifts)) == 4
    # The mean of the paper's basis matrices A_u.
    expected = np.mean([0.9 * np.roll(np.eye(10), shift, axis=0) + 0.1 * np.eye(10) for shift in shifts], axis=0)
    np.testing.assert_allclose(W, expected, atol=1e-15)
    assert singular_value(graph) == pytest.approx(np.linalg.norm(W - 0.1, 2))
    assert graph.is_symmetric == (not directed) == np.array_equal(W, W.T)
    assert (graph.period, graph.is_dynamic) == (1, False)
    everyone = EquiStaticGraph(10, 9, directed=directed)
    assert np.abs(np.asarray(default_mixing(everyone, push_sum=False).matrix(0)) - 0.1).max() < 1e-15


@pytest.mark.parametrize("n", [64, 1024, 16384])
def test_equi_static_agrees_as_fast_for_every_number_of_ranks(n: int) -> None:
    """The bound holds with probability .9; of these seeds, always. The number of peers grows as ln n."""
    rho, p = 0.8, 0.1
    num_peers = int(np.ceil(8 / 3 * np.log(2 * n / p) / rho**2))
    for directed in (True, False):
        values = [singular_value(EquiStaticGraph(n, num_peers, directed=directed, seed=seed)) for seed in range(5)]
        assert max(values) <= rho, (values, num_peers)


def test_equi_static_connects_all_ranks_with_few_shifts() -> None:
    for n in (4, 6, 12, 30):
        for seed in range(20):
            assert default_mixing(EquiStaticGraph(n, 1, seed=seed), push_sum=True).spectral_gap() > 0
            assert default_mixing(EquiStaticGraph(n, 2, seed=seed, directed=False), push_sum=False).spectral_gap() > 0
    assert [EquiStaticGraph(n).num_peers(0) for n in (1, 2, 3, 5, 16, 17)] == [0, 1, 2, 3, 4, 5]
    assert [EquiStaticGraph(n, directed=False).num_peers(0) for n in (1, 2, 3, 4, 5, 16, 17)] == [0, 1, 2, 2, 4, 4, 6]
    schedule = EquiStaticGraph(16, {0: 3, 4: 1})
    assert [len(schedule.out_peers(0, t)) for t in (3, 4)] == [3, 1]


@pytest.mark.parametrize("n", [3, 4, 5, 6, 7, 10, 16, 25, 48])
def test_the_static_exponential_graph_contracts_as_in_the_paper(n: int) -> None:
    graph = StaticExponentialGraph(n)
    tau = (n - 1).bit_length()
    rho = (tau - 1) / (tau + 1)
    assert UniformMixing(graph).is_doubly_stochastic
    if n % 2:
        assert singular_value(graph) < rho
    else:
        assert singular_value(graph) == pytest.approx(rho)
        assert UniformMixing(graph).spectral_gap() == pytest.approx(1 - rho)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomMatchingGraph(6, 2), "got peers_per_itr=2, expected 1: it makes pairs"),
        (lambda: EquiDynGraph(6, 2, directed=False), "EquiDynGraph: got peers_per_itr=2, expected 1: it makes pairs"),
        (lambda: EquiDynGraph(6, 6), "EquiDynGraph: got peers_per_itr=6, expected 1 to 5"),
        (lambda: RandomPushGraph(6, 6), "RandomPushGraph: got peers_per_itr=6, expected 1 to 5"),
        (lambda: EquiStaticGraph(6, 6), "EquiStaticGraph: got peers_per_itr=6, expected 1 to 5"),
        (lambda: EquiStaticGraph(7, 3, directed=False), "got peers_per_itr=3 and directed=False for 7 ranks, expected"),
        (lambda: EquiStaticGraph(8, 1, directed=False), "expected an even number, or, .* odd one. Take 2 peers"),
        (lambda: StaticExponentialGraph(8, 4), "StaticExponentialGraph: got peers_per_itr=4, expected 1 to 3"),
        (
            lambda: RandomMatchingGraph(6, seed=-1),
            "got seed=-1, expected an integer of at least 0; pass the seed",
        ),
        (lambda: EquiStaticGraph(6, seed=0.5), "got seed=0.5, expected an integer"),  # type: ignore[arg-type]
        (lambda: EquiStaticGraph(0), "got world_size=0, expected an integer of at least 1"),
        (lambda: StaticExponentialGraph("8"), "got world_size='8', expected an integer"),  # type: ignore[arg-type]
        (lambda: EquiDynGraph(6).out_peers(6, 0), "got rank 6, expected 0 to 5"),
        (lambda: RandomPushGraph(6).in_peers(0, -1), "got round t=-1, expected t >= 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_examples() -> None:
    assert doctest.testmod(random_graphs).failed == 0
