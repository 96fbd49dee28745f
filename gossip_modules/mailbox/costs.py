"""The costs of a run: the requests, bytes and seconds of a round by one law, and their prices."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import NamedTuple

from .base import MediumCounts
from .bucket import ENDPOINTS
from .saved_models import KEPT_ROUNDS

HOURS_PER_MONTH = 730
BYTES_PER_GB = 1 << 30  # as the stores count


class Money(NamedTuple):
    """US dollars per hour.

    storage: for the stored bytes.
    requests: for writes, reads and lists.
    egress: for the bytes that workers outside the region of the store read; nothing for workers inside.
    """

    storage: float
    requests: float
    egress: float


@dataclass(frozen=True)
class Prices:
    """Prices in US dollars. Deletes and uploads are free in all stores of `PRICES`.

    Args:
        storage: of a GB (2^30 bytes) for a month.
        writes: of a million writes or lists.
        reads: of a million reads.
        egress: of a GB that leaves for the internet.
    """

    storage: float = 0.0
    writes: float = 0.0
    reads: float = 0.0
    egress: float = 0.0

    def hourly(self, requests: Requests | MediumCounts, *, seconds: float, stored_bytes: float = 0.0) -> Money:
        """The price of requests and of stored bytes.

        Args:
            requests: the requests of `seconds` seconds.
            seconds: their time.
            stored_bytes: the bytes in the store.
        """
        per_hour = 3600.0 / seconds
        return Money(
            self.storage * stored_bytes / BYTES_PER_GB / HOURS_PER_MONTH,
            (self.writes * (requests.writes + requests.lists) + self.reads * requests.reads) * per_hour / 1e6,
            self.egress * requests.bytes_read / BYTES_PER_GB * per_hour,
        )


PRICES = {
    "s3": Prices(storage=0.023, writes=5.0, reads=0.4, egress=0.09),
    "gs": Prices(storage=0.020, writes=5.0, reads=0.4, egress=0.12),
    "az": Prices(storage=0.018, writes=5.0, reads=0.4, egress=0.087),
}
"""List prices by scheme, without volume discounts and free allowances, as quoted in spring 2026: S3 Standard in
us-east-1 (aws.amazon.com/s3/pricing), Standard in us-central1 (cloud.google.com/storage/pricing), and hot blobs with
local redundancy in East US (azure.microsoft.com/pricing/details/storage/blobs)."""
PRICES_AS_OF = "list prices of US regions, spring 2026"
UNKNOWN = Prices(math.nan, math.nan, math.nan, math.nan)


def prices_of(address: str) -> Prices:
    """List prices for the store at an address; NaN for a store of another provider with the protocol of S3."""
    scheme = address.partition("://")[0]
    if scheme == "s3" and any(map(os.environ.get, ENDPOINTS)):
        return UNKNOWN
    return PRICES.get(scheme, Prices())


class Requests(NamedTuple):
    """Requests to a store, and the bytes of their objects; a mean, so the numbers need not be whole."""

    writes: float
    reads: float
    lists: float
    bytes_written: float
    bytes_read: float


@dataclass(frozen=True)
class RoundCosts:
    """The costs of one round of a `Stream` in which all workers are in time.

    [Note: The requests of a round] Of n workers with messages of m bytes and L looks each, one worker finds all
    messages and closes the round. It reads n - 1 messages, and writes the close, the reader if n > 2, and the mean
    where the algorithm averages. Each other worker then reads the mean, or r messages. The first look is a list, and
    others are reads: see [Note: Looks] of `Stream`. In front of the looks a worker reads whether the round is closed
    already, and after them it reads the close. A model of M bytes is saved every s rounds, with three lists for newer
    and older objects.

        writes          n + 1 + (n > 2) + mean + 1/s
        reads           n (L + 1) + (n - 1) + (n - 1) r
        lists           n + 1 + 3/s
        bytes written   (n + mean) m + M/s
        bytes read      (n - 1) (1 + r) m

    with mean = 1 and r = 1 where the algorithm averages, else mean = 0. These are the least costs: waits add looks,
    and signs of life add a write each. A list of more than 1,000 objects is several requests.

    Args:
        num_workers: n.
        message_bytes: m.
        model_bytes: M.
        save_every: s.
        num_read: r; None: the algorithm averages.
        num_looks: L.
    """

    num_workers: int
    message_bytes: float
    model_bytes: float = 0.0
    save_every: float = 1.0
    num_read: int | None = None
    num_looks: float = 1.0

    @property
    def requests(self) -> Requests:
        """The requests of all workers together."""
        n, has_mean, num_read, num_saves = self.num_workers, self._has_mean, self._num_read, 1 / self.save_every
        return Requests(
            writes=n + 1 + (n > 2) + has_mean + num_saves,
            reads=n * (self.num_looks + 1) + (n - 1) * (1 + num_read),
            lists=n + 1 + 3 * num_saves,
            bytes_written=(n + has_mean) * self.message_bytes + self.model_bytes * num_saves,
            bytes_read=(n - 1) * (1 + num_read) * self.message_bytes,
        )

    @property
    def stored_bytes(self) -> float:
        """The bytes in the store, which keeps the objects of the last rounds and the models saved after them."""
        kept = KEPT_ROUNDS + 1
        messages = (self.num_workers + self._has_mean) * self.message_bytes
        return kept * messages + math.ceil(kept / self.save_every) * self.model_bytes

    def seconds(self, byte_s: float, *, latency: float) -> float:
        """The time from the first upload to the end of the last download, without looks in vain, in seconds.

        The worker that closes reads the messages one after the other, while the others wait.

        Args:
            byte_s: bytes that a worker and the store send to each other in a second.
            latency: of a request, in seconds.
        """
        num_messages = 1 + (self.num_workers - 1) + self._has_mean + self._num_read
        num_small = 5 + (self.num_workers > 2) + self.num_looks  # around the looks, and for the close
        return num_messages * (latency + self.message_bytes / byte_s) + num_small * latency

    @property
    def _has_mean(self) -> int:
        return int(self.num_read is None)

    @property
    def _num_read(self) -> int:
        return 1 if self.num_read is None else self.num_read


def least_sync_every(step_seconds: float, wait_seconds: float, *, waiting_share: float) -> int:
    """The smallest number of steps between two rounds with which waits take at most a share of the time.

    Args:
        step_seconds: the time of a step.
        wait_seconds: the wait of a round.
        waiting_share: the largest share of waits in the time of a worker.
    """
    return max(2, math.ceil(wait_seconds * (1 - waiting_share) / (waiting_share * step_seconds)))


def rates(counts: MediumCounts, prices: Prices, *, num_rounds: int, seconds: float) -> dict[str, float]:
    """The entries of `comm_stats()` with requests, bytes and dollars of a worker; none before its first round.

    Args:
        counts: the requests so far.
        prices: see `prices_of`.
        num_rounds: the rounds so far.
        seconds: the time so far.
    """
    if not num_rounds or not seconds:
        return {}
    money = prices.hourly(counts, seconds=seconds)
    return {
        "store_requests_per_round": (counts.writes + counts.reads + counts.lists) / num_rounds,
        "store_bytes_per_round": (counts.bytes_written + counts.bytes_read) / num_rounds,
        "store_dollars_per_hour": money.requests,
        "store_egress_dollars_per_hour": money.egress,
    }
