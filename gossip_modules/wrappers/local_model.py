"""LocalModel: the model of one rank as one vector, and everything that changes it in training."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..engine.engine import MAX_KEPT, Engine
from ..engine.lockstep import LockstepEngine
from ..flat.aliases import has_memory
from ..flat.buffer import FlatBuffer
from ..flat.former_layout import FormerLayout
from ..flat.selection import Selection, set_noise_source
from ..flat.vector import FlatVector
from ..loop.copies import WeightCopies
from ..loop.loop import Loop, RoundTime
from ..loop.turn import is_in_signal_handler
from ..membership.links import LinkTransport
from ..profiling import Span
from ..state import branch, transient
from ..transport.agreement import check_agreement
from ..transport.change_board import REMEDY, first_difference
from ..transport.process_group import ProcessGroupTransport
from ..warn import levels_to_user
from ..worlds.all_or_none import MayBeLost
from ..worlds.world import ModelWorld
from .averaging import AveragedModel
from .composition import check_outside
from .exchanged_tensors import ExchangedTensors
from .node import Node
from .state import Place


def _nothing() -> None:
    return None


class LocalModel(AveragedModel):
    """The model of one rank: its vector, the engine that mixes it, and the world in which other ranks do the same.

    A wrapper decides when a step begins; this object runs the step. A membership changes its world and its vector.

    [Note: exchanged tensors] Ranks exchange a vector of the tensors trained at a training forward, or trained since the
    last round. The first forward after `requires_grad_()`, or after layers have come or gone, makes a new vector on all
    ranks alike, once they have compared their trained tensors; see `ExchangedTensors`. Nothing else does: a `flush()`,
    which one rank may call alone (for `eval()`, or to save), leaves vectors as they are, so that the vectors of all
    ranks still match. An asynchronous wrapper, whose peers may ask for its model at any time, goes on with frozen
    tensors and refuses new ones. A forward with tensors that `functional_call` lends to the module starts no round.

    [Note: Safe point] Gossip writes parameters in place, through storage that autograd does not watch. So it bumps
    their version: a backward through a graph that was built before the round fails with autograd's own "modified by
    an inplace operation" instead of computing wrong gradients.

    [Note: after infinities] A script may catch the FloatingPointError of `on_nonfinite="raise"`, mend the model and go
    on. In lockstep its next forward is of the same step, so that it takes part in the round in which the others wait
    for it; had the step been counted, they might average where it gossips. With a membership, corrections in flight are
    applied before a generation begins or a worker gets a copy of the model, so that neither is left half done.

    Args:
        module: mutated: its trained tensors become views of one flat vector, which keeps their values.
        name: the class of the wrapper, for messages.
        selection: the buffers that are mixed too, and the parameters and buffers that stay local.
        rounds: when rounds run: see `RoundTime`.
        run: runs the round of a step after the optimizer's; a bound method, whose object is not kept alive.
        num_shards: the vector is padded to this many equal shards.

    Attributes:
        engine: how rounds run.
        transport: the transport of the rounds, over the ranks; only if `is_connected`.
        is_connected: whether rounds have a transport over ranks; only rounds of dpwa have none.
        averages_gradients: whether all ranks step by one gradient, their mean.
        world: the ranks that train together.
        loop: observes the training of this model.
        place: this rank and the number of ranks; None without ranks.
        node: the processes that share this model, if there are several.
        description: the options that ranks agree on, by name.
        who: this worker, in front of errors, where ranks have no numbers.
        around: the wrapper, or None when it was collected.
        former: the layout of the last round, if tensors of another one stand in the module since then.
        is_seen_current: whether this forward has found the vector current already, a walk over all tensors.
        num_steps: the steps that were run here; steps before a checkpoint that was loaded do not count.
    """

    engine: Engine = branch(is_needed=True)
    loop: Loop = branch(is_flat=True)
    transport: ProcessGroupTransport | LinkTransport
    is_connected = averages_gradients = False
    place: Place = None
    who: str = ""
    around: Callable[[], nn.Module | None] = transient(_nothing)
    _run_after_step: Callable[[], Callable[[], None] | None] = transient(_nothing)
    former: FormerLayout | None = None
    is_closed = is_seen_current = _has_warned = False
    num_steps = 0

    def __init__(
        self,
        module: nn.Module,
        *,
        name: str,
        selection: Selection,
        rounds: str = "forward",
        run: Callable[[], None],
        num_shards: int = 1,
    ) -> None:
        when = RoundTime.of(rounds)
        self.name = name
        self.world = ModelWorld()
        self.description: dict[str, str] = {}
        self.buffer = FlatBuffer(module, selection=selection, num_shards=num_shards)
        self.exchanged = ExchangedTensors(self.buffer)
        self._run_after_step = weakref.WeakMethod(run)
        self.loop = Loop(self.buffer, self, when=when, name=name, max_flushes=MAX_KEPT)

    @property
    def copies(self) -> WeightCopies:
        """See `AveragedModel`."""
        return self.loop.copies

    @property
    def vector(self) -> FlatVector:
        """The vector, or the shard of it that this process mixes."""
        return self.buffer.vector if self.node is None else self.node.shard(self.buffer.vector)

    @property
    def is_held(self) -> bool:
        """Whether corrections must wait until `averaged()` ends."""
        return self.is_averaged and self.engine.is_asynchronous

    def start_training(self) -> None:
        """Training begins, with the model as it is now, before or after the first round."""
        self.loop.start()
        if self.loop.when is not RoundTime.FORWARD:
            self.engine.start_training(self.vector)

    def connect(self, transport: ProcessGroupTransport | LinkTransport) -> None:
        """Run rounds over this transport from now on."""
        self.transport, self.is_connected = transport, True
        name = self.world.own_name
        number = transport.rank if name is None else int(name.partition(".")[0])  # the processes of a node have one
        set_noise_source(self.buffer.module, 0 if self.averages_gradients else number)

    def share_with(self, node: Node) -> None:
        """Hold this model together with the processes of the node."""
        self.node = node
        if not self.world.changes:  # else the membership has them, too
            self.world = ModelWorld(node.control)

    # See `AveragedModel`.

    def read(self) -> FlatVector:
        """See `AveragedModel`."""
        self.flush()
        self.share_buffers()
        self.to_numerator()
        return self.buffer.vector

    def write(self, vector: FlatVector) -> None:
        """See `AveragedModel`."""
        self.to_estimate()
        self.loop.gradient.note_gossip_write()

    @property
    def rank(self) -> int:
        """See `AveragedModel`."""
        return super().rank if self.place is None else self.place[0]

    @property
    def state_place(self) -> Place:
        """See `AveragedModel`; a worker without a process group has the place of its process."""
        if self.world.changes or self.place is not None:
            return None if self.world.changes else self.place
        return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    # A step.

    def step(self) -> None:
        """Begin the generation that is due, then run the round of a step."""
        world, engine = self.world, self.engine
        if world.changes:
            if world.at_step():
                self.is_seen_current = False
            if self.loop.debias is not None:
                self.loop.debias.limits_steps = world.has_lost_peers
        step = engine.step
        self.num_steps += 1
        turn = self.loop.turn
        turn.trainer = threading.get_ident()
        self.loop.trained_weights.is_step_open = True
        try:
            with turn.change:
                self._round()
        except FloatingPointError:
            if isinstance(engine, LockstepEngine):  # [Note: after infinities]
                engine.step = step
                world.repeat_step()
            raise

    def _round(self) -> None:
        """The round of a step, of the trained tensors now."""
        engine, exchanged, loop = self.engine, self.exchanged, self.loop
        debias, trained_weights, masters = loop.debias, loop.trained_weights, loop.copies.masters
        if masters.is_looking or self.num_steps >= loop.next_look:
            loop.before_round(self.num_steps, None if self.world.changes else getattr(self.averager, "transport", None))
        is_current = self.is_seen_current or self.buffer.is_current()
        is_leaving = exchanged.frozen_at is not None and exchanged.must_leave(engine.t)
        if is_leaving or exchanged.is_first or not is_current:
            self.choose()
            if not self.buffer.is_attached():
                self.reattach()
        if self.former is not None:  # ranks have agreed on the present layout
            self.apply_in_flight()
            self.former = None
        if trained_weights.levels:
            trained_weights.recover()
        if self.node is not None:
            self.share_buffers()
        with torch.no_grad(), Span(f"{self.name}.mix", []):
            try:
                if debias is not None:
                    debias.to_numerator()
                is_written = self._run(engine.round)
                if trained_weights.levels or trained_weights.num_flushes:
                    trained_weights.begin_round()
                if is_written:
                    self.written()
            finally:
                if debias is not None:
                    debias.to_estimate()
        if masters.follows_rounds or loop.lost_corrections.is_subscribed:
            loop.after_round()
        if engine.is_asynchronous or (engine.may_be_in_flight and engine.is_in_flight):
            trained_weights.note()

    # The parts of a step, which `flush` and `averaged` use as well.

    def _run(self, act: Callable[[FlatVector], bool]) -> bool:
        """`act`, of the engine, on the vector of this process; in a node one process may act for all.

        A `former` layout is the layout of corrections in flight: see `FormerLayout`.
        """
        whole, former, node = self.buffer.vector, self.former, self.node
        x = whole if former is None else former.vector(whole)
        part = x if node is None else node.shard(x)
        is_written = act(part) if node is None else node.run(lambda: act(part))
        if former is not None and is_written:
            if node is not None:
                node.gather(x)
            former.write_back(x, whole)
        return is_written

    def share_buffers(self) -> None:
        """Every process of a node takes the buffers of the first one, before they are sent."""
        if self.node is not None:
            self.node.share_buffers(self.buffer.vector.buffers)

    def to_numerator(self) -> None:
        """Storage <- x, which is sent and stepped, where weights move; see `Debias`."""
        if self.loop.debias is not None:
            self.loop.debias.to_numerator()

    def to_estimate(self) -> None:
        """Storage <- z = x / w, with which the module computes, where weights move; see `Debias`."""
        if self.loop.debias is not None:
            self.loop.debias.to_estimate()

    def written(self) -> None:
        """Parameters were changed in place: [Note: Safe point]."""
        if self.node is not None:
            self.node.gather(self.buffer.vector)
        self.loop.gradient.note_gossip_write()

    def holds_other_weights(self) -> bool:
        """Whether other weights stand in the place of those that training has left.

        See [Note: Swapped weights] of `TrainedWeights`.
        """
        if not (self.is_closed or self.buffer.is_attached()):
            self.reattach()
        return self.loop.trained_weights.is_replaced()

    def flush(self) -> None:
        """Apply everything in flight to the tensors that the module has now."""
        if not self.is_closed:
            with self.loop.turn:
                if not self.buffer.is_attached():
                    self.reattach()
                self.apply_in_flight()

    def wait_for_rounds(self) -> None:
        """Wait for the rounds in flight, and apply those that a checkpoint cannot contain."""
        if self.is_closed:
            return
        with self.loop.turn:
            if not self.buffer.is_attached():
                self.reattach()
            self.to_estimate()  # after a step that raised
            if self.engine.is_in_flight and self._saved_flights() is None:
                self.apply_in_flight()
            elif not self.is_held:
                self.loop.trained_weights.recover()

    def _saved_flights(self) -> list[dict[str, Any]] | None:
        """See `Engine`; the result is None, too, if the rounds in flight have other tensors than those trained now."""
        buffer = self.buffer
        if self.former is not None or not (buffer.is_complete() or buffer.has_all()):
            return None
        return self.engine.saved_flights()

    @property
    def may_flush(self) -> bool:
        """Whether a call may apply corrections and change the form of the weights.

        See [Note: One thread at a time] of `Turn`.
        """
        turn = self.loop.turn
        if turn.is_in_change or turn.is_in_step:
            return False
        if not (self.loop.trained_weights.is_step_open and self.engine.is_in_flight):
            return True
        return not (turn.is_of_other_thread or is_in_signal_handler())

    @property
    def is_whole(self) -> bool:
        """Whether the model and the state of the engine belong together, as between two changes."""
        engine, turn = self.engine, self.loop.turn
        if turn.is_in_step or (turn.is_in_change and not engine.is_waiting):
            return False
        return engine.can_leave_out or not engine.is_in_flight

    def own_copies(self, state: dict[str, Any]) -> None:
        """Put copies, as estimates, in the place of tensors in a state dict."""
        raw, debias = self.buffer.vector.raw, self.loop.debias
        first, last = raw.data_ptr(), raw.data_ptr() + raw.numel()
        for name, value in state.items():
            if isinstance(value, Tensor):
                x = value.detach()
                is_ours = has_memory(x) and first <= x.data_ptr() < last
                state[name] = x.clone() if debias is None or not is_ours else debias.estimate_of(x)

    def apply_in_flight(self) -> None:
        """Apply everything in flight."""
        trained_weights = self.loop.trained_weights
        try:
            if not self.is_held:
                trained_weights.recover()
            if self.engine.is_in_flight and not self.is_held:
                if not self.engine.adds_again and trained_weights.is_replaced():
                    self._warn_of_other_weights()
                with self.loop.turn.change:
                    trained_weights.flush_at(self.buffer.vector.push_sum_weight)
                    self.to_numerator()
                    with torch.no_grad():
                        is_added = self._run(self.engine.flush)
                    self.written()
                    self.to_estimate()
                    if is_added:
                        trained_weights.flushed()
        finally:  # a script that catches the error of a peer goes on with a model
            self.to_estimate()

    def _warn_of_other_weights(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"got state_dict(), settle() or an average of a {self.name} while other weights stand in its "
                "parameters, such as an average for evaluation: the round in flight goes to these, and the weights of "
                "training lack it when they are back; expected the weights of training: put them back before you save",
                stacklevel=levels_to_user(),
            )

    @torch.no_grad()
    def add_again(self, num_flushes: int, at: Tensor) -> None:
        """Add the corrections of the flushes since the last round once more.

        See [Note: Swapped weights] of `TrainedWeights`.

        Args:
            num_flushes: the number of flushes whose corrections are in the weights already.
            at: the push-sum weight of the numerator that the next correction is added to.
        """
        weight = self.buffer.vector.push_sum_weight
        now = weight.clone()
        weight.copy_(at)
        self.to_numerator()
        try:
            if self._run(partial(self.engine.add_again, after=num_flushes)):
                self.written()
        finally:
            weight.copy_(now)
            self.to_estimate()

    # Changes of what is trained.

    def choose(self, *, may_leave: bool = True) -> None:
        """Let the vector have the trained tensors now, on all ranks at this point: [Note: exchanged tensors].

        With a membership the vector stays as it is where a worker is lost meanwhile, and the next step tries again.

        Args:
            may_leave: whether frozen tensors may leave the vector: see [Note: leaving the vector] of
                `ExchangedTensors`.

        Raises:
            ValueError: ranks train other tensors.
            TimeoutError, ConnectionError: a peer is late or gone; names it.
        """
        if self.engine.is_asynchronous:
            self._refuse_others()
            return
        if not self.buffer.is_attached():
            self.reattach()
        if not self.buffer.is_trained():
            return
        with MayBeLost(self.transport):
            if self.exchanged.is_first and may_leave:
                self.world.compare_layouts()
            self.exchanged.change(self, self.engine.t, may_leave=may_leave)

    def watch_changes(self) -> None:
        """Let ranks with other trained tensors and ranks without a change find each other: see `ChangeBoard`."""
        if self.is_connected and not self.engine.is_asynchronous:
            local = weakref.ref(self)
            self.exchanged.watch(self.transport, step=lambda: -1 if (kept := local()) is None else kept.engine.step)

    def compare_trained(self, description: list[str]) -> None:
        """See `Ranks`; the processes of a node compare theirs first, if each has the whole model."""
        node, transport = self.node, self.transport
        check = partial(check_agreement, what="comparing what is trained", remedy=REMEDY)

        def compare() -> bool:
            if transport.board is not None:
                transport.board.announce(description)
            check(transport, {"trained": description})
            return False

        if node is None:
            compare()
            return
        if not node.is_sharded:
            check(node.control, {"trained": description})
        node.run(compare)

    def average_frozen(self, vector: FlatVector) -> None:
        """See `Ranks`."""
        self.averager.mix(vector, self.engine.t)

    def _refuse_others(self) -> None:
        """Raise ValueError where other tensors are trained, of a rank whose peers may ask for its model at any time."""
        buffer = self.buffer
        if not buffer.is_trained():
            return
        if not buffer.is_attached():
            self.reattach()
        if not buffer.is_complete() and not buffer.has_all():
            self.apply_in_flight()
            buffer.attach()
        buffer.keep()
        mine, theirs = first_difference(buffer.signature(), buffer.agreed)
        if mine != theirs:
            raise ValueError(
                f"{self.who}got a model of which {mine} is where it had {theirs}: dtypes, trained tensors or device "
                "have changed since it was wrapped, expected the same, as peers may ask for it at any time; call "
                ".to(), .half() and requires_grad_() before wrapping"
            )

    @torch.no_grad()
    def reattach(self) -> None:
        """Attach tensors that were put in place of ours, with their values; corrections in flight stay so.

        See [Note: memory that has left] of `FlatBuffer`.
        """
        if (wrapper := self.around()) is not None:
            check_outside(wrapper, was_sharded=self.buffer.is_sharded)
        if self.buffer.is_lent():
            return
        self.loop.trained_weights.leave()
        former = self.former or self.buffer.former_layout()
        self.buffer.reattach()
        self.former = None if former.layout == self.buffer.vector.layout else former

    # Its life.

    def bind(self, wrapper: nn.Module, run: Callable[[], None]) -> None:
        """Serve this wrapper, whose bound method `run` runs the round after a step; neither is kept alive."""
        self.around, self._run_after_step = weakref.ref(wrapper), weakref.WeakMethod(run)

    def round_after_step(self) -> None:
        """See `Owner`."""
        if (run := self._run_after_step()) is not None:
            run()

    def stop(self) -> None:
        """Watch optimizers no more; storage holds the estimate from now on."""
        self.is_closed = True
        self.loop.close()

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        state = super().__getstate__()
        if self.engine.is_asynchronous or self.world.changes:
            # Its threads answer for one model; a copy is a snapshot that stays local.
            state.update(engine=self.engine.snapshot(), is_closed=True, world=ModelWorld())
            if self.world.changes:
                state["node"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.loop.bind(self)
        if self.is_closed:
            self.loop.close()

    # State.

    def state_dict(self, *, joins: bool = False, has_links: bool = True) -> dict[str, Any]:
        """See `State`: the place of this rank, the engine, the rounds in flight, and the position in the loop."""
        # Waits for the rounds in flight.
        rounds = self._saved_flights() if self.may_flush and self.engine.is_in_flight else None
        flights = {
            "rounds": rounds,
            "settings": self.engine.flight_settings,
            "tensors": self.buffer.signature(),
        }
        return {
            **super().state_dict(joins=joins, has_links=has_links),
            **self.exchanged.saved(self.engine.t),
            **({"flights": flights} if rounds else {}),
            **({} if self.place is None else dict(zip(("rank", "world_size"), self.place, strict=True))),
        }

    def from_layout(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """See `State`. A wrapper keeps entries of its own beside these."""
        return {name: state[name] for name in self.entry_names() if name in state}

    def check_state(self, state: Mapping[str, Any], *, of: object = None) -> None:
        """See `State`: the vectors of rounds in flight have the tensors that were trained then."""
        super().check_state(state, of=of)
        if "flights" not in state or self.world.changes:
            return
        frozen, theirs = state.get("frozen", ()), state["flights"]["tensors"]
        slots = self.buffer.candidates(frozen=frozen) if frozen else self.buffer.slots
        found, own = first_difference(theirs, [slot.signature() for slot in slots])
        if found != own:
            raise ValueError(
                f"got a checkpoint with a round in flight that has {found} where this model has {own}: other tensors "
                "were trained when it was saved, or of other dtypes; freeze the same parameters before you load it, or "
                "load the model alone: module.load_state_dict"
            )

    def fill(self, state: Mapping[str, Any]) -> None:
        """See `State`."""
        super().fill(state)
        if not state:
            self.start_training()
            return
        if not self.engine.is_asynchronous:
            self.exchanged.load_saved(state)
        if "flights" in state:
            self._resume_flights(state["flights"])

    def _resume_flights(self, saved: Mapping[str, Any]) -> None:
        """Go on with the rounds in flight of a checkpoint, or warn that they are left out."""
        engine = self.engine
        if not self.world.changes and engine.resume_flights(saved["rounds"], saved["settings"]):
            return
        own = "none for a membership" if self.world.changes else f"one of {engine.flight_settings}"
        warnings.warn(
            f"got a checkpoint with a round in flight of {saved['settings']}, expected {own}: the round is left "
            "out, and the ranks next exchange models at the next round; to keep it, wrap as for the saved model, load, "
            "call settle() and save again",
            stacklevel=levels_to_user(),
        )
