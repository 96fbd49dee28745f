"""A ratio compares a host with our own loop, and loses the cost that the host has by itself."""

from __future__ import annotations

import pytest

pytest.importorskip("sklearn")

from benchmarks.hosts import OWN, rows_of


def test_the_cost_of_a_host_is_not_the_cost_of_its_integration() -> None:
    cpu = {f"{OWN}/DDP": 0.1, f"{OWN}/SGP": 0.2, "Fabric/DDP": 0.11, "Fabric/SGP": 0.231}
    steps = {key: [(2 * seconds, seconds), (9.0, 9.0), (0.0, 0.0)] for key, seconds in cpu.items()}
    rows = rows_of(steps, {key: [0.5, 0.7] for key in cpu})
    assert [(row["host"], row["method"]) for row in rows] == [tuple(key.split("/")) for key in cpu]
    assert [row["cpu_ms"] for row in rows] == [100.0, 200.0, 110.0, 231.0]
    assert [row["over_own_loop"] for row in rows] == [1.0, 1.0, 1.1, 1.155]
    assert [row["of_integration"] for row in rows] == [None, 1.0, None, 1.105]
    assert {row["accuracy"] for row in rows} == {0.6}
