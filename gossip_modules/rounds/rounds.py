"""Rounds: runs the rounds of an algorithm over a transport, and answers what it asks for."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..flat.buffer import FlatBuffer
from ..flat.nonfinite import is_finite
from ..flat.vector import FlatVector
from ..gossiper.gossiper import Gossiper
from ..gossiper.message import MessageBuffer
from ..gossiper.mixer import ElasticAverage, GlobalAverage, Mixer, NonfiniteRound
from ..graph_manager.base import GraphManager
from ..mixing_manager.base import MixingManager
from ..mixing_manager.relaxed import RelaxedMixing
from ..transport.base import Transport, is_elastic
from .algorithm import Algorithm, Over
from .memory import Memory
from .message import Message, Received
from .messages import MessageRounds
from .old_checkpoints import renewed
from .optimizer_watch import OptimizerWatch
from .requests import Average, Exchange, Gather, Mix, Request, RoundLost, Share
from .vector import Snapshot, Vector
from .vectors import Vectors


class Rounds(Mixer):
    """Makes a mixer of an algorithm: s <- one round of it, blocking; or the correction of that round.

    [Note: who answers] `Mix(x)` is answered by another mixer: plain gossip, or the rounds of another algorithm, so that
    algorithms may be stacked on each other. `Average(x)` is an all-reduce; messages go by `MessageRounds`.

    Args:
        algorithm: what a round does.
        mixer: answers `Mix`; not bound yet.
    """

    is_elastic = True

    def __init__(self, algorithm: Algorithm, mixer: Gossiper | Rounds) -> None:
        self.algorithm, self.mixer = algorithm, mixer
        self.name = type(algorithm).__name__  # in checkpoints
        self._is_torn = False  # whether a round has ended while it was writing what its messages had said
        self.memory = Memory()
        self.messages = MessageRounds(
            self.memory, has_links=algorithm.keeps_links, is_checked=algorithm.checks_messages
        )
        self.watch: OptimizerWatch | None = None  # of the optimizer, once the wrapper has said which model it is
        self._has_checked_step = False
        self._agree_finite: Callable[[bool], bool] | None = None  # where answers are looked at
        self.has_failed = False  # whether the last round took no effect, as a worker had died
        self._k = self._t = 0
        self._alpha: float | None = None
        self._has_begun = False
        self._own_buffer_weight = 1.0
        self._buffers: list[Tensor] = []

    # See `Mixer`.

    def bind(self, mixing: MixingManager, transport: Transport) -> None:
        """See `Mixer`."""
        super().bind(mixing, transport)
        self.mixer.bind(mixing, transport)
        self.messages.bind(mixing, transport)
        self.memory.weights = repr(mixing)
        self.averager: GlobalAverage = (ElasticAverage if is_elastic(transport) else GlobalAverage)(transport)

    def rebind(self, mixing: MixingManager, transport: Transport) -> None:
        """See `Mixer`."""
        self.check(mixing)
        self.mixing, self.transport = mixing, transport
        self.mixer.rebind(mixing, transport)
        self.messages.rebind(mixing, transport)
        self.averager.transport, self.memory.weights = transport, repr(mixing)
        self.memory.begin_generation()
        self._has_begun = False

    def check(self, mixing: MixingManager) -> None:
        """See `Mixer`."""
        self.mixer.check(mixing)
        self.algorithm.check(self._relaxed(mixing))

    def _relaxed(self, mixing: MixingManager) -> MixingManager:
        """About what answers to `Mix` are made by."""
        step_size = self.mixer.algorithm.step_size_on(mixing) if isinstance(self.mixer, Rounds) else 1.0
        return mixing if step_size == 1.0 else RelaxedMixing(mixing, step_size)

    @property
    def is_weighted(self) -> bool:
        """See `Mixer`."""
        return self.mixer.is_weighted

    @property
    def keeps_models(self) -> bool:  # type: ignore[override]
        """See `Mixer`."""
        return self.algorithm.keeps_models or self.mixer.keeps_models

    @property
    def is_skippable(self) -> bool:  # type: ignore[override]
        """See `Mixer`."""
        return self.algorithm.is_skippable and self.mixer.is_skippable

    @property
    def own_buffer_weight(self) -> float:
        """See `Mixer`."""
        return self._own_buffer_weight

    @property
    def sources(self) -> Sequence[int]:
        """See `Mixer`."""
        if self.algorithm.averages_exactly:
            return range(self.transport.world_size)
        return self.messages.sources or self.mixer.sources

    def is_due(self, k: int) -> bool:
        """See `Mixer`."""
        if self.algorithm.is_due(k):
            self._k = k
            return True
        return False

    def start(self, s: FlatVector, t: int) -> None:
        """See `Mixer`; the round itself runs in `finish` or `difference`."""
        self._t = t

    def finish(self, s: FlatVector) -> None:
        """See `Mixer`."""
        self._alpha = None
        self._run(Vector.of(s))

    def difference(self, s: FlatVector) -> float:
        """See `Mixer`; without a copy of s, but where the algorithm keeps models, which are never mixed late."""
        if self.algorithm.keeps_models:
            return super().difference(s)
        snapshot = Snapshot(s.parameters, s)
        sent_buffers = [b.clone() for b in s.buffers]
        weight = s.push_sum_weight.clone()
        self._alpha = None
        self._run(snapshot)
        if self._alpha is not None:  # the mixer has made the correction of the whole vector
            return self._alpha
        if not snapshot.is_correction:
            snapshot.zero_()
        for b, sent in zip(s.buffers, sent_buffers, strict=True):
            b.sub_(sent)
        s.push_sum_weight.sub_(weight)
        return 1.0

    @property
    def needs_symmetric_weights(self) -> bool:  # type: ignore[override]
        """See `Mixer`."""
        return (
            self.algorithm.needs_symmetric_weights
            or self.algorithm.needs_static_graph
            or self.mixer.needs_symmetric_weights
        )

    def default_graph(self, world_size: int) -> GraphManager | None:
        """See `Gossiper`."""
        return self.algorithm.default_graph(world_size) or self.mixer.default_graph(world_size)

    def default_mixing(self, world_size: int) -> MixingManager | None:
        """The weights where the user names neither graph nor weights; None: those of the graph."""
        own = self.algorithm.default_mixing(world_size)
        return own or (self.mixer.default_mixing(world_size) if isinstance(self.mixer, Rounds) else None)

    def refuse_nonfinite(self, agree: Callable[[bool], bool]) -> None:
        """See `Mixer`."""
        self._agree_finite = agree

    def watch_optimizer(self, buffer: FlatBuffer) -> None:
        """Watch the optimizers of this model, as far as the algorithms need it."""
        self.watch = OptimizerWatch(self.algorithm, buffer)
        if isinstance(self.mixer, Rounds):
            self.mixer.watch_optimizer(buffer)

    # A round.

    def begin(self, x: FlatVector) -> None:
        """See `Mixer`. The rates of the first step of SGD are looked at before anything has changed.

        On an elastic transport they are not: one worker would end the training of others by its rates.
        """
        step = None if self.watch is None else self.watch.step
        if step is not None and not self._has_checked_step:
            if not is_elastic(self.transport):
                self.algorithm.check_step(self._relaxed(self.mixing), step)
            self._has_checked_step = True
        if not self._has_begun:
            self.algorithm.begin(self._vectors(Vector.of(x)), self.memory)
            self._has_begun = True

    def _vectors(self, x: Vector) -> Vectors:
        self.memory.fit(x, who=self.algorithm)
        self.messages.begin_round(x, self._t)
        rank, num_ranks = self.transport.rank, self.transport.world_size
        return Vectors(x, self.messages, t=self._t, rank=rank, num_ranks=num_ranks)

    def _run(self, x: Vector) -> None:
        assert x.flat is not None, "rounds mix flat vectors"
        if self._is_torn:
            raise RuntimeError(
                f"{self}: got a round after one that failed, expected none: the states of the ranks may no longer "
                "agree; start again from a checkpoint on all ranks"
            )
        v = self._vectors(x)
        if self.watch is not None:
            self.watch.before_round(self.memory)
            v.step = self.watch.step if self.memory.num_rounds else None
        self._buffers = [b.clone() for b in x.flat.buffers]
        self._own_buffer_weight, self.has_failed = 1.0, False
        generator = self.algorithm.round(v, self.memory, self._k)
        lost: Exception | None = None
        try:
            self._drive(generator, v)
            self.memory.end_round()
            if self._alpha is None:
                for b, mixed in zip(x.flat.buffers, self._buffers, strict=True):
                    b.copy_(mixed)
        except (RoundLost, NonfiniteRound) as error:  # training goes on without this round
            lost, self.has_failed = error, True
        finally:
            generator.close()
            self.memory.put_back()
        if self.watch is not None:
            self.watch.after_round(self.memory)
        if isinstance(lost, NonfiniteRound):
            raise lost

    def _drive(self, generator: Generator[Request, Any, None], v: Vectors) -> None:
        """Answer until the round ends."""
        reply = None
        while True:
            # Peers have the same messages: if this rank does not write what they say, they no longer agree.
            self._is_torn = isinstance(reply, Received | dict) and not self.algorithm.is_skippable
            try:
                request = generator.send(reply)
            except StopIteration:
                self._is_torn = False
                return
            self._is_torn = False
            reply = self._answer(request, v)
            if self._agree_finite is not None and isinstance(request, Mix | Average):
                flat = request.x.flat
                if flat is not None and not self._agree_finite(is_finite(flat)):
                    raise NonfiniteRound
            if reply is RoundLost:
                generator.throw(RoundLost())

    def _answer(self, request: Request, v: Vectors) -> Any:
        if isinstance(request, Mix):
            return self._mix(request.x, v, self.mixer)
        if isinstance(request, Average):
            self._mix(request.x, v, self.averager)
            return RoundLost if self.averager.has_failed else None
        if isinstance(request, Share):
            replies = self._exchange(dict.fromkeys(v.peers, request.message), {})
            return self.messages.row_of(request.message, replies)
        if isinstance(request, Exchange):
            return self._exchange(request.messages, request.checksums)
        assert isinstance(request, Gather), f"got the request {request!r}"
        return self._gather(request.message)

    def _exchange(self, messages: Mapping[int, Message], checksums: Mapping[int, int]) -> dict[int, Message]:
        self.messages.post(messages, self._buffers, checksums=checksums)
        replies = self.messages.wait(self._buffers)
        self._own_buffer_weight = self.messages.own_buffer_weight
        return replies

    def _mix(self, x: Vector, v: Vectors, mixer: Mixer) -> None:
        flat = x.flat
        assert flat is not None, "only vectors of the model's layout are mixed: v.x, or one of m.scratch()"
        for b, own in zip(flat.buffers, self._buffers, strict=True):
            b.copy_(own)
        if x is not v.x and mixer is self.mixer:
            flat.push_sum_weight.fill_(1.0)
        mixer.start(flat, self._t)
        if isinstance(x, Snapshot):
            self._alpha, x.is_correction = mixer.difference(flat), True
            self._own_buffer_weight = mixer.own_buffer_weight
            return
        mixer.finish(flat)
        self._own_buffer_weight *= mixer.own_buffer_weight
        for own, b in zip(self._buffers, flat.buffers, strict=True):
            own.copy_(b)

    def _gather(self, message: Message) -> list[Message]:
        """See `Gather`."""
        mine, n = message.buffer.raw, self.transport.world_size
        everyone = mine.new_empty(n * mine.numel())
        self.transport.all_gather(everyone, mine, what=f"messages of round {self._t}")
        sizes, num_others = message.buffer.sizes, len(message.buffer.fields) - len(message.fields)
        return [Message(message.code, MessageBuffer(sizes, raw), num_others) for raw in everyone.view(n, -1)]

    # State.

    def forget_models(self) -> None:
        """See `Mixer`."""
        self.memory.forget_models()
        self.mixer.forget_models()
        self._begin_anew()

    def end_average(self) -> None:
        """See `Mixer`."""
        self.memory.forget_models(is_asked=False)
        self.mixer.end_average()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._has_begun = False
        if self.watch is not None:
            self.watch.forget(self.memory.parts_of("momentum"))

    def shared(self, x: FlatVector) -> Sequence[Tensor]:
        """See `Mixer`: the momentum of the optimizer, where the algorithm writes it."""
        if not self.algorithm.needs_sgd:
            return ()
        self.memory.fit(Vector.of(x), who=self.algorithm)
        return self.memory.momentum.parts

    def take_shared(self, x: FlatVector) -> None:
        """See `Mixer`."""
        if self.watch is not None:
            self.watch.forget(self.shared(x))

    def close(self) -> None:
        """See `Mixer`; keeps what `state_dict()` gives."""
        self.mixer.close()
        if self.watch is not None:
            self.watch.close()

    def state_dict(self) -> dict[str, Any]:
        """See `Mixer`; shares memory. Without any memory after a round that ended while it was writing."""
        if self._is_torn:
            return {"algorithm": self.name}
        return {
            "algorithm": self.name,
            "links": sorted(self.mixing.graph.phone_book(self.transport.rank)) if self.algorithm.keeps_links else [],
            "memory": self.memory.state_dict(has_links=not is_elastic(self.transport)),
            "messages": self.messages.state_dict(),
            "mixer": self.mixer.state_dict(),
            "optimizer": {} if self.watch is None else self.watch.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Mixer`. Under a membership what workers must keep the sum of starts anew: see `Memory`."""
        state = renewed(state, self.name)
        if state.get("algorithm") != self.name:
            raise ValueError(
                f"got the state of {state.get('algorithm', 'another algorithm')}, expected that of {self.name}; wrap "
                "as when it was saved, or load the model alone: module.load_state_dict"
            )
        self._load(state)

    def reset(self) -> None:
        """See `Mixer`."""
        self._load({})

    def _load(self, state: Mapping[str, Any]) -> None:
        self._has_begun = self._is_torn = False
        memory = dict(state.get("memory", {}))
        if self.algorithm.keeps_links and is_elastic(self.transport):
            memory.pop("vectors", None)
        if memory.get("links"):
            if is_elastic(self.transport):  # whoever loads it may have other peers
                del memory["links"]
            else:
                self._check_links(state["links"])
        self.memory.load_state_dict(memory)
        if is_elastic(self.transport):
            self.memory.begin_generation()
        self.messages.load_state_dict(state.get("messages", {}))
        if mixer := state.get("mixer"):
            self.mixer.load_state_dict(mixer)
        else:
            self.mixer.reset()
        if self.watch is not None:
            self.watch.load_state_dict(state.get("optimizer", {}), self.memory.parts_of("momentum"))

    def state_for_newcomer(self) -> dict[str, Any]:
        """See `Mixer`."""
        return {
            "algorithm": self.name,
            "memory": self.memory.state_dict(joins=True, has_links=False),
            "mixer": self.mixer.state_for_newcomer(),
            "optimizer": {} if self.watch is None else self.watch.state_dict(joins=True),
        }

    def _check_links(self, found: Sequence[int]) -> None:
        own = sorted(self.mixing.graph.phone_book(self.transport.rank))
        if list(found) != own:
            raise ValueError(
                f"{self.algorithm}: got the state of links to {list(found)}, expected {own}; load the checkpoint of "
                "this rank, made on the same graph"
            )

    def for_membership(self) -> Rounds:
        """See `Gossiper`."""
        rounds = Rounds(self.algorithm.for_membership(), self.mixer.for_membership())
        rounds.name = self.name
        return rounds

    def __repr__(self) -> str:
        inner = f".over({self.mixer!r})" if isinstance(self.mixer, Rounds) else ""
        return f"{self.algorithm!r}{inner}"


def rounds_of(algorithm: Algorithm | Over, plain: Gossiper) -> Gossiper | Rounds:
    """What runs the rounds of an algorithm, by plain gossip in the end; not bound yet."""
    if isinstance(algorithm, Over):
        return Rounds(algorithm.outer, rounds_of(algorithm.inner, plain))
    return plain if algorithm.is_plain else Rounds(algorithm, plain)
