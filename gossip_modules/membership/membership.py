"""Membership: the workers of a job. They may die, come back and be added while training goes on."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from operator import methodcaller
from typing import Any

import torch.distributed as dist

from .. import extras
from ..transport.deadline import Deadline, as_timeout
from ..transport.uncaught_errors import stay
from ..version import __version__
from .address import own_address
from .arguments import as_description, check_callback, check_num_steps, check_numbers, check_places, check_tracked
from .background_log import log
from .joining import Joining, LeftWhileJoiningError, rejoin
from .links import LinkTransport
from .shared_roster import SharedRoster
from .view import Change, View
from .watcher import ends_by_error, watch
from .worker import JobState, LocalWorker

_STORE_SECONDS = 10.0  # of a request to the store, at most
_GENERATION_SECONDS = 1.0  # that a step waits for the next generation, which does not come while the store is away


class Membership:
    """The workers of a training job. They may die, come back and be added; the others do not wait for them.

    Pass a membership to a wrapper. Its workers meet in a key-value store, in a process of its own, and need the store
    only when a worker comes or goes. Heartbeats and messages go from worker to worker. Do not initialise
    torch.distributed.

    A worker is excluded from rounds at once if its connection closes, or if it sends no heartbeat for its deadline:
    each message to or from it stays with its present holder, so only the state of the lost worker is lost. Meanwhile
    the remaining workers form the next generation, with a graph for their number, and begin it at one training step.

    Each start of a process is a new worker. In a running job a new worker gets model, optimizer and step from another
    worker, its donor. The donor trains on meanwhile. If a live worker is declared dead, it notices and joins again by
    itself.

    Wrap the model last, with data and all else ready, and train at once. The others wait for you from then on: a donor
    copies the training state for your worker. If the worker does not take the copy within ten seconds, another donor
    makes one.

    Args:
        store: "host:port", where `python -m gossip_modules.membership.serve` runs; "file:path", the file with its
            address, so that you can start it again elsewhere; or a `torch.distributed.Store`. An address with "://",
            such as "s3://bucket/run", is a mailbox: see `MailMembership`, which has other arguments.
        min_workers: the number of workers of the first generation; later workers join. If its workers ask for different
            numbers, the largest counts, and the others warn.
        max_workers: the largest number of workers, equal on all workers. Further workers are refused; 0: any number.
        name: the name of the job, if several jobs share a store.
        options: for a mailbox only: see `MailMembership`.
        key: the key of the job, a secret of 16 bytes or more, the same on all workers: no stranger at the store or at
            the ports of the workers can take a worker's place then. None: the variable GOSSIP_JOB_KEY, if it is set.
        description: other facts to be equal on all workers, by name. Values are compared as text. A worker with other
            values is refused; the error names both sides.
        timeout: the limit of every wait, in seconds or as a timedelta. Other workers wait that long only for a live
            process with halted training.
        interval: seconds between two heartbeats.
        min_deadline: the shortest deadline of a heartbeat, in seconds; irregular heartbeats get a longer one. A machine
            with more threads than cores may keep a thread waiting for some tenths of a second.
        on_partition: the action when some workers cannot reach the others. "majority": the larger part forms a
            generation; the other workers train on alone and join again when they can. "both": each part forms a
            generation.
        host: the name or IPv4 address of this machine for other workers; None: the address of the interface towards the
            store. If the variable GLOO_SOCKET_IFNAME is set, messages use its interface.

    Raises:
        ConnectionError: the store does not answer; names address and seconds.
        ValueError: invalid arguments; or the job in the store is of another release of this package.

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

    is_by_mail: bool = False
    """Whether workers share a place for objects, and have no connections: see `MailMembership`."""

    def __new__(cls, store: dist.Store | str = "", *args: Any, **options: Any) -> Membership:
        """Make a membership, or the one of a mailbox, for an address with "://"; a subclass has its own arguments."""
        if cls is Membership and isinstance(store, str) and "://" in store:
            kind: type[Membership] = extras.load("mailbox.membership:MailMembership")
            return object.__new__(kind)
        return object.__new__(cls)

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
        key: str | bytes | None = None,
        description: Mapping[str, object] | None = None,
        **options: Any,
    ) -> None:
        if options:
            raise ValueError(
                f"got {', '.join(options)} with the store {store!r}, expected the address of a mailbox, whose rounds "
                "have them, such as 's3://bucket/run', 'file:///folder' or 'store://host:port/run'"
            )
        check_numbers(min_workers, max_workers, interval, min_deadline)
        check_places(store, name, host, on_partition)
        own_description = as_description(description)
        if max_workers:
            own_description["max_workers"] = str(int(max_workers))
        limit = as_timeout(timeout)
        request_limit = min(limit, timedelta(seconds=_STORE_SECONDS))
        shared = SharedRoster(store, name=name, timeout=request_limit, on_partition=on_partition, key=key)
        shared.check_format()
        address = own_address(shared.address, host)
        self.name, self.timeout = name, limit
        self.min_workers, self.max_workers = int(min_workers), int(max_workers)
        self.job = JobState(
            shared,
            limit,
            self.min_workers,
            address,
            host or (None if os.environ.get("GLOO_SOCKET_IFNAME") else address),
            {"interval": interval, "floor": min_deadline},
            {**own_description, "on_partition": on_partition},
        )
        self.worker = LocalWorker(self.job)
        self.node: Any = None  # the `NodeProcesses`, where several processes are this worker
        self.thread = threading.get_ident()  # that trains
        self.has_joined = False
        self.is_steady = False  # whether the last step has found nothing new
        self._watcher: threading.Thread | None = None
        self._callbacks: list[Callable[[Change], None]] = []
        self._is_ahead = False  # whether `steps` has called `at_step` for the forward that comes
        self._failure: FloatingPointError | None = None  # of that call, which the forward is to raise
        self._is_again = False  # whether that is of a step which `at_step` has counted, as its round has failed
        self._has_stepped = False

    # The workers, as they are now.

    @property
    def view(self) -> View:
        """The active generation.

        Raises:
            RuntimeError: this worker has none yet.
        """
        view = self.worker.generations.active
        if view is None:
            raise RuntimeError("this worker has no place in the job yet, expected join() before; wrap the model first")
        return view

    @property
    def id(self) -> int:
        """Identifies this start of the worker."""
        return self.worker.id

    @property
    def rank(self) -> int:
        """The position of this worker in the present generation; it changes with generations."""
        return self.view.ids.index(self.id)

    @property
    def world_size(self) -> int:
        """The number of workers in the present generation."""
        return len(self.view.members)

    @property
    def generation(self) -> int:
        """The number of the present generation; 0 before the first."""
        view = self.worker.generations.active
        return 0 if view is None else view.generation

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the workers of the present generation, by rank."""
        return tuple(member.number for member in self.view.members)

    @property
    def number(self) -> int:
        """The number of this worker in logs and errors; it keeps it for as long as it lives."""
        return self.members[self.rank]

    @property
    def own_name(self) -> str:
        """The number, and in a node the local rank after it: the name of this process in statistics."""
        return str(self.number) if self.node is None else f"{self.number}.{self.node.control.rank}"

    @property
    def transport(self) -> LinkTransport:
        """The links of the present generation."""
        transport = self.worker.generations.transport
        assert transport is not None, "attach() or join() comes first"
        return transport

    @property
    def num_joins(self) -> int:
        """The number of joins since the start."""
        return self.job.num_joins

    @property
    def num_deaths(self) -> int:
        """The number of deaths and departures since the start."""
        return self.job.num_deaths

    @property
    def lost(self) -> tuple[int, ...]:
        """The numbers of lost members in the present generation, as seen by this worker."""
        return self.worker.lost() if self.node is None else self.node.lost

    def stats(self) -> dict[str, float]:
        """generation, live (workers), joins and deaths since the start, deadline (largest of the peers', seconds)."""
        return self.worker.stats() if self.node is None else dict(self.node.stats)

    # The user's loop.

    def track(self, **objects: Any) -> None:
        """Name the state to send to a joining worker beside the model: objects with a state dict.

        Args:
            objects: by name, the same on all workers: an optimizer, a learning rate scheduler, a sampler. They have
                `state_dict` and `load_state_dict`, and their states are tensors and plain values. A newcomer with
                objects of other names or classes, or an optimizer of other groups or shapes, is refused where it joins.
                See [Note: state at entry] of `TrackedCounts` for tensors that may be some steps older than its first
                one.

        Raises:
            TypeError: an object without these methods.
        """
        check_tracked(objects)
        self.job.tracked.update(objects)

    def on_change(self, callback: Callable[[Change], None]) -> None:
        """Call `callback` with every new generation, in the training thread, before its first round.

        Its error is raised in `steps`, `join` or the forward, when all callbacks were called. Your script may catch it
        and go on: the generation has begun. The first generation of a job begins where the model is wrapped: there an
        error closes the membership.
        """
        check_callback(callback)
        self._callbacks.append(callback)

    def join(self) -> int:
        """Begin; returns the training step to continue from, 0 at the start of the job.

        In a running job a worker first gets the state of training, and returns when its generation begins. The first
        training forward calls it otherwise.

        Raises:
            TimeoutError: no donor, or no generation, within `timeout`.
            ConnectionError: `leave` was called meanwhile.
            Exception: the error of a callback; this worker has joined.
        """
        if self.job.participant is None:
            raise RuntimeError("got join() of a membership without a wrapper, expected it after the model was wrapped")
        if self.job.closed.is_set():
            raise RuntimeError("got join() of a membership that is closed, expected it before close(); make another")
        if not self.has_joined:
            self._as_one(self._join)
            self._tell_callbacks()
        return self.job.participant.step

    def _join(self) -> None:
        Joining(self.worker).enter(Deadline(self.timeout))
        self.worker.generations.next_is(self.worker.generations.clock + 1)
        self.has_joined = True

    def steps(self, num_steps: int) -> Iterator[int]:
        """The training steps from the worker's own first one, up to `num_steps`: 0, 1, ... for a founder.

        A new generation begins before its first step is yielded, so `rank` and `world_size` are right for the next
        round. After a second join a worker continues with the step of the others.

        The others go on at once where an error leaves the loop, or nothing catches one. Catch it and call this method
        again to join again. After `break` or `return` this worker is a member still.

        Raises:
            RuntimeError: a step went by without a training forward, or the wrapper was closed in it.
            TimeoutError: see `join`.
            Exception: of a callback; another call goes on with the same step.
        """
        check_num_steps(num_steps)
        try:
            self.join()
        except LeftWhileJoiningError:
            return
        participant = self.job.participant
        while (step := participant.step) < num_steps:
            failure = self._failure = self._step_ahead()
            if self.must_leave:
                if failure is not None:
                    raise failure
                return
            self._is_ahead = True
            step = participant.step
            if step < num_steps:
                participant.expect_forward()
                try:
                    yield step
                except GeneratorExit:
                    if not self._is_again and ends_by_error(sys._getframe().f_back):
                        self.end_liveness()
                    raise
                if participant.step < num_steps:
                    self._raise_if_closed_in(step)
                is_again = self._is_again or (failure is not None and not self._is_ahead)
                if participant.step == step and not is_again:
                    raise RuntimeError(
                        f"got no training forward in step {step}, expected one: each step is one round with the others"
                    )

    def _raise_if_closed_in(self, step: int) -> None:
        if self.job.closed.is_set() and not self.must_leave:
            raise RuntimeError(
                f"job {self.name!r}: got close() of the wrapper or the membership in step {step}, expected it after "
                "the loop over steps(); to end early, break out of the loop, or call leave()"
            )

    def turn(self, step: int) -> int:
        """The number of this worker's step `step` among the steps of all workers since the start of the job.

        No number is given twice: draw the batch of this number, and no batch is repeated when workers come and go. If a
        worker dies or leaves, its numbers are skipped from its last step to the first step of the next generation. If a
        live worker is declared dead, it keeps counting until it joins again. Where the wrapper has loaded the
        checkpoint of an earlier job, `min_workers`, the same on all, count for each step of that one.

        Args:
            step: a step from `steps` in this generation.

        Raises:
            ValueError: workers take steps at their own pace, so that a step has no such number.
        """
        participant, view = self.job.participant, self.view
        if not participant.is_in_lockstep:
            raise ValueError(
                f"got turn({step}) of workers that take steps at their own pace, expected workers in lockstep; draw "
                "batches at random, with a seed of each worker's `number`"
            )
        is_at_start = view.start == 0 and not self._has_stepped  # a checkpoint may have been loaded since
        before = participant.step if is_at_start else self.job.steps_before
        return max(before, 0) * self.min_workers + view.turns_before(step - before) + self.rank

    def leave(self) -> None:
        """End `steps` before the next one, on all processes of a node; then call `close()`. From any thread.

        The others go on at once. The numbers of `turn` that it would have had until their next generation begins are
        left out. Where this worker waits for the others, or for a donor, that wait ends, and `steps` has no step. In a
        node this takes the first process to be told.
        """
        self.job.is_leaving = True

    @property
    def must_leave(self) -> bool:
        """Whether `steps` is to end: `leave` was called."""
        return self.job.is_leaving if self.node is None else self.node.must_leave

    # The wrapper.

    def check_free(self) -> None:
        """Raise ValueError if there is a wrapper already."""
        if self.job.participant is not None:
            raise ValueError(
                f"got membership of job {self.name!r} in a second wrapper, expected one wrapper; models that train in "
                "one loop are one module, whose forward runs them all: with a wrapper and a membership for each, a "
                "worker that joins would wait in one for workers that wait for it in the other"
            )

    def describe(self) -> dict[str, str]:
        """The common settings of the processes of one worker, by name."""
        store = self.job.store.given
        own = {
            "store": store if isinstance(store, str) else type(store).__name__,
            "name of the job": self.name,
            "min_workers": self.min_workers,
            "timeout": self.timeout,
        }
        return {**self.job.description, **{name: str(value) for name, value in own.items()}}

    def attach(self, participant: Any) -> None:
        """Come to the job: on return the first generation is formed, or this worker waits in the join queue of another.

        Args:
            participant: the `wrappers.participant.Participant` of the wrapper.

        Raises:
            ValueError: the job is another one; names the difference. It goes on without this worker.
            JobFullError: it has as many workers as it takes.
            TimeoutError: too few workers have come.
        """
        self.check_free()
        self.job.participant = participant
        own, version = self.job.description, {"version of gossip_modules": __version__}
        self.job.description = {**own, **version, **participant.describe()}
        try:
            self._as_one(self._come)
            self._tell_callbacks()
        except BaseException:
            self.close()
            self.release()  # also where it was closed already
            if self.node is not None:
                self.node.close()
            raise

    def _come(self) -> None:
        joining = Joining(self.worker)
        self.begin_watch()
        joining.come()
        if self.worker.generations.due:
            joining.found(Deadline(self.timeout))
            self.has_joined = True

    @property
    def is_watched(self) -> bool:
        """Whether the roster's reading thread runs."""
        return self._watcher is not None

    def begin_watch(self) -> None:
        """Start the roster's reading thread, unless it runs."""
        if self._watcher is None:
            self._watcher = watch(self)

    def at_step(self) -> Change | None:
        """At the safe point of a training step, before its round: the change of generation, if any.

        Gives snapshots to joining workers, waits as in [Note: first step] of `Generations`, and begins due generations.
        The forward calls it once for each training step, unless `steps` has called it.
        """
        if self._is_ahead:
            self._is_ahead, failure, self._failure = False, self._failure, None
            if failure is not None:
                raise failure
            return None
        if not self.has_joined:
            self.join()
        self.is_steady = self.node is None and self.worker.is_steady and not self._is_again
        if self.is_steady:
            self.thread = threading.get_ident()
            self.worker.count_step()
            self._has_stepped = True
            return None
        act = self._at_step if not self._is_again else lambda: None  # a node has the model of its first process again
        self._is_again = False
        change = self._as_one(act)
        self._is_ahead = self._has_stepped = True  # where a callback raises, the step counts as begun
        self._tell_callbacks()
        self._is_ahead = False
        return change

    def wait_for_generation(self) -> None:
        """Wait until the next generation is due, for a second at most: the wrapper would lose its steps until then.

        Where none is being formed, as no worker has died, this worker asks for one.
        """
        generations, worker = self.worker.generations, self.worker
        is_due = worker.wait_until(lambda: bool(generations.due) or worker.is_excluded, Deadline(_GENERATION_SECONDS))
        if not is_due and worker.roster.forming is None:
            self.transport.ask_for_another()

    def repeat_step(self) -> None:
        """The round of this step has failed: the next call of `at_step` is of the same one."""
        self._is_again = True

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
        self.thread = threading.get_ident()
        worker, deadline = self.worker, Deadline(self.timeout)  # [Note: one deadline] of `Deadline`
        worker.begin_step(deadline)
        if worker.is_excluded and worker.can_rejoin and not (self.job.is_leaving or deadline.is_over):
            change = rejoin(self, deadline)
            self.worker.generations.next_is(self.worker.generations.clock)
            return change
        return worker.act_at_step()

    def _as_one(self, act: Callable[[], Change | None]) -> Change | None:
        """Act, in the first process where several are this worker: see `NodeProcesses`."""
        return act() if self.node is None else self.node.as_one(act)

    def _tell_callbacks(self) -> None:
        """Tell all callbacks of the changes since the last call; raises the first of their errors at the end.

        They are called last. So a script can catch their error and go on from a consistent state.
        """
        changes, self.job.untold = self.job.untold, []
        errors: list[Exception] = []
        for change in changes:
            for callback in self._callbacks:
                try:
                    callback(change)
                except Exception as error:  # noqa: BLE001 (raised below)
                    errors.append(error)
        try:
            if errors:
                raise errors[0]
        finally:
            errors.clear()  # the traceback of an error holds this frame

    # The end.

    def close(self) -> None:
        """Leave; the others go on. Idempotent."""
        if self.job.closed.is_set():
            return
        acts = self.node is None or self.node.leads
        if acts and self.job.participant is not None and not self.worker.is_excluded:
            has_left = self.job.store.update([methodcaller("leave", self.id, why="it left")], is_last=True)
            if self.worker.liveness is not None:
                self.worker.liveness.is_leaving = has_left
        self.release()

    def release(self) -> None:
        """Close all connections without a notice to the others, as at the end of the process. Idempotent."""
        stay(self)
        self.job.closed.set()
        self.job.wake.set()
        with self.worker.moved:
            self.worker.moved.notify_all()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(1.0)
        self.worker.release()

    def end_by(self, error: BaseException) -> None:
        """See `Leaver`."""
        self.end_liveness()

    def end_liveness(self) -> None:
        """Let the others go on at once, and not when this process has ended.

        [Note: errors that end a loop] A process may take long to end after an error: see [Note: errors that end a
        program] of `uncaught_errors.py`. So the liveness of the worker ends as soon as the error leaves the loop over
        `steps`, or when nothing catches it. A script that catches the error and trains on joins again, as a new worker
        does. A worker that is alone holds no other up.
        """
        worker, view = self.worker, self.worker.generations.active
        is_alone = view is not None and len(view.members) == 1
        if worker.is_over:
            return
        if self.job.shard:  # of a replica: peers of this place are to go on, too
            worker.has_stopped = True
            for transport in worker.generations.transports():
                transport.close_connections()
        if worker.liveness is None or is_alone:
            return
        worker.has_stopped = True
        log.warning("job %s: an error ended the training of this worker, and the others go on without it", self.name)
        worker.liveness.close(is_met=True)
