"""ModelParticipant: the interface of a wrapper to its membership, and the state that a joining worker gets."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..flat.buffer import FlatBuffer
from ..transport.agreement import broadcast_tensors
from .links import LinkTransport


@dataclass(frozen=True)
class Change:
    """A generation that has begun.

    Attributes:
        generation: its number.
        step: the first training step of its rounds.
        rank: of this worker, its position in the graph.
        members: the numbers of the workers, by rank.
        joined: the numbers of members that were not in the generation before.
        left: by number of each worker that is a member no more, why it left.
    """

    generation: int
    step: int
    rank: int
    members: tuple[int, ...]
    joined: tuple[int, ...]
    left: Mapping[int, str]


class ModelParticipant(ABC):
    """The interface between a wrapper and its membership.

    Args:
        wrapper: the `GossipWrapper` that trains.
        membership: its `Membership`.

    Attributes:
        weight: the push-sum weight, as it was at the last safe point; 1.0 without push-sum. Read from any thread.
        is_in_lockstep: whether step k of one worker is step k of all. Else each begins a generation at its own next
            step.
    """

    is_in_lockstep = True

    def __init__(self, wrapper: Any, membership: Any) -> None:
        if wrapper.rounds != "forward":
            raise ValueError(
                f"got rounds={wrapper.rounds!r} with a membership, expected 'forward': a worker that joins takes the "
                "state of training before its first forward; leave rounds out"
            )
        self.wrapper, self.membership = wrapper, membership
        self.weight = 1.0

    @property
    def engine(self) -> Any:
        """The engine of the wrapper."""
        return self.wrapper._engine

    @property
    def buffer(self) -> FlatBuffer:
        """The tensors of the wrapper."""
        buffer: FlatBuffer = self.wrapper._buffer
        return buffer

    # The wrapper calls these.

    def describe(self) -> dict[str, str]:
        """The options that a worker must have in common with the others."""
        buffer = self.buffer
        digest = hashlib.sha256("\n".join(buffer.signature()).encode()).hexdigest()[:16]
        size = sum(parameter.numel() for parameter in buffer.parameters)
        return {
            **self.wrapper._description,
            "wrapper": type(self.wrapper).__name__,
            "model": f"{type(self.wrapper.module).__name__} with {size} parameters, signature {digest}",
        }

    def at_step(self) -> None:
        """At the safe point of every training step; see `Membership.at_step`."""
        self.membership.at_step()

    # The membership calls these, in the training thread at a safe point unless they say otherwise.

    @abstractmethod
    def peers(self, rank: int, world_size: int) -> Iterable[int]:
        """The ranks that this one watches: those that it exchanges with, in any round. From any thread."""

    def links(self, rank: int, world_size: int) -> Iterable[int]:
        """The peers with which it has a link, beside the group over all ranks. From any thread."""
        return self.peers(rank, world_size)

    @property
    def is_cut_off(self) -> bool:
        """Whether its rounds with this generation have ended, so that the next one need not wait for its first step."""
        return False

    @property
    def is_weighted(self) -> bool:
        """Whether workers have push-sum weights, which a donor shares with a joining worker."""
        return False

    @property
    def num_bytes(self) -> int:
        """The size of the model."""
        return int(self.buffer.vector.layout.num_bytes)

    @property
    def step(self) -> int:
        """The training step that comes next."""
        return int(self.engine.step)

    def expect_forward(self) -> None:
        """A loop over `steps` begins a step: its first training forward has the round, whatever was stepped before."""
        self.wrapper._steps.end()

    def skipped(self) -> int:
        """How many training steps it has left out since the last call, beside the steps of `advance`."""
        return 0

    def advance(self, num_steps: int) -> None:
        """Count training steps that the others have taken."""
        self.engine.step += num_steps

    @torch.no_grad()
    def found(self) -> None:
        """Begin with the model of the first rank; all workers of the first generation call it.

        Rounds and weight of a worker that trained before are dropped.
        """
        vector = self.buffer.vector
        self.wrapper._to_estimate()
        counts = torch.tensor([self.engine.t, self.step], device="cpu")
        broadcast_tensors(self.membership.transport, [vector.raw, counts, *self._others()])
        vector.push_sum_weight.fill_(1.0)
        self._go_to(*counts.tolist())

    def begin(self, transport: LinkTransport, growth: float) -> None:
        """Turn to the links of the generation that trains now; all its members multiply their weights by `growth`."""
        wrapper = self.wrapper
        wrapper._apply_in_flight()
        self._turn_to(transport, growth)
        wrapper._transport = transport
        wrapper._place = transport.rank, transport.world_size
        wrapper._travelling.watch(wrapper, transport)

    def flush(self) -> None:
        """Apply the round in flight; raises its error, after which none is in flight."""
        self.wrapper._apply_in_flight()

    def settle(self) -> None:
        """Apply the round in flight, before the links that it came over are given up."""
        self.flush()

    @torch.no_grad()
    def give(self) -> Mapping[str, Any]:
        """Copies of everything that a worker needs to join, with half of the push-sum weight."""
        self._gather()
        vector = self.buffer.vector
        weight = vector.push_sum_weight * (0.5 if self.is_weighted else 1.0)
        engine = self._engine_state()
        state = {"vector": vector.raw.clone(), "weight": weight, "engine": engine, **self.layout()}
        vector.push_sum_weight.copy_(weight)  # at last, as a copy may fail
        return state

    def take_back(self, state: Mapping[str, Any]) -> None:
        """The copies of `give` have reached no worker."""
        if self.is_weighted:
            self._gather()
            self.buffer.vector.push_sum_weight.add_(state["weight"])

    @torch.no_grad()
    def take(self, state: Mapping[str, Any]) -> None:
        """Go on from the copies of `give`."""
        self._gather()  # a round in flight came over links that are closed: nothing of it stays
        self.take_layout(state)
        self.wrapper._travelling.is_newcomer = True
        vector = self.buffer.vector
        vector.raw.copy_(state["vector"])
        vector.push_sum_weight.copy_(state["weight"])
        self.weight = vector.push_sum_weight.item()
        self._load_engine(state["engine"])
        torch.autograd.graph.increment_version(self.buffer.parameters)

    def layout(self) -> dict[str, Any]:
        """The tensors that travel, the names of those that are trained, and copies of all others."""
        buffer = self.buffer
        return {
            "others": [tensor.detach().clone() for tensor in self._others()],
            "travels": buffer.signature(),
            "trained": [name for name, tensor in self._named().items() if tensor.requires_grad],
            "travelling": self.wrapper._travelling.state_dict(),
            "agreed": buffer.agreed,
            "is_complete": buffer.is_complete(),
        }

    @torch.no_grad()
    def take_layout(self, state: Mapping[str, Any], *, freezes: bool = True) -> None:
        """Take over the `layout` of another worker, and its tensors that do not travel; nothing is in flight.

        This worker then finds the same changes at its next round as the other one.

        Args:
            state: of the other worker.
            freezes: whether to train the same tensors; else this worker compares its own choice at its next round.
        """
        buffer, named = self.buffer, self._named()
        trained = {name for name, x in named.items() if x.requires_grad} if not freezes else {*state["trained"]}
        self._choose(state["travels"], trained)
        self.wrapper._travelling.load_state_dict(state["travelling"])
        buffer.keep(is_complete=freezes and state["is_complete"])
        buffer.agree(state["agreed"])
        for own, other in zip(self._others(), state["others"], strict=True):
            own.copy_(other)

    # Its own.

    @abstractmethod
    def _turn_to(self, transport: LinkTransport, growth: float) -> None:
        """Run rounds over these links from now on; nothing is in flight."""

    def _go_to(self, t: int, step: int) -> None:
        """The round and the training step that come next."""
        self.engine.t, self.engine.step = t, step

    def _engine_state(self) -> Mapping[str, Any]:
        """The state of the engine, for a joining worker."""
        return {"t": self.engine.t, "step": self.step}

    def _load_engine(self, state: Mapping[str, Any]) -> None:
        """Go on from the engine of a donor."""
        self._go_to(int(state["t"]), int(state["step"]))

    def _gather(self) -> None:
        """Leave nothing in flight, and have the estimate in the tensors of the vector."""
        self.wrapper._apply_in_flight()
        if not self.buffer.is_attached():
            self.wrapper._reattach()
        self.wrapper._to_estimate()

    def _choose(self, travels: Sequence[str], trained: Collection[str]) -> None:
        """Freeze the parameters that the job has frozen on the way, and train the others.

        Args:
            travels: the signature of the donor's vector, which an engine with rounds under way keeps when less is
                trained than travels.
            trained: the names of the parameters that the donor trains.
        """
        buffer, named = self.buffer, self._named()
        if buffer.signature() != travels:
            travelling = {text.split(" ", 1)[0] for text in travels}
            for name, parameter in named.items():
                parameter.requires_grad_(name in travelling)
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

    def _named(self) -> dict[str, Tensor]:
        """The parameters that are not ignored, by name."""
        ignored = self.buffer.selection.ignored_ids(self.wrapper.module)
        return {name: x for name, x in self.wrapper.module.named_parameters() if id(x) not in ignored}

    def _others(self) -> list[Tensor]:
        """Parameters and buffers that neither travel nor are ignored: frozen ones, counters."""
        buffer = self.buffer
        return list(buffer.selection.others(self.wrapper.module, buffer.tensors).values())
