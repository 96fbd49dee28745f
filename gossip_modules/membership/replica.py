"""The processes that hold one replica of a model in shards, which are one worker of a membership."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch

from ..transport.agreement import broadcast_state
from ..transport.deadline import Deadline
from ..transport.process_group import ProcessGroupTransport
from ..worlds.all_or_none import LOST
from . import limits
from .background_log import log
from .joining import Joining
from .links import Vote
from .liveness.contact import Contact
from .liveness.monitor import LivenessMonitor
from .membership import Membership
from .node import NEWS, NodeProcesses, described
from .view import Joiner, View, parsed
from .worker import LocalWorker

_HEAR = timedelta(seconds=1.0)  # until the heartbeats tell which process has ended


class ReplicaProcesses(NodeProcesses):
    """The processes of one sharded replica, which together are one worker of a membership.

    [Note: one replica, several links] Each process has links with the processes of the same place in other replicas,
    and gossips its shards over them. The first process speaks for the worker: it comes and leaves, sends heartbeats,
    and decides. The others read the roster, too. When it asks for a generation, each process connects with its own
    peers, and the first one is ready when all of its replica are. A process that loses a peer reports it in the name of
    the worker.

    At a safe point the first process runs the same code as a process without others. Where that code changes the model
    or its links, it calls `JobState.together`, which has the other processes do the same to their shards:

        come                                        another start of the worker has begun
        begin, go_to, found, flush, settle          see `Participant`
        copy, drop_copy, serve, take_back           see `Donor`: each process gives its shards to the same place
        receive, load, take_counts                  see `Joining`: each takes its shards from the same place
        post_counts                                 see `Generations`

    If one of them fails, all raise its error. Between safe points they agree on lost peers: [Note: one replica, one
    row] of `Vote`.

    [Note: a replica falls] The processes watch each other by heartbeats as workers do. When one has ended, or is
    silent, the first process ends the liveness of the worker, and each process closes its links, so that other replicas
    go on at once. A wait of the library then raises an error that names the process. A wait of torch, such as a
    collective of `fully_shard`, ends as torch ends it: at once over Gloo if the process has ended.

    Args:
        membership: the membership of this process.
        control: over the processes of the replica, with messages in CPU memory.
        vote: over the same processes.
    """

    vote: Vote

    def __init__(self, membership: Membership, control: ProcessGroupTransport, vote: Vote) -> None:
        super().__init__(membership, control, control)
        self.vote = vote
        job = membership.job
        job.shard, job.num_shards, job.together = control.rank, control.world_size, self._together
        self._has_joined = False  # as the others know
        told: dict[str, Any] = {"on_silent": self._on_silent, "on_ended": self._on_ended, **job.liveness_options}
        self._monitor = LivenessMonitor(
            control.rank, job=f"{job.name}/replica", host=job.host, key=job.store.key, **told
        )
        try:
            self._watch_processes()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """See `NodeProcesses`."""
        self._monitor.is_leaving = True
        self._monitor.close()
        super().close()
        self.vote.close()

    def _watch_processes(self) -> None:
        """Watch all other processes."""
        own, control, contacts = self._monitor.contact, self.control, {}
        for rank in range(control.world_size):
            mine = [list(own.address), own.secret.hex()] if rank == control.rank else None
            address, secret = broadcast_state(control, mine, source=rank, what="how a replica watches its processes")
            contacts[rank] = Contact(rank, (address[0], address[1]), bytes.fromhex(secret))
        del contacts[control.rank]
        self._monitor.watch(contacts)

    def _on_silent(self, rank: int, seconds: float) -> None:
        self._fall(rank, f"was silent for {seconds:.2f} s")

    def _on_ended(self, rank: int) -> None:
        self._fall(rank, "has ended")

    def _fall(self, rank: int, what: str) -> None:
        """End all waits of this and of other replicas, and leave the job: a process of this replica has failed."""
        if self.vote.why:  # the first one that has failed is named
            return
        name = self.membership.name
        self.vote.why = f"job {name!r}: process {self.control.names[rank]} of this replica {what}: the replica falls"
        log.error("%s", self.vote.why)
        self.membership.end_liveness()
        for transport in self.membership.worker.generations.transports():
            transport.close_connections()
        self.vote.close_connections()
        self.control.close_connections()
        self._monitor.close()

    def _together(self, name: str, argument: Any, act: Callable[[], Any]) -> Any:
        """See `JobState`; in the first process, at a safe point."""
        try:
            self._tell(has_message=True)
            broadcast_state(self.control, {"act": name, "argument": argument}, source=0, what=NEWS)
            result, error = self._as_all(act, name)
        except LOST:  # another process has failed, which the heartbeats show a bit later
            self.membership.end_liveness()
            raise
        if error is not None:
            raise error
        return result

    def _obey(self, order: Mapping[str, Any]) -> None:
        name, argument = order["act"], order["argument"]
        _, error = self._as_all(lambda: self._obeyed(name, argument), name)
        if error is not None:  # the first process knows it, and decides
            log.warning("job %s: %s has failed in this replica: %s", self.membership.name, name, error)

    def _as_all(self, act: Callable[[], Any], name: str) -> tuple[Any, Exception | None]:
        """Return the result of `act` in this process, and its error, or the error of the first process with one."""
        result: Any = None
        error: Exception | None = None
        try:
            result = act()
        except Exception as raised:  # noqa: BLE001 (told to the others, and raised below)
            error = raised
        failed = torch.zeros(self.control.world_size, dtype=torch.int32, device="cpu")
        failed[self.control.rank] = error is not None
        self.control.all_reduce(failed, what=f"{name} of a replica")
        if failed.any():
            source = int(failed.argmax())
            text = described(error) if source == self.control.rank else None
            text = broadcast_state(self.control, text, source=source, what=f"why {name} has failed")
            error = error or self._error_of(text, source)
        return result, error

    def _named(self, failure: Exception) -> Exception:
        """See `NodeProcesses`. A process that has heard of the failure first may have closed the broken connection."""
        deadline = Deadline(_HEAR)
        while isinstance(failure, ConnectionError) and not (self.vote.why or deadline.is_over):
            time.sleep(limits.BUSY_POLL)
        return ConnectionError(f"{self.vote.why}: {failure}") if self.vote.why else failure

    def _act(self, act: Callable[[], object]) -> Mapping[str, Any] | None:
        membership = self.membership
        act()
        lost, changes = membership.worker.lost(), membership.job.untold
        if not changes and lost == self.lost and self._has_joined == membership.has_joined:
            return None
        self._has_joined = membership.has_joined
        changed = [vars(change) for change in changes]
        return {"lost": list(lost), "changes": changed, "id": membership.id, "has_joined": membership.has_joined}

    # What the other processes do.

    def _obeyed(self, name: str, argument: Any) -> Any:
        """Do what `JobState.together` names, in this process."""
        worker, participant = self.membership.worker, self._participant
        acts: dict[str, Callable[[], Any]] = {
            "come": lambda: self._come(argument),
            "begin": lambda: worker.generations.follow(parsed(View, argument["view"]), argument["growth"]),
            "found": self._found,
            "go_to": lambda: participant.go_to(argument),
            "post_counts": lambda: worker.generations.post_counts(**argument),
            "flush": participant.flush,
            "settle": participant.settle,
            "copy": worker.donor.copy,
            "drop_copy": worker.donor.drop_copy,
            "serve": lambda: worker.donor.serve(parsed(Joiner, argument)),
            "take_back": lambda: participant.take_back(argument),
            "receive": lambda: self._receive(parsed(Joiner, argument)),
            "load": Joining(worker).load,
            "take_counts": lambda: Joining(worker).take_counts(**argument),
        }
        return acts[name]()

    def _come(self, worker: int) -> None:
        membership = self.membership
        if membership.is_watched:  # the replica joins again
            membership.worker.release()
            membership.worker = LocalWorker(membership.job)
        membership.worker.id = worker
        membership.begin_watch()

    def _found(self) -> None:
        with self.membership.transport.within(Deadline(self.membership.timeout)):
            self._participant.found()

    def _receive(self, joiner: Joiner) -> None:
        worker = self.membership.worker
        worker.wait_until(lambda: worker.joiner == joiner, Deadline(limits.QUERY))  # this process reads it a bit later
        Joining(worker).receive(joiner, Deadline(self.membership.timeout), asks=False)
