"""PeerStatus: who is asked, who is silent, and who is named as the rank that keeps others waiting."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import cast

import pytest

from gossip_modules.wagma.control import ControlChannel, ControlKind, ControlMessage
from gossip_modules.wagma.failure_reason import FailureReason
from gossip_modules.wagma.peer_status import Activity, PeerStatus

TIMEOUT = 0.05


class Channel:
    """That of rank 0 with neighbours 1, 2 and 3; keeps what is posted."""

    def __init__(self) -> None:
        self.neighbours = (1, 2, 3)
        self.closed_peers: dict[int, float] = {}
        self.transport = SimpleNamespace(rank=0, names=(10, 11, 12, 13))
        self.posted: list[int] = []

    def post(self, message: ControlMessage, peer: int) -> None:
        """See `ControlChannel`."""
        assert message.kind is ControlKind.STATUS_REQUEST
        self.posted.append(peer)


def make(timeout: float = 60.0) -> tuple[PeerStatus, Channel]:
    """For rank 0."""
    channel = Channel()
    return PeerStatus(cast(ControlChannel, channel), threading.Condition(), timeout=timeout), channel


def status(activity: Activity, *, t: int = 5, waits_for: int = -1) -> ControlMessage:
    """The answer of a neighbour."""
    return ControlMessage(ControlKind.STATUS, t, stage=activity, oldest=waits_for)


def test_a_neighbour_is_asked_again_only_after_its_answer() -> None:
    peers, channel = make()
    channel.closed_peers[3] = 0.0
    peers.request()
    peers.request()
    assert channel.posted == [1, 2]  # one that has closed is not asked
    peers.record(2, status(Activity.TRAINING))
    peers.request()
    assert channel.posted == [1, 2, 2]


def test_a_neighbour_that_does_not_answer_is_silent_and_at_fault() -> None:
    peers, _ = make(TIMEOUT)
    assert not peers.has_silent_peer
    peers.request()
    for peer in (1, 2):
        peers.record(peer, status(Activity.GROUP))
    deadline = time.monotonic() + 10
    while not peers.is_silent(3):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert peers.has_silent_peer
    assert peers.culprit(1, activity=Activity.GROUP, t=5) == (3, FailureReason.SILENT, "")


@pytest.mark.parametrize(
    ("answers", "peer", "activity", "expected"),
    [
        # The peer that is waited for trains on, or waits itself for another rank.
        ({1: status(Activity.TRAINING, t=4)}, 1, Activity.GROUP, (1, "; it trains, in round 4")),
        ({1: status(Activity.GROUP, waits_for=2)}, 1, Activity.GROUP, (2, " (rank 11 waits for it too)")),
        ({1: status(Activity.GROUP, waits_for=0)}, 1, Activity.GROUP, (1, "; it waits for its group, in round 5")),
        ({}, 1, Activity.GROUP, (1, "")),
        # At a global average nobody knows for whom all wait: it is a neighbour that is not there.
        (
            {1: status(Activity.GLOBAL), 2: status(Activity.TRAINING), 3: status(Activity.GLOBAL)},
            -1,
            Activity.GLOBAL,
            (2, "; it trains, in round 5"),
        ),
        ({1: status(Activity.GLOBAL, t=2)}, -1, Activity.GLOBAL, (1, "; it waits for all ranks, in round 2")),
    ],
)
def test_the_rank_that_does_not_come_is_named(
    answers: dict[int, ControlMessage], peer: int, activity: Activity, expected: tuple[int, str]
) -> None:
    peers, _ = make()
    for sender, message in answers.items():
        peers.record(sender, message)
    rank, reason, note = peers.culprit(peer, activity=activity, t=5)
    assert reason is FailureReason.ABSENT
    assert (rank, note) == expected


@pytest.mark.parametrize("activity", [Activity.GROUP, Activity.GLOBAL])
def test_nobody_is_named_where_nothing_is_known(activity: Activity) -> None:
    peers, _ = make()
    assert peers.culprit(-1, activity=activity, t=5) == (-1, FailureReason.UNKNOWN, "")
