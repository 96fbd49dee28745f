"""Rounds: runs the rounds of an algorithm over a transport, and answers its requests."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..flat.buffer import FlatBuffer
from ..flat.nonfinite import is_finite
from ..flat.vector import FlatVector, add_
from ..mixing_manager.base import MixingManager
from ..transport.base import Transport
from .algorithm import Algorithm, next_request
from .memory import Memory
from .message_rounds import MessageRounds
from .messages import Message, Received
from .mixer import ElasticAverage, GlobalAverage, Mixer, NonfiniteRound
from .old_checkpoints import renewed
from .optimizer_watch import OptimizerWatch
from .requests import Average, Exchange, Gather, Inner, Mix, Request, Round, RoundLost, Share, Vectors
from .stamps import Stamps
from .vector import Snapshot, Vector


class Rounds(Mixer):
    """A mixer that runs the rounds of an algorithm, blocking: s <- the result of a round, or its correction.

    Plain gossip answers `Mix(x)`, an all-reduce answers `Average(x)`, and `MessageRounds` exchanges messages.

    If the algorithm has equal memories on all ranks, newly trained tensors become their average over all ranks before
    the memory includes them.

    Args:
        algorithm: the algorithm.
        plain: the mixer that answers `Mix`; not bound yet.
    """

    def __init__(self, algorithm: Algorithm, plain: Mixer) -> None:
        self.algorithm, self.plain = algorithm, plain
        self.keeps_models, self.can_recover = algorithm.keeps_models, algorithm.can_recover
        self.is_skippable = algorithm.is_skippable and not algorithm.can_recover
        self._k = self._t = 0  # the optimizer steps before the round, and its number
        self._is_torn = False  # whether a round failed while it was applying messages
        self._is_cut_off = False  # whether a round failed while messages were in transfer
        self.memory = Memory()
        self.messages = MessageRounds(
            self.memory, has_links=algorithm.keeps_links, is_checked=algorithm.checks_messages
        )
        self.watch: OptimizerWatch | None = None  # if the algorithm needs the steps of the model's optimizer
        self._has_checked_step = False
        self._agree_finite: Callable[[bool], bool] | None = None  # if replies are checked, see `refuse_nonfinite`
        self.has_failed = False  # whether the last round took no effect, because a worker died
        self.stamps = Stamps()
        self._alpha: float | None = None
        self._has_begun = False
        self._own_buffer_weight = 1.0
        self._averages = False  # whether the round that runs averages exactly
        self._buffers: list[Tensor] = []
        self._v: Vectors | None = None  # the argument of the round that runs
        self._generator: Round | None = None
        self._request: Request | None = None
        self._replies: list[Any] = []  # the reply to the first request of a round that has departed

    # See `Mixer`.

    def check(self, mixing: MixingManager) -> None:
        """See `Mixer`."""
        self.plain.check(mixing)
        self.algorithm.check(mixing)

    def bind(self, mixing: MixingManager, transport: Transport) -> None:
        """See `Mixer`."""
        super().bind(mixing, transport)
        self.plain.bind(mixing, transport)
        self._join(mixing, transport)

    def _join(self, mixing: MixingManager, transport: Transport) -> None:
        self.mixing, self.transport = mixing, transport
        if self.is_weighted and self.algorithm.averages_exactly and transport.is_elastic:
            raise ValueError(
                f"got push_sum=True between the exact averages of {self.algorithm} with a membership, expected "
                "push_sum=False: when workers die and join, the sum of the push-sum weights is not known, and an exact "
                "average needs it"
            )
        if self.algorithm.writes_early and self.algorithm.averages_exactly and transport.is_elastic:
            raise ValueError(
                f"got {self.algorithm} with a membership, expected an algorithm that waits for its averages: this one "
                "moves the anchor before the average, which may fail; take StreamingDiLoCo, for example"
            )
        self.messages.bind(mixing, transport)
        self.memory.weights = repr(mixing)
        self.averager: GlobalAverage = (ElasticAverage if transport.is_elastic else GlobalAverage)(transport)
        self.stamps.begin_generation(is_needed=self._must_agree)

    def sibling(self) -> Rounds:
        """Make the rounds of another fragment of the same model, with their own memory, over the same plain gossip."""
        other = Rounds(self.algorithm, self.plain)
        other._join(self.mixing, self.transport)
        return other

    def rebind(self, mixing: MixingManager, transport: Transport) -> None:
        """See `Mixer`. The weights for all numbers of workers were checked when the model was wrapped."""
        self.mixing, self.transport = mixing, transport
        self.plain.rebind(mixing, transport)
        self.messages.rebind(mixing, transport)
        self.averager.transport = transport
        self.memory.begin_generation(repr(mixing))
        self._has_begun = False
        self.stamps.begin_generation(is_needed=self._must_agree)

    @property
    def has_news(self) -> bool:  # type: ignore[override]
        """See `Mixer`."""
        return not self.stamps.has_tried

    @property
    def _must_agree(self) -> bool:
        return self.algorithm.has_equal_memory and self.transport.is_elastic

    @property
    def own_buffer_weight(self) -> float:
        """See `Mixer`."""
        return self._own_buffer_weight

    @property
    def sources(self) -> Sequence[int]:
        """See `Mixer`."""
        if self.algorithm.averages_exactly:
            return range(self.transport.world_size)
        return self.messages.sources or self.plain.sources

    @property
    def is_weighted(self) -> bool:
        """See `Mixer`."""
        return self.plain.is_weighted

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
        self._run(Vector.of(s))

    def difference(self, s: FlatVector) -> float:
        """See `Mixer`; takes a copy of s only if the algorithm keeps models."""
        if self.algorithm.keeps_models:
            return super().difference(s)
        snapshot = Snapshot(s.parameters, s)
        sent_buffers = [b.clone() for b in s.buffers]
        weight = s.push_sum_weight.clone()
        self._run(snapshot)
        if self._alpha is not None:  # the mixer has computed the correction of the whole vector
            return self._alpha
        if not snapshot.is_correction:
            snapshot.zero_()
        for b, sent in zip(s.buffers, sent_buffers, strict=True):
            b.sub_(sent)
        s.push_sum_weight.sub_(weight)
        return 1.0

    def refuse_nonfinite(self, agree: Callable[[bool], bool]) -> None:
        """See `Mixer`."""
        self._agree_finite = agree

    def watch_optimizer(self, buffer: FlatBuffer, *, is_whole: bool = True) -> None:
        """See `Mixer`."""
        if self.algorithm.needs_sgd or self.algorithm.follows_rate or self.algorithm.needs_inner_rate:
            self.watch = OptimizerWatch(self.algorithm, buffer)

    # Before rounds.

    @property
    def has_begun(self) -> bool:
        """Whether `Algorithm.begin` was called."""
        return self._has_begun

    def begin(self, x: FlatVector, k: int = 0) -> bool:
        """See `Mixer` and [Note: One memory] of `Stamps`."""
        return self.begin_part(x, is_due=self.has_news and self.algorithm.averages_at(k), k=k)

    def begin_part(self, x: FlatVector, *, is_due: bool, k: int) -> bool:
        """Do the same as `begin`, for a fragment.

        The rates of the first step of SGD are checked before anything changes. On an elastic transport they are not
        checked, since the rates of one worker would end the training of all.

        Args:
            x: the fragment, mutated.
            is_due: whether a round that averages x is due now.
            k: the number of optimizer steps so far.

        Returns:
            Whether x was written.
        """
        has_changed = False
        step = None if self.watch is None else self.watch.step
        if step is not None and not self._has_checked_step:
            if not self.transport.is_elastic:
                self.algorithm.check_step(self.mixing, step)
            self._has_checked_step = True
        if not self._has_begun:
            self.algorithm.begin(self._vectors(Vector.of(x)), self.memory)
            self._buffers = [b.clone() for b in x.buffers]
            self._has_begun = True
        if not self.stamps.has_tried:
            has_changed = self._agree(x)
            if self.stamps.is_agreed and self.stamps.lost > self.stamps.taken and not is_due:
                self._k = self._t = self.stamps.lost
                self._run(Vector.of(x))
                has_changed = True
        if self.algorithm.has_equal_memory and self.stamps.is_agreed and (new := self.memory.new_tensors(x)):
            warnings.warn(
                f"{self.algorithm}: other tensors are trained than before; the new ones "
                f"({sum(map(torch.numel, new))} elements) become their average over all ranks",
                stacklevel=2,
            )
            if average_(new, x, self.averager):
                self.stamps.taken, has_changed = max(k, self.stamps.taken), True
                self.memory.fit(Vector.of(x))
        return has_changed

    def recover(self, x: FlatVector) -> None:
        """See `Mixer`; buffers that are not finite get their values after the last round."""
        self.algorithm.recover(self._vectors(Vector.of(x)), self.memory)
        if self.is_weighted:
            for part in x.parameters:
                part.mul_(x.push_sum_weight[0])
        for own, kept in zip(x.buffers, self._buffers, strict=True):
            own.copy_(torch.where(own.isfinite(), own, kept.to(own)))

    def _agree(self, x: FlatVector) -> bool:
        """Take the newest memory of all ranks; returns whether x was written."""
        if not self.stamps.agree(self.memory, self.transport, who=self.algorithm):
            return False
        self.algorithm.recover(self._vectors(Vector.of(x)), self.memory)
        return self.algorithm.can_recover

    # A round.

    def _vectors(self, x: Vector) -> Vectors:
        self.memory.fit(x, who=self.algorithm)
        self.messages.begin_round(x, self._t)
        rank, num_ranks = self.transport.rank, self.transport.world_size
        return Vectors(x, self.messages, t=self._t, rank=rank, num_ranks=num_ranks)

    def _run(self, x: Vector) -> None:
        """Run one round, blocking."""
        self._open(x)
        while self._request is not None:
            self._go_on(self._answer(self._request))
        self._end(x, 0.0)

    def blocking(self, x: FlatVector, t: int, k: int) -> None:
        """Run round t on x, after k optimizer steps."""
        self._t, self._k = t, k
        self._run(Vector.of(x))

    def depart(self, x: FlatVector, t: int, k: int) -> Callable[[], float]:
        """Begin round t, after k optimizer steps. You may then change and free x.

        Returns:
            A job that answers the first request, in any thread.
        """
        self._t, self._k = t, k
        vector = Vector.of(x)
        self._open(vector)
        if self._request is not None and isinstance(self._request, Mix | Average) and self._request.x is vector:
            assert self._v is not None
            copy = x.clone()
            self._v.x = Snapshot(copy.parameters, copy)
            self._request = replace(self._request, x=self._v.x)
        replies: list[Any] = []

        def answer() -> float:
            if self._request is not None:
                replies.append(self._answer(self._request))
            return 1.0

        self._replies = replies
        return answer

    def arrive(self, x: FlatVector, *, kept: float) -> None:
        """End the round that departed.

        Args:
            x: the present model, mutated.
            kept: the weight of its own buffers: b <- kept b + (1 - kept) mixed b.
        """
        v = self._v
        if self._request is not None and v is not None:
            snapshot, reply = v.x, self._replies.pop()
            v.x = Vector.of(x)
            if isinstance(snapshot, Snapshot) and reply is not RoundLost:
                for own, correction in zip(x.parameters, snapshot.parts, strict=True):
                    add_(own, correction, alpha=1.0 if self._alpha is None else self._alpha)
                for own, correction in zip(self._buffers, snapshot.flat.buffers, strict=True):  # type: ignore[union-attr]
                    add_(own, correction, alpha=1.0 if self._alpha is None else self._alpha)
                self._alpha = None
            self._go_on(reply)
            while self._request is not None:
                self._go_on(self._answer(self._request))
        self._end(Vector.of(x), kept)

    def give_up(self) -> None:
        """Cancel the round that departed."""
        self._close()

    def replace_memory(self, memory: Memory) -> None:
        """Go on with another memory, which has the values of this one for tensors that are still trained."""
        self.memory = self.messages.memory = memory

    def release(self) -> None:
        """Drop the references to the vector of the last round."""
        self.memory.release()
        self.messages.release()

    def _open(self, x: Vector) -> None:
        """Run a round up to its first request."""
        assert x.flat is not None, "rounds mix flat vectors"
        if self._is_torn or self._is_cut_off:
            raise RuntimeError(
                f"{self}: got a round after one that failed, expected none: the states of the ranks may no longer "
                "agree; start again from a checkpoint on all ranks"
            )
        self._alpha, self._own_buffer_weight, self.has_failed = None, 1.0, False
        self._averages = averages = self.algorithm.averages_at(self._k)
        if averages and not self.stamps.is_agreed and not isinstance(x, Snapshot):
            self._agree(x.flat)  # the failure of a worker here leads to another generation
        if averages and not self.stamps.is_agreed:
            self.has_failed, self.stamps.lost = True, self._k
            return
        v = self._vectors(x)
        if self.watch is not None:
            self.watch.before_round(self.memory)
            v.step = self.watch.step if self.memory.num_rounds else None
            v.inner_rate = self.watch.inner_rate
        self._buffers = [b.clone() for b in x.flat.buffers]
        self._v, self._generator = v, self.algorithm.round(v, self.memory, self._k)
        self._go_on(None)

    def _go_on(self, reply: Any) -> None:
        """Send a reply into the round, which runs to its next request or to its end."""
        assert self._generator is not None, "a round is open"
        try:
            self._request = self._next_request(self._generator, reply)
        except RoundLost:  # training goes on without this round
            self._request, self.has_failed, self.stamps.lost = None, True, self._k
        except BaseException:
            self._close()
            raise

    def _run_inner(self, inner: Inner) -> None:
        self.messages.begin_round(inner.x, self._t)
        with contextlib.closing(inner.round) as generator:
            request = next_request(generator, None)
            while request is not None:
                request = self._next_request(generator, self._answer(request))

    def _next_request(self, generator: Round, reply: Any) -> Request | None:
        # Peers apply the same messages: if this rank fails to apply them, the ranks no longer agree.
        self._is_torn = isinstance(reply, Received | dict) and not self.algorithm.is_skippable
        if reply is RoundLost:
            with contextlib.suppress(StopIteration):
                return generator.throw(RoundLost())
            return None
        request = next_request(generator, reply)
        self._is_torn = False
        return request

    def _close(self) -> None:
        if self._generator is not None:
            self._generator.close()
            self.memory.put_back()
        self._generator = self._request = self._v = None

    def _end(self, x: Vector, kept: float) -> None:
        """Finish a round; for `kept` see `arrive`."""
        is_open = self._generator is not None
        if is_open and not self.has_failed:
            self.memory.end_round()
            assert x.flat is not None, "rounds mix flat vectors"
            if self._alpha is None:
                for b, mixed in zip(x.flat.buffers, self._buffers, strict=True):
                    b.copy_(torch.lerp(mixed, b.to(mixed), kept) if kept else mixed)
            if self._averages:
                self.stamps.taken = self._k
                self.memory.forget_inner_models()
        self._close()
        if is_open and self.watch is not None:
            self.watch.after_round(self.memory)

    def _answer(self, request: Request) -> Any:
        v = self._v
        assert v is not None, "a round is open"
        try:
            reply = self._reply_to(request, v)
            if self._agree_finite is not None and isinstance(request, Mix | Average | Inner):
                flat = request.x.flat
                if flat is not None and not self._agree_finite(is_finite(flat)):
                    raise NonfiniteRound
        except NonfiniteRound:  # training goes on without this round
            self.has_failed = True
            self._close()
            if self.watch is not None:
                self.watch.after_round(self.memory)
            raise
        except BaseException:
            self._close()
            raise
        return reply

    def _reply_to(self, request: Request, v: Vectors) -> Any:
        if isinstance(request, Mix):
            return self._mix(request.x, v, self.plain)
        if isinstance(request, Average):
            self._mix(request.x, v, self.averager)
            if self.averager.has_failed:
                return RoundLost
            self._set_weight(v)
            return None
        if isinstance(request, Inner):
            try:
                return self._run_inner(request)
            except RoundLost:
                return RoundLost
        if isinstance(request, Share):
            replies = self._exchange(dict.fromkeys(v.peers, request.message), {})
            return self.messages.row_of(request.message, replies)
        if isinstance(request, Exchange):
            return self._exchange(request.messages, request.checksums)
        assert isinstance(request, Gather), f"got the request {request!r}"
        try:
            received = self.messages.gather(request.message, self._buffers)
        except (ConnectionError, TimeoutError):
            if self.transport.is_elastic:
                return RoundLost
            raise
        self._own_buffer_weight *= 1 / self.transport.world_size
        self._set_weight(v)
        return received

    def _exchange(self, messages: Mapping[int, Message], checksums: Mapping[int, int]) -> dict[int, Message]:
        self._is_cut_off = not self.transport.is_elastic
        self.messages.post(messages, self._buffers, checksums=checksums)
        replies = self.messages.wait(self._buffers)
        self._is_cut_off = False
        self._own_buffer_weight = self.messages.own_buffer_weight
        return replies

    def _set_weight(self, v: Vectors) -> None:
        """Set the push-sum weight to one after an exact average over all ranks."""
        if v.x.flat is not None and not (isinstance(v.x, Snapshot) and v.x.is_correction):
            v.x.flat.push_sum_weight.fill_(1.0)

    def _mix(self, x: Vector, v: Vectors, mixer: Mixer) -> None:
        flat = x.flat
        assert flat is not None, "only vectors of the model's layout are mixed: v.x, or one of m.scratch()"
        for b, own in zip(flat.buffers, self._buffers, strict=True):
            b.copy_(own)
        if x is not v.x and mixer is self.plain:
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

    # State.

    def forget_models(self) -> None:
        """See `Mixer`."""
        self.memory.forget_models()
        self._begin_anew()

    def end_average(self) -> None:
        """See `Mixer`."""
        self.memory.forget_models(is_asked=False)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._has_begun = False
        if self.watch is not None:
            self.watch.forget(self.memory)

    def shared(self, x: FlatVector) -> Sequence[Tensor]:
        """See `Mixer`: the momentum of the optimizer, where the algorithm writes it."""
        if not self.algorithm.needs_sgd:
            return ()
        self.memory.fit(Vector.of(x), who=self.algorithm)
        return self.memory.momentum.parts

    def take_shared(self, x: FlatVector) -> None:
        """See `Mixer`."""
        if self.watch is not None and self.shared(x):
            self.watch.forget(self.memory)

    def close(self) -> None:
        """See `Mixer`; keeps the state."""
        if self.watch is not None:
            self.watch.close()

    def state_dict(self) -> dict[str, Any]:
        """See `Mixer`; shares memory. After a round that failed while it applied messages, the state is empty."""
        if self._is_torn:
            return {"algorithm": self.algorithm.name}
        return {
            "algorithm": self.algorithm.name,
            "links": sorted(self.mixing.graph.phone_book(self.transport.rank)) if self.algorithm.keeps_links else [],
            "memory": self.memory.state_dict(has_links=not self.transport.is_elastic),
            "messages": self.messages.state_dict(),
            "optimizer": {} if self.watch is None else self.watch.state_dict(),
            "stamps": self.stamps.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Mixer`. Under a membership some vectors restart: see [Note: Sums over workers] of `Memory`."""
        names = [part.name for part in self.algorithm.parts]
        state = renewed(state, names)
        if state.get("algorithm") != names[0]:
            raise ValueError(
                f"got the state of {state.get('algorithm', 'another algorithm')}, expected the state of {names[0]}; "
                "wrap as for the saved model, or load the model alone: module.load_state_dict"
            )
        self._load(state)

    def reset(self) -> None:
        """See `Mixer`."""
        self._load({})

    def _load(self, state: Mapping[str, Any]) -> None:
        self._has_begun = self._is_torn = self._is_cut_off = False
        self.stamps.taken, self.stamps.lost = state.get("stamps", (0, 0))
        memory = state.get("memory", {})
        if self.transport.is_elastic:  # this worker may have other peers than the one that saved the state
            memory = without_links(memory, self.algorithm.parts)
        elif state.get("links"):
            self._check_links(state["links"])
        self.memory.load_state_dict(memory)
        if self.transport.is_elastic:
            self.memory.begin_generation(self.memory.weights)
        self.messages.load_state_dict(state.get("messages", {}))
        if self.watch is not None:
            self.watch.load_state_dict(state.get("optimizer", {}), self.memory)

    def state_for_newcomer(self) -> dict[str, Any]:
        """See `Mixer`."""
        return {
            "algorithm": self.algorithm.name,
            "memory": self.memory.state_dict(joins=True, has_links=False),
            "optimizer": {} if self.watch is None else self.watch.state_dict(joins=True),
            "stamps": self.stamps.state(),
        }

    def _check_links(self, found: Sequence[int]) -> None:
        own = sorted(self.mixing.graph.phone_book(self.transport.rank))
        if list(found) != own:
            raise ValueError(
                f"{self.algorithm}: got the state of links to {list(found)}, expected {own}; load the checkpoint of "
                "this rank, made on the same graph"
            )

    def describe(self, dtypes: Sequence[torch.dtype]) -> str:
        """See `Mixer`."""
        inner = f" by {self.plain}" if self.algorithm.mixes else ""
        return f"{self.algorithm.describe(dtypes)}{inner}"

    def __repr__(self) -> str:
        return repr(self.algorithm)

    def __getstate__(self) -> dict[str, Any]:
        assert self._generator is None, "flush() before copying: a round is in flight"
        return self.__dict__


def average_(tensors: Sequence[Tensor], x: FlatVector, averager: GlobalAverage) -> bool:
    """Replace tensors, which are views of x, by their average over all ranks; returns False if a worker died."""
    vector = FlatVector.pack(tensors)
    vector.push_sum_weight.copy_(x.push_sum_weight)
    averager.mix(vector, 0)
    if averager.has_failed:
        return False
    vector.multiply_by_weight_(x.push_sum_weight)
    vector.unpack_to(tensors)
    return True


def without_links(memory: Mapping[str, Any], parts: Sequence[Algorithm]) -> dict[str, Any]:
    """Return the state of a memory without the links of its algorithms, the outermost first."""
    left_out = {"links", "vectors"} if parts[0].keeps_links else {"links"}
    kept = {name: value for name, value in memory.items() if name not in left_out}
    return {**kept, "inner": without_links(kept["inner"], parts[1:])} if "inner" in kept else kept


def rounds_of(algorithm: Algorithm, plain: Mixer) -> Mixer:
    """Make the mixer that runs the rounds of an algorithm over plain gossip; not bound yet."""
    return plain if algorithm.is_plain else Rounds(algorithm, plain)
