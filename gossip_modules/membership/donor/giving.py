"""Giving: how a donor gives the state of training to a worker that joins."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from ...transport import threads
from ...transport.gloo import gloo_backend
from ...transport.state_tree import copied, encode
from .. import limits
from ..liveness.background_log import log
from ..liveness.contact import digest
from ..liveness.door import Door
from ..liveness.probe import LifeSign, probe
from ..view import Joiner
from . import transfer

_LOOK_SECONDS = 1.0


def name_of(joiner: Joiner) -> str:
    """Of the meeting of a donor and a worker in the store."""
    return "/".join(["give", *map(str, joiner.key)])


class Giving(Door):
    """The part of `Membership` for donors; see [Note: what was given].

    [Note: who does not come for the state] A worker that waits for a donor, or loads what it got, has no connection
    that closes when it dies. It would take one of `max_workers` places for ever, and copies of the state. So where it
    has not come, or not loaded in `timeout`, its donor asks its machine. It is forgotten where that refuses, and where
    it is silent after more attempts than there are members. A refusal alone is not believed, as firewalls refuse too;
    and who lives comes again: [Note: left out at the door].
    """

    def _settle(self, apply_in_flight: Callable[[], None]) -> None:
        """Apply what is in flight, before anything else changes at this training step; raises what that raises.

        Then the step is not counted, so that who goes on takes the same one again: see [Note: after infinities]. Other
        donors give meanwhile.
        """
        try:
            apply_in_flight()
        except BaseException:
            with self._lock:
                self._clock -= 1
                waiting, self._snapshots = self._snapshots, []
            for joiner in waiting:
                self._give_up(joiner)
            raise

    def _take_snapshots(self) -> None:
        """For workers that join. One that cannot be taken is no error of training, which goes on."""
        assert self._participant is not None
        with self._lock:
            joiners = [joiner for joiner in self._snapshots if self._roster.joiners.get(joiner.member.id) == joiner]
            self._snapshots = []
        for joiner in joiners:
            model: Mapping[str, Any] | None = None
            try:
                model = self._participant.give()
                tracked = {name: copied(value.state_dict()) for name, value in self._tracked.items()}
                encode(tracked)
                encode(model)
            except Exception as error:  # noqa: BLE001 (of memory, or of the user's objects: others give, or it is told)
                if model is not None:
                    self._participant.take_back(model)
                self._decline(joiner, error)
                continue
            state: dict[str, Any] = {"model": model, "tracked": tracked, "clock": self._clock}
            until = time.monotonic() + self.timeout.total_seconds()
            with self._lock:
                self._given[joiner.key] = until, state["model"]
            threads.start(self._serve, joiner, state, name="gossip-donor")

    def _decline(self, joiner: Joiner, error: Exception) -> None:
        """Leave a worker to another donor; or say why it cannot join, where as many have tried as there are members.

        A value of a type that cannot travel is the same on all.
        """
        log.warning("job %s: %s did not get the state of training: %r", self.name, joiner.member, error)
        is_same_on_all = isinstance(error, TypeError) or joiner.attempt + 1 >= len(self._require_view().members)
        self._give_up(joiner, why=f"{type(error).__name__}: {error}" if is_same_on_all else "")

    def _give_up(self, joiner: Joiner, *, why: str = "", is_gone: bool = False) -> None:
        event = {"event": "gave up", "id": joiner.member.id, "attempt": joiner.attempt, "by": self.id}
        if is_gone:
            log.warning("job %s: %s does not come for the state of training: forgotten", self.name, joiner.member)
            event |= {"is_gone": True, "number": joiner.member.number}
        self._say({**event, "why": why} if why else event)

    def _serve(self, joiner: Joiner, state: Mapping[str, Any]) -> None:
        """A thread of its own: give the state to a worker that joins; see [Note: who does not come for the state]."""
        name = name_of(joiner)
        try:
            self._log.arrive(name)
            with self._log.lent_store(name) as store:
                group = gloo_backend(store, 0, 2, timedelta(seconds=limits.CONNECT), host=self._link_host)
            transfer.send(group, state, timeout=self.timeout)
            self._log.forget(f"arrived/{name}", f"{name}/0/0", f"{name}/0/1")
        except (RuntimeError, OSError) as error:
            log.warning("job %s: %s did not get the state of training: %s", self.name, joiner.member, error)
            with self._lock:
                view = self._roster.view
            sign = self._sign_of(joiner)
            is_gone = sign is LifeSign.SILENT and view is not None and joiner.attempt >= len(view.members)
            self._give_up(joiner, is_gone=is_gone or sign is LifeSign.ENDED)
            return
        until = time.monotonic() + self.timeout.total_seconds()
        while self._is_loading(joiner):
            if time.monotonic() > until and self._sign_of(joiner) is not LifeSign.LIVES:
                self._give_up(joiner, is_gone=True)
                return

    def _is_loading(self, joiner: Joiner) -> bool:
        """Whether a worker has got the state, and does not say within a second that it has loaded it."""
        with self._moved:
            is_over = self._moved.wait_for(
                lambda: self._closed.is_set() or self._roster.joiners.get(joiner.member.id) != joiner, _LOOK_SECONDS
            )
        return not is_over

    def _sign_of(self, joiner: Joiner) -> LifeSign:
        try:
            signs = probe({joiner.member.id: joiner.member.contact}, job=digest(self.name), seconds=limits.PROBE)
        except OSError:  # no descriptor is left here: nothing says that it has ended
            return LifeSign.LIVES
        return signs[joiner.member.id]

    def _take_back(self) -> None:
        assert self._participant is not None
        with self._lock:
            unclaimed, self._unclaimed = self._unclaimed, []
        for state in unclaimed:
            self._participant.take_back(state)
