"""Graphs that all ranks draw alike, from a seed that they share: random rounds, and a static graph of random shifts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import count
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checks import checked_integer, checked_seed
from .base import GraphManager, LazyRow, WeightedGraph
from .matchings import Matching
from .shift_graphs import ShiftGraph

_MAX_KEPT_RANKS = 2**13  # up to here a matching is drawn for all ranks at once and kept; beyond it, for one rank only


class RandomGraph(GraphManager):
    """A graph whose round t is drawn at random: a pure function of (seed, t), so all ranks draw the same.

    Rounds never repeat, so `period` is 0 and `in_every_round` is False: a property of all rounds has to be known from
    the law of the graph. How fast ranks agree is `rho`, an expectation. Any two ranks may meet.

    Args:
        world_size: the number of ranks n.
        peers_per_itr: the number of peers that a rank sends to per round, or a schedule of it.
        seed: the seed of all rounds, the same on all ranks; at least 0.
    """

    def __init__(self, world_size: int, peers_per_itr: int | Mapping[int, int] = 1, *, seed: int = 0) -> None:
        self.seed = checked_seed(seed)
        self._last: tuple[int, Any] | None = None
        super().__init__(world_size, peers_per_itr=peers_per_itr)

    @property
    @abstractmethod
    def rho(self) -> float:
        """The factor by which a round shrinks the squared distance from the average, in expectation.

        The largest eigenvalue of E[W^T W] on vectors that sum to zero, with the weights that wrappers choose. Rounds
        are independent, so t rounds shrink it by rho^t. With a schedule: in the rounds of its last entry.
        """

    def phone_book(self, rank: int) -> Sequence[int]:
        """See `GraphManager`: all ranks but `rank`, ascending."""
        self._check_rank(rank)
        return LazyRow(self.world_size - 1, lambda index: index + (index >= rank))

    def in_every_round(self, predicate: Callable[[int], bool]) -> bool:
        """See `GraphManager`; False where rounds are random, as they are too many to check."""
        return all(map(self._segment_period, self._segments.values())) and super().in_every_round(predicate)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, seed={self.seed})"

    @abstractmethod
    def _is_certain(self, num_peers: int) -> bool:
        """Whether all draws of a round with so many peers give the same edges."""

    def _segment_period(self, num_peers: int) -> int:
        return int(num_peers == 0 or self._is_certain(num_peers))

    @abstractmethod
    def _draw(self, t: int) -> Any:
        """The random choices of round `t`, the same on all ranks."""

    def _drawn(self, t: int) -> Any:
        """`_draw(t)`, which is kept for the next query: do not change it."""
        last = self._last
        if last is None or last[0] != t:
            self._segment(t)  # refuses t < 0
            last = self._last = (t, self._draw(t))
        return last[1]

    @property
    def _last_num_peers(self) -> int:
        return [*self._segments.values()][-1]


class ActivatedGraph(RandomGraph):
    """A graph whose rounds use some of fixed matchings at random: W(t) = I - alpha sum_j B_j(t) L_j.

    Attributes:
        matchings: the links of each matching.
        probabilities: the probability of each matching in a round.
        is_periodic: whether a round uses all matchings or none.
        alpha: the weight of a link that was planned for these probabilities.
    """

    is_symmetric = True
    matchings: tuple[Matching, ...]
    probabilities: tuple[float, ...]
    is_periodic: bool
    alpha: float

    @abstractmethod
    def active(self, t: int) -> list[bool]:
        """B_j of round `t`: whether each matching is used. The list is kept for the next query: do not change it."""


class RandomMatchingGraph(RandomGraph, WeightedGraph):
    """Each round pairs all ranks anew, uniformly at random; the two of a pair average. Undirected, for every n.

        pi = a random permutation of the ranks, from (seed, t)
        the ranks that pi takes to 2 j and 2 j + 1 are a pair;  W_ij = W_ii = 1/2 for a pair i, j

    If n is odd, one rank has no peer. This is the randomised gossip of Boyd, Ghosh, Prabhakar, Shah, "Randomized gossip
    algorithms", IEEE Transactions on Information Theory, 2006, with all pairs of a round at once. W is a projection, so
    E[W^T W] = E[W], and in expectation a round shrinks the squared distance from the average by exactly

        rho = (1 - 1/(n-1)) / 2    for even n,        rho = 1/2    for odd n

    So it does not slow down with n; but unlike on `BaseGraph`, no number of rounds makes the average exact.

    pi is the swap-or-not shuffle of Hoang, Morris, Rogaway, "An enciphering scheme based on a card shuffle", CRYPTO
    2012: a query takes O(log n) time and memory. Up to 8192 ranks the pairs of all ranks are computed at once and kept
    until another round is asked for.

    Args:
        world_size: the number of ranks n.
        peers_per_itr: 1, since a matching has pairs.
        seed: the seed of all rounds, the same on all ranks; at least 0.

    Raises:
        ValueError: peers_per_itr is not 1, or the seed is no integer of at least 0.

    >>> graph = RandomMatchingGraph(4)
    >>> [graph.out_peers(0, t) for t in range(6)]
    [(3,), (1,), (3,), (3,), (1,), (2,)]
    """

    makes_pairs = True

    @property
    def rho(self) -> float:
        """See `RandomGraph`."""
        n = self.world_size
        if n == 1:
            return 0.0
        return 0.5 if n % 2 else (1 - 1 / (n - 1)) / 2

    def link_weights(self, rank: int, t: int) -> Mapping[int, float]:
        self._check_rank(rank)
        is_kept = self.world_size <= _MAX_KEPT_RANKS
        peer = int(self._drawn(t)[rank] if is_kept else self._partners(t, np.array([rank]))[0])
        return {} if peer == rank else {peer: 0.5}

    @cached_property
    def is_regular(self) -> bool:
        """See `GraphManager`."""
        return self.world_size == 1 or self.world_size % 2 == 0

    def _is_certain(self, num_peers: int) -> bool:
        return self.world_size == 2

    def _draw(self, t: int) -> npt.NDArray[np.int64]:
        return self._partners(t, np.arange(self.world_size))

    def _partners(self, t: int, ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The peers of these ranks; a rank without a peer has itself."""
        self._segment(t)  # refuses t < 0
        place = self._shuffle(t, ranks, is_inverse=False) ^ 1
        return self._shuffle(t, np.minimum(place, self.world_size - 1), is_inverse=True)

    def _shuffle(self, t: int, ranks: npt.NDArray[np.int64], *, is_inverse: bool) -> npt.NDArray[np.int64]:
        """pi of each rank, or its inverse: a step swaps x and (key - x) mod n if a coin for the two shows heads."""
        n = self.world_size
        num_steps = 32 + 3 * n.bit_length()
        bits = random_bits(self.seed, t, 3 * num_steps).reshape(num_steps, 3)
        keys = (unit_interval(bits[:, 0]) * n).astype(np.int64)
        steps = list(zip(keys.tolist(), *bits[:, 1:].view(np.int64).T.tolist(), strict=True))
        x = ranks
        for key, factor, offset in reversed(steps) if is_inverse else steps:
            other = (key - x) % n
            has_coin = np.maximum(x, other) * factor + offset < 0  # the highest bit; the product is modulo 2^64
            x = np.where(has_coin, other, x)
        return x


class RandomPushGraph(RandomGraph):
    """Each rank sends to s random others per round, each independently; directed, for push-sum.

        rank j: targets = s distinct ranks other than j, uniformly at random, from (seed, t, j)
        W_ij = 1/(s+1) if i is a target of j,  W_jj = 1/(s+1)

    The number of messages that a rank gets varies, so columns of W sum to one and rows do not: values and weights are
    mixed alike, and x_i / w_i is the estimate (push-sum: Kempe, Dobra, Gehrke, "Gossip-based computation of aggregate
    information", FOCS 2003). Targets are chosen as in EL-Local: de Vos, Farhadkhani, Guerraoui, Kermarrec, Pires,
    Sharma, "Epidemic Learning: Boosting Decentralized Learning with Randomized Communication", NeurIPS 2023,
    arXiv:2310.01972, which averages the messages that arrive instead, and so lets the mean drift. The sum of the
    squared distances of the shares W(t-1) ... W(0) from equal ones shrinks per round, in expectation, by exactly

        rho = 1/(s+1) - (2a + (n-2) a^2) / (s+1)^2,    a = s/(n-1).

    The peers that a rank sends to take O(s). Its senders take O(n s), as any rank may be one: they are found for all
    ranks at once, and kept until another round is asked for.

    Args:
        world_size: the number of ranks n.
        peers_per_itr: s, the number of peers per round, or a schedule of it.
        seed: the seed of all rounds, the same on all ranks; at least 0.

    Raises:
        ValueError: a rank has fewer than s others, or the seed is no integer of at least 0.

    >>> graph = RandomPushGraph(4)
    >>> [graph.out_peers(rank, t=0) for rank in range(4)], graph.in_peers(3, t=0)
    ([(3,), (0,), (3,), (0,)], (0, 2))
    """

    @property
    def rho(self) -> float:
        """See `RandomGraph`; W is not doubly stochastic, and the distance is the one of push-sum's shares."""
        n, s = self.world_size, self._last_num_peers
        if n == 1:
            return 0.0
        a = s / (n - 1)
        return 1 / (s + 1) - (2 * a + (n - 2) * a**2) / (s + 1) ** 2

    def out_peers(self, rank: int, t: int) -> tuple[int, ...]:
        self._check_rank(rank)
        s, last = self.num_peers(t), self._last
        if last is not None and last[0] == t:
            return tuple(last[1][rank].tolist())
        return tuple(self._targets(rank, random_bits(self.seed, t, s, start=rank * s)[None])[0].tolist())

    def in_peers(self, rank: int, t: int) -> tuple[int, ...]:
        self._check_rank(rank)
        return tuple(np.flatnonzero((self._drawn(t) == rank).any(axis=1)).tolist())

    def _is_certain(self, num_peers: int) -> bool:
        return num_peers >= self.world_size - 1

    def _draw(self, t: int) -> npt.NDArray[np.int64]:
        """The peers that each rank sends to, int64 [n, s]."""
        n, s = self.world_size, self.num_peers(t)
        return self._targets(np.arange(n)[:, None], random_bits(self.seed, t, n * s).reshape(n, s))

    def _targets(self, ranks: int | npt.NDArray[np.int64], bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        chosen = np.sort(distinct_below(bits, self.world_size - 1), axis=1)
        return chosen + (chosen >= ranks)


class EquiDynGraph(RandomGraph, WeightedGraph):
    """EquiDyn: in each round all ranks send by the same random shift; it agrees as fast for every number of ranks n.

    The one-peer graphs of Song, Li, Jin, Shi, Yan, Yin, Yuan, "Communication-Efficient Topologies for Decentralized
    Learning with O(1) Consensus Rate", NeurIPS 2022, arXiv:2210.07881. With P_u the shift i -> i + u modulo n:

        directed (OD-EquiDyn):    u uniform in 1..n-1                        W = (I + P_u) / 2
        undirected (OU-EquiDyn):  u uniform in 1..n-1, s uniform in 0..n-1
            for i = s, s+1, ..., s+n-1 (mod n):
                if neither i nor i + u is in a pair: i, i + u are one        W_ii = W_ij = 1/2 for a pair i, j

    The paper writes W = (1 - eta) I + eta A_u, where A_u = ((n-1)/n) P_u + (1/n) I; here eta = n / (2 (n-1)), so that
    a rank keeps one half. With k peers per round, a directed round has k distinct shifts: W = (I + P_u1 + ... + P_uk) /
    (k + 1). The squared distance from the average shrinks per round, in expectation and for every start, by exactly

        rho = (1 - k/(n-1)) / (k + 1)    directed;

    undirected rounds leave some ranks without a peer, and rho, which is for the worst start then, is above that. All
    rounds are doubly stochastic. A query takes O(k) time and memory.

    Args:
        world_size: the number of ranks n.
        peers_per_itr: k, the number of peers per round, or a schedule of it; undirected: 1.
        directed: whether shifts are used in one direction, or in both by pairs.
        seed: the seed of all rounds, the same on all ranks; at least 0.

    Raises:
        ValueError: there are not as many peers, or the seed is no integer of at least 0.

    >>> graph = EquiDynGraph(8)
    >>> [(graph.out_peers(0, t), graph.in_peers(0, t)) for t in range(3)]
    [((7,), (1,)), ((5,), (3,)), ((6,), (2,))]
    """

    def __init__(
        self, world_size: int, peers_per_itr: int | Mapping[int, int] = 1, *, directed: bool = True, seed: int = 0
    ) -> None:
        self.directed = directed
        self.makes_pairs = not directed
        super().__init__(world_size, peers_per_itr, seed=seed)

    @property
    def rho(self) -> float:
        """See `RandomGraph`. Takes O(n log n) for an undirected graph."""
        n, k = self.world_size, self._last_num_peers
        if n == 1:
            return 0.0
        if self.directed:
            return (1 - k / (n - 1)) / (k + 1)
        # A pair subtracts (e_i - e_j)(e_i - e_j)^T / 2, and i is uniform: E[W] is circulant, and W^T W = W.
        shares = np.array([0.0] + [_num_paired(n, u) / (2 * n * (n - 1)) for u in range(1, n)])
        return float(1 - (shares.sum() - np.fft.fft(shares).real[1:]).min())

    def link_weights(self, rank: int, t: int) -> Mapping[int, float]:
        return dict.fromkeys(self.in_peers(rank, t), 1 / (self.num_peers(t) + 1))

    def in_peers(self, rank: int, t: int) -> tuple[int, ...]:
        return self._peers(rank, t, sign=-1)

    def out_peers(self, rank: int, t: int) -> tuple[int, ...]:
        return self._peers(rank, t, sign=1)

    @cached_property
    def is_regular(self) -> bool:
        """See `GraphManager`."""
        # With more ranks, some shift leaves a rank without a peer.
        return self.directed or self.world_size in (1, 2, 4)

    @cached_property
    def is_symmetric(self) -> bool:
        """See `GraphManager`."""
        # Random shifts are symmetric only if there is no other choice: all ranks with all.
        return not self.directed or all(map(self._segment_period, self._segments.values()))

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, directed={self.directed})"

    def _is_certain(self, num_peers: int) -> bool:
        return num_peers >= self.world_size - 1 if self.directed else self.world_size <= 2

    def _draw(self, t: int) -> tuple[int, ...]:
        """The shifts, ascending, of a directed round; the shift and the start of an undirected one."""
        n, k = self.world_size, self.num_peers(t)
        if self.directed:
            return tuple(sorted((1 + distinct_below(random_bits(self.seed, t, k)[None], n - 1)[0]).tolist()))
        shift, start = unit_interval(random_bits(self.seed, t, 2)).tolist()
        return 1 + int(shift * (n - 1)), int(start * n)

    def _peers(self, rank: int, t: int, *, sign: int) -> tuple[int, ...]:
        self._check_rank(rank)
        drawn, n = self._drawn(t), self.world_size
        if self.directed:
            return tuple((rank + sign * shift) % n for shift in drawn)
        if n == 1:
            return ()
        shift, start = drawn
        peer = _paired(n, shift, (rank - start) % n)
        return () if peer is None else ((start + peer) % n,)


def _paired(n: int, shift: int, place: int) -> int | None:
    """The place that the walk over the places 0, 1, ..., n-1 pairs with this one, or None."""
    # Where the shift is above n/2, the first `around` places are paired with the last ones. The rest is a line in which
    # the distance of a pair is n - shift.
    around, step = (0, shift) if shift <= n - shift else (n - shift, n - shift)
    if place < around:
        return place + shift
    if place >= n - around:
        return place - shift
    if (place - around) // step % 2:  # blocks of `step` places: the second is paired with the first, and so on
        return place - step
    return place + step if place + step < n - around else None


def _num_paired(n: int, shift: int) -> int:
    """The number of places that have a peer in the walk."""
    around, step = (0, shift) if shift <= n - shift else (n - shift, n - shift)
    length = n - 2 * around
    return 2 * around + length // (2 * step) * 2 * step + 2 * max(0, length % (2 * step) - step)


class EquiStaticGraph(ShiftGraph, WeightedGraph):
    """EquiStatic: the same k random shifts in all rounds; with k of the order of ln n its gap does not depend on n.

    From Song, Li, Jin, Shi, Yan, Yin, Yuan, "Communication-Efficient Topologies for Decentralized Learning with O(1)
    Consensus Rate", NeurIPS 2022, arXiv:2210.07881. With P_u the shift i -> i + u modulo n:

        A_u = ((n-1)/n) P_u + (1/n) I,  u = 1..n-1         their mean is the exact average J
        directed (D-EquiStatic):     W = (1/k) sum of A_u over k random u
        undirected (U-EquiStatic):   W = (1/k) sum of A_u over k/2 random u and their negatives

    So a link weighs (n-1)/(nk), a rank keeps 1/n, and all k = n-1 shifts give J. For k >= (8/3) ln(2n/p) / rho^2 the
    second largest singular value is at most rho with probability 1 - p. Shifts are drawn without repeats here, so that
    a rank has exactly k peers; the bound holds all the more. They are drawn again if they leave ranks unconnected. With
    an odd k, an undirected graph has the shift n/2 too, and n must be even. A query takes O(k). With as few shifts as
    by default, seeds differ much: compare them by `GraphMixing(graph).spectral_gap()`.

    Args:
        world_size: the number of ranks n.
        peers_per_itr: k, the number of peers in every round, or a schedule of it; each entry has shifts of its own.
            None: the least whole number from log2(n) on, undirected rounded up to an even one; at most n - 1.
        directed: whether links are used in one direction.
        seed: the seed of the shifts, the same on all ranks; at least 0.

    Raises:
        ValueError: there is no such number of peers, or the seed is no integer of at least 0.

    >>> EquiStaticGraph(16).out_peers(rank=0, t=0), EquiStaticGraph(16, directed=False).out_peers(rank=0, t=0)
    ((2, 5, 11, 12), (3, 6, 10, 13))
    """

    def __init__(
        self,
        world_size: int,
        peers_per_itr: int | Mapping[int, int] | None = None,
        *,
        directed: bool = True,
        seed: int = 0,
    ) -> None:
        self.directed, self.seed = directed, checked_seed(seed)
        if peers_per_itr is None:
            others = checked_integer("world_size", world_size, 1, "give the number of ranks") - 1
            peers = others.bit_length()
            peers_per_itr = max(1, min(peers if directed else peers + peers % 2, others))
        super().__init__(world_size, peers_per_itr=peers_per_itr)

    def link_weights(self, rank: int, t: int) -> Mapping[int, float]:
        peers = self.in_peers(rank, t)
        return dict.fromkeys(peers, (self.world_size - 1) / (self.world_size * max(1, len(peers))))

    def shifts(self, num_peers: int) -> Sequence[int]:
        n = self.world_size
        is_odd = num_peers % 2 == 1
        if not self.directed and is_odd and (n % 2 == 1 or num_peers == 1 < n - 1):
            raise ValueError(
                f"EquiStaticGraph: got peers_per_itr={num_peers} and directed=False for {n} ranks, expected an even "
                f"number, or, from 3 on and for even n, an odd one. Take {num_peers + 1} peers."
            )
        attempts = (self._drawn_shifts(num_peers, attempt) for attempt in count())
        return next(drawn for drawn in attempts if gcd(n, *drawn) == 1)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, seed={self.seed}, directed={self.directed})"

    def _drawn_shifts(self, num_peers: int, attempt: int) -> tuple[int, ...]:
        n = self.world_size
        num_drawn = num_peers if self.directed else num_peers // 2
        bits = random_bits(self.seed, attempt, num_drawn).reshape(1, num_drawn)
        drawn = 1 + distinct_below(bits, n - 1 if self.directed else (n - 1) // 2)[0]
        if not self.directed:
            drawn = np.concatenate([drawn, n - drawn, [n // 2] * (num_peers % 2)])
        return tuple(sorted(map(int, drawn)))


def random_bits(seed: int, t: int, count: int, *, start: int = 0) -> npt.NDArray[np.uint64]:
    """The words `start` to `start + count - 1` of the random 64-bit words of round `t`, in O(count + log start)."""
    # Raw output of the bit generator: numpy promises that it never changes, unlike the numbers that Generator makes.
    generator = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(t,)))
    generator.advance(start)
    return np.asarray(generator.random_raw(count))


def unit_interval(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Uniform in [0, 1)."""
    return np.asarray((bits >> np.uint64(11)) * 2.0**-53)


def distinct_below(bits: npt.NDArray[np.uint64], bound: int) -> npt.NDArray[np.int64]:
    """In each row of `bits` [m, k] k distinct integers of 0..bound-1, all sets alike likely: Floyd's algorithm."""
    uniform = unit_interval(bits)
    num_drawn = bits.shape[1]
    chosen = np.empty(bits.shape, dtype=np.int64)
    for column in range(num_drawn):
        largest = bound - num_drawn + column
        draws = (uniform[:, column] * (largest + 1)).astype(np.int64)
        is_taken = (chosen[:, :column] == draws[:, None]).any(axis=1)
        chosen[:, column] = np.where(is_taken, largest, draws)
    return chosen
