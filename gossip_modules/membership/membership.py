"""Membership: who is live; generations come and go while training goes on."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..transport.deadline import Deadline, as_timeout
from ..version import __version__
from .arguments import as_description, check_callback, check_num_steps, check_numbers, check_places
from .events.event_log import EventLog
from .liveness.address import own_address
from .liveness.door import LeftAtDoorError
from .liveness.loop_error import ends_by_error
from .participant import Change, Participant
from .turns import Turns


class Membership(Turns):
    """Who takes part in training: workers may die, come back, and be added, and nobody who lives waits for them.

    Give one to a wrapper. Its workers meet in a key-value store that outlives them, and need it only when somebody
    comes or goes; heartbeats and messages go from worker to worker. torch.distributed is not initialised.

    A worker whose connection closes, or that is silent for longer than its deadline, is left out of rounds at once:
    what would have travelled stays with who has it, so that nothing but what it held is lost. Meanwhile those who
    remain form the next generation, with a graph for as many as they are, and begin it at one training step.

    Each start of a process is a new worker. One that comes to a job that runs already gets model, optimizer and step
    from one of the others, its donor, beside the donor's training. A worker that was declared dead and wakes notices
    it and joins anew, by itself.

    Wrap the model last, with data and all else ready, and train at once. A worker that has wrapped it is waited for: a
    donor copies the state of training for it, and where it does not take it within ten seconds, another donor does.

    Args:
        store: "host:port", where `python -m gossip_modules.membership.serve` runs; "file:path", of a file that it
            writes its address to, so that it can be started anew elsewhere; or a `torch.distributed.Store`.
        min_workers: how many workers the first generation has; whoever comes later joins. Where those who wait for it
            ask for different numbers, the largest counts, and the others warn.
        max_workers: how many there are at most, the same on all: others are refused; 0: any number.
        name: of the job, where several share a store.
        description: what else all workers must have in common, by name, compared as text: others are refused, with both
            sides named.
        timeout: the limit of every wait, in seconds or as a timedelta. Only a worker whose process lives and whose
            training stands still is waited for so long.
        interval: seconds between two heartbeats.
        min_deadline: seconds of silence that are always allowed; more where heartbeats are irregular. A machine that
            runs more threads than it has cores may keep a thread waiting for some tenths of a second.
        on_partition: where workers cannot reach each other: "majority": the larger part forms a generation, the others
            train on without it and join again when they can; "both": each part forms one.
        host: the name or address of this machine at which others reach it; None: the address of the interface towards
            the store, but that messages travel over the interface of the variable GLOO_SOCKET_IFNAME where it is set.

    Raises:
        ConnectionError: the store does not answer; names address and seconds.
        ValueError: arguments that do not fit.

    Example (each worker is a process of its own, started with the same command):
        >>> membership = Membership("node0:29400", min_workers=4)
        >>> model = GossipDataParallel(model, graph=RingGraph, membership=membership)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> membership.track(optimizer=optimizer)
        >>> for step in membership.steps(num_steps):
        ...     x, y = batch(step, membership.rank, membership.world_size)
        ...     loss = criterion(model(x), y)
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
    """

    def __init__(
        self,
        store: dist.Store | str,
        *,
        min_workers: int,
        max_workers: int = 0,
        name: str = "job",
        timeout: timedelta | float = 60.0,
        interval: float = 0.05,
        min_deadline: float = 1.0,
        on_partition: str = "majority",
        host: str | None = None,
        description: Mapping[str, object] | None = None,
    ) -> None:
        check_numbers(min_workers, max_workers, interval, min_deadline)
        check_places(store, name, host, on_partition)
        self.min_workers, self.max_workers = int(min_workers), int(max_workers)
        self._own_description = as_description(description)
        limit = as_timeout(timeout)
        log = EventLog(store, name=name, timeout=min(limit, timedelta(seconds=10)))
        address = own_address(log.address, host)
        super().__init__(
            log,
            name=name,
            timeout=limit,
            host=address,
            link_host=host or (None if os.environ.get("GLOO_SOCKET_IFNAME") else address),
            on_partition=on_partition,
            interval=interval,
            floor=min_deadline,
        )

    def track(self, **objects: Any) -> None:
        """Say what a worker that joins gets beside the model: objects with `state_dict` and `load_state_dict`.

        Args:
            objects: by name, the same on all workers: an optimizer, a learning rate scheduler, a sampler. Their states
                are tensors and plain values.

        Raises:
            TypeError: an object without these methods.
        """
        for name, value in objects.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise TypeError(
                    f"got {name} of type {type(value).__name__}, expected an object with state_dict() and "
                    "load_state_dict(), like an optimizer"
                )
        self._tracked.update(objects)

    def join(self) -> int:
        """Begin; returns the training step that this worker goes on from, 0 at the start of the job.

        A worker that comes to a job that runs gets the state of training first, and returns when its generation
        begins. The first training forward calls it otherwise.

        Raises:
            TimeoutError: no donor, or no generation, within `timeout`.
            ConnectionError: `leave` was called meanwhile.
            Exception: of a callback, after which this worker has joined.
        """
        self._check_attached()
        if not self._has_joined:
            self._as_one(self._join)
            self._callbacks.tell()
        return self._participant.step  # type: ignore[union-attr]

    def _join(self) -> None:
        if self._is_newcomer:
            self._enter(Deadline(self.timeout))
            self._next_is(self._clock + 1)
        self._has_joined = True

    def steps(self, num_steps: int) -> Iterator[int]:
        """The training steps from the one that this worker comes to, up to `num_steps`: 0, 1, ... for a founder.

        A generation that is due begins before its first step is handed out, so `rank` and `world_size` are those of the
        round that comes. After a worker was declared dead and has joined again, steps go on from that of the others.

        The others go on at once where an error leaves the loop, or nothing catches one. A script that catches it and
        calls this again joins again. After `break` or `return` this worker is a member still.

        Raises:
            RuntimeError: a step went by without a training forward, or the wrapper was closed in it.
            TimeoutError: see `join`.
            Exception: of a callback; another call goes on with the same step.
        """
        check_num_steps(num_steps)
        try:
            self.join()
        except LeftAtDoorError:
            return
        assert self._participant is not None
        while (step := self._participant.step) < num_steps:
            failure = self._failure = self._step_ahead()
            if self.must_leave:
                if failure is not None:
                    raise failure
                return
            self._is_ahead = True
            step = self._participant.step
            if step < num_steps:
                self._participant.expect_forward()
                try:
                    yield step
                except GeneratorExit:
                    if not self._is_again and ends_by_error(sys._getframe().f_back):
                        self._end_liveness()
                    raise
                if self._participant.step < num_steps:
                    self._raise_if_closed_in(step)
                is_again = self._is_again or (failure is not None and not self._is_ahead)
                if self._participant.step == step and not is_again:
                    raise RuntimeError(
                        f"got no training forward in step {step}, expected one: each step is one round with the others"
                    )

    def on_change(self, callback: Callable[[Change], None]) -> None:
        """Call `callback` with every generation that begins, in the training thread, before its first round.

        What it raises is raised in `steps`, `join` or the forward, when all callbacks were called. A script that
        catches it may go on: the generation has begun. The first generation of a job begins where the model is wrapped:
        there an error closes the membership.
        """
        check_callback(callback)
        self._callbacks.add(callback)

    def leave(self) -> None:
        """End `steps` before the next one, on all processes of a node; then call `close()`. From any thread.

        The others go on at once. Of the numbers of `turn`, those that it would have had until their next generation
        begins are left out. Where this worker waits for the others, or for a donor, that wait ends, and `steps` has no
        step. In a node this takes the first process to be told.
        """
        self.is_leaving = True

    def attach(self, participant: Participant, description: Mapping[str, str]) -> None:
        """Come to the job: on return the first generation is formed, or this worker waits at the door of another.

        Args:
            participant: who trains.
            description: what all workers must agree on, by name.

        Raises:
            ValueError: the job is another one; says in what. It goes on without this worker.
            JobFullError: it has as many workers as it takes.
            TimeoutError: too few workers have come.
        """
        self.check_free()
        self._participant = participant
        limit = {"max_workers": str(self.max_workers)} if self.max_workers else {}
        policy = {"version of gossip_modules": __version__, "on_partition": self._on_partition}
        self._description = {**self._own_description, **limit, **policy, **description}
        try:
            self._as_one(self._come_to_the_job)
            self._callbacks.tell()
        except BaseException:
            self.close()
            self._release_all()  # also where it was closed already
            if self.siblings is not None:
                self.siblings.close()
            raise

    def _come_to_the_job(self) -> None:
        self._come()
        if not self._is_newcomer:
            self._switch(0)
            self._participant.found()  # type: ignore[union-attr]

    def check_free(self) -> None:
        """Raise ValueError if there is a wrapper already."""
        if self._participant is not None:
            raise ValueError(
                f"got membership of job {self.name!r} in a second wrapper, expected one wrapper; models that train in "
                "one loop are one module, whose forward runs them all: with a wrapper and a membership for each, who "
                "joins would wait in one for workers that wait for it in the other"
            )

    def at_step(self) -> Change | None:
        """At the safe point of a training step, before its round: what has changed, or None.

        Gives snapshots to workers that join, waits where [Note: first step] asks for it, and begins generations that
        are due. Called once for each training step, whose number is that of calls on all workers; by the forward,
        unless `steps` has called it.
        """
        if self._is_ahead:
            self._is_ahead, failure, self._failure = False, self._failure, None
            if failure is not None:
                raise failure
            return None
        act = self._at_step if not self._is_again else lambda: None  # a node has the model of its first process again
        self._is_again = False
        change = self._as_one(act)
        self._is_ahead = self._has_stepped = True  # where a callback raises, the step counts as begun
        self._callbacks.tell()
        self._is_ahead = False
        return change

    def _step_ahead(self) -> FloatingPointError | None:
        """`at_step`, or its error for the forward of this step to raise: a script that goes on catches it there."""
        try:
            self.at_step()
        except FloatingPointError as failure:
            if self._is_ahead:  # it is a callback's
                raise
            return failure
        return None

    def _at_step(self) -> Change | None:
        assert self._participant is not None
        self._thread = threading.get_ident()
        with self._lock:
            clock = self._clock = self._clock + 1 + self._participant.skipped()
            self._next_is(clock)
            must_wait = self._limit is not None and clock >= self._limit
            if self._has_stopped:
                self._is_excluded = self._can_rejoin = True
        deadline = Deadline(self.timeout) if must_wait or self._is_excluded else None  # [Note: one deadline]
        if must_wait and deadline is not None:
            self._wait_for_first_step(clock, deadline)
        is_late = deadline is not None and deadline.is_over
        if self._is_excluded and self._can_rejoin and not (self.is_leaving or is_late):
            change = self._rejoin(deadline or Deadline(self.timeout))
            self._next_is(self._clock)
            return change
        if self._due and self._first_step(self._due[0][0]) < clock:
            self._drop_late(clock)
        begins = bool(self._due) and (self._participant.is_cut_off or self._first_step(self._due[0][0]) == clock)
        gives = bool(self._unclaimed or self._snapshots)
        if begins or gives:
            self._settle(self._participant.flush)
        if gives:
            self._take_back()
            self._take_snapshots()
        if not begins:
            return None
        if self._participant.is_cut_off:
            clock = self._skip_to(self._due[0][0].start)
        return self._switch(clock)
