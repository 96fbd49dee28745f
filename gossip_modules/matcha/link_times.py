"""How long each link of a base graph takes: the costs that a communication budget in seconds is based on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..devices import wait_for_queue
from ..graph_manager.matchings import Edge, Matching, as_matchings, decompose, world_size
from ..transport.agreement import rows_of_all
from ..transport.base import Transport

if TYPE_CHECKING:
    import networkx as nx

_CPU = torch.device("cpu")


def measure_link_times(
    base: nx.Graph | Sequence[Sequence[Edge]],
    transport: Transport,
    *,
    num_bytes: int,
    num_repeats: int = 5,
    device: torch.device = _CPU,
) -> dict[Edge, float]:
    """The seconds that each link takes to exchange `num_bytes` in both directions, the same dict on every rank.

    Matchings are measured one after the other, so that no rank serves two links at once; the links of one matching run
    at the same time, as they do in training. The time of a link is the median over the repeats at its slower end. All
    ranks call this at the same time with the same arguments, while nothing else is in flight on `transport`. Pass the
    result to `MatchaGraph` as `costs`.

    Args:
        base: the base graph with the nodes 0..n-1, or its matchings.
        transport: the transport over the n ranks.
        num_bytes: the size of a message; take the size of the model, since small messages measure the latency only.
        num_repeats: the number of exchanges per link, at least 1, after one that warms up.
        device: the device of the messages; take the device of the model.

    Returns:
        Seconds by link (u, v), u < v, ascending.

    Raises:
        ValueError: base is not a connected graph or its matchings, it has another size than the transport, or a count
            is below 1.
        TimeoutError, ConnectionError: a peer did not answer; the message names it.
    """
    import networkx as nx

    matchings = decompose(base) if isinstance(base, nx.Graph) else as_matchings(base)
    if num_bytes < 1 or num_repeats < 1:
        raise ValueError(f"got {num_bytes=} and {num_repeats=}, expected at least 1 each. Give e.g. 2**20 and 5.")
    if world_size(matchings) != transport.world_size:
        raise ValueError(
            f"got a base graph of {world_size(matchings)} ranks, expected {transport.world_size}, the size of the "
            f"transport. Build the graph with that many ranks."
        )
    median = median_exchange(transport, num_bytes=num_bytes, num_repeats=num_repeats, device=device)
    return seconds_of_links(transport, matchings, median, what="measure_link_times")


def median_exchange(
    transport: Transport, *, num_bytes: int, num_repeats: int, device: torch.device
) -> Callable[[int], float]:
    """Return a function of a peer: the median seconds of an exchange with it, after one that warms up.

    Args:
        transport: the transport over the ranks.
        num_bytes: the size of a message.
        num_repeats: the number of exchanges.
        device: the device of the messages.
    """
    outgoing = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    incoming = torch.empty_like(outgoing)

    def median(peer: int) -> float:
        times = [_exchange_seconds(transport, peer, outgoing, incoming, tag=i) for i in range(num_repeats + 1)]
        return statistics.median(times[1:])

    return median


def seconds_of_links(
    transport: Transport, matchings: Sequence[Matching], measure: Callable[[int], float], *, what: str
) -> dict[Edge, float]:
    """Measure matching after matching; return the result of the slower end of each link, equal on every rank.

    Args:
        transport: the transport over the ranks.
        matchings: the links. Links of one matching are measured at the same time.
        measure: `measure(peer)`, called at both ends of a link.
        what: names the measurement in errors.
    """
    own = torch.zeros(max(len(matchings), 1), dtype=torch.float64, device="cpu")
    for index, matching in enumerate(matchings):
        transport.all_reduce(torch.zeros(1, device="cpu"), what=f"start of matching {index} of {what}")
        peer = next((u + v - transport.rank for u, v in matching if transport.rank in (u, v)), None)
        if peer is not None:
            own[index] = measure(peer)
    seconds = rows_of_all(transport, own, what=what).tolist()
    links = ((index, u, v) for index, matching in enumerate(matchings) for u, v in matching)
    return dict(sorted(((u, v), max(seconds[u][index], seconds[v][index])) for index, u, v in links))


def _exchange_seconds(transport: Transport, peer: int, outgoing: Tensor, incoming: Tensor, *, tag: int) -> float:
    # One byte is exchanged first, so that waiting for a late peer does not count as the time of the link.
    transport.exchange({peer: [outgoing[:1]]}, {peer: [incoming[:1]]}, tag=2 * tag).wait()
    wait_for_queue(incoming.device)  # wait() only orders the stream there
    start = time.perf_counter()
    transport.exchange({peer: [outgoing]}, {peer: [incoming]}, tag=2 * tag + 1).wait()
    wait_for_queue(incoming.device)  # wait() only orders the stream there
    return time.perf_counter() - start
