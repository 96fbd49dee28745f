"""MailWorld: the world of a model whose workers share a mailbox."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import torch

from ..engine.lockstep import LockstepEngine
from ..flat.nonfinite import is_finite
from ..flat.vector import FlatVector
from ..rounds.mixer import GlobalAverage, Mixer
from ..transport.base import Transport
from ..transport.process_group import calling
from ..worlds.world import ModelWorld
from ..wrappers.local_model import LocalModel
from .by_mail import ByMail
from .costs import prices_of, rates
from .job import MailJob
from .mail_rounds import MailRounds
from .rounds import Close
from .saved_models import SavedModel


class Workers(Protocol):
    """The part of a `MailMembership` that the world of a model needs."""

    @property
    def mail(self) -> MailJob: ...

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def own_name(self) -> str: ...

    @property
    def tracked_state(self) -> dict[str, Any]: ...

    def attach(self, participant: object) -> None: ...

    def at_step(self) -> object: ...

    def repeat_step(self) -> None: ...

    def note_members(self, found: Collection[int]) -> None: ...

    def save(self, number: int) -> None: ...

    def stats(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class AnchorAverage(GlobalAverage):
    """The average of all workers, for `averaged()`: the newest anchor that this worker has, without a message.

    Args:
        rounds: the rounds of a method whose workers share an anchor; None: they share none.
        transport: the transport of this worker alone.
    """

    def __init__(self, rounds: MailRounds | None, transport: Transport) -> None:
        super().__init__(transport)
        self._rounds = rounds

    def finish(self, s: FlatVector) -> None:
        """See `Mixer`.

        Raises:
            ValueError: the workers share no anchor, or the call needs the models of all workers; or the trained
                tensors have changed.
        """
        if not (name := calling.get()):
            raise ValueError(
                "got other trained tensors than before over a mailbox, expected the same tensors in all rounds of a "
                "run: its workers would change them at different times; freeze and unfreeze layers before the model "
                "is wrapped, or begin a new run at another address"
            )
        if self._rounds is None or name not in ("averaged()", "averaged_state_dict()"):
            raise ValueError(
                f"got {name} over a mailbox, whose workers take steps at their own pace, expected averaged() or "
                "averaged_state_dict() with a method that has an anchor, such as DiLoCo; else evaluate the model of "
                "this worker, or the saved models of the run, as `mailbox.follow` gives them"
            )
        self._rounds.recover(s)


class MailWorld(ModelWorld):
    """The world of a model over a mailbox: workers come and go, and each takes steps at its own pace.

    Args:
        local: the `LocalModel` of this worker.
        membership: its workers.
        mixer: runs its rounds.
    """

    changes = True

    def __init__(self, local: LocalModel, membership: Workers, mixer: Mixer) -> None:
        super().__init__()
        self.local, self.membership = local, membership
        self._rounds = mixer if isinstance(mixer, MailRounds) else None
        self._by_mail = mixer if isinstance(mixer, ByMail) else None
        self._must_save: int | None = None
        self._last = self._num_rounds = 0
        self._began = membership.mail.clock.now()

    def enter(self) -> None:
        """See `ModelWorld`."""
        self.membership.attach(self)
        self._place()

    @property
    def own_name(self) -> str:
        """See `ModelWorld`."""
        return self.membership.own_name

    def averager_of(self, exact: Any) -> Any:
        """See `ModelWorld`."""
        rounds = self._rounds if self._rounds is not None and self._rounds.algorithm.has_equal_memory else None
        return AnchorAverage(rounds, self.local.transport)

    def at_step(self) -> bool:
        """See `ModelWorld`; saves the model of a round that has ended, if it is this worker's turn."""
        self.membership.at_step()
        if self._must_save is not None:
            number, self._must_save = self._must_save, None
            self.membership.save(number)
        self._place()
        return True

    def repeat_step(self) -> None:
        """See `ModelWorld`."""
        self.membership.repeat_step()

    def _place(self) -> None:
        self.local.place = self.membership.rank, self.membership.world_size

    def note_round(self, kind: str, close: Close, *, counts: bool) -> None:
        """A round of the first fragment has ended.

        Args:
            kind: the kind of the round.
            close: its close.
            counts: whether this worker is in it.
        """
        membership = self.membership
        self._num_rounds += 1
        membership.note_members(close.members)
        is_of_models = kind == "average" or self._rounds is None or not self._rounds.algorithm.averages_exactly
        if not (counts and is_of_models):
            return
        self._last = close.number + 1
        turn, rest = divmod(self._last, membership.mail.settings.save_every)
        if not rest and close.members[turn % len(close.members)] == membership.mail.number:
            self._must_save = self._last

    @property
    def num_bytes_sent(self) -> int:
        """See `ModelWorld`."""
        return self.membership.mail.medium.counts.bytes_written

    def note_exchange(self, live: Collection[int], save_as: int | None) -> None:
        """An exchange by mail has ended: see `MailNotes`."""
        self._num_rounds += 1
        self.membership.note_members(live)
        self._must_save = save_as

    def stats(self) -> dict[str, float]:
        """See `ModelWorld`; with the requests, the bytes and the price of a round."""
        medium = self.membership.mail.medium
        seconds, prices = medium.clock.now() - self._began, prices_of(medium.address)
        costs = rates(medium.counts, prices, num_rounds=self._num_rounds, seconds=seconds)
        return {**self.membership.stats(), **costs}

    def close(self) -> None:
        """See `ModelWorld`; the model of the last round stays in the run, by one of the workers that have it."""
        try:
            if self._by_mail is not None and self.membership.mail.number >= 0:
                with torch.no_grad():
                    self._by_mail.leave(self.local.buffer.vector, is_sound=self.is_sound)
                self.local.buffer.written()
                self._last = self._must_save or 0
            if self._last:
                self.membership.save(self._last)
        finally:
            self.membership.close()

    # The membership calls these.

    @property
    def step(self) -> int:
        """The next training step."""
        return int(self.local.engine.step)

    def expect_forward(self) -> None:
        """See `Participant`."""
        self.local.loop.end()

    @property
    def is_sound(self) -> bool:
        """Whether others may get this model: it has no infinities or NaN, or the user lets them spread."""
        engine = self.local.engine
        spreads = isinstance(engine, LockstepEngine) and engine.on_nonfinite == "spread"
        return spreads or is_finite(self.local.buffer.vector)

    def describe(self) -> dict[str, str]:
        """The options to be equal on all workers."""
        buffer = self.local.buffer
        return {**self.local.description, "model": "; ".join(buffer.signature())}

    @torch.no_grad()
    def give(self, number: int) -> SavedModel:
        """Copies of the model and of the state for a worker that joins; the anchor if the workers share one.

        Args:
            number: the number of rounds before it.
        """
        local, engine, vector = self.local, self.local.engine, self.local.buffer.vector
        local.to_estimate()
        is_average = self._rounds is not None and self._rounds.algorithm.has_equal_memory
        before = vector.clone()
        if is_average and number and self._rounds is not None:
            self._rounds.recover(vector)
        named = {name: x.detach().cpu().clone() for name, x in self._named().items()}
        vector.copy_(before)
        state = {"engine": {**engine.state_dict(joins=True), "step": engine.step}, **self.membership.tracked_state}
        return SavedModel(number, named, is_average, engine.step, state)

    @torch.no_grad()
    def take(self, saved: SavedModel) -> None:
        """Go on from a saved model."""
        local = self.local
        local.to_estimate()
        own = self._named()
        for name, x in saved.model.items():
            own[name].copy_(x)
        vector = local.buffer.vector
        vector.reset_weight_()
        local.engine.join(vector, saved.state["engine"])
        local.engine.step = saved.step
        local.buffer.written()

    def _named(self) -> dict[str, torch.Tensor]:
        """The tensors of the module that are not ignored, by name; they share memory."""
        buffer = self.local.buffer
        ignored = buffer.selection.ignored_ids(buffer.module)
        state = buffer.module.state_dict(keep_vars=True)
        return {name: x for name, x in state.items() if isinstance(x, torch.Tensor) and id(x) not in ignored}
