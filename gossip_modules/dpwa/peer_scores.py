"""PeerScores: which peer is asked next, by dpwa's flow control, and when one that failed is tried again."""

from __future__ import annotations

import random
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..state import Restart, State

MIN_SCORE, START_SCORE, MAX_SCORE = 10, 1000, 1000
REWARD, PENALTY = 10, 100
STARVED_SCORE = 500  # below this a peer is rarely drawn again
PROBE_EVERY = 4  # rounds without an answer of a peer that failed or has a low score, until it is sent a probe


@dataclass
class _Record:
    score: int = START_SCORE
    has_failed: bool = False  # the last contact
    has_answered: bool = False  # a probe, since then
    last_contact: int = 0  # round of the last fetch or probe


class PeerScores(State):
    """Chooses the peer that is asked for its model: the one with the highest score + uniform integer in [10, 1000].

    A score starts at 1000, gains 10 with each completed request, loses 100 with each that failed, and stays within
    [10, 1000]. This is dpwa's flow control, which avoids slow and dead peers within a few rounds.

    [Note: Recovery] By that rule alone a peer with the lowest score would never be drawn again, alive or not. So a peer
    whose last request failed, or whose score is below 500, is sent a probe every 4th round: 64 bytes whose answer is
    not waited for. If the peer answers, the next round fetches from it, whatever its score, and if that succeeds its
    score is 1000 again. So a peer that has come back is fetched from within ten rounds, and one that stays away delays
    no round. A peer that answers probes but no fetches is tried once in that time.

    Any thread may call any method: `_lock` guards all state, and is not held while anything is waited for.

    Args:
        peers: the names of the peers.
        seed: the seed of the draws; equal seeds and equal calls give equal choices. Use another one for each worker.

    Attributes:
        num_joins: how often a peer was added, or answered again.
        num_deaths: how often one that had not failed before did.
    """

    def __init__(self, peers: Iterable[str], *, seed: str = "") -> None:
        self._lock = threading.Lock()
        self._records = {peer: _Record() for peer in peers}
        self.num_joins = self.num_deaths = 0
        self._seed = seed
        self.fill({})

    @property
    def scores(self) -> dict[str, int]:
        """The score of every peer."""
        with self._lock:
            return {peer: record.score for peer, record in self._records.items()}

    def statistics(self) -> dict[str, float]:
        """The number of workers whose last request has not failed, this one included, and the counts."""
        with self._lock:
            num_live = 1 + sum(not record.has_failed for record in self._records.values())
            return {"live": num_live, "joins": self.num_joins, "deaths": self.num_deaths}

    def add(self, peer: str) -> None:
        """Add a peer with the start score; a known peer gets the start score again."""
        with self._lock:
            self.num_joins += peer not in self._records or self._records[peer].has_failed
            self._records[peer] = _Record(last_contact=self._round)

    def remove(self, peer: str) -> None:
        """Never choose this peer again. An unknown peer is no error, as it may just have been removed."""
        with self._lock:
            self._records.pop(peer, None)

    def is_due(self, probability: float) -> bool:
        """Draw whether this round asks a peer."""
        with self._lock:
            return self._generator.random() < probability

    def start_round(self) -> list[str]:
        """Count a round.

        Returns:
            The peers that are to be sent a probe now; each gets the next one a few rounds later.
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
        """The peer to fetch from: one that answered a probe, or else the highest draw. None if no peer is left."""
        with self._lock:
            records = {peer: record for peer, record in self._records.items() if peer not in excluded}
            if not records:
                return None
            back = [peer for peer, record in records.items() if record.has_answered]
            if back:
                return self._generator.choice(back)

            def draw(peer: str) -> tuple[int, float]:
                return records[peer].score + self._generator.randint(10, 1000), self._generator.random()

            return max(records, key=draw)

    def answered(self, peer: str) -> None:
        """Note that the peer answered a probe."""
        with self._lock:
            if (record := self._records.get(peer)) is not None:
                record.has_answered = True

    def succeeded(self, peer: str) -> None:
        """Note that a request was completed, possibly with an empty reply."""
        with self._lock:
            if (record := self._records.get(peer)) is not None:
                self.num_joins += record.has_failed
                score = START_SCORE if record.has_answered else min(record.score + REWARD, MAX_SCORE)
                self._records[peer] = _Record(score, last_contact=self._round)

    def failed(self, peer: str) -> None:
        """Note that a request was refused, timed out or was broken off."""
        with self._lock:
            if (record := self._records.get(peer)) is not None:
                self.num_deaths += not record.has_failed
                score = max(record.score - PENALTY, MIN_SCORE)
                self._records[peer] = _Record(score, has_failed=True, last_contact=self._round)

    def state_dict(self, *, joins: bool = False, has_links: bool = True) -> dict[str, Any]:
        """See `State`: the scores, the state of recoveries, the round, and the state of the generator."""
        with self._lock:
            version, words, gauss = self._generator.getstate()
            records = {peer: asdict(record) for peer, record in self._records.items()}
            return {"round": self._round, "records": records, "generator": [version, list(words), gauss]}

    def entry_names(self) -> set[str]:
        """See `State`."""
        return {"round", "records", "generator"}

    def fill(self, state: Mapping[str, Any]) -> None:
        """See `State`; peers that are not in the state get the start score."""
        generator = random.Random(self._seed)
        if state:
            version, words, gauss = state["generator"]
            generator.setstate((version, tuple(words), gauss))
        with self._lock:
            self._generator, self._round = generator, state.get("round", 0)
            records = state.get("records", {})
            for peer in self._records:
                self._records[peer] = _Record(**records.get(peer, {"last_contact": self._round}))

    def restart(self, event: Restart = Restart.ALL) -> None:
        """See `State`: all scores return to the start, for the peers that are known."""
        if event is Restart.ALL:
            self.fill({})
