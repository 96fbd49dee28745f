"""Pieces: runs the rounds of fragments of a model at different steps, optionally in a thread under training."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import record_function

from ..flat.buffer import FlatBuffer
from ..flat.layout import FlatLayout
from ..flat.vector import FlatVector
from ..mixing_manager.base import MixingManager
from ..transport.base import Transport
from ..transport.threads import CallThread
from .algorithm import Algorithm
from .memory import Memory
from .mixer import Mixer
from .periodic import Fragment, Periodic, check_names, cut
from .rounds import Rounds, average_, rounds_of
from .runs import places_of, tensors_beyond
from .vector import Vector, widened

_OTHERS = "the algorithm keeps its state for tensors that are still trained, and starts new tensors anew"


@dataclass
class _TravellingRound:
    """A round in the gossip thread: its fragment, the step at which it is due, and the future of its first reply."""

    fragment: int
    due: int
    future: Future[float]


class Pieces(Mixer):
    """Runs the rounds of a `Periodic` algorithm for each fragment of the model; see [Note: Fragments and delays].

    A round with a delay begins on the training thread. The gossip thread answers its first request. The round ends on
    the training thread at the step when it is due, which waits for the reply. The gossip thread answers one round after
    the other, in the order of the steps, which is equal on all ranks. Meanwhile the gossip thread owns the vector that
    is mixed, and the training thread owns the rest of the memory, so no lock is needed.

    [Note: Memory of the host] With anchor_device="cpu" the algorithm gets a copy of the model in host memory. So its
    memory is there too, and rounds are computed there; the result is copied back. Both copies run in the current stream
    and through pageable memory. So the host waits for the first copy, and may change its vectors after the second.

    In a step where the algorithm has a round but no fragment begins one, plain gossip mixes the whole model.

    Args:
        rounds: the rounds of the first fragment; not bound yet.
    """

    def __init__(self, rounds: Rounds) -> None:
        self.algorithm, self.rounds = rounds.algorithm, [rounds]
        self.times = times_of(rounds.algorithm)
        self.keeps_models, self.can_recover = rounds.keeps_models, rounds.can_recover
        # With a delay, a model that is not finite must not enter a round, since the round cannot be left out later.
        self.is_skippable = rounds.is_skippable and not self.times.delay
        self._k = self._t = 0  # the optimizer steps before the round, and its number
        self._device = None if self.times.anchor_device is None else torch.device(self.times.anchor_device)
        self._buffer: FlatBuffer | None = None  # knows the places of the tensors in the vector
        self._fragments: list[Fragment] = []
        self._layout: FlatLayout | None = None  # of the whole vector
        self._flights: list[_TravellingRound] = []  # in the order in which they began
        self._thread: CallThread | None = None
        self._stream: torch.cuda.Stream | None = None

    def bind(self, mixing: MixingManager, transport: Transport) -> None:
        """See `Mixer`."""
        self.rounds[0].bind(mixing, transport)
        super().bind(mixing, transport)
        self.rounds += [self.rounds[0].sibling() for _ in range(self.times.num_fragments - 1)]

    def rebind(self, mixing: MixingManager, transport: Transport) -> None:
        """See `Mixer`."""
        self.mixing, self.transport = mixing, transport
        for rounds in self.rounds:
            rounds.rebind(mixing, transport)

    def check(self, mixing: MixingManager) -> None:
        """See `Mixer`."""
        self.rounds[0].check(mixing)

    def is_due(self, k: int) -> bool:
        """See `Mixer`."""
        self._k = k
        return self.algorithm.is_due(k)

    def start(self, s: FlatVector, t: int) -> None:
        """See `Mixer`; the round itself runs in `finish`."""
        self._t = t

    @property
    def is_weighted(self) -> bool:
        """See `Mixer`."""
        return self.rounds[0].is_weighted

    @property
    def has_news(self) -> bool:  # type: ignore[override]
        """See `Mixer`."""
        return any(rounds.has_news for rounds in self.rounds)

    @property
    def sources(self) -> Sequence[int]:
        """See `Mixer`."""
        return self.rounds[0].sources

    def watch_optimizer(self, buffer: FlatBuffer, *, is_whole: bool = True) -> None:
        """See `Mixer`; also reads the places of the tensors of the model.

        Raises:
            ValueError: fragments are names that the model does not have, or the vector is a shard of a model, whose
                tensors have no names.
        """
        if is_whole:
            check_names(self.times.fragments, buffer.module)
            self._buffer = buffer
        elif not isinstance(self.times.fragments, int):
            raise ValueError(
                f"got fragments={self.times.fragments!r} while several processes share the vector of one model, "
                "expected the number of fragments: shards have no names of tensors"
            )
        for rounds in self.rounds[:1]:
            rounds.watch_optimizer(buffer)
        for rounds in self.rounds[1:]:
            rounds.watch = self.rounds[0].watch

    # Rounds.

    def begin(self, x: FlatVector, k: int = 0) -> bool:
        """See `Mixer`; ends the rounds that are due."""
        has_changed = self._cut(x)
        starting = self.times.starting_at(k)
        for p, rounds in enumerate(self.rounds):
            if rounds.has_news or not rounds.has_begun:
                with self._part(p, x) as part:
                    has_changed |= rounds.begin_part(part, is_due=p in starting, k=k)
        while self._flights and self._flights[0].due <= k:
            self._arrive(x)
            has_changed = True
        return has_changed

    def recover(self, x: FlatVector) -> None:
        """See `Mixer`; recovers all fragments, since one that is not finite makes all gradients not finite."""
        for p, rounds in enumerate(self.rounds):
            with self._part(p, x) as part:
                rounds.recover(part)

    def finish(self, s: FlatVector) -> None:
        """See `Mixer`; with a delay it begins rounds."""
        starting = self.times.starting_at(self._k)
        if not starting:
            self.rounds[0].plain.mix(s, self._t)
        for p in starting:
            t = self.times.number_of(p, self._k)  # so that each fragment uses every matrix of a graph that changes
            if self.times.delay:
                self._depart(p, s, t)
            else:
                with self._part(p, s) as part:
                    self.rounds[p].blocking(part, t, self._k)

    def _depart(self, p: int, x: FlatVector, t: int) -> None:
        """Begin a round of fragment p, and pass its first request to the gossip thread."""
        rounds = self.rounds[p]
        with self._part(p, x) as part:
            job = rounds.depart(part, t, self._k)
            if part is not x:
                rounds.release()
        # Vectors in host memory are sent through the GPU if messages are, and not in the stream of training.
        device = x.raw.device if self._device is None else self.transport.device
        if device.type == "cuda":
            if self._stream is None or self._stream.device != device:
                self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))  # the vector is written before it is sent
        stream = self._stream if device.type == "cuda" else None

        def run() -> float:
            on_stream = torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()
            with torch.no_grad(), on_stream, record_function("gossip.round", f"t={t}"):
                return job()

        if self._thread is None:
            self._thread = CallThread(f"gossip-{self.transport.rank}")
        self._flights.append(_TravellingRound(p, self._k + self.times.delay, self._thread.submit(run)))

    def _arrive(self, x: FlatVector) -> None:
        """Wait for the oldest round in the gossip thread, and end it."""
        flight = self._flights[0]
        names, rank = self.transport.names, self.transport.rank

        def what() -> str:
            peers = [names[i] for i in self.sources if i != rank]
            return f"rank {names[rank]}: a round of fragment {flight.fragment} with ranks {peers}"

        try:
            with record_function("gossip.wait"):
                assert self._thread is not None, "the thread runs all rounds in flight"
                self._thread.result(flight.future, what=what, timeout=self.transport.timeout)
        except Exception:  # an error of the round; an interrupt leaves the round in flight
            self._flights.clear()
            for rounds in self.rounds:
                rounds.give_up()
            raise
        self._flights.pop(0)
        if self._stream is not None:  # the vector has arrived before it is read
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        with self._part(flight.fragment, x) as part:
            self.rounds[flight.fragment].arrive(part, kept=self.times.kept)

    @property
    def is_in_flight(self) -> bool:
        """See `Mixer`."""
        return bool(self._flights)

    def flush(self, x: FlatVector) -> bool:
        """See `Mixer`."""
        has_changed = bool(self._flights)
        while self._flights:
            self._arrive(x)
        return has_changed

    # Fragments.

    @contextlib.contextmanager
    def _part(self, p: int, x: FlatVector) -> Iterator[FlatVector]:
        """A context with fragment p of x, on the device of the memory; changes are written back to x."""
        is_whole = len(self.rounds) == 1 and self._device in (None, x.raw.device)
        part = x if is_whole else self._fragments[p].read(x, self._device or x.raw.device)
        part.push_sum_weight = x.push_sum_weight
        yield part
        if part is not x:
            self._fragments[p].write(part, x)
            self.rounds[p].release()

    def _cut(self, x: FlatVector) -> bool:
        """Cut x into fragments if its tensors have changed; returns whether x was written."""
        if x.layout is self._layout:
            return False
        places = None if self._buffer is None else self._buffer.places()
        before, has_changed = self._layout, False
        fragments = cut(x.layout, self.times.fragments, places)
        if before is not None and len(self.rounds) > 1 and self.rounds[0].has_begun:
            wide = widened(before, has_buffers=True)
            if wide != widened(x.layout, has_buffers=True):
                has_changed = self._move(wide, fragments, x)
        self._layout, self._fragments = x.layout, fragments
        return has_changed

    def _move(self, before: FlatLayout, fragments: list[Fragment], x: FlatVector) -> bool:
        """Move the memories to a new cut, because other tensors are trained; returns whether x was written.

        New tensors become their average over ranks if the algorithm has an equal memory.
        """
        new = tensors_beyond(places_of(widened(before, has_buffers=False)), x)
        warnings.warn(f"{self.algorithm}: other tensors are trained than before; {_OTHERS}", stacklevel=2)
        if new and self.algorithm.has_equal_memory:
            average_(new, x, self.rounds[0].averager)
        memories = [Memory(rounds.memory.weights) for rounds in self.rounds]
        for fragment, memory in zip(fragments, memories, strict=True):
            memory.fit(Vector.of(fragment.read(x, self._device or x.raw.device)))
            memory.carry([rounds.memory for rounds in self.rounds])
        for rounds, memory in zip(self.rounds, memories, strict=True):
            rounds.replace_memory(memory)
        return bool(new)

    # State.

    def forget_models(self) -> None:
        """See `Mixer`."""
        for rounds in self.rounds:
            rounds.forget_models()

    def end_average(self) -> None:
        """See `Mixer`."""
        for rounds in self.rounds:
            rounds.end_average()

    def reset(self) -> None:
        """See `Mixer`."""
        for rounds in self.rounds:
            rounds.reset()

    def describe(self, dtypes: Sequence[torch.dtype]) -> str:
        """See `Mixer`."""
        return self.rounds[0].describe(dtypes)

    def __repr__(self) -> str:
        return repr(self.algorithm)

    def state_dict(self) -> dict[str, Any]:
        """See `Mixer`; shares memory."""
        return self._state([rounds.state_dict() for rounds in self.rounds])

    def state_for_newcomer(self) -> dict[str, Any]:
        """See `Mixer`."""
        return self._state([rounds.state_for_newcomer() for rounds in self.rounds])

    def _state(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        return states[0] if len(states) == 1 else {"algorithm": states[0]["algorithm"], "fragments": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Mixer`."""
        states = state.get("fragments", [state])
        if len(states) != len(self.rounds) and state.get("algorithm") == self.algorithm.name:
            raise ValueError(
                f"got the state of {len(states)} fragments, expected {len(self.rounds)}; wrap with the fragments= of "
                "the saved model, or load the model alone: module.load_state_dict"
            )
        for rounds, own in zip(self.rounds, states, strict=False):
            rounds.load_state_dict(own)

    def close(self) -> None:
        """See `Mixer`. Rounds in the thread may end by themselves, since other ranks wait for them."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        self._flights.clear()
        for rounds in self.rounds:
            rounds.give_up()
            rounds.close()

    def __getstate__(self) -> dict[str, Any]:
        assert not self._flights, "flush() before copying: a round is in flight"
        return {**self.__dict__, "_thread": None, "_stream": None}


def times_of(algorithm: Algorithm) -> Periodic:
    """Return the outermost algorithm, which has the settings of fragments and delays."""
    outer = algorithm.parts[0]
    assert isinstance(outer, Periodic), "fragments and delays are settings of periodic algorithms"
    return outer


def mixer_of(algorithm: Algorithm, plain: Mixer) -> Mixer:
    """Make the mixer that runs the rounds of an algorithm, by fragments if it has these; not bound yet."""
    made, outer = rounds_of(algorithm, plain), algorithm.parts[0]
    return Pieces(made) if isinstance(made, Rounds) and isinstance(outer, Periodic) and outer.is_in_pieces else made
