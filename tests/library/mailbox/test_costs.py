"""The law of the costs of a round predicts the counted requests and bytes, and prices turn them into money."""

from __future__ import annotations

import math
import threading
import uuid
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

from gossip_modules.mailbox.base import Listed, MediumCounts
from gossip_modules.mailbox.bucket import ENDPOINTS
from gossip_modules.mailbox.clock import Clock
from gossip_modules.mailbox.costs import Prices, Requests, RoundCosts, least_sync_every, prices_of, rates
from gossip_modules.mailbox.memory import MemoryMedium
from gossip_modules.mailbox.sealed import Seal
from tests.harness.quadratics import Point
from tests.library.mailbox.runs import H, Worker, train

N = 3
GB = 1 << 30


class WidePoint(Point):
    """A point with 80 kB more, so that headers hardly count."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(10_000, dtype=torch.float64))


class OrderlyMedium(MemoryMedium):
    """A medium in which the last worker writes after the first look of all others, and alone sees all messages.

    Args:
        name: of the memory.
        looks: the first looks of all workers, by prefix and number.
    """

    def __init__(self, name: str, looks: set[tuple[str, int]]) -> None:
        super().__init__(name, timeout=30.0, clock=Clock(), seal=Seal(None))
        self.number, self._looks = -1, looks

    def create(self, path: str, data: bytes, *, deadline: float | None = None) -> bool:
        folder, _, leaf = path.rpartition("/")
        if path.startswith("round/") and leaf.isdigit():
            self.number = int(leaf)
            while self.number == N - 1 and not {(f"{folder}/", number) for number in range(N - 1)} <= self._looks:
                self.clock.sleep(0.001)
        return super().create(path, data, deadline=deadline)

    def list(self, prefix: str = "", *, deadline: float | None = None) -> dict[str, Listed]:
        found = super().list(prefix, deadline=deadline)
        if prefix.startswith("round/0-average/") and self.number != N - 1:
            self._looks.add((prefix, self.number))
            self._wait(f"{prefix}close")
        return found

    def get(self, path: str, *, max_bytes: int, deadline: float | None = None) -> bytes | None:
        if path.endswith("/mean"):
            self._wait(path)
        return super().get(path, max_bytes=max_bytes, deadline=deadline)

    def _wait(self, path: str) -> None:
        while self._get(path, 1 << 30) is None:
            self.clock.sleep(0.001)


def test_the_law_predicts_the_counters_of_a_run() -> None:
    name = uuid.uuid4().hex
    before: dict[int, dict[str, int]] = {}
    after: dict[int, dict[str, int]] = {}
    looks: set[tuple[str, int]] = set()
    all_ended = threading.Barrier(N)

    def at_step(worker: Worker, step: int) -> None:
        if step == H + 1:
            before[worker.membership.number] = asdict(worker.membership.medium.counts)

    def end(worker: Worker) -> None:
        for task in worker.membership._uploads:
            assert task.wait(10.0)
        after[worker.membership.number] = asdict(worker.membership.medium.counts)
        all_ended.wait(10.0)
        worker.membership.close()

    options: dict[str, Any] = {"save_every": 2, "interval": 1000.0}
    (medium, *_) = train(
        lambda: OrderlyMedium(name, looks), 5 * H + 1, at_step=at_step, end=end, make_model=WidePoint, **options
    )
    sizes = {path: entry.num_bytes for path, entry in medium.membership.medium.list().items()}
    law = RoundCosts(N, sizes[f"round/0-average/{4:010d}/{0:06d}"], sizes[f"model/{4:010d}"], save_every=2).requests
    num_rounds = 4
    for field in Requests._fields:
        counted = sum(after[i][field] - before[i][field] for i in range(N))
        expected = num_rounds * getattr(law, field)
        if field in ("reads", "lists"):  # a busy machine lets workers look again
            assert expected <= counted <= 2 * expected, field
        else:
            assert counted == pytest.approx(expected, rel=0.01 if field.startswith("bytes") else 0.0, abs=0), field


def test_each_worker_of_a_round_without_a_mean_reads_the_messages_of_its_peers() -> None:
    assert RoundCosts(8, 100, num_read=1).requests.bytes_read == 7 * 2 * 100
    assert RoundCosts(8, 100, num_read=7).requests.bytes_read == 8 * 7 * 100
    assert RoundCosts(8, 100, num_read=7).requests.bytes_written == 8 * 100
    assert RoundCosts(8, 100, 1000, save_every=10).requests.bytes_written == 9 * 100 + 100


def test_the_store_keeps_messages_and_models_of_the_last_rounds() -> None:
    assert RoundCosts(8, 100, 1000, save_every=1).stored_bytes == 17 * (9 * 100 + 1000)
    assert RoundCosts(8, 100, 1000, save_every=10).stored_bytes == 17 * 9 * 100 + 2 * 1000


def test_a_round_takes_its_messages_one_after_the_other() -> None:
    costs = RoundCosts(4, 1e6)
    assert costs.seconds(1e6, latency=0.0) == 6.0
    assert costs.seconds(math.inf, latency=1.0) == 6 + 7


def test_the_smallest_period_keeps_the_share_of_waiting() -> None:
    every = least_sync_every(0.25, 10.0, waiting_share=0.05)
    assert 10.0 / (10.0 + every * 0.25) <= 0.05 < 10.0 / (10.0 + (every - 1) * 0.25)
    assert least_sync_every(100.0, 0.1, waiting_share=0.5) == 2


def test_money_of_requests_bytes_and_storage() -> None:
    requests = Requests(writes=10, reads=20, lists=30, bytes_written=GB, bytes_read=2 * GB)
    prices = Prices(storage=0.73, writes=5.0, reads=0.4, egress=0.09)
    storage, of_requests, egress = prices.hourly(requests, seconds=36.0, stored_bytes=10 * GB)
    assert storage == pytest.approx(0.01)
    assert of_requests == pytest.approx(100 * (40 * 5.0 + 20 * 0.4) / 1e6)
    assert egress == pytest.approx(100 * 2 * 0.09)


def test_prices_are_of_the_store_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert prices_of("gs://bucket/run").egress == 0.12
    assert prices_of("s3://bucket/run").storage == 0.023
    for address in ("file:///folder/run", "memory://run", "store://host:1/run"):
        assert prices_of(address) == Prices()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://another.provider")
    assert math.isnan(prices_of("s3://bucket/run").storage)


def test_entries_come_with_the_first_round() -> None:
    counts = MediumCounts(writes=4, reads=6, lists=10, bytes_written=100, bytes_read=GB)
    prices = prices_of("az://container/run")
    assert rates(counts, prices, num_rounds=0, seconds=9.0) == {}
    assert rates(counts, prices, num_rounds=2, seconds=1800.0) == {
        "store_requests_per_round": 10.0,
        "store_bytes_per_round": (100 + GB) / 2,
        "store_dollars_per_hour": pytest.approx(2 * (14 * 5.0 + 6 * 0.4) / 1e6),
        "store_egress_dollars_per_hour": pytest.approx(2 * 0.087),
    }


def test_comm_stats_has_requests_bytes_and_money_of_a_round() -> None:
    (worker,) = train(f"memory://{uuid.uuid4().hex}", 2 * H, parabolas=[0])
    stats, counts = worker.model.comm_stats(), worker.membership.medium.counts
    assert stats["store_requests_per_round"] == (counts.writes + counts.reads + counts.lists) / 2
    assert stats["store_bytes_per_round"] == (counts.bytes_written + counts.bytes_read) / 2
    assert stats["store_dollars_per_hour"] == stats["store_egress_dollars_per_hour"] == 0.0
