"""Participant: the world of a model with workers that die and join, and the state for a joining worker."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ..flat.sharded import local_of
from ..graph_manager.base import GraphManager
from ..membership.links import LinkTransport, alone
from ..membership.membership import Membership
from ..mixing_manager.base import MixingManager
from ..transport.agreement import broadcast_state, broadcast_tensors, rows_of_all
from ..transport.base import Transport
from ..transport.change_board import digest_of
from ..transport.process_group import DEFAULT_TIMEOUT
from ..transport.state_tree import copied
from ..worlds.world import ModelWorld
from .local_model import LocalModel

_KEPT_SIZES = 64
_CHECKED_SIZES = 16  # worlds of so many workers at least must have a graph


def neighbours(mixing: MixingManager, rank: int) -> Iterable[int]:
    """The ranks with which this one exchanges in some round."""
    graph: GraphManager = mixing.graph
    gives = set(graph.phone_book(rank))
    return gives | {peer for peer in range(graph.world_size) if rank in graph.phone_book(peer)}


class Participant(ModelWorld):
    """The world of a model in a membership. The membership calls all methods but the first five.

    [Note: generations] A generation of the membership is a set of workers, a transport over links of its own, and a
    first training step. At that step, every worker first applies the round in flight over the old links and turns to
    the new ones, with graph and weights for the new number of workers. Rounds and steps count on. A joining worker gets
    half of its donor's push-sum weight. Then all workers multiply their weights by one number, see [Note: weights] of
    `Roster`. A worker without peers has the weight one.

    Until the membership has a place for this worker, the world is one of this worker alone.

    Args:
        local: the model of this worker.
        membership: its workers.
        choose: the weights, with their graph, for a number of workers; the same function on all of them.
        check: raises ValueError for unsuitable weights.
        example: graphs for any number of workers, for the error.
        peers: the peers of a rank in any round; it watches them.
        has_links: whether a worker has a link with each peer, beside the group over all ranks.

    Attributes:
        weight: the push-sum weight, as it was at the last safe point; 1.0 without push-sum. Read from any thread.

    Raises:
        ValueError: rounds run at another time than in forwards; there is no graph for some number of workers, or
            `check` raises it.
    """

    changes = True

    def __init__(
        self,
        local: LocalModel,
        membership: Membership,
        choose: Callable[[int], Any],
        *,
        check: Callable[[Any], None] = lambda mixing: None,
        example: str = "RingGraph or BaseGraph",
        peers: Callable[[Any, int], Iterable[int]] = neighbours,
        has_links: bool = True,
    ) -> None:
        check_forward(local)
        super().__init__()
        self.local, self.membership = local, membership
        self.weight = 1.0
        self.choose = functools.lru_cache(maxsize=_KEPT_SIZES)(choose)  # MATCHA plans each graph, which takes a while
        self._peers, self._has_links = peers, has_links
        check_sizes(membership, self.choose, check, example=example)
        local.connect(alone(membership.timeout))

    # See `ModelWorld`.

    @property
    def sharers(self) -> Transport | None:
        """See `ModelWorld`: the processes that gossip shards of a model. The first process of a node gossips alone."""
        node = self.membership.node
        return None if node is None or node.vote is None else node.control

    def enter(self) -> None:
        """See `ModelWorld`."""
        self.membership.attach(self)

    @property
    def own_name(self) -> str:
        """See `ModelWorld`."""
        return self.membership.own_name

    def at_step(self) -> bool:
        """See `ModelWorld`."""
        if self.local.engine.needs_generation:
            self.membership.wait_for_generation()
        membership = self.membership
        membership.at_step()
        if membership.is_steady:
            return False
        if self._gossips:  # else `NodeProcesses` looks, before it tells the other processes
            self.look_at_weight()
        self.has_lost_peers = bool(membership.lost)
        return True

    def compare_layouts(self) -> None:
        """See `ModelWorld`, and [Note: agreeing] of `ExchangedTensors`."""
        local, exchanged, transport = self.local, self.local.exchanged, self.local.transport
        assert isinstance(transport, LinkTransport), "the transport of a membership"

        def compare() -> bool:
            """Whether this worker has taken over the layout of another one."""
            digest = bytes.fromhex(digest_of([json.dumps(exchanged.signature())]))
            mine = torch.frombuffer(bytearray(digest) + bytes([exchanged.is_newcomer]), dtype=torch.uint8)
            rows = rows_of_all(transport, mine, what="comparing exchanged tensors")
            if bool((rows[:, :-1] == rows[0, :-1]).all()):
                return False
            source = int(rows[:, -1].argmin())  # the first one of those that are not new, or of all
            state = self.layout() if transport.rank == source else None
            state = broadcast_state(transport, state, source=source, what="the exchanged tensors")
            differs = not torch.equal(rows[source, :-1], mine[:-1])
            if differs:
                self.take_layout(state, freezes=exchanged.is_newcomer)
            return differs

        if (node := local.node) is None or node.is_sharded:
            with transport.as_one_collective():
                compare()
        elif node.run(compare):
            state = self.layout() if node.control.rank == 0 else None
            state = broadcast_state(node.control, state, source=0, what="the exchanged tensors")
            if node.control.rank:
                self.take_layout(state)
        exchanged.is_first = exchanged.is_newcomer = False

    def repeat_step(self) -> None:
        """See `ModelWorld`."""
        self.membership.repeat_step()

    def stats(self) -> dict[str, float]:
        """See `ModelWorld`."""
        return self.membership.stats()

    def close(self) -> None:
        """See `ModelWorld`."""
        self.membership.close()

    # The membership calls these, in the training thread at a safe point unless they say otherwise.

    def describe(self) -> dict[str, str]:
        """The options to be equal on all workers."""
        local = self.local
        buffer, module = local.buffer, local.buffer.module
        digest = hashlib.sha256("\n".join(buffer.signature()).encode()).hexdigest()[:16]
        size = sum(parameter.numel() for parameter in buffer.parameters)
        return {
            **local.description,
            "wrapper": local.name,
            "push-sum weight": str(buffer.vector.push_sum_weight.dtype),
            "model": f"{type(module).__name__} with {size} parameters, signature {digest}",
        }

    def peers(self, rank: int, world_size: int) -> Iterable[int]:
        """The watched ranks: the peers of this rank in any round. From any thread."""
        return self._peers(self.choose(world_size), rank)

    def links(self, rank: int, world_size: int) -> Iterable[int]:
        """The peers with a link to this rank, beside the group over all ranks. From any thread."""
        return self.peers(rank, world_size) if self._has_links else ()

    @property
    def is_in_lockstep(self) -> bool:
        """Whether step k of one worker is step k of all. Else each begins a generation at its own next step."""
        return self.local.engine.is_in_lockstep

    @property
    def is_cut_off(self) -> bool:
        """Whether its rounds with this generation have ended, so that the next one need not wait for its first step."""
        return self.local.engine.is_cut_off

    @property
    def is_weighted(self) -> bool:
        """Whether workers have push-sum weights; a donor shares its weight with a joining worker."""
        return self.local.loop.debias is not None

    @property
    def num_bytes(self) -> int:
        """The size of the model."""
        return int(self.local.buffer.vector.layout.num_bytes)

    @property
    def step(self) -> int:
        """The next training step."""
        return self.local.engine.step

    def expect_forward(self) -> None:
        """A loop over `steps` begins a step: its first training forward has the round, whatever was stepped before."""
        self.local.loop.end()

    def counts(self) -> tuple[int, int]:
        """The training steps left out since the last call, beside the steps of `go_to`; and `step`."""
        engine = self.local.engine
        num_skipped, engine.num_skipped_steps = engine.num_skipped_steps, 0
        return num_skipped, engine.step

    def go_to(self, step: int) -> None:
        """Go on from the training step `step`, where the others are."""
        self.advance(step - self.step)

    def advance(self, num_steps: int) -> None:
        """Count training steps of the others; a negative number takes steps back."""
        self.local.engine.advance(num_steps)

    def look_at_weight(self) -> None:
        """Note the weight; a lone worker has weight one, and its estimate stays."""
        if not self.is_weighted:
            return
        local, vector = self.local, self.local.buffer.vector
        if self.membership.transport.is_alone and vector.push_sum_weight.item() != 1.0:
            try:
                local.apply_in_flight()
            except FloatingPointError:  # [Note: after infinities] of `LocalModel`
                self.membership.repeat_step()
                raise
            local.to_estimate()
            vector.reset_weight_()
        self.weight = vector.push_sum_weight.item()

    @torch.no_grad()
    def found(self) -> None:
        """Begin with the model of the first rank; all workers of the first generation call it.

        Rounds and weight from earlier training are dropped.
        """
        local, engine = self.local, self.local.engine
        vector = local.buffer.vector
        local.to_estimate()
        counts = torch.tensor([engine.t, engine.step], device="cpu")
        transport = self.membership.transport
        with transport.as_one_collective():
            broadcast_tensors(transport, [vector.raw, counts, *self._others()])
        vector.reset_weight_()
        engine.go_to(vector, *counts.tolist())

    def begin(self, transport: LinkTransport, growth: float) -> None:
        """Turn to the links of the active generation now; all its members multiply their weights by `growth`."""
        local, vector, node = self.local, self.local.buffer.vector, self.membership.node
        local.apply_in_flight()
        if node is not None and node.vote is not None:
            transport.vote_by(node.vote)
        if self.is_weighted:  # the storage holds z = x / w, so this changes no estimate
            local.to_estimate()
            vector.push_sum_weight.mul_(growth)
        local.engine.rebind(self.choose(transport.world_size), transport, vector)
        local.connect(transport)
        if local.node is None:  # else the averages of a node follow the membership
            local.averager.transport = transport
        self.place()
        local.watch_changes()

    def place(self) -> None:
        """Note the place of this process; the processes of a node have consecutive ranks, as without a membership."""
        membership, node = self.membership, self.membership.node
        rank, g = (0, 1) if self._gossips else (node.control.rank, node.control.world_size)
        self.local.place = membership.rank * g + rank, membership.world_size * g

    def flush(self) -> None:
        """Apply the round in flight, or raise its error; afterwards no round is in flight."""
        self.local.engine.withdraw()
        self.local.apply_in_flight()

    def settle(self) -> None:
        """Apply the round in flight, before its links are given up."""
        if not self.local.engine.give_up(self.local.buffer.vector):
            self.flush()

    @torch.no_grad()
    def give(self) -> Mapping[str, Any]:
        """Copies of the state for a joining worker, with half of the push-sum weight."""
        self._gather()
        vector = self.local.buffer.vector
        weight = vector.push_sum_weight * (0.5 if self.is_weighted else 1.0)
        engine = copied({**self.local.engine.state_dict(joins=True), "step": self.step})
        state = {"vector": vector.raw.clone(), "weight": weight, "engine": engine, **self.layout()}
        vector.push_sum_weight.copy_(weight)  # at last, as a copy may fail
        return state

    def take_back(self, state: Mapping[str, Any]) -> None:
        """The copies of `give` have reached no worker."""
        if self.is_weighted:
            self._gather()
            weight = self.local.buffer.vector.push_sum_weight
            weight.add_(state["weight"].to(weight.device))

    @torch.no_grad()
    def take(self, state: Mapping[str, Any]) -> None:
        """Go on from the copies of `give`."""
        local = self.local
        self._gather()  # a round in flight came over links that are closed: nothing of it stays
        self.take_layout(state)
        local.exchanged.is_newcomer = True
        vector = local.buffer.vector
        vector.raw.copy_(state["vector"])
        vector.push_sum_weight.copy_(state["weight"])
        self.weight = vector.push_sum_weight.item()
        local.engine.join(vector, state["engine"])
        local.buffer.written()

    def copy(self) -> Mapping[str, Any]:
        """The state of `give`, with the whole weight and only the counters of the engine; the weight stays here too."""
        state = self.give()
        self.take_back(state)
        engine = self.local.engine
        counters = {"engine": engine.state_name, "t": engine.t, "step": engine.step}
        return {**state, "engine": counters, "weight": self.local.buffer.vector.push_sum_weight.clone()}

    def counters(self) -> tuple[object, ...]:
        """Changes wherever a safe point has changed the model or the engine."""
        engine, vector = self.local.engine, self.local.buffer.vector
        weight = vector.push_sum_weight.item() if self.is_weighted else 1.0  # which waits for a GPU
        return engine.t, engine.step, engine.is_in_flight, weight

    def layout(self) -> dict[str, Any]:
        """The exchanged tensors, the names of the trained ones, and copies of all others."""
        buffer = self.local.buffer
        return {
            "others": [tensor.detach().clone() for tensor in self._others()],
            "travels": buffer.signature(),
            "trained": [name for name, tensor in self._named().items() if tensor.requires_grad],
            "travelling": self.local.exchanged.state_dict(),
            "agreed": buffer.agreed,
            "is_complete": buffer.is_complete(),
        }

    @torch.no_grad()
    def take_layout(self, state: Mapping[str, Any], *, freezes: bool = True) -> None:
        """Take over the `layout` of another worker, and its tensors without exchange; nothing is in flight.

        This worker then finds the same changes at its next round as the other one.

        Args:
            state: the state of the other worker.
            freezes: whether to train the same tensors; else this worker compares its own choice at its next round.
        """
        buffer, named = self.local.buffer, self._named()
        trained = {name for name, x in named.items() if x.requires_grad} if not freezes else {*state["trained"]}
        self._choose(state["travels"], trained)
        self.local.exchanged.load_state_dict(state["travelling"])
        buffer.keep(is_complete=freezes and state["is_complete"])
        buffer.agree(state["agreed"])
        for own, other in zip(self._others(), state["others"], strict=True):
            own.copy_(other)

    def _gather(self) -> None:
        """Leave nothing in flight, and have the estimate in the tensors of the vector."""
        self.local.apply_in_flight()
        if not self.local.buffer.is_attached():
            self.local.reattach()
        self.local.to_estimate()

    def _choose(self, travels: Sequence[str], trained: Collection[str]) -> None:
        """Freeze the parameters frozen by the job, and train the others.

        Args:
            travels: the signature of the donor's vector. An engine with rounds under way keeps it if fewer tensors are
                trained than exchanged.
            trained: the names of the donor's trained parameters.
        """
        buffer, named = self.local.buffer, self._named()
        if buffer.signature() != travels:
            names = {text.split(" ", 1)[0] for text in travels}
            for name, parameter in named.items():
                parameter.requires_grad_(name in names)
            buffer.attach()
            if buffer.signature() != travels:
                ours, theirs = set(buffer.signature()) - set(travels), set(travels) - set(buffer.signature())
                raise ValueError(
                    f"got a donor that trains {sorted(theirs)} where this worker has {sorted(ours)}, expected the same "
                    "tensors on both; layers that are added or taken away on the way must be so before the model is "
                    "wrapped"
                )
        for name, parameter in named.items():
            parameter.requires_grad_(name in trained)

    @property
    def _gossips(self) -> bool:
        """Whether this process gossips: it is no node's, or has shards of the model."""
        node = self.membership.node
        return node is None or node.vote is not None

    def _named(self) -> dict[str, Tensor]:
        """The parameters that are not ignored, by name."""
        buffer = self.local.buffer
        ignored = buffer.selection.ignored_ids(buffer.module)
        return {name: x for name, x in buffer.module.named_parameters() if id(x) not in ignored}

    def _others(self) -> list[Tensor]:
        """Parameters and buffers neither exchanged nor ignored: frozen ones, counters."""
        buffer = self.local.buffer
        return list(map(local_of, buffer.selection.others(buffer.module, buffer.tensors).values()))


def check_forward(local: LocalModel) -> None:
    """Raise ValueError if rounds of a model in a membership run at another time than in forwards."""
    if local.loop.when.value != "forward":
        raise ValueError(
            f"got rounds={local.loop.when.value!r} with a membership, expected 'forward': a worker that joins takes "
            "the state of training before its first forward; leave rounds out"
        )


def check_sizes(
    membership: Membership,
    choose: Callable[[int], Any],
    check: Callable[[Any], None],
    *,
    example: str = "RingGraph or BaseGraph",
) -> None:
    """Raise ValueError unless there are suitable weights for each number of workers that a membership may have.

    Args:
        membership: the workers.
        choose, check, example: see `Participant`.
    """
    failing: dict[int, Exception] = {}
    chosen = []
    for n in range(1, (membership.max_workers or max(2 * membership.min_workers, _CHECKED_SIZES)) + 1):
        try:
            chosen.append(choose(n))
        except ValueError as error:
            failing[n] = error
    if failing:
        raise ValueError(
            f"got a graph or mixing that does not exist for {list(failing)} workers, expected one for any number, "
            f"since workers may die and join; e.g. {example}: {next(iter(failing.values()))}"
        )
    for n, mixing in enumerate(chosen, start=1):
        try:
            check(mixing)
        except ValueError as error:
            raise ValueError(
                f"{error}; {n} workers are tried since others may come: give the membership max_workers, or leave "
                "graph and mixing out"
            ) from error


def check_elastic(
    membership: object,
    *,
    graph: object,
    mixing: object,
    example: str = "graph=RingGraph or graph=BaseGraph",
    **links: Any,
) -> None:
    """Raise ValueError for arguments of a wrapper unfit for a membership.

    Args:
        membership: see `check_links`.
        graph, mixing: as the user gave them.
        example: suitable graphs, for the error.
        links: the other arguments of `check_links`.
    """
    check_links(membership, **links)
    for name, value in (("graph", graph), ("mixing", mixing)):
        is_function = callable(value) or isinstance(value, str)
        if isinstance(value, (GraphManager, MixingManager)) or (value is not None and not is_function):
            raise ValueError(
                f"got {name}={value} with a membership, expected a class, a function or a name, since it is made anew "
                f"for each number of workers, e.g. {example}"
            )


def check_links(
    membership: object,
    *,
    group: object,
    init_sync: object,
    timeout: timedelta,
    comm_device: object = None,
    takes_mail: bool = False,
) -> None:
    """Raise ValueError for anything but a membership, and for arguments of a wrapper decided by a membership.

    Args:
        membership: what the user gave as one.
        group, comm_device: of messages.
        init_sync: all workers begin with the model of the first one.
        timeout: the timeout of the membership, or the default of wrappers.
        takes_mail: whether the membership may be a mailbox.
    """
    if not isinstance(membership, Membership):
        store = membership if isinstance(membership, str) else "host:port"
        raise ValueError(
            f"got membership={membership!r}, expected a Membership; pass Membership({store!r}, min_workers=...)"
        )
    if membership.is_by_mail and not takes_mail:
        raise ValueError(
            f"got the mailbox {membership.name} for a wrapper whose workers are connected, expected the wrapper whose "
            "messages may lie in a store: GossipDataParallel(model, algorithm=DiLoCo(sync_every=H), membership=...)"
        )
    if not init_sync or isinstance(init_sync, str):
        raise ValueError(
            f"got init_sync={init_sync!r} with a membership, expected True: its workers begin with the model of the "
            "first one, or of a donor if they join later; leave init_sync out"
        )
    if timeout not in (DEFAULT_TIMEOUT, membership.timeout):
        raise ValueError(
            f"got timeout={timeout.total_seconds():g} s with a membership, which has a timeout of "
            f"{membership.timeout.total_seconds():g} s, expected none; pass it to Membership(..., timeout=...)"
        )
    if group is not None:
        raise ValueError(
            "got process_group with a membership, expected None, and no device_mesh: a membership connects its workers "
            "itself"
        )
    if comm_device not in (None, "cpu", torch.device("cpu")):
        raise ValueError(
            f"got comm_device={comm_device} with a membership, expected 'cpu', as its messages are in host memory, or "
            "None; leave comm_device out"
        )
