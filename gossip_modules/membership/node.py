"""Several processes that are one worker of a membership, whose first one acts for all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ..transport.agreement import broadcast_state
from ..transport.deadline import Deadline
from ..transport.process_group import ProcessGroupTransport
from ..transport.state_tree import copied, encode
from ..worlds.all_or_none import LOST
from .joining import JobFullError, LeftWhileJoiningError
from .links import Vote
from .membership import Membership
from .view import Change, View, parsed

PATIENCE = 5  # times the timeout of the membership: the first process waits for other workers while the others wait
NEWS = "what has changed in the membership"
_KINDS = (ValueError, TypeError, FloatingPointError, *LOST, JobFullError, LeftWhileJoiningError)
_ERRORS = {kind.__name__: kind for kind in _KINDS}


class NodeProcesses:
    """The processes of one node, which together are one worker of a membership.

    [Note: one worker, several processes] Only the first process of a node talks to the store, sends heartbeats, has
    links, and gossips. At each safe point, where a single process would look for changes (`join`, `at_step`), all
    processes of the node meet:

        the first one:  acts as a single process would
                        tells the others: nothing has changed; or it has failed; or the generation, the model and the
                        step as they are now, and the tracked objects, if they have come from a donor
        the others:     wait for this, and take it

    So they hold the same model, and give the same answers, at each training step. Rounds are the first process's too.
    When it has run one it tells the others whether its model was written, how far its engine is and whether something
    is in flight, or that it has failed (`run`); then it gives them its model. The memory that an algorithm keeps from
    round to round, such as links, an anchor or corrections, is in the first process only, and dies with the node. After
    an error in a round, which all processes raise, the others take its model at the next safe point: it may have been
    half written.

    Args:
        membership: the membership of this process.
        control: over the processes of the node, with messages in CPU memory.
        data: the same for tensors of the model; may be `control`.

    Attributes:
        leads: whether this is the first process.
        is_apart: whether this process is at a safe point, where changes of its model are not shared at once.
        stats: as the first process saw them at the last safe point; see `Membership.stats`.
        lost: see `Membership.lost`, at the last safe point.
        must_leave: whether a process of the node had called `Membership.leave` before the last safe point.
    """

    vote: Vote | None = None  # of processes that gossip shards: see `ReplicaProcesses`

    def __init__(self, membership: Membership, control: ProcessGroupTransport, data: ProcessGroupTransport) -> None:
        self.membership, self.control, self.data = membership, control, data
        self.leads = control.rank == 0
        self.is_apart = False
        self.stats: dict[str, float] = membership.worker.stats()
        self.lost: tuple[int, ...] = ()
        self.must_leave = False
        self._has_failed = False  # a round, since the last safe point; in the first process

    def as_one(self, act: Callable[[], object]) -> Change | None:
        """Have the first process act for all of them; the last change of generation in it, if any.

        Raises:
            Exception: the error of `act`, on all.
            TimeoutError, ConnectionError: a process of the node is late or gone; names it.
        """
        self.is_apart = True
        try:
            message = self._call(lambda: self._act(act))
            if message is not None:
                self.lost = tuple(message["lost"])
                if not self.leads:
                    self._take(message)
        finally:
            self.is_apart = False
        changes = self.membership.job.untold
        return changes[-1] if changes else None

    def do(self, act: Callable[[], object]) -> None:
        """Have the first process act; all return, or raise its error, when it has acted. Raises as `as_one`."""

        def message() -> None:
            act()

        self._call(message)

    def share(self, x: Tensor, act: Callable[[], object], *, what: str) -> None:
        """x <- its value in the first process after it has acted; on all. Raises as `as_one`."""
        self.do(act)
        self.data.broadcast(x, source=0, what=what)

    def run(
        self,
        act: Callable[[], bool],
        progress: Callable[[], Sequence[float]],
        follow: Callable[[Sequence[float]], None],
    ) -> bool:
        """The result of `act`, which runs rounds, in the first process; on all.

        Args:
            act: runs the rounds; called in the first process.
            progress: returns the counters of the rounds; the same number of counters on all.
            follow: takes the counters of the first process; called in the others.

        Raises as `as_one`. At a safe point it acts in this process only.
        """
        if self.is_apart:
            return act()
        result, error = False, None
        if self.leads:
            try:
                result = act()
            except Exception as raised:  # noqa: BLE001 (told to the others, and raised below)
                error, self._has_failed = raised, True
        numbers = torch.tensor([error is not None, result, *progress()], dtype=torch.float64, device="cpu")
        try:
            self.control.broadcast(numbers, source=0, what="a round of the node")
            failed, result, *counters = numbers.tolist()
            if failed:
                text = broadcast_state(self.control, described(error), source=0, what="why a round has failed")
        except LOST as failure:
            raise (error or failure) from failure
        if not self.leads:
            follow(counters)
        if failed:
            raise error or self._error_of(text)
        return bool(result)

    def close(self) -> None:
        """Give back the groups inside the node. Idempotent."""
        self.data.close()
        self.control.close()

    @property
    def _participant(self) -> Any:
        """The participant of this process."""
        return self.membership.job.participant

    def _call(self, act: Callable[[], Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
        """The result of `act` in the first process; in all of them."""
        message, error = None, None
        if self.leads:
            try:
                message = act()
                encode(message)
            except Exception as raised:  # noqa: BLE001 (told to the others, and raised below)
                error, message, self._has_failed = raised, described(raised), True
        try:
            while self._tell(has_message=message is not None):
                message = broadcast_state(self.control, message, source=0, what=NEWS)
                if "act" not in message:
                    break
                self._obey(message)
                message = None
        except LOST as failure:
            raise self._named(error or failure) from failure
        if message is not None and "error" in message:
            raise self._named(error or self._error_of(message))
        return message

    def _named(self, failure: Exception) -> Exception:
        """An error to raise, with the name of the process that has failed first, where that is known."""
        return failure

    def _obey(self, order: Mapping[str, Any]) -> None:
        """In the others: do what the first process does, too."""
        raise AssertionError("the first process of a node acts alone")

    def _tell(self, *, has_message: bool) -> bool:
        """Share `stats`, whether a process wants to leave, and whether the first process has a message."""
        membership = self.membership
        own = membership.worker.stats() if self.leads else dict.fromkeys(self.stats, 0.0)
        before = membership.job.steps_before if self.leads else 0
        numbers = [has_message, membership.job.is_leaving, before, *own.values()]
        header = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self.control.all_reduce(header, what="a training step of the node")
        has_message, leaving, before, *stats = header.tolist()
        membership.job.steps_before = int(before)
        self.must_leave = leaving > 0
        self.stats = dict(zip(own, stats, strict=True))
        return bool(has_message)

    def _error_of(self, message: Mapping[str, str], source: int = 0) -> Exception:
        name, first = message["error"], "" if source else ", the first one of this worker,"
        kind, prefix = _ERRORS.get(name, RuntimeError), "" if name in _ERRORS else f"{name}: "
        return kind(f"process {self.control.names[source]}{first} failed: {prefix}{message['text']}")

    def _act(self, act: Callable[[], object]) -> Mapping[str, Any] | None:
        """In the first process: the changes by this; None: nothing has changed."""
        membership, participant = self.membership, self._participant
        before, was_in, was = self._summary(), membership.generation > 0, membership.id
        act()
        if membership.generation > 0:
            participant.look_at_weight()
        is_new, lost = self._has_failed or self._summary() != before, membership.worker.lost()
        if not is_new and lost == self.lost:
            return None
        message: dict[str, Any] = {
            "lost": list(lost),
            "changes": [asdict(change) for change in membership.job.untold],
            "id": membership.id,
            "has_joined": membership.has_joined,
        }
        if membership.generation > 0 and is_new:
            message |= {"view": asdict(membership.view), "model": participant.copy()}
            self._has_failed = False
            if not was_in or membership.id != was:  # the state may have come from a donor
                message["tracked"] = {name: copied(x.state_dict()) for name, x in membership.job.tracked.items()}
        return message

    def _summary(self) -> tuple[object, ...]:
        """Changes wherever a safe point has changed anything."""
        membership = self.membership
        view = membership.worker.generations.active
        return membership.id, view, membership.has_joined, self._participant.counters()

    def _take(self, message: Mapping[str, Any]) -> None:
        """In the others: take over the changes."""
        membership, job = self.membership, self.membership.job
        membership.worker.id, membership.has_joined = message["id"], message["has_joined"]
        job.num_joins, job.num_deaths = int(self.stats["joins"]), int(self.stats["deaths"])
        job.untold += [Change(**change) for change in message["changes"]]
        if "view" in message:
            membership.worker.generations.active = parsed(View, message["view"])
            self._participant.take(message["model"])
            self._participant.place()
        states = message.get("tracked", job.tracked)
        if job.tracked.keys() != states.keys():
            raise ValueError(
                f"process {self.control.names[self.control.rank]}: got track() of {sorted(job.tracked)}, expected that "
                f"of the first process of the node, {sorted(states)}; track the same on all of them"
            )
        for name, state in message.get("tracked", {}).items():
            job.tracked[name].load_state_dict(state)


class NodeCollectives:
    """Collectives over all workers of a membership, for each process of a node: the first one gives the result.

    Args:
        node: the processes of this node.
    """

    is_elastic = True  # see `Transport`: the first process goes on where another node fails
    lost: frozenset[int] = frozenset()
    num_bytes_sent = 0  # the transports inside and between nodes count them

    def __init__(self, node: NodeProcesses) -> None:
        self._node = node
        self.timeout = node.membership.timeout

    def __deepcopy__(self, memo: dict[int, object]) -> NodeCollectives:
        """Copies of a wrapper are snapshots, which send nothing."""
        return self

    @property
    def rank(self) -> int:
        """The rank of the node."""
        return self._node.membership.rank

    @property
    def world_size(self) -> int:
        """The number of nodes."""
        return self._node.membership.world_size

    def within(self, deadline: Deadline) -> contextlib.AbstractContextManager[None]:
        """See `Transport`: the first process waits for other nodes, and the others for the first one."""
        node = self._node
        return node.membership.transport.within(deadline) if node.leads else contextlib.nullcontext()

    def all_reduce(self, x: Tensor, *, what: str) -> None:
        """See `Transport`: the sum over all nodes."""
        membership = self._node.membership
        self._node.share(x, lambda: membership.transport.all_reduce(x, what=what), what=what)

    def barrier(self, *, what: str) -> None:
        """See `Transport`: among all nodes."""
        self._node.do(lambda: self._node.membership.transport.barrier(what=what))


def described(error: Exception | None) -> dict[str, str]:
    """An error, as the other processes are told of it."""
    return {} if error is None else {"error": type(error).__name__, "text": str(error)}
