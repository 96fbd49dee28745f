"""What a membership and the wrapper that trains have to do with each other, and what a worker that joins gets."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..flat.buffer import FlatBuffer
from ..transport.agreement import broadcast_tensors


class Participant(Protocol):
    """What a membership needs of the wrapper that trains."""

    is_in_lockstep: bool
    """Whether step k of one worker is step k of all. Else each begins a generation at its own next step."""

    def peers(self, rank: int, world_size: int) -> Iterable[int]:
        """The ranks that this one watches: those that it exchanges with, in any round."""

    def links(self, rank: int, world_size: int) -> Iterable[int]:
        """Those of them with which it has a link, beside the group over all ranks."""

    def found(self) -> None:
        """Begin with the model of the first rank; all workers of the first generation call it."""

    def begin(self, growth: float) -> None:
        """Turn to the transport of the generation that trains now; called at a safe point, by the training thread.

        Args:
            growth: what all of its members multiply their push-sum weights by.
        """

    @property
    def weight(self) -> float:
        """The push-sum weight, as it was at the last safe point; 1.0 where there is none. From any thread."""

    def flush(self) -> None:
        """Apply what is in flight; raises what that raises, after which nothing is in flight."""

    def settle(self) -> None:
        """Apply what is in flight, before the links that it came over are given up."""

    def give(self) -> Mapping[str, Any]:
        """Copies of everything that a worker needs to join; called at a safe point, by the training thread."""

    def take_back(self, state: Mapping[str, Any]) -> None:
        """What `give` gave has reached nobody."""

    @property
    def num_bytes(self) -> int:
        """Of the model."""

    def take(self, state: Mapping[str, Any]) -> None:
        """Go on from what `give` gave."""

    def advance(self, num_steps: int) -> None:
        """Count training steps that the others have taken."""

    def skipped(self) -> int:
        """How many training steps it has left out since the last call, beside those of `advance`."""

    def expect_forward(self) -> None:
        """A loop over `steps` begins a step: its first training forward has the round, whatever was stepped before."""

    @property
    def is_cut_off(self) -> bool:
        """Whether its rounds with this generation have ended, so that the next one need not wait for its first step."""

    @property
    def step(self) -> int:
        """The training step that comes next."""


@dataclass(frozen=True)
class Change:
    """A generation that has begun.

    Attributes:
        generation: its number.
        step: the first training step of its rounds.
        rank: of this worker, its position in the graph.
        members: the numbers of the workers, by rank.
        joined: the numbers of those that were not in the generation before.
        left: why each of those left that are in it no more, by number.
    """

    generation: int
    step: int
    rank: int
    members: tuple[int, ...]
    joined: tuple[int, ...]
    left: Mapping[int, str]


class ElasticWrapper(Protocol):
    """What is used of the wrapper."""

    module: nn.Module
    _buffer: FlatBuffer
    _engine: Any
    _averager: Any
    _description: dict[str, str]
    _transport: Any
    _place: tuple[int, int] | None
    _node: Any
    _travelling: Any

    _steps: Any

    @property
    def rounds(self) -> str: ...

    def _reattach(self) -> None: ...

    def _apply_in_flight(self) -> None: ...

    def _to_estimate(self) -> None: ...


class ModelParticipant(ABC):
    """The part of a `Participant` that is the same for all wrappers: what a worker that joins gets of its donor.

    Args:
        wrapper: that trains.
        membership: the `Membership`: who takes part.
    """

    is_in_lockstep = True

    def __init__(self, wrapper: ElasticWrapper, membership: Any) -> None:
        if wrapper.rounds != "forward":
            raise ValueError(
                f"got rounds={wrapper.rounds!r} with a membership, expected 'forward': a worker that joins takes the "
                "state of training before its first forward; leave rounds out"
            )
        self.wrapper, self.membership = wrapper, membership
        self.weight = 1.0

    def describe(self) -> dict[str, str]:
        """What a worker that joins must have in common with the others."""
        signature = "\n".join(self.wrapper._buffer.signature())
        digest = hashlib.sha256(signature.encode()).hexdigest()[:16]
        size = sum(parameter.numel() for parameter in self.wrapper._buffer.parameters)
        return {
            **self.wrapper._description,
            "wrapper": type(self.wrapper).__name__,
            "model": f"{type(self.wrapper.module).__name__} with {size} parameters, signature {digest}",
        }

    def expect_forward(self) -> None:
        """See `Participant`."""
        self.wrapper._steps.end()

    def at_step(self) -> None:
        """At the safe point of every training step; see `Membership.at_step`."""
        if self.membership.is_waiting_at_the_door:
            self.membership.join()
        self.membership.at_step()

    def begin(self, growth: float) -> None:
        """See `Participant`."""
        transport, wrapper = self.membership.transport, self.wrapper
        wrapper._apply_in_flight()
        self._turn_to(transport, growth)
        wrapper._transport = transport
        wrapper._place = transport.rank, transport.world_size
        wrapper._travelling.watch(wrapper, transport)

    @abstractmethod
    def _turn_to(self, transport: Any, growth: float) -> None:
        """Run rounds over this `LinkTransport` from now on; nothing is in flight."""

    @abstractmethod
    def peers(self, rank: int, world_size: int) -> Iterable[int]:
        """See `Participant`."""

    def links(self, rank: int, world_size: int) -> Iterable[int]:
        """See `Participant`."""
        return self.peers(rank, world_size)

    @property
    def is_cut_off(self) -> bool:
        """See `Participant`."""
        return False

    def skipped(self) -> int:
        """See `Participant`."""
        return 0

    @property
    def step(self) -> int:
        """See `Participant`."""
        return int(self.wrapper._engine.step)

    @property
    def is_weighted(self) -> bool:
        """Whether workers have push-sum weights, which a donor shares with who joins."""
        return False

    def _go_to(self, t: int, step: int) -> None:
        """The round and the training step that come next."""
        self.wrapper._engine.t, self.wrapper._engine.step = t, step

    def _engine_state(self) -> Mapping[str, Any]:
        """Of the engine, for who joins."""
        return {"t": self.wrapper._engine.t, "step": self.step}

    def _load_engine(self, state: Mapping[str, Any]) -> None:
        """Go on from that of a donor."""
        self._go_to(int(state["t"]), int(state["step"]))

    @torch.no_grad()
    def found(self) -> None:
        """See `Participant`; who was in an earlier life of the job gives up its own rounds and weight."""
        vector = self.wrapper._buffer.vector
        self.wrapper._to_estimate()
        counts = torch.tensor([self.wrapper._engine.t, self.step], device="cpu")
        broadcast_tensors(self.membership.transport, [vector.raw, counts, *self._others()])
        vector.push_sum_weight.fill_(1.0)
        self._go_to(*counts.tolist())

    def flush(self) -> None:
        """See `Participant`."""
        self.wrapper._apply_in_flight()

    def settle(self) -> None:
        """See `Participant`."""
        self.flush()

    @torch.no_grad()
    def give(self) -> Mapping[str, Any]:
        """See `Participant`. Halves a push-sum weight, whose other half goes with the copy."""
        wrapper = self.wrapper
        wrapper._apply_in_flight()  # a correction of the whole weight would leave nothing of the half
        if not wrapper._buffer.is_attached():
            wrapper._reattach()
        vector = wrapper._buffer.vector
        wrapper._to_estimate()
        weight = vector.push_sum_weight * (0.5 if self.is_weighted else 1.0)
        state = {
            "vector": vector.raw.clone(),
            "weight": weight,
            "engine": self._engine_state(),
            **self.layout(),
        }
        vector.push_sum_weight.copy_(weight)  # at last, as a copy may fail
        return state

    def layout(self) -> dict[str, Any]:
        """What travels and what is trained, with copies of all tensors that do not travel."""
        buffer = self.wrapper._buffer
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
        """Let that travel which `layout` of another worker says, and take its tensors that do not; none is in flight.

        What the other one finds changed at its next round this one finds too.

        Args:
            state: of the other worker.
            freezes: whether to train what that one trains; else this worker compares at its next round what it trains.
        """
        buffer = self.wrapper._buffer
        trained = state["trained"] if freezes else [name for name, x in self._named().items() if x.requires_grad]
        self._choose_as(state["travels"], set(trained))
        self.wrapper._travelling.load_state_dict(state["travelling"])
        buffer.keep(is_complete=freezes and state["is_complete"])
        buffer.agree(state["agreed"])
        for own, other in zip(self._others(), state["others"], strict=True):
            own.copy_(other)

    def take_back(self, state: Mapping[str, Any]) -> None:
        """See `Participant`."""
        if self.is_weighted:
            self.wrapper._apply_in_flight()
            self.wrapper._to_estimate()
            self.wrapper._buffer.vector.push_sum_weight.add_(state["weight"])

    @property
    def num_bytes(self) -> int:
        """See `Participant`."""
        return self.wrapper._buffer.vector.layout.num_bytes

    @torch.no_grad()
    def take(self, state: Mapping[str, Any]) -> None:
        """See `Participant`."""
        wrapper = self.wrapper
        wrapper._apply_in_flight()  # of links that are closed: nothing of it stays
        if not wrapper._buffer.is_attached():
            wrapper._reattach()
        wrapper._to_estimate()
        self.take_layout(state)
        wrapper._travelling.is_newcomer = True
        vector = wrapper._buffer.vector
        vector.raw.copy_(state["vector"])
        vector.push_sum_weight.copy_(state["weight"])
        self.weight = vector.push_sum_weight.item()
        self._load_engine(state["engine"])
        torch.autograd.graph.increment_version(wrapper._buffer.parameters)

    def _choose_as(self, travels: Sequence[str], trained: Collection[str]) -> None:
        """Freeze what the job has frozen on the way, and train what it trains.

        Args:
            travels: the signature of the donor's vector, which an engine with rounds under way keeps when less is
                trained than travels.
            trained: the names of the parameters that the donor trains.
        """
        buffer, named = self.wrapper._buffer, self._named()
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
        ignored = self.wrapper._buffer.selection.ignored_ids(self.wrapper.module)
        return {name: x for name, x in self.wrapper.module.named_parameters() if id(x) not in ignored}

    def _others(self) -> list[Tensor]:
        """Parameters and buffers that neither travel nor are ignored: frozen ones, counters."""
        buffer = self.wrapper._buffer
        return list(buffer.selection.others(self.wrapper.module, buffer.tensors).values())
