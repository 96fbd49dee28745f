"""PeerTraffic: bytes, waits and staleness of the rounds with each peer."""

from __future__ import annotations

import statistics
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

Peer = TypeVar("Peer", int, str)

_NUM_WAITS = 64  # of each peer that are remembered
_NOTHING: Mapping[Any, int] = {}
_TOTALS = ("bytes_sent", "bytes_received", "wait_seconds")
_INSIDE, _BETWEEN = "inside_region", "between_regions"


@dataclass(slots=True)
class _Counts:
    """The counts of one peer; waits: the seconds of its last rounds."""

    num_sent: int = 0
    num_received: int = 0
    num_rounds: int = 0
    num_refused: int = 0
    total_staleness: int = 0
    waited_seconds: float = 0.0
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_WAITS))


class PeerTraffic:
    """Counts the traffic with each peer, a rank or a name. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: defaultdict[int | str, _Counts] = defaultdict(_Counts)
        self._waited: dict[int | str, float] = {}  # seconds of the present round
        self._heard: set[int | str] = set()  # the senders of its messages
        self._collective: Counter[int] = Counter()  # bytes of collectives, by the rank that gets them

    def __deepcopy__(self, memo: dict[int, object]) -> PeerTraffic:
        """A copy of a transport has sent nothing."""
        return PeerTraffic()

    def arrived(
        self, num_bytes: Mapping[Peer, int], seconds: Mapping[Peer, float], *, sent: Mapping[Peer, int] = _NOTHING
    ) -> None:
        """Count a complete exchange. A round may have several.

        Args:
            num_bytes: the bytes from these peers.
            seconds: the waits for these peers.
            sent: the bytes to these peers.
        """
        with self._lock:
            for peer, number in sent.items():
                self._counts[peer].num_sent += number
            for peer, number in num_bytes.items():
                self._counts[peer].num_received += number
            self._heard.update(num_bytes)
            for peer, waited in seconds.items():
                self._waited[peer] = self._waited.get(peer, 0.0) + waited
                self._counts[peer].waited_seconds += waited

    def mixed(self, staleness: int, peers: Iterable[int | str] | None = None) -> None:
        """Count the exchanges since the last call as one round.

        Args:
            staleness: the lateness of the round, in forwards.
            peers: the senders of its messages; None: all senders since the last call.
        """
        with self._lock:
            for peer, seconds in self._waited.items():
                self._counts[peer].waits.append(seconds)
            for peer in self._heard if peers is None else peers:
                counts = self._counts[peer]
                counts.num_rounds += 1
                counts.total_staleness += staleness
            self._waited.clear()
            self._heard.clear()

    def refused(self, peers: Iterable[int | str]) -> None:
        """Count a message of each of these peers that was not mixed."""
        with self._lock:
            for peer in peers:
                self._counts[peer].num_refused += 1

    def sent_together(self, num_bytes: Mapping[int, int]) -> None:
        """Count the bytes of a collective.

        Args:
            num_bytes: the bytes that this rank sends, by the rank that gets them.
        """
        with self._lock:
            self._collective.update(num_bytes)

    def forget_collectives(self) -> None:
        """Count the bytes of collectives from zero."""
        with self._lock:
            self._collective.clear()

    def forget(self, peer: int | str) -> None:
        """Drop the counts of a peer."""
        with self._lock:
            self._counts.pop(peer, None)

    def by_region(self, is_far: Callable[[int], bool]) -> dict[str, float]:
        """Return the bytes and waits inside the region of this rank and between regions, by names of `comm_stats()`.

        Args:
            is_far: whether a peer, by its rank, is in another region.
        """
        totals = dict.fromkeys((f"{what}_{place}" for what in _TOTALS for place in (_INSIDE, _BETWEEN)), 0.0)
        with self._lock:
            for peer, counts in self._counts.items():
                place = _BETWEEN if is_far(int(peer)) else _INSIDE
                totals[f"bytes_sent_{place}"] += counts.num_sent
                totals[f"bytes_received_{place}"] += counts.num_received
                totals[f"wait_seconds_{place}"] += counts.waited_seconds
            for peer, num_bytes in self._collective.items():
                totals[f"bytes_sent_{_BETWEEN if is_far(peer) else _INSIDE}"] += num_bytes
        return totals

    def summary(self, names: Sequence[int] | None = None) -> dict[str, float]:
        """Return the counts by the names of `comm_stats()`; a count of zero has no entry.

        Args:
            names: the names of the peers, by rank; None: peers have no other names.
        """
        with self._lock:
            figures = {peer: _figures(counts) for peer, counts in self._counts.items()}
        return {
            f"{key}/{peer if names is None else names[int(peer)]}": value
            for peer, values in figures.items()
            for key, value in values.items()
        }


def _figures(counts: _Counts) -> dict[str, float]:
    figures: dict[str, float] = {}
    if counts.num_sent:
        figures["bytes_sent"] = counts.num_sent
    if counts.num_received:
        figures["bytes_received"] = counts.num_received
    if counts.num_rounds:
        figures["staleness"] = counts.total_staleness / counts.num_rounds
    if counts.num_refused:
        figures["num_refused"] = counts.num_refused
    if counts.waits:
        figures["wait_median"] = median = statistics.median(counts.waits)
        figures["wait_mad"] = statistics.median(abs(seconds - median) for seconds in counts.waits)
    return figures


def on_ring(rank: int, world_size: int, num_bytes: int, *, up: bool = False) -> dict[int, int]:
    """Return the bytes that a collective along a ring sends, by the rank that gets them.

    Gloo's sums go to the rank below, its gathers to the rank above. NCCL chooses a ring by itself, which is taken to be
    in the order of ranks.

    Args:
        rank, world_size: the sender, and the number of ranks.
        num_bytes: the bytes that each rank sends.
        up: whether a rank sends to the rank above.
    """
    return {(rank + (1 if up else -1)) % world_size: num_bytes} if world_size > 1 else {}


def down_tree(rank: int, world_size: int, num_bytes: int, *, source: int) -> dict[int, int]:
    """Return the bytes that a broadcast along Gloo's binomial tree sends, by the rank that gets them.

    Args:
        rank, world_size: the sender, and the number of ranks.
        num_bytes: the size of the tensor.
        source: the rank that has it.
    """
    place = (rank - source) % world_size
    first = place.bit_length()
    children = (place + (1 << k) for k in range(first, world_size.bit_length()))
    return {(source + child) % world_size: num_bytes for child in children if child < world_size}
