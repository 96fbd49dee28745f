from __future__ import annotations

import tracemalloc

from gossip_modules.transport.traffic import PeerTraffic


def test_waits_for_a_peer_are_those_of_its_last_rounds() -> None:
    traffic = PeerTraffic()
    for seconds in (100.0, *[1.0, 2.0, 3.0, 6.0] * 16):
        traffic.arrived({}, {0: seconds / 2})  # two exchanges make one round
        traffic.arrived({}, {0: seconds / 2})
        traffic.mixed(0)
    # 64 rounds; distances from the median: 1.5, 0.5, 0.5, 3.5
    assert traffic.summary() == {"wait_median/0": 2.5, "wait_mad/0": 1.0}


def test_staleness_is_counted_for_the_senders_of_a_round() -> None:
    traffic = PeerTraffic()
    traffic.arrived({1: 8}, {})
    traffic.mixed(3)
    traffic.arrived({1: 8, 2: 4}, {})
    traffic.mixed(0)
    traffic.arrived({}, {}, sent={0: 16})
    assert traffic.summary([10, 11, 12]) == {
        "bytes_sent/10": 16,
        "bytes_received/11": 16,
        "staleness/11": 1.5,
        "bytes_received/12": 4,
        "staleness/12": 0.0,
    }
    traffic.forget(1)
    assert set(traffic.summary()) == {"bytes_sent/0", "bytes_received/2", "staleness/2"}


def test_memory_does_not_grow_with_rounds() -> None:
    traffic = PeerTraffic()

    def rounds() -> None:
        for k in range(500):
            traffic.arrived({0: 1 << 60}, {0: k / 3}, sent={0: 1 << 60})
            traffic.mixed(k)

    rounds()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    rounds()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 8192  # 64 floats are new objects
