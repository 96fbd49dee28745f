"""MailMembership: the workers of a run that share one place for objects, and no connection with each other."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from ..membership.arguments import as_description, check_callback, check_num_steps, check_tracked
from ..membership.background_log import log
from ..membership.links import LinkTransport, alone
from ..membership.membership import Membership
from ..membership.tracked import check_alike, described
from ..membership.view import Change
from ..membership.watcher import ends_by_error
from ..mixing_manager.base import MixingManager
from ..rounds.mixer import Mixer
from ..transport.deadline import as_timeout
from ..transport.state_tree import copied
from ..version import __version__
from ..wrappers.choices import Choices
from ..wrappers.local_model import LocalModel
from ..wrappers.participant import check_sizes
from .background import BackgroundCall
from .by_mail import ByMail
from .choices import MailChoices
from .clock import Clock
from .errors import MailboxError, RoundGone, Unavailable
from .job import MailJob, Settings
from .mail_rounds import MailRounds
from .medium import REAL_TIME, Medium, key_of, open_medium
from .saved_models import SavedModels
from .world import MailWorld


class MailMembership(Membership):
    """The workers of a run that share a place for objects: a bucket, a folder, or the store of torchrun.

    `Membership` makes one for an address with "://". A worker makes outgoing connections only, so it trains behind NAT
    and firewalls, in several clouds, and on machines that may vanish. There is no leader and no server. It is for
    messages every some seconds to minutes: outer methods, and gossip every H steps.

    A round of an outer method closes if all live workers have written their messages, or if `quorum` of them have and
    `grace` seconds have passed. A worker that is late keeps its model and its anchor, trains on, and its longer drift
    counts in a later round: see [Note: Late drifts] of `MailDriver`. So no worker waits longer than `grace` seconds for
    others.

    Where machines have unequal speeds, give each its own `sync_every`, in proportion to its speed, with
    `weighted_by="num_steps"` and a call of `count_tokens` in each step: then all write at about the same times.
    Otherwise the drifts of slow workers are old, and a large outer momentum does harm.

    Workers take steps at their own pace, so `steps` counts the steps of this worker, and `turn` is refused. Draw
    batches at random, with a seed of each worker's `number`.

    Args:
        store: "s3://bucket/run", "gs://bucket/run", "az://container/run", "file:///shared/run", "memory://run" for
            threads of one process, or "store://host:port/run" for the store of torchrun or of
            `python -m gossip_modules.membership.serve`; or a `Medium`. Use another address for each run.
        min_workers: the number of workers for which the first ones wait before they train.
        quorum: the number of messages with which a round may close after `grace`; None: more than half of
            `min_workers`.
        grace: seconds; see above.
        poll: the most seconds between two looks at the store.
        interval: the most seconds between two signs of life of this worker, or the time of a round if that is longer.
        audit: the share of rounds in which a worker recomputes the mean that another one has written.
        save_every: rounds from one saved model to the next; joining workers begin with such a model.
        key: the key that seals all objects of the run, the same on all workers; None: the variable GOSSIP_JOB_KEY.
        timeout: seconds, or a timedelta, after which an outage of the store is an error.
        description: see `Membership`.
        clock: the clock of all waits.

    Raises:
        ValueError: an argument is out of its range, or the address has another scheme.
        MailboxError: the store refuses to be opened.

    Example:
        >>> membership = Membership("s3://bucket/run", min_workers=4, quorum=3, grace=30.0)
        >>> model = GossipDataParallel(model, algorithm=DiLoCo(sync_every=100), membership=membership)
        >>> for step in membership.steps(num_steps):
        ...     loss = criterion(model(x), y)
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
    """

    is_by_mail = True

    def __init__(
        self,
        store: Medium | str,
        *,
        min_workers: int,
        quorum: int | None = None,
        grace: float = 30.0,
        poll: float = 1.0,
        interval: float = 10.0,
        audit: float = 0.0,
        save_every: int = 1,
        key: str | bytes | None = None,
        timeout: timedelta | float = 600.0,
        description: Mapping[str, object] | None = None,
        clock: Clock = REAL_TIME,
    ) -> None:
        self.timeout = as_timeout(timeout)
        self.min_workers, self.max_workers = min_workers, 0
        settings = Settings(
            quorum=1 if quorum is None else quorum,
            grace=grace,
            poll=poll,
            interval=interval,
            timeout=self.timeout.total_seconds(),
            audit=audit,
            save_every=save_every,
        )
        settings.check(min_workers)
        if quorum is None:
            settings = replace(settings, quorum=min_workers // 2 + 1)
        if not isinstance(store, Medium):
            store = open_medium(store, timeout=settings.timeout, clock=clock, key=key_of(key))
        self.medium = store
        self._mail = MailJob(store, settings)
        weakref.finalize(self, self._mail.stop).atexit = False  # nobody is to wait for a wrapper that was lost
        self.models = SavedModels(store)
        self.name = store.address
        self.node = None
        self.has_joined = False
        self._description = as_description(description)
        self._tracked: dict[str, Any] = {}
        self._callbacks: list[Callable[[Change], None]] = []
        self._members: tuple[int, ...] = ()
        self._untold: list[Change] = []
        self._num_joins = self._num_deaths = self._generation = 0
        self._world: MailWorld | None = None
        self._untaken: Mapping[str, Any] = {}
        self._is_again = False  # whether the present step may come again: its round failed, or took the newest model
        self._closed, self._is_leaving = threading.Event(), threading.Event()
        self._uploads: list[BackgroundCall[None]] = []

    # The workers.

    @property
    def mail(self) -> MailJob:
        """This worker in the run."""
        return self._mail

    @property
    def number(self) -> int:
        """See `Membership`."""
        return self.mail.number

    @property
    def id(self) -> int:
        """See `Membership`."""
        return self.mail.number

    @property
    def own_name(self) -> str:
        """See `Membership`."""
        return str(self.number)

    @property
    def members(self) -> tuple[int, ...]:
        """The workers of the last close, or the live workers at the start; this worker is one of them."""
        return self._members

    @property
    def rank(self) -> int:
        """The position of this worker among `members`."""
        return self._members.index(self.number)

    @property
    def world_size(self) -> int:
        """The number of `members`."""
        return len(self._members)

    @property
    def generation(self) -> int:
        """The number of changes of `members`."""
        return self._generation

    @property
    def num_joins(self) -> int:
        """See `Membership`."""
        return self._num_joins

    @property
    def num_deaths(self) -> int:
        """See `Membership`: workers that were in one close, and not in the next."""
        return self._num_deaths

    @property
    def lost(self) -> tuple[int, ...]:
        """See `Membership`: rounds have no fixed members, so nobody is lost."""
        return ()

    def stats(self) -> dict[str, float]:
        """See `Membership`; with the requests and bytes of this worker at the store."""
        counts = self.medium.counts
        own: dict[str, float] = {"generation": self._generation, "live": len(self._members)}
        own |= {"joins": self._num_joins, "deaths": self._num_deaths, "deadline": self.mail.deadline}
        return {**own, **{f"store_{name}": float(value) for name, value in vars(counts).items()}}

    def note_members(self, found: Collection[int]) -> None:
        """The workers of a close, or the live workers of an exchange by mail, take the place of the ones before.

        Args:
            found: their numbers.
        """
        members = tuple(sorted({*found, self.number}))
        if members == self._members:
            return
        joined = tuple(sorted(set(members) - set(self._members)))
        left = {number: "it was late, or is gone" for number in self._members if number not in members}
        self._members, self._generation = members, self._generation + 1
        self._num_joins, self._num_deaths = self._num_joins + len(joined), self._num_deaths + len(left)
        step = 0 if self._world is None else self._world.step
        self._untold.append(Change(self._generation, step, self.rank, members, joined, left))

    def tell_callbacks(self) -> None:
        """Call the callbacks of `on_change` with the changes since the last call."""
        changes, self._untold = self._untold, []
        for change in changes:
            for callback in self._callbacks:
                callback(change)

    # The user's loop.

    def track(self, **objects: Any) -> None:
        """See `Membership`."""
        check_tracked(objects)
        self._tracked.update(objects)

    def on_change(self, callback: Callable[[Change], None]) -> None:
        """See `Membership`: called at the step after a close with other members."""
        check_callback(callback)
        self._callbacks.append(callback)

    def join(self) -> int:
        """See `Membership`."""
        if self._world is None:
            raise RuntimeError("got join() of a membership without a wrapper, expected it after the model was wrapped")
        if not self.has_joined:
            self._enter()
        self.mail.beat_soon()
        self._take_tracked()
        return self._world.step

    def steps(self, num_steps: int) -> Iterator[int]:
        """See `Membership`; the steps of this worker, from the step of the model with which it has begun."""
        check_num_steps(num_steps)
        step = self.join()
        world = self._world
        assert world is not None, "join() has looked"
        while step < num_steps and not self._is_leaving.is_set():
            world.expect_forward()
            try:
                yield step
            except GeneratorExit:
                if ends_by_error(sys._getframe().f_back):
                    self.end_liveness()
                raise
            if self._closed.is_set():
                raise RuntimeError(
                    f"{self.name}: got close() of the wrapper or the membership in step {step}, expected it after the "
                    "loop over steps(); to end early, break out of the loop, or call leave()"
                )
            if world.step == step and not self._is_again:
                raise RuntimeError(f"got no training forward in step {step}, expected one")
            step, self._is_again = world.step, False

    def turn(self, step: int) -> int:
        """See `Membership`.

        Raises:
            ValueError: always, as workers take steps at their own pace.
        """
        raise ValueError(
            f"got turn({step}) of workers that take steps at their own pace, expected workers in lockstep; draw "
            "batches at random, with a seed of each worker's `number`"
        )

    def leave(self) -> None:
        """See `Membership`."""
        self._is_leaving.set()

    @property
    def must_leave(self) -> bool:
        """See `Membership`."""
        return self._is_leaving.is_set()

    # The wrapper.

    def check_free(self) -> None:
        """See `Membership`."""
        if self._world is not None:
            raise ValueError(
                f"got the membership of the run {self.name} in a second wrapper, expected one wrapper; models that "
                "train in one loop are one module, whose forward runs them all"
            )

    def world_of(self, local: LocalModel, choices: Choices) -> tuple[MixingManager, Mixer]:
        """Make the world of a model, and the mixer of its rounds.

        Args:
            local: the `LocalModel`.
            choices: the `Choices` of the wrapper.

        Returns:
            The weights of a world of one, and the mixer, not bound yet.

        Raises:
            ValueError: the method does not fit to a mailbox; names the remedy.
        """
        self.check_free()
        chosen = MailChoices(choices)
        mixer = chosen.mixer()
        check_sizes(self, chosen.weights, mixer.check)
        self._world = local.world = MailWorld(local, self, mixer)
        local.connect(self.transport)
        if isinstance(mixer, MailRounds):
            mixer.join_run(self.mail, chosen.weights, notes=self._world.note_round, rejoin=self.rejoin)
        elif isinstance(mixer, ByMail):
            mixer.join_run(self.mail, chosen.weights, self._world.note_exchange)
        return chosen.weights(1), mixer

    @property
    def transport(self) -> LinkTransport:
        """A transport of this worker alone."""
        if self._world is not None and self._world.local.is_connected:
            transport = self._world.local.transport
            assert isinstance(transport, LinkTransport), "world_of() has connected the model with such a one"
            return transport
        return alone(self.timeout)

    def attach(self, participant: object) -> None:
        """See `Membership`: take a number, get the model of the run, and wait for `min_workers`.

        A worker that fails leaves the run, so that nobody counts it among those that have come.
        """
        try:
            self._enter()
        except Unavailable:  # nor would the store take notice of its end
            self.release()
            raise
        except BaseException:
            self.close()
            raise

    def _enter(self) -> None:
        world, mail = self._world, self.mail
        assert world is not None, "world_of() comes first"
        version = {"version of gossip_modules": __version__}
        is_first = mail.claim({**self._description, **version, **world.describe()})
        self.transport.names = [mail.number]  # for errors
        if is_first or not self._take_model(world):
            self._begin_run(world, is_first=is_first)
        mail.beat()
        mail.beat_soon()
        mail.wait_for(self.min_workers if self.models.newest() == 0 else 1)
        self._members = tuple(sorted(mail.live()))
        self.has_joined = True

    def _begin_run(self, world: MailWorld, *, is_first: bool) -> None:
        """Write the first model, or wait for the model of the first worker."""
        clock, start = self.mail.clock, self.mail.clock.now()
        while not is_first and self.models.newest() is None and clock.now() - start < self.mail.settings.grace:
            clock.sleep(self.mail.settings.poll / 16)
        if self.models.newest() is None:
            self.models.create(0, self.models.pack(world.give(0)))
        start = clock.now()
        while not self._take_model(world):  # some stores show an object in lists before it can be read
            if clock.now() - start > self.mail.settings.grace:
                raise MailboxError(
                    f"{self.name}: no saved model of the run opens, expected one that is not damaged; begin a new run "
                    "at another address"
                )
            clock.sleep(self.mail.settings.poll)

    def _take_model(self, world: MailWorld) -> bool:
        """Go on from the newest model of the run that opens; False: the run has none."""
        saved = self.models.load()
        if saved is None:
            return False
        world.take(saved)
        self._untaken = saved.state
        return True

    def _take_tracked(self) -> None:
        """Load the state of the tracked objects of the model with which this worker has begun.

        The user tracks objects after the model is wrapped, so the first step is the first time to look.
        """
        state, self._untaken = self._untaken, {}
        if tracked := state.get("tracked"):
            check_alike(described(self._tracked), state["kinds"])
            for name, own in tracked.items():
                self._tracked[name].load_state_dict(own)

    def rejoin(self, why: RoundGone) -> None:
        """Go on from the newest model of the run.

        Args:
            why: the reason: this worker has missed more rounds than the store keeps, or others have replaced objects.
        """
        assert self._world is not None, "a round runs in a wrapper"
        log.warning("worker %d: %s; going on from the newest model of the run", self.number, why)
        self._is_again = True
        self._take_model(self._world)
        self._take_tracked()

    def save(self, number: int) -> None:
        """Write the model after a round to the run, in a thread, unless the run has it already or a newer one.

        Args:
            number: the number of rounds before it.
        """
        assert self._world is not None, "a round runs in a wrapper"
        if not self._world.is_sound:  # also the anchor would be saved with an optimizer that has seen the NaN
            log.warning(
                "worker %d: the model of round %d has infinities or NaN, so it is not saved", self.number, number
            )
            return
        saved = self._world.give(number)
        try:
            data = self.models.pack(saved)
        except TypeError as error:
            log.warning("worker %d: the model of round %d is not saved: %s", self.number, number, error)
            return

        def upload() -> None:
            try:
                newest = self.models.newest()
                if (newest is None or newest < number) and self.models.create(number, data):
                    self.models.prune({"model": number, **self.mail.closed})
            except MailboxError as error:  # the model of a later round may do
                log.warning("worker %d: the model of round %d is not saved: %s", self.number, number, error)

        self._uploads = [task for task in self._uploads if not task.is_done]
        self._uploads.append(BackgroundCall(self.mail.clock, upload, name="mailbox-model"))

    @property
    def tracked_state(self) -> dict[str, Any]:
        """The state of the tracked objects, and their kinds, for a saved model."""
        states = {name: copied(x.state_dict()) for name, x in self._tracked.items()}
        return {"tracked": states, "kinds": described(self._tracked)}

    def at_step(self) -> Change | None:
        """See `Membership`."""
        if not self.has_joined:
            self._enter()
        self._take_tracked()
        self.tell_callbacks()
        return None

    def repeat_step(self) -> None:
        """See `Membership`."""
        self._is_again = True

    # The end.

    def close(self) -> None:
        """See `Membership`."""
        if self._closed.is_set():
            return
        self._closed.set()
        have_ended = [task.wait(self.mail.settings.timeout) for task in self._uploads]
        if not all(have_ended):
            log.warning("worker %d: leaving while its model is not saved yet, after a wait of `timeout`", self.number)
        try:
            if self.number >= 0:
                self.mail.leave()
        except MailboxError as error:
            log.warning("worker %d: the others do not know that it has left: %s", self.number, error)
        self.mail.stop()
        self.medium.close()

    def release(self) -> None:
        """See `Membership`."""
        self._closed.set()
        self.mail.stop()

    def end_by(self, error: BaseException) -> None:
        """See `Membership`: signs of life end."""
        self.release()

    def end_liveness(self) -> None:
        """See `Membership`: signs of life end, until another loop over `steps` begins."""
        log.warning("worker %d: an error ended its training, and the others go on without it", self.number)
        self.mail.rest()
