"""With whom to speak next: the odds of the flow control, and that everybody who comes back is found again."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from gossip_modules.dpwa.peer_scores import PROBE_EVERY, PeerScores


def lower_to(scores: PeerScores, peer: str, score: int) -> None:
    """As many failures as that takes."""
    while scores.scores[peer] > score:
        scores.failed(peer)


def odds(differences: list[int]) -> list[float]:
    """P(i wins) of score + uniform integer in [10, 1000], by summing over the winner's draw; ties are shared."""
    n = 991
    result = []
    for i, score in enumerate(differences):
        total = 0.0
        for draw in range(n):
            below = equal = 1.0
            for j, other in enumerate(differences):
                if j != i:
                    reach = score + draw - other  # the other must draw less than this, from 0 to n - 1
                    below *= min(max(reach, 0), n) / n
                    equal *= min(max(reach + 1, 0), n) / n
            total += (below + equal) / 2
        result.append(total / n)
    return result


@pytest.mark.parametrize("start", [[1000, 900, 1000], [1000, 500], [1000, 200, 1000]], ids=str)
def test_odds_of_the_choice(start: list[int]) -> None:
    peers = [f"w{i}" for i in range(len(start))]
    scores = PeerScores(peers, seed="odds")
    for peer, score in zip(peers, start, strict=True):
        lower_to(scores, peer, score)
    num_draws = 20_000
    counts = Counter(scores.choose() for _ in range(num_draws))
    for peer, expected in zip(peers, odds(start), strict=True):
        # Four standard deviations of a binomial count.
        assert counts[peer] / num_draws == pytest.approx(
            expected, abs=4 * (expected * (1 - expected) / num_draws) ** 0.5
        )


def test_scores_move_by_the_rule_and_stay_in_range() -> None:
    scores = PeerScores(["a"], seed="range")
    scores.succeeded("a")
    assert scores.scores == {"a": 1000}
    scores.failed("a")
    assert scores.scores == {"a": 900}
    scores.succeeded("a")
    assert scores.scores == {"a": 910}
    for _ in range(20):
        scores.failed("a")
    assert scores.scores == {"a": 10}


def run_rounds(scores: PeerScores, dead: set[str], num_rounds: int) -> list[list[str]]:
    """Who was asked in each round; a probe of a live peer is answered before the next round."""
    asked: list[list[str]] = []
    for _ in range(num_rounds):
        answers = [peer for peer in scores.start_round() if peer not in dead]
        tried: list[str] = []
        while (peer := scores.choose(tried)) is not None:
            tried.append(peer)
            if peer not in dead:
                scores.succeeded(peer)
                break
            scores.failed(peer)
        asked.append(tried)
        for peer in answers:
            scores.answered(peer)
    return asked


@pytest.mark.parametrize("num_peers", [2, 3, 16])
@pytest.mark.parametrize("dead_for", [5, 40, 200])
@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_a_peer_that_came_back_is_asked_within_ten_rounds(num_peers: int, dead_for: int, seed: str) -> None:
    peers = [f"w{i}" for i in range(num_peers)]
    scores = PeerScores(peers, seed=seed)
    run_rounds(scores, set(), 10)
    lower_to(scores, "w0", 10)
    run_rounds(scores, {"w0"}, dead_for)
    asked = run_rounds(scores, set(), 10)
    assert any("w0" in tried for tried in asked)
    assert scores.scores["w0"] == 1000


def test_a_dead_peer_soon_costs_nothing() -> None:
    scores = PeerScores(["a", "b", "c"], seed="dead")
    run_rounds(scores, {"a"}, 60)
    asked = run_rounds(scores, {"a"}, 500)
    assert sum("a" in tried for tried in asked) < 10


def test_a_starved_peer_that_lives_is_probed() -> None:
    scores = PeerScores(["a", "b"], seed="starved")
    lower_to(scores, "a", 10)
    scores.succeeded("a")
    probed = [peer for _ in range(PROBE_EVERY) for peer in scores.start_round()]
    assert probed == ["a"]


def test_a_peer_that_answered_a_probe_but_fails_is_lowered_and_probed_again() -> None:
    scores = PeerScores(["a", "b"], seed="half")
    lower_to(scores, "a", 110)
    scores.answered("a")
    assert scores.choose() == "a"
    scores.failed("a")
    assert scores.scores["a"] == 10
    assert scores.choose() == "b"


def test_seeds_differ_and_equal_seeds_agree() -> None:
    def choices(seed: str) -> list[str | None]:
        scores = PeerScores(["a", "b", "c"], seed=seed)
        return [scores.choose() for _ in range(50)]

    assert choices("0/w0/peers") == choices("0/w0/peers")
    assert choices("0/w0/peers") != choices("0/w1/peers")


def test_state_continues_scores_and_choices() -> None:
    scores = PeerScores(["a", "b", "c"], seed="state")
    lower_to(scores, "b", 700)
    [scores.choose() for _ in range(5)]
    other = PeerScores(["a", "b", "c", "new"], seed="another")
    other.load_state_dict(scores.state_dict())
    other.remove("new")
    assert other.scores == scores.scores
    assert [other.choose() for _ in range(50)] == [scores.choose() for _ in range(50)]


def test_state_continues_recoveries() -> None:
    scores = PeerScores("abc", seed="state")
    for _ in range(3):
        scores.start_round()
    for peer in "ab":
        scores.failed(peer)
    scores.start_round()
    scores.answered("a")
    other = PeerScores("abc", seed="another")
    other.load_state_dict(scores.state_dict())
    assert other.choose() == "a"  # which has answered a probe
    rounds = [(scores.start_round(), other.start_round()) for _ in range(8)]
    assert [x for x, _ in rounds] == [x for _, x in rounds]
    assert ["b"] in [x for x, _ in rounds]


def test_no_peer_is_left() -> None:
    scores = PeerScores(["a"], seed="none")
    assert scores.choose({"a"}) is None
    scores.remove("a")
    assert scores.choose() is None
    scores.failed("a")  # it was removed while it was asked
    assert scores.scores == {}


def test_peers_come_and_go_while_others_choose() -> None:
    scores = PeerScores(["a"], seed="threads")
    errors: list[BaseException] = []
    stop = threading.Event()

    def choose() -> None:
        try:
            while not stop.is_set():
                scores.start_round()
                peer = scores.choose()
                if peer is not None:
                    scores.failed(peer)
                    scores.succeeded(peer)
        except BaseException as error:  # noqa: BLE001 (checked below)
            errors.append(error)

    threads = [threading.Thread(target=choose) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(2000):
        scores.add(f"w{i % 7}")
        scores.remove(f"w{(i + 3) % 7}")
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_living_peer_has_not_failed_last() -> None:
    scores = PeerScores(["a", "b"], seed="live")
    assert tuple(scores.statistics().values()) == (3, 0, 0)
    for _ in range(2):  # it dies once
        scores.failed("a")
    assert tuple(scores.statistics().values()) == (2, 0, 1)
    scores.succeeded("a")
    assert tuple(scores.statistics().values()) == (3, 1, 1)
    scores.add("c")
    scores.add("c")  # at another address
    scores.failed("c")
    scores.remove("c")
    assert tuple(scores.statistics().values()) == (3, 2, 2)
