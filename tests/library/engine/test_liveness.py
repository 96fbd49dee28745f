"""Liveness: the peers that are asked for their status, and the rank that is named where others wait in vain."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gossip_modules.engine.liveness import Activity, ControlKind, ControlMessage, FailureReason, Liveness
from gossip_modules.transport.exchange import PointToPoint


class Wire:
    """The transport of rank 0 with peers 1, 2 and 3; keeps the control messages that are sent.

    Args:
        seconds: the timeout.
    """

    is_elastic = True  # no thread checks the waits
    rank, names = 0, (10, 11, 12, 13)

    def __init__(self, seconds: float) -> None:
        self.timeout = timedelta(seconds=seconds)
        self.sent: list[tuple[int, int]] = []

    def exchange(self, sends: dict[int, Any], recvs: dict[int, Any], **_: object) -> Any:
        """Note the receiver and the kind of each message."""
        self.sent += [(peer, int(tensor[0])) for peer, (tensor,) in sends.items()]
        return SimpleNamespace(wait=lambda timeout=None: None)


def make(seconds: float = 60.0) -> tuple[Liveness, Wire]:
    """The liveness of rank 0, in round 5."""
    wire = Wire(seconds)
    liveness = Liveness(cast(PointToPoint, wire), [1, 2, 3])
    liveness.round = 5
    return liveness, wire


def status(activity: Activity, *, t: int = 5, waits_for: int = -1) -> ControlMessage:
    """The answer of a peer."""
    return ControlMessage(ControlKind.STATUS, t, activity, waits_for)


def asked(wire: Wire) -> list[int]:
    """The peers that were asked for their status."""
    return [peer for peer, kind in wire.sent if kind == ControlKind.ASK]


def test_a_peer_is_asked_again_only_after_its_answer() -> None:
    liveness, wire = make()
    liveness.closed[3] = 0.0
    liveness._ask()
    liveness._ask()
    assert asked(wire) == [1, 2]  # one that has closed is not asked
    liveness._handle(2, status(Activity.TRAINING))
    liveness._ask()
    assert asked(wire) == [1, 2, 2]


def test_a_peer_that_asks_is_told_the_activity_and_the_rank_that_is_waited_for() -> None:
    liveness, _ = make()
    assert liveness._status() == status(Activity.TRAINING)
    with liveness.waiting("settling", lambda: 2, activity=Activity.SETTLING):
        assert liveness._status() == status(Activity.SETTLING, waits_for=2)
        with liveness.waiting("averaging", activity=Activity.COLLECTIVE):
            assert liveness._status() == status(Activity.COLLECTIVE)
        assert liveness._status() == status(Activity.SETTLING, waits_for=2)
    assert liveness._status() == status(Activity.TRAINING)


def test_a_peer_that_does_not_answer_is_silent_and_at_fault() -> None:
    liveness, _ = make(0.05)
    assert not liveness._silent()
    liveness._ask()
    for peer in (1, 2):
        liveness._handle(peer, status(Activity.EXCHANGING))
    deadline = time.monotonic() + 10
    while not liveness._silent():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert liveness._silent() == [3]
    assert liveness._culprit(1, Activity.EXCHANGING) == (3, FailureReason.SILENT, "")


@pytest.mark.parametrize(
    ("answers", "peer", "activity", "expected"),
    [
        # The peer that is waited for trains on, or waits itself for another rank.
        ({1: status(Activity.TRAINING, t=4)}, 1, Activity.EXCHANGING, (1, "; it trains, in round 4")),
        ({1: status(Activity.EXCHANGING, waits_for=2)}, 1, Activity.EXCHANGING, (2, " (rank 11 waits for it too)")),
        (
            {1: status(Activity.EXCHANGING, waits_for=0)},
            1,
            Activity.EXCHANGING,
            (1, "; it waits for its peers, in round 5"),
        ),
        ({}, 1, Activity.EXCHANGING, (1, "")),
        # In a collective the rank that is waited for is not known: it is a peer that is not there.
        (
            {1: status(Activity.COLLECTIVE), 2: status(Activity.TRAINING), 3: status(Activity.COLLECTIVE)},
            -1,
            Activity.COLLECTIVE,
            (2, "; it trains, in round 5"),
        ),
        ({1: status(Activity.COLLECTIVE, t=2)}, -1, Activity.COLLECTIVE, (1, "; it waits for all ranks, in round 2")),
        ({1: status(Activity.TRAINING)}, -1, Activity.EXCHANGING, (None, "")),
    ],
)
def test_the_rank_that_does_not_come_is_named(
    answers: dict[int, ControlMessage], peer: int, activity: Activity, expected: tuple[int | None, str]
) -> None:
    liveness, _ = make()
    for sender, message in answers.items():
        liveness._handle(sender, message)
    rank, reason, note = liveness._culprit(peer, activity)
    assert reason is FailureReason.ABSENT
    assert (rank, note) == expected


def test_a_patient_wait_lasts_as_long_as_the_partner_makes_progress() -> None:
    liveness, _ = make()
    with liveness.waiting("settling", lambda: 1, activity=Activity.SETTLING, is_patient=True):
        (waiting,) = liveness._waits.values()
        for t in (1, 2, 2):
            waiting.seconds = 50.0
            liveness._handle(1, status(Activity.TRAINING, t=t))
            liveness._check(waiting)
        assert waiting.seconds == 50.0
        waiting.seconds = 55.0
        with pytest.raises(TimeoutError, match=r"settling failed after 55.0 s .*rank 11 did not come"):
            liveness._check(waiting)


def test_waits_of_one_operation_share_a_timeout() -> None:
    liveness, _ = make()
    with liveness.operation():
        for before in (0.0, 20.0):
            with liveness.waiting("waiting", lambda: 1):
                (waiting,) = liveness._waits.values()
                assert waiting.seconds == before
                waiting.seconds += 20.0
        with liveness.operation(), liveness.waiting("settling", lambda: 1, is_patient=True):
            (waiting,) = liveness._waits.values()
            waiting.seconds += 5.0
        with liveness.waiting("waiting", lambda: 1):
            (waiting,) = liveness._waits.values()
            assert waiting.seconds == 40.0
    with liveness.waiting("waiting", lambda: 1):
        (waiting,) = liveness._waits.values()
        assert waiting.seconds == 0.0


def test_every_activity_and_reason_has_words() -> None:
    assert len({activity.phrase for activity in Activity}) == len(Activity)
    assert all("7" in reason.sentence(7) for reason in FailureReason)
