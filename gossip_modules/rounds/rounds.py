"""Rounds: the mixer that runs the rounds of an algorithm, for the whole model or for each of its fragments."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..flat.buffer import FlatBuffer
from ..flat.layout import FlatLayout
from ..flat.vector import FlatVector
from ..loop.hooks import Observer
from ..mixing_manager.base import MixingManager
from ..state import Restart, branch, check_layout, transient
from ..transport.base import Transport
from ..worlds.world import ALONE, ModelWorld
from .agreed_delay import AgreedDelay
from .algorithm import Algorithm
from .driver import Driver
from .flights import Flight, Flights
from .mixer import Mixer
from .optimizer_watch import OptimizerWatch
from .periodic import Fragment, Periodic, check_names, cut
from .runs import layout_of, places_of, tensors_beyond
from .vector import SentVector, Vector


class Rounds(Mixer):
    """A mixer that runs the rounds of an algorithm: s <- the result of a round, or its correction.

    A `Periodic` algorithm with fragments, a delay or a device for its memory runs in pieces: the rounds of each
    fragment have a driver of their own; see [Note: Fragments and delays] of `Periodic`. In a step where the algorithm
    has a round but no fragment begins one, plain gossip mixes the whole model.

    A round with a delay begins on the training thread. The gossip thread answers its first request. The round ends on
    the training thread at the step when it is due, which waits for the reply; see `Flights`. Meanwhile the gossip
    thread owns the vector that is mixed, and the training thread owns the rest of the memory.

    [Note: Memory of the host] With anchor_device="cpu" the algorithm gets a copy of the model in host memory. So its
    memory is there too, and rounds are computed there; the result is copied back. Both copies run in the current stream
    and through pageable memory. So the host waits for the first copy, and may change its vectors after the second.

    Args:
        algorithm: the algorithm.
        plain: the mixer that answers `Mix`; not bound yet.

    Attributes:
        drivers: the driver of each fragment; one for the whole model.
        k: the number of optimizer steps before the next round; write it before `start`.
        is_delayed: whether rounds of this algorithm are in flight between two steps.
    """

    make_driver: type[Driver] = Driver

    drivers: list[Driver] = branch(name="fragments")
    _agreed: AgreedDelay | None = branch(is_flat=True)
    _whole: Vector | None = transient(None)  # the model of the last round

    def __init__(self, algorithm: Algorithm, plain: Mixer) -> None:
        self.algorithm, self.plain, self.k = algorithm, plain, 0
        outer = algorithm.parts[0]
        self._times = outer if isinstance(outer, Periodic) and outer.is_in_pieces else None
        num_fragments, delay = (1, 0) if self._times is None else (self._times.num_fragments, self._times.delay)
        self._agreed = None if delay != "auto" or self._times is None else AgreedDelay(self._times.sync_every - 1)
        self.is_delayed = bool(delay)
        self.drivers = [self.make_driver(algorithm, plain) for _ in range(num_fragments)]
        self.keeps_models = algorithm.keeps_models
        # With a delay, a model that is not finite must not enter a round, since the round cannot be left out later.
        self.is_skippable = algorithm.is_skippable and not algorithm.can_recover and not delay
        self._t = 0  # the number of the round
        self._buffer: FlatBuffer | None = None  # knows the places of the tensors in the vector
        self._fragments: list[Fragment] = []
        self._layout: FlatLayout | None = None  # of the vector that the fragments are cut from
        self._flights: Flights[Flight] = Flights()

    def check(self, mixing: MixingManager) -> None:
        """See `Mixer`."""
        self.plain.check(mixing)
        self.algorithm.check(mixing)

    def bind(self, mixing: MixingManager, transport: Transport, world: ModelWorld = ALONE) -> None:
        """See `Mixer`."""
        super().bind(mixing, transport)
        self.plain.bind(mixing, transport)
        if transport.is_elastic and self.algorithm.averages_exactly:
            self._check_averages()
        if transport.is_elastic and self._agreed is not None:
            raise ValueError(
                f"got {self.algorithm} with a membership, expected a number of steps as delay: workers that join or "
                "die have measured no round together; pass delay=1, for example"
            )
        for driver in self.drivers:
            driver.bind(mixing, transport, world)

    def rebind(self, mixing: MixingManager, transport: Transport) -> None:
        """See `Mixer`. The weights for all numbers of workers were checked when the model was wrapped."""
        self.mixing, self.transport = mixing, transport
        self.plain.rebind(mixing, transport)
        for driver in self.drivers:
            driver.rebind(mixing, transport)

    def _check_averages(self) -> None:
        """Raise ValueError if exact averages among workers that die and join would not be right."""
        if self.is_weighted:
            raise ValueError(
                f"got push_sum=True between the exact averages of {self.algorithm} with a membership, expected "
                "push_sum=False: when workers die and join, the sum of the push-sum weights is not known, and an exact "
                "average needs it"
            )

    @property
    def is_weighted(self) -> bool:
        """See `Mixer`."""
        return self.plain.is_weighted

    @property
    def has_news(self) -> bool:
        """Whether the next `begin` exchanges messages with other ranks, so that x must be finite."""
        return any(not driver.stamps.has_tried for driver in self.drivers)

    @property
    def own_buffer_weight(self) -> float:
        """See `Mixer`."""
        return self.drivers[0].own_buffer_weight if self._times is None else 1.0

    @property
    def sources(self) -> Sequence[int]:
        """See `Mixer`."""
        return self.drivers[0].sources

    def count_tokens(self, num_tokens: int) -> None:
        """Count `num_tokens` tokens of this rank, if the algorithm counts them."""
        for driver in self.drivers:
            driver.memory.count_tokens(num_tokens)

    def bind_to_training(self, observer: Observer, *, is_whole: bool = True) -> None:
        """Take what the rounds need of the training of the model; called once, after `bind`.

        These are the places of the tensors, where fragments of the model are names, and the steps of its optimizers,
        where the algorithm needs them: see `OptimizerWatch`.

        Args:
            observer: the observer of the training of the model, which knows the places of its tensors.
            is_whole: whether this process has the whole model instead of a shard.

        Raises:
            ValueError: the settings have names that the model does not have, or the vector is a shard of a model, whose
                tensors have no names.
        """
        if is_whole and isinstance(outer := self.algorithm.parts[0], Periodic):
            check_names(outer, observer.buffer.module)
        if self._times is not None and is_whole:
            self._buffer = observer.buffer
        elif self._times is not None and not isinstance(self._times.fragments, int):
            raise ValueError(
                f"got fragments={self._times.fragments!r} while several processes share the vector of one model, "
                "expected the number of fragments: shards have no names of tensors"
            )
        if self.algorithm.needs_sgd or self.algorithm.follows_rate or self.algorithm.needs_inner_rate:
            watch = OptimizerWatch(self.algorithm, observer.buffer)
            observer.add(watch)
            for driver in self.drivers:
                driver.watch = watch

    # Rounds.

    def begin(self, x: FlatVector, k: int = 0) -> bool:
        """Prepare a round at a safe point, and end the rounds in flight that are due.

        Args:
            x: the model; the first call is at the beginning of training.
            k: the number of optimizer steps so far.

        Returns:
            Whether x was written.
        """
        if self._agreed is not None:
            self._agreed.k = k
        if self._times is None:
            return self.drivers[0].begin(x, k, is_due=self.has_news and self.algorithm.averages_at(k))
        is_new, has_changed, starting = x.layout is not self._layout, self._cut(x), self._times.starting_at(k)
        for p, driver in enumerate(self.drivers):
            if is_new or not (driver.stamps.has_tried and driver.has_begun):
                with self._part(p, x) as part:
                    has_changed |= driver.begin(part, k, is_due=p in starting)
        while (flight := self._flights.oldest) is not None and flight.is_due(k):
            self._land(flight, x)
            has_changed = True
        return has_changed

    def start(self, s: FlatVector, t: int) -> None:
        """See `Mixer`; the round itself runs in `finish` or `difference`."""
        self._t = t

    def finish(self, s: FlatVector) -> None:
        """See `Mixer`; with a delay it begins rounds."""
        if self._times is None:
            if self._whole is None or self._whole.flat is not s:
                self._whole = Vector.of(s)
            self.drivers[0].run(self._whole, self._t, self.k)
            return
        starting = self._times.starting_at(self.k)
        if not starting:
            self.plain.mix(s, self._t)
        for p in starting:
            t = self._times.number_of(p, self.k)  # so that each fragment uses every matrix of a graph that changes
            if self._times.delay:
                self._depart(p, s, t)
            else:
                with self._part(p, s) as part:
                    self.drivers[p].run(Vector.of(part), t, self.k)

    def difference(self, s: FlatVector) -> float:
        """See `Mixer`; takes a copy of s only if the algorithm keeps models, or runs in pieces."""
        if self.keeps_models or self._times is not None:
            return super().difference(s)
        snapshot, driver = SentVector(s.parameters, s), self.drivers[0]
        sent_buffers, weight = [b.clone() for b in s.buffers], s.push_sum_weight.clone()
        driver.run(snapshot, self._t, self.k)
        if driver.alpha is not None:  # the mixer has computed the correction of the whole vector
            return driver.alpha
        snapshot.begin_adding()  # if the round has written nothing, the correction is zero
        for b, sent in zip(s.buffers, sent_buffers, strict=True):
            b.sub_(sent)
        s.push_sum_weight.sub_(weight)
        return 1.0

    def _depart(self, p: int, x: FlatVector, t: int) -> None:
        """Begin a round of fragment p, and pass its first request to the gossip thread."""
        assert self._times is not None, "only periodic algorithms have a delay"
        with self._part(p, x) as part:
            job = self.drivers[p].depart(part, t, self.k, keeps_sent=self._times.keeps_sent)
        # Vectors in host memory are sent through the GPU if messages are, and not in the stream of training.
        self._flights.follow_training(x.raw.device if self._times.anchor_device is None else self.transport.device)
        agreed, begun = self._agreed, self.k
        delay = self._times.delay if agreed is None else agreed.at(begun)
        assert isinstance(delay, int), "an agreed delay is a number too"
        due = begun + delay

        def run() -> float:
            job()
            return 0.0 if agreed is None else agreed.agree(self.transport, begun=begun, due=due)

        describe = partial(self._describe_round, p)
        self._flights.begin(Flight(begun, due, due, t, run, describe, fragment=p), self.transport)

    def _describe_round(self, fragment: int) -> str:
        names, rank = self.transport.names, self.transport.rank
        peers = [names[i] for i in self.sources if i != rank]
        return f"rank {names[rank]}: a round of fragment {fragment} with ranks {peers}"

    def _land(self, flight: Flight, x: FlatVector) -> None:
        """Wait for a round in the gossip thread, and end it."""
        assert self._times is not None, "only periodic algorithms have a delay"
        try:
            agreed = self._flights.wait(flight, self.transport)
        except Exception:  # an error of the round; an interrupt leaves the round in flight
            self._give_up()
            raise
        self._flights.end(flight)
        if self._agreed is not None:
            self._agreed.land(flight.last, agreed)
        with self._part(flight.fragment, x) as part:
            self.drivers[flight.fragment].arrive(part, kept=self._times.kept)

    def _give_up(self) -> None:
        """Cancel all rounds in flight."""
        self._flights.cancel()
        for driver in self.drivers:
            driver.close_round()

    @property
    def is_in_flight(self) -> bool:
        """Whether `flush` would end a round."""
        return bool(self._flights)

    def flush(self, x: FlatVector) -> bool:
        """Wait for the rounds in flight, and end them on x; returns whether x was written."""
        has_changed = bool(self._flights)
        if has_changed and self._times is not None and self._layout is None:  # rounds of a checkpoint, before any step
            self._cut(x)
        while (flight := self._flights.oldest) is not None:
            self._land(flight, x)
        return has_changed

    # Fragments.

    @contextlib.contextmanager
    def _part(self, p: int, x: FlatVector) -> Iterator[FlatVector]:
        """A context with fragment p of x, on the device of the memory; changes are written back to x."""
        device = self._device_of(x)
        part = x if len(self.drivers) == 1 and device == x.raw.device else self._fragments[p].read(x, device)
        if part is not x:
            part.push_sum_weight, part.message = x.push_sum_weight, None
        yield part
        if part is not x:
            self._fragments[p].write(part, x)
            self.drivers[p].memory.release()

    def _device_of(self, x: FlatVector) -> torch.device:
        """Return the device of the memory for a model x."""
        place = None if self._times is None else self._times.anchor_device
        return x.raw.device if place is None else torch.device(place)

    def _cut(self, x: FlatVector) -> bool:
        """Cut x into fragments if its tensors have changed; returns whether x was written."""
        if x.layout is self._layout:
            return False
        assert self._times is not None, "only periodic algorithms have fragments"
        before, has_changed = self._layout, False
        places = None if self._buffer is None else self._buffer.places()
        self._layout, self._fragments = x.layout, cut(x.layout, self._times.fragments, places)
        if before is not None and len(self.drivers) > 1 and self.drivers[0].has_begun:
            has_changed = layout_of(before) != layout_of(x.layout) and self._move(before, x)
        return has_changed

    def _move(self, before: FlatLayout, x: FlatVector) -> bool:
        """Move the memories to a new cut, because other tensors are trained; returns whether x was written.

        New tensors become their average over ranks if the algorithm has an equal memory.
        """
        new = tensors_beyond(places_of(layout_of(before)), x)
        warnings.warn(
            f"{self.algorithm}: other tensors are trained than before; the algorithm keeps its state for tensors that "
            "are still trained, and starts new tensors anew",
            stacklevel=2,
        )
        if new and self.algorithm.has_equal_memory:
            self.drivers[0].average_(new, x)
        old = [copy.copy(driver.memory) for driver in self.drivers]
        for p, (fragment, driver) in enumerate(zip(self._fragments, self.drivers, strict=True)):
            driver.memory.carry(Vector.of(fragment.read(x, self._device_of(x))), old, p)
        return bool(new)

    # State.

    def shared(self, x: FlatVector) -> Sequence[Tensor]:
        """Return the tensors of a round beside x: the momentum of the optimizer, if the algorithm writes it."""
        if not self.algorithm.needs_sgd:
            return ()
        memory = self.drivers[0].memory
        memory.fit(Vector.of(x), who=self.algorithm)
        return memory.momentum.parts

    def take_shared(self, x: FlatVector) -> None:
        """Write the tensors of `shared(x)` into the optimizer, after the process with the round has sent them."""
        driver = self.drivers[0]
        if driver.watch is not None and self.shared(x):
            driver.watch.restart(Restart.REQUEST)
            driver.watch.write(driver.memory)

    def describe(self, dtypes: Sequence[torch.dtype]) -> str:
        """See `Mixer`."""
        inner = f" by {self.plain}" if self.algorithm.mixes else ""
        return f"{self.algorithm.describe(dtypes)}{inner}"

    def __repr__(self) -> str:
        return repr(self.algorithm)

    def state_dict(self, *, joins: bool = False, has_links: bool = True) -> dict[str, Any]:
        """See `State`.

        Fragments are cut anew in the first step after a change of the trained tensors, so that their states have no
        places: they load into the same cut only.
        """
        state = super().state_dict(joins=joins, has_links=has_links)
        if "fragments" in state and not joins:
            state["fragments"] = list(map(_without_places, state["fragments"]))
        return state

    def to_layout(self, state: dict[str, Any]) -> dict[str, Any]:
        """See `State`: the state of the only driver is the state of the whole model."""
        if len(self.drivers) > 1:
            return {"algorithm": self.algorithm.name, **state}
        (whole,) = state.pop("fragments")
        return {**whole, **state}

    def saved_flights(self) -> list[dict[str, Any]] | None:
        """Wait for the rounds in flight, and return them for a checkpoint.

        See [Note: Rounds in a checkpoint] of `saved_round`.

        Returns:
            Plain values and tensors that share memory; None: a `flush` must come before the checkpoint.
        """
        if self._flights and (self.transport.is_elastic or not all(driver.can_be_saved for driver in self.drivers)):
            return None
        saved = []
        for flight in self._flights:
            agreed = self._flights.wait(flight, self.transport)
            place = {"fragment": flight.fragment, "begun": flight.begun, "due": flight.last, "t": flight.t}
            saved.append({**place, "agreed": agreed, "round": self.drivers[flight.fragment].saved_round()})
        return saved

    def resume_flights(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Go on with rounds of `saved_flights()`, after `load_state_dict`."""
        for each in saved:
            flight = Flight(each["begun"], each["due"], each["due"], each["t"], fragment=each["fragment"])
            self._flights.note(flight, each["agreed"])
            self.drivers[flight.fragment].resume_round(each["round"])

    def from_layout(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """See `State`."""
        own = {name: value for name, value in state.items() if name != "delays"}
        delays = {} if self._agreed is None or "delays" not in state else {"delays": state["delays"]}
        return {"fragments": own.get("fragments", [own] * bool(own)), **delays}

    def check_state(self, state: Mapping[str, Any], *, of: object = None) -> None:
        """See `State`."""
        states = state.get("fragments", [state])
        if "fragments" in state:
            check_layout(state, ("algorithm", "fragments", "delays"), of=self.algorithm)
        name = self.algorithm.parts[0].name
        if any(each.get("algorithm") != name for each in states):
            raise ValueError(
                f"got the state of {states[0].get('algorithm', 'another algorithm')}, expected the state of "
                f"{name}; wrap as for the saved model, or load the model alone: module.load_state_dict"
            )
        if len(states) != len(self.drivers):
            raise ValueError(
                f"got the state of {len(states)} fragments, expected {len(self.drivers)}; wrap with the fragments= of "
                "the saved model, or load the model alone: module.load_state_dict"
            )
        super().check_state(state, of=of)

    def stats(self) -> dict[str, float]:
        """See `Mixer`: the delay of the last rounds, if ranks agree on it."""
        return {} if self._agreed is None else {"auto_delay": self._agreed.present}

    def interrupt(self) -> None:
        """See `State`."""
        self._give_up()

    def start_over(self, x: FlatVector, k: int) -> None:
        """Drop all state, and begin with equal models on all ranks; see `begin` for x and k.

        A rank that misses this begin takes the memory of another rank: [Note: One memory] of `Stamps`.
        """
        self.restart()
        self.begin(x, k)
        for driver in self.drivers:
            driver.stamps.taken = k

    def close(self) -> None:
        """See `Mixer`; keeps the state. Rounds in the thread may end by themselves, as other ranks wait for them."""
        self._flights.close()
        self._give_up()
        if (watch := self.drivers[0].watch) is not None:
            watch.close()


def _without_places(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a driver or of a memory without the places of its tensors, and of the memories in it."""
    kept = {name: value for name, value in state.items() if name != "places"}
    return {name: _without_places(value) if name in ("memory", "inner") else value for name, value in kept.items()}


def mixer_of(algorithm: Algorithm, plain: Mixer) -> Mixer:
    """Make the mixer that runs the rounds of an algorithm; not bound yet."""
    return plain if algorithm.is_plain else Rounds(algorithm, plain)
