"""With whom to speak next: flow-control scores of the peers, and who is tried again after it failed."""

from __future__ import annotations

import random
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

MIN_SCORE, START_SCORE, MAX_SCORE = 10, 1000, 1000
REWARD, PENALTY = 10, 100
STARVED_SCORE = 500  # below this a peer is rarely drawn again
PROBE_EVERY = 4  # rounds without a word from a peer that failed or starves, until it is asked for a sign of life


@dataclass
class _Record:
    score: int = START_SCORE
    has_failed: bool = False  # the last contact
    has_answered: bool = False  # a probe, since then
    last_contact: int = 0  # round of the last fetch or probe


class PeerScores:
    """Who is asked for its model: the highest of score + a uniform integer in [10, 1000] wins.

    A score starts at 1000, gains 10 with each completed request, loses 100 with each that failed, and stays within
    [10, 1000]: dpwa's flow control, which avoids slow and dead peers within a few rounds.

    [Note: Recovery] A peer at the bottom is never drawn again by that rule, alive or not. So one whose last contact
    failed, or whose score is below 500, is sent a probe every 4th round: 64 bytes that nobody waits for. If it answers
    it is fetched from in the next round, whatever its score, and if that succeeds its score is 1000 again. So a peer
    that has come back is fetched from within ten rounds, and one that stays away costs no round anything. One that
    answers probes but no fetches is tried once in that time.

    Safe to use from several threads.

    Args:
        peers: their names.
        seed: any; equal seeds and equal calls give equal choices. Make it differ between workers.
    """

    def __init__(self, peers: Iterable[str], *, seed: str) -> None:
        self._lock = threading.Lock()
        self._records = {peer: _Record() for peer in peers}
        self.reset(seed=seed)

    @property
    def scores(self) -> dict[str, int]:
        """The score of every peer."""
        with self._lock:
            return {peer: record.score for peer, record in self._records.items()}

    def add(self, peer: str) -> None:
        """A new peer, at the start score; one that is known starts anew."""
        with self._lock:
            self._records[peer] = _Record(last_contact=self._round)

    def remove(self, peer: str) -> None:
        """Never choose this peer again; one that is not known is no error, as it may just have been removed."""
        with self._lock:
            self._records.pop(peer, None)

    def start_round(self) -> list[str]:
        """Count a round.

        Returns:
            Who is to be sent a probe now: each will hear nothing more from us for a few rounds if it stays silent.
        """
        with self._lock:
            self._round += 1
            due = []
            for peer, record in self._records.items():
                is_suspect = record.has_failed or record.score < STARVED_SCORE
                silent = self._round - record.last_contact
                if is_suspect and not record.has_answered and silent >= PROBE_EVERY:
                    record.last_contact = self._round
                    due.append(peer)
            return due

    def choose(self, excluded: Collection[str] = ()) -> str | None:
        """Whom to fetch from, None if nobody is left: first those that answered a probe, then the highest draw."""
        with self._lock:
            records = {peer: record for peer, record in self._records.items() if peer not in excluded}
            if not records:
                return None
            back = [peer for peer, record in records.items() if record.has_answered]
            if back:
                return self._generator.choice(back)
            draws = {
                peer: (record.score + self._generator.randint(10, 1000), self._generator.random())
                for peer, record in records.items()
            }
            return max(draws, key=lambda peer: draws[peer])

    def answered(self, peer: str) -> None:
        """A probe was answered: the peer lives."""
        with self._lock:
            if (record := self._records.get(peer)) is not None:
                record.has_answered = True

    def succeeded(self, peer: str) -> None:
        """A request was completed, be it with an empty reply."""
        with self._lock:
            if (record := self._records.get(peer)) is not None:
                score = START_SCORE if record.has_answered else min(record.score + REWARD, MAX_SCORE)
                self._records[peer] = _Record(score, last_contact=self._round)

    def failed(self, peer: str) -> None:
        """A request was refused, timed out or broke off."""
        with self._lock:
            if (record := self._records.get(peer)) is not None:
                score = max(record.score - PENALTY, MIN_SCORE)
                self._records[peer] = _Record(score, has_failed=True, last_contact=self._round)

    def state_dict(self) -> dict[str, Any]:
        """Scores, what is known of recoveries, the round, and the state of the generator: plain values."""
        with self._lock:
            version, words, gauss = self._generator.getstate()
            return {
                "round": self._round,
                "records": {peer: asdict(record) for peer, record in self._records.items()},
                "generator": [version, list(words), gauss],
            }

    def reset(self, *, seed: str) -> None:
        """Start anew with the peers that are known."""
        with self._lock:
            self._generator = random.Random(seed)
            self._records = {peer: _Record() for peer in self._records}
            self._round = 0

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict()` gave; peers that it does not name start anew."""
        version, words, gauss = state["generator"]
        with self._lock:
            self._generator.setstate((version, tuple(words), gauss))
            self._round = state["round"]
            for peer in self._records:
                self._records[peer] = _Record(**state["records"].get(peer, {"last_contact": self._round}))
