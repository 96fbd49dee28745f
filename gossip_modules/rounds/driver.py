"""Driver: runs the rounds of an algorithm on one vector, and answers its requests."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..compression.compressor import Compressor
from ..flat.vector import FlatVector, add_
from ..mixing_manager.base import MixingManager
from ..state import Restart, State, branch, leaf
from ..transport.agreement import rows_of_all
from ..transport.base import Transport
from ..transport.deadline import Deadline
from ..worlds.all_or_none import MayBeLost, all_or_none
from ..worlds.world import ALONE, ModelWorld
from .algorithm import Algorithm
from .coded_average import CodedAverage
from .memory import Memory
from .message_rounds import MessageCheck, MessageRounds
from .messages import Message, Received
from .mixer import GlobalAverage, Mixer
from .optimizer_watch import OptimizerWatch
from .requests import (
    Average,
    Exchange,
    Gather,
    Inner,
    Mix,
    OpenRound,
    Reply,
    Request,
    Round,
    RoundLost,
    Share,
    Vectors,
    next_request,
)
from .saved_round import can_be_saved, reopen, saved_round
from .stamps import Stamps
from .vector import SentVector, Vector, wide


class Driver(State):
    """Runs the rounds of an algorithm on one vector, the whole model or a fragment of it.

    Plain gossip answers `Mix(x)`, an all-reduce answers `Average(x)`, and `MessageRounds` exchanges messages.

    If the algorithm has equal memories on all ranks, newly trained tensors become their average over all ranks before
    the memory includes them.

    Args:
        algorithm: the algorithm.
        plain: the mixer that answers `Mix`.

    Attributes:
        memory: the memory of the algorithm for this vector.
        watch: the watch on the optimizers of the model, if the algorithm needs their steps.
        has_begun: whether `Algorithm.begin` was called.
        has_failed: whether the last round took no effect, because a worker died.
        alpha: the factor of the correction that the mixer has computed for the whole vector in the last round; None:
            the algorithm has written the vector.
        own_buffer_weight: see `Mixer`.
        open_round: the round that has begun and not ended.
    """

    memory: Memory = branch(is_needed=True)
    watch: OptimizerWatch | None = branch(name="optimizer")
    stamps: Stamps = branch()
    message_check: MessageCheck = branch(name="messages")
    has_begun: bool = leaf(False, average="reset", generation="reset", is_saved=False)
    _is_torn: bool = leaf(False, is_saved=False)  # whether a round failed while it was applying messages

    def __init__(self, algorithm: Algorithm, plain: Mixer) -> None:
        self.algorithm, self.plain = algorithm, plain
        self.memory = Memory()
        self.messages = MessageRounds(
            self.memory, has_links=algorithm.keeps_links, is_checked=algorithm.checks_messages
        )
        self.message_check = self.messages.message_check
        self.stamps = Stamps()
        self.has_failed = False
        self.alpha: float | None = None
        self.own_buffer_weight = 1.0
        self.open_round: OpenRound | None = None
        self._saved_round: Mapping[str, Any] | None = None  # of a checkpoint, until the round goes on
        self._buffers: list[Tensor] = []  # of the model, mixed; after a round their last values
        self._has_checked_step = False
        self._has_joined = False  # whether the model is the donor's, from within a window of outer steps

    def bind(self, mixing: MixingManager, transport: Transport, world: ModelWorld = ALONE) -> None:
        """See `Mixer`."""
        self.mixing, self.transport, self._is_elastic = mixing, transport, transport.is_elastic
        self.world = world
        self.messages.bind(mixing, transport)
        self.averager = GlobalAverage(transport, may_fail=True)
        self.stamps.is_needed = self.algorithm.has_equal_memory and self._is_elastic
        self._begin_generation()

    def rebind(self, mixing: MixingManager, transport: Transport) -> None:
        """See `Mixer`."""
        self.mixing, self.transport, self.averager.transport = mixing, transport, transport
        self.messages.rebind(mixing, transport)
        self._begin_generation()

    def _begin_generation(self) -> None:
        self.memory.turn_to(repr(self.mixing))
        self.restart(Restart.GENERATION)

    @property
    def sources(self) -> Sequence[int]:
        """See `Mixer`."""
        if self.algorithm.averages_exactly:
            return range(self.transport.world_size)
        return self.messages.row.in_peers or self.plain.sources

    # Before rounds.

    def begin(self, x: FlatVector, k: int, *, is_due: bool) -> bool:
        """Prepare a round at a safe point: see `Mixer.begin` and [Note: One memory] of `Stamps`.

        A newcomer of an outer method starts at the anchor: else its drift would have the donor's steps of the window.

        The rates of the first step of SGD are checked before anything changes. On an elastic transport they are not
        checked, since the rates of one worker would end the training of all.

        Args:
            x: the vector, mutated.
            k: the number of optimizer steps so far.
            is_due: whether a round that averages x is due now.

        Returns:
            Whether x was written.
        """
        has_changed, stamps = False, self.stamps
        if not self._has_checked_step and self.watch is not None and (step := self.watch.step) is not None:
            if not self._is_elastic:
                self.algorithm.check_step(self.mixing, step)
            self._has_checked_step = True
        if not self.has_begun:
            self.algorithm.begin(self._vectors(Vector.of(x), 0), self.memory)
            self._buffers, self.has_begun = self._buffers_of(x), True
        if self._has_joined:
            self._has_joined, has_changed = False, self._recover(x)
        if not stamps.has_tried:
            stamps.go_back(k)
            has_changed |= self._agree(x)
            if stamps.is_agreed and stamps.lost > stamps.taken and not is_due:
                self.run(Vector.of(x), stamps.lost, stamps.lost)
                has_changed = True
        if self.algorithm.has_equal_memory and stamps.is_agreed and (new := self.memory.new_tensors(x)):
            warnings.warn(
                f"{self.algorithm}: other tensors are trained than before; the new ones "
                f"({sum(map(torch.numel, new))} elements) become their average over all ranks",
                stacklevel=2,
            )
            if self.average_(new, x):
                stamps.taken, has_changed = max(k, stamps.taken), True
                self.memory.fit(Vector.of(x))
        return has_changed

    def average_(self, tensors: Sequence[Tensor], x: FlatVector) -> bool:
        """Replace tensors, which are views of x, by their average over all ranks; returns False if a worker died."""
        vector = FlatVector.pack(tensors)
        vector.push_sum_weight.copy_(x.push_sum_weight)
        self.averager.mix(vector, 0)
        if self.averager.has_failed:
            return False
        vector.multiply_by_weight_(x.push_sum_weight)
        vector.unpack_to(tensors)
        return True

    def _recover(self, x: FlatVector) -> bool:
        """Return to the model in the memory, x <- the anchor, if there is one; returns whether x was written."""
        if not self.algorithm.can_recover:
            return False
        self.algorithm.recover(self._vectors(Vector.of(x), 0), self.memory)
        if self.plain.is_weighted:
            for part in x.parameters:
                part.mul_(x.push_sum_weight[0])
        return True

    def _agree(self, x: FlatVector) -> bool:
        """Take the newest memory of all ranks; returns whether x was written."""
        return self.stamps.agree(self.memory, self.transport, who=self.algorithm) and self._recover(x)

    def _buffers_of(self, x: FlatVector | Vector) -> list[Tensor]:
        """Return copies of the buffers that a round mixes."""
        return [b.clone() for b in x.buffers] if self.algorithm.mixes_buffers else []

    def _vectors(self, x: Vector, t: int) -> Vectors:
        self.memory.fit(x, who=self.algorithm)
        assert x.flat is not None, "rounds mix flat vectors"
        self.messages.begin_round(x.flat, t, self._buffers)
        rank, num_ranks = self.transport.rank, self.transport.world_size
        return Vectors(
            x, self.messages, t=t, rank=rank, num_ranks=num_ranks, sum_over_shards=self.world.sum_over_processes
        )

    # A round.

    def run(self, x: Vector, t: int, k: int) -> None:
        """Run round t on x, after k optimizer steps."""
        self.begin_round(x, t, k)
        self._run_to_end()
        self._end_round(x, 0.0)

    def depart(self, x: FlatVector, t: int, k: int, *, keeps_sent: bool = False) -> Callable[[], float]:
        """Begin round t, after k optimizer steps. You may then change and free x.

        Args:
            x: the model.
            t: the number of the round.
            k: the number of optimizer steps so far.
            keeps_sent: whether `Vectors.sent` is a copy of x.

        Returns:
            A job that answers the first request, in any thread.
        """
        self.begin_round(Vector.of(x), t, k)
        self._let_go(x, keeps_sent=keeps_sent)
        opened = self.open_round

        def answer() -> float:
            if opened is not None and opened.request is not None:
                opened.reply = self.answer(opened.request)
            return 1.0

        return answer

    def _let_go(self, x: FlatVector, *, keeps_sent: bool) -> None:
        """Copy as much of the model x as the open round needs of it; training may then change x."""
        opened = self.open_round
        if opened is None or opened.request is None:
            return
        if isinstance(opened.request, Mix | Average) and opened.request.x is opened.v.x:
            sent = x.clone()
            opened.v.x = SentVector(sent.parameters, sent)
            opened.request = replace(opened.request, x=opened.v.x)
        else:
            opened.v.sent = Vector.of(x.clone()) if keeps_sent else None
            opened.v.x = Vector(())  # the round reads the model again when it arrives

    def arrive(self, x: FlatVector, *, kept: float) -> None:
        """End the round that departed.

        Args:
            x: the present model, mutated.
            kept: the weight of its own buffers: b <- kept b + (1 - kept) mixed b.
        """
        if self._saved_round is not None:
            self._reopen(x, self._saved_round)
        opened, vector = self.open_round, Vector.of(x)
        if opened is not None and opened.request is not None:
            sent, opened.v.x = opened.v.x, vector
            self.memory.fit(vector)  # a fragment is read anew, and the round may declare vectors
            if isinstance(sent, SentVector) and opened.reply is not RoundLost:
                buffers, alpha = sent.buffers if self._buffers else (), 1.0 if self.alpha is None else self.alpha
                corrections = (*sent.parts, *buffers)
                for own, correction in zip((*x.parameters, *self._buffers), corrections, strict=True):
                    add_(own, correction, alpha=alpha)
                self.alpha = None
            self.go_on(opened.reply)
            self._run_to_end()
            if (before := opened.v.sent) is not None:
                for mixed, own, b in zip(self._buffers, vector.buffers, before.buffers, strict=True):
                    mixed.add_(own).sub_(b)
        self._end_round(vector, kept)

    @property
    def can_be_saved(self) -> bool:
        """Whether `saved_round` describes the round that has departed, if there is one."""
        return not self.memory.units.kept and can_be_saved(self.open_round, self.memory)

    def saved_round(self) -> Mapping[str, Any]:
        """The round that has departed, and whose reply is there.

        It shares memory; see [Note: Rounds in a checkpoint] of `saved_round`.
        """
        if self._saved_round is not None or self.open_round is None or self.has_failed:
            return self._saved_round or {}
        return {
            **saved_round(self.open_round, self.memory),
            "buffers": self._buffers,
            "own_buffer_weight": self.own_buffer_weight,
            "alpha": self.alpha,
        }

    def resume_round(self, saved: Mapping[str, Any]) -> None:
        """Go on with a round of `saved_round` when it arrives."""
        self._saved_round = copy.deepcopy(saved) if saved else None

    def _reopen(self, x: FlatVector, saved: Mapping[str, Any]) -> None:
        """Open the saved round: see [Note: Rounds in a checkpoint] of `saved_round`."""
        memory, self._saved_round = self.memory, None
        memory.fit(Vector.of(x))
        kept = copy.deepcopy(memory.state_dict())
        memory.numbers = dict(saved["numbers"])
        self._buffers = self._buffers_of(x)
        v = self._vectors(Vector.of(x.clone()), saved["t"])
        v.inner_rate, v.sent = saved["inner_rate"], None if saved["sent"] is None else v.x
        generator = self.algorithm.round(v, memory, saved["k"])
        self.open_round = OpenRound(v, saved["k"], saved["averages"], generator)
        self.go_on(None)
        memory.overwrite(kept)
        reopen(self.open_round, saved, memory, x)
        self._buffers, self.own_buffer_weight, self.alpha = (
            saved[n] for n in ("buffers", "own_buffer_weight", "alpha")
        )
        self.has_failed = False

    def begin_round(self, x: Vector, t: int, k: int) -> None:
        """Run a round up to its first request; no round is open if the ranks cannot agree on one memory."""
        if self._is_torn or self.message_check.is_cut_off:
            raise RuntimeError(
                f"{self.algorithm}: got a round after one that failed, expected none: the states of the ranks may no "
                "longer agree; start again from a checkpoint on all ranks"
            )
        self.alpha, self.own_buffer_weight, self.has_failed = None, 1.0, False
        averages = self.algorithm.averages_exactly and self.algorithm.averages_at(k)
        if averages and not self.stamps.is_agreed:
            if not isinstance(x, SentVector):
                self._agree(x.whole)  # the failure of a worker here leads to another generation
            if not self.stamps.is_agreed:
                self.has_failed, self.stamps.lost = True, k
                return
        assert x.flat is not None, "rounds mix flat vectors"
        self._buffers = self._buffers_of(x)
        v = self._vectors(x, t)
        if self.watch is not None:
            self.watch.before_round(v, self.memory)
        numbers = dict(self.memory.numbers)
        self.open_round = OpenRound(v, k, averages, self.algorithm.round(v, self.memory, k), numbers)
        self.go_on(None)
        if self.memory.missing:
            self._check_vectors(self.memory)

    def _check_vectors(self, memory: Memory) -> None:
        try:
            memory.check_vectors(of=self.algorithm)
        except ValueError:
            self.close_round()
            raise

    def go_on(self, reply: Reply) -> None:
        """Send a reply into the round, which runs to its next request or to its end."""
        assert self.open_round is not None, "a round is open"
        try:
            self.open_round.request = self._next_request(self.open_round.generator, reply)
        except RoundLost:  # training goes on without this round
            self.open_round.request, self.has_failed, self.stamps.lost = None, True, self.open_round.k
        except BaseException:
            self.close_round()
            raise

    def answer(self, request: Request) -> Reply:
        """Return the reply to a request of the round."""
        assert self.open_round is not None, "a round is open"
        try:
            return self._reply_to(request, self.open_round.v)
        except RoundLost:
            return RoundLost
        except BaseException:
            self.close_round()
            raise

    def close_round(self) -> None:
        """Cancel the round that is open; model and memory are then as before the round."""
        if self.open_round is not None:
            self.open_round.generator.close()
            self.memory.put_back()
            self.open_round = None
        self._saved_round = None

    def _run_to_end(self) -> None:
        while self.open_round is not None and self.open_round.request is not None:
            self.go_on(self.answer(self.open_round.request))

    def _next_request(self, generator: Round, reply: Reply) -> Request | None:
        # Peers apply the same messages: if this rank fails to apply them, the ranks no longer agree.
        self._is_torn = isinstance(reply, Received | dict) and not self.algorithm.is_skippable
        request = next_request(generator, reply)
        self._is_torn = False
        return request

    def _end_round(self, x: Vector, kept: float) -> None:
        """Finish a round; for `kept` see `arrive`."""
        if (opened := self.open_round) is None:
            return
        if self.has_failed:
            self.close_round()
        else:
            self.memory.end_round()
            if self._buffers and self.alpha is None:
                for b, mixed in zip(x.buffers, self._buffers, strict=True):
                    b.copy_(torch.lerp(mixed, b.to(mixed), kept) if kept else mixed)
            if opened.averages:
                self.stamps.taken = opened.k
                self.memory.restart_inner()
        self.open_round = None
        # Also after a failed round: all ranks count the rates of steps from here on ([Note: Rates of ranks] of
        # `StepRates`), and the optimizer gets the momentum of the memory, which is as before the round.
        self._after_round()

    def _after_round(self) -> None:
        if self.watch is not None:
            self.watch.after_round(self.memory)

    # Replies.

    def _reply_to(self, request: Request, v: Vectors) -> Reply:
        match request:
            case Mix(x):
                self._mix(x, v, self.plain)
            case Average(x, numbers, Compressor() as code, Vector() as rest):
                everyone = self._gather_numbers(numbers)
                self._average_codes(x, rest, code, v)
                return everyone
            case Average(x, numbers):
                everyone = self._gather_numbers(numbers)
                self.averager.restores = x is v.x
                self._mix(x, v, self.averager)
                if self.averager.has_failed:
                    raise RoundLost
                self._set_weight(v)
                return everyone
            case Inner(x, generator):
                self._run_inner(x, generator, v.t)
            case Share(message):
                received = self.messages.share(message)
                self._note_buffer_weight()
                return received
            case Exchange(messages, checksums):
                replies = self.messages.exchange(messages, checksums)
                self._note_buffer_weight()
                return replies
            case Gather(message, numbers):
                everyone = self._gather_numbers(numbers)
                received = self._gather(message, v)
                received.numbers = everyone
                return received
        return None

    def _note_buffer_weight(self) -> None:
        if self.algorithm.mixes_buffers:
            self.own_buffer_weight = self.messages.row.buffer_weights.own

    def _mix(self, x: Vector, v: Vectors, mixer: Mixer) -> None:
        flat, buffers = x.flat, x.buffers if self._buffers else []
        assert flat is not None, "only the model and vectors of m.scratch() can be mixed"
        for b, own in zip(buffers, self._buffers, strict=True):
            b.copy_(own)
        if x is not v.x and mixer is self.plain:
            flat.reset_weight_()
        mixer.start(flat, v.t)
        if isinstance(x, SentVector):
            self.alpha, x.is_correction = mixer.difference(flat), True
            self.own_buffer_weight = mixer.own_buffer_weight
            return
        mixer.finish(flat)
        self.own_buffer_weight *= mixer.own_buffer_weight
        for own, b in zip(self._buffers, buffers, strict=True):
            own.copy_(b)

    def _run_inner(self, x: Vector, generator: Round, t: int) -> None:
        self.messages.begin_round(x.whole, t, self._buffers)
        with contextlib.closing(generator):
            request = next_request(generator, None)
            if self.memory.inner.missing:
                self._check_vectors(self.memory.inner)
            while request is not None:
                request = self._next_request(generator, self.answer(request))

    def _gather(self, message: Message, v: Vectors) -> Received:
        with MayBeLost(self.transport):
            received = self.messages.gather(message, name=str(self.algorithm))
            self.own_buffer_weight *= 1 / self.transport.world_size
            self._set_weight(v)
            return received
        raise RoundLost

    def _average_codes(self, x: Vector, rest: Vector, code: Compressor, v: Vectors) -> None:
        """Answer `Average` with a code; the buffers change on all ranks or on none."""
        transport, what = self.transport, f"the coded average in round {v.t}"
        # Without a membership an error ends training, so nobody needs the buffers from before.
        means = [b.to(wide(b.dtype), copy=transport.is_elastic) for b in self._buffers]
        with MayBeLost(transport), transport.within(Deadline(transport.timeout)):
            with all_or_none(transport, what=what):
                layout = x.whole.layout if means else None
                CodedAverage(transport).run(x, rest, code, v.t, buffers=means, layout=layout)
            for own, mean in zip(self._buffers, means, strict=True):
                if own is not mean:
                    own.copy_(mean)
            self.own_buffer_weight *= 1 / transport.world_size
            self._set_weight(v)
            return
        raise RoundLost

    def _gather_numbers(self, numbers: Sequence[float]) -> Tensor | None:
        """Return the numbers of all ranks; before the vector is sent, whose end confirms that no rank has failed."""
        if not numbers:
            return None
        mine = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        with MayBeLost(self.transport):
            return rows_of_all(self.transport, mine, what=f"numbers of all ranks for {self.algorithm}")
        raise RoundLost

    def _set_weight(self, v: Vectors) -> None:
        """Set the push-sum weight to one after an exact average over all ranks."""
        if v.x.flat is not None and not (isinstance(v.x, SentVector) and v.x.is_correction):
            v.x.flat.reset_weight_()

    # State.

    def state_dict(self, *, joins: bool = False, has_links: bool = True) -> dict[str, Any]:
        """See `State`. After a round that failed while it applied messages, the state is empty."""
        if self._is_torn and not joins:
            return {"algorithm": self.algorithm.name}
        return super().state_dict(joins=joins, has_links=has_links and not self._is_elastic)

    def to_layout(self, state: dict[str, Any]) -> dict[str, Any]:
        """See `State`."""
        links = self._links if self.algorithm.keeps_links else []
        stamps = [self.stamps.taken, self.stamps.lost]
        return {"algorithm": self.algorithm.name, **state, "stamps": stamps, "links": links}

    def from_layout(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """See `State`. A worker of a membership may have other peers than the worker that saved the state."""
        left_out = {"algorithm", "links", "messages"} if self._is_elastic else {"algorithm", "links"}
        kept = {name: value for name, value in state.items() if name not in left_out}
        if self._is_elastic and "memory" in kept:
            kept["memory"] = without_links(kept["memory"], self.algorithm.parts)
        if "stamps" in kept:
            kept["stamps"] = dict(zip(("taken", "lost"), kept["stamps"], strict=True))
        return kept

    def check_state(self, state: Mapping[str, Any], *, of: object = None) -> None:
        """See `State`."""
        super().check_state(state, of=self.algorithm.name)
        links = state.get("links", [])
        if not self._is_elastic and links and list(links) != self._links:
            raise ValueError(
                f"{self.algorithm}: got the state of links to {list(links)}, expected {self._links}; load the "
                "checkpoint of this rank, made on the same graph"
            )

    def fill(self, state: Mapping[str, Any]) -> None:
        """See `State`. Under a membership some vectors restart: see [Note: Sums over workers] of `Memory`."""
        super().fill(state)
        self._has_joined = state.get("memory", {}).get("joins", False)
        if self._is_elastic:
            self.memory.restart(Restart.GENERATION)

    def restarted(self, event: Restart) -> None:
        """See `State`: the optimizer takes over the momentum of the memory."""
        if self.watch is not None and event is not Restart.GENERATION:
            self.watch.write(self.memory)

    @property
    def _links(self) -> list[int]:
        return sorted(self.mixing.graph.phone_book(self.transport.rank))


def without_links(memory: Mapping[str, Any], parts: Sequence[Algorithm]) -> dict[str, Any]:
    """Return the state of a memory without the links of its algorithms, the outermost first."""
    left_out = {"links", "vectors"} if parts[0].keeps_links else {"links"}
    kept = {name: value for name, value in memory.items() if name not in left_out}
    return {**kept, "inner": without_links(kept["inner"], parts[1:])} if "inner" in kept else kept
