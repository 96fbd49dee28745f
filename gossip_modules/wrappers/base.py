"""The one nn.Module base of the gossip wrappers: a round in each optimizer step, no_sync, eval flush, state."""

from __future__ import annotations

import contextlib
import copy
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from ..engine.background import close_in_thread
from ..engine.engine import Engine, IdleEngine, LockstepEngine
from ..flat.buffer import FlatBuffer
from ..flat.selection import Selection
from ..flat.transformed import call_plain, is_transformed, not_compiled, refuse_scripting
from ..flat.vector import FlatVector
from ..membership.participant import ModelParticipant
from ..old_calls import levels_to_user
from ..transport.agreement import broadcast_tensors, check_agreement
from ..transport.change_board import first_difference
from ..transport.connect import connect, group_or_world
from ..transport.process_group import ProcessGroupTransport
from .arguments import Links, check_flags
from .averaging import AveragingMixin
from .composition import check_inside, check_optimizers, check_outside, hold, let_go
from .debias import Debias
from .node import Node
from .optimizer_steps import OptimizerSteps, RoundTime
from .other_names import DDP_ATTRIBUTES, MISSING, OldNames
from .state import (
    KEY,
    SUFFIX,
    InnerPlace,
    Place,
    WholeState,
    check_place,
    check_prefix,
    plain,
    put_state,
    take_place,
    warn_stateless,
)
from .travelling import Travelling
from .weights.copies import WeightCopies
from .weights.own import OwnWeights

if TYPE_CHECKING:
    from typing_extensions import Self


_DEFAULT = Selection()


class GossipWrapper(OldNames, AveragingMixin):
    """A module whose parameters are mixed with the parameters of other ranks before its training forwards.

    [Note: Where a round runs] At the first training forward of an optimizer step (the wrapped module in train mode,
    grad enabled, something to train) the parameters are exactly "after optimizer.step()", so the round runs there, like
    mixing after the previous `step()`. [Note: One step is one round] says which forward begins a step; a GradScaler
    that skips a step on one rank skips no round. The mode of the wrapped module counts, since trainers put modules in
    train mode without the wrapper's knowledge. A forward in eval mode starts no round unless `gossip_in_eval_mode`;
    training so is an error. With `rounds="step"` the round runs after the optimizer's step, and with "manual" in
    `gossip_step()` alone.

    [Note: What travels] The vector that ranks exchange has the tensors that are trained at a training forward, or were
    trained since the last round. The first forward after `requires_grad_()`, or after layers have come or gone, makes a
    new vector on all ranks alike, once they have compared their trained tensors; see `Travelling`. Nothing else does: a
    `flush()`, which one rank may call alone (for `eval()`, or to save), leaves vectors as they are, so that the vectors
    of all ranks still match. An asynchronous wrapper, whose peers may ask for its model at any time, goes on with
    frozen tensors and refuses new ones. A forward with tensors that `functional_call` lends to the module starts no
    round.

    [Note: Safe point] Gossip writes parameters in place, through storage that autograd does not watch. So it bumps
    their version: a backward through a graph that was built before the round fails with autograd's own "modified by
    an inplace operation" instead of computing wrong gradients.

    [Note: after infinities] A script may catch the FloatingPointError of `on_nonfinite="raise"`, mend the model and go
    on. In lockstep its next forward is of the same step, so that it takes part in the round in which the others wait
    for it; had the step been counted, they might average where it gossips. With a membership, corrections in flight are
    applied before a generation begins or a worker gets a copy of the model, so that neither is left half done.

    A subclass makes `_engine`, which decides when rounds run, and `_averager`, and ends its constructor with
    `hold(self)`, after which no other wrapper takes the module.

    Args:
        module: mutated: its trained tensors become views of one flat vector, which keeps their values.
        selection: the buffers that are mixed too, and the parameters and buffers that stay local.
        gossip_in_eval_mode: whether forwards in eval mode with grad enabled are training forwards too.
        rounds: when rounds run: see `RoundTime`.
        num_shards: the vector is padded to this many equal shards.

    Raises:
        ValueError: the module is wrapped or sharded by another tool, or has nothing to train.
    """

    _foreign_attributes: ClassVar[Mapping[str, str]] = {**DDP_ATTRIBUTES, **MISSING}
    _transport: Any
    _debias: Debias | None = None
    _node: Node | None = None
    _elastic: ModelParticipant | None = None
    _join_config: Any = SimpleNamespace(enable=False)  # of `Joinable`, where a wrapper is one
    _who: str = ""  # this worker, in front of errors, where ranks have no numbers

    def __init__(
        self,
        module: nn.Module,
        *,
        selection: Selection = _DEFAULT,
        gossip_in_eval_mode: bool = False,
        rounds: str = "forward",
        num_shards: int = 1,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check_inside(module, wrapper=name)
        check_flags(gossip_in_eval_mode=gossip_in_eval_mode)
        self.module = module
        self.gossip_in_eval_mode = gossip_in_eval_mode
        self._place: Place = None
        self._description: dict[str, str] = {}  # what ranks agree on, by name
        self._sync = True  # False inside no_sync()
        self._is_closed = False
        self._is_checked = False  # for other tools around it
        self._has_trained = False
        self._has_warned = False  # of training after close()
        self._trains = False  # in this forward
        self._is_seen_current = (
            False  # the buffer, in this forward: a walk over all tensors that a round need not repeat
        )
        self._travelling = Travelling()
        when = RoundTime.of(rounds)
        self._buffer = FlatBuffer(module, selection=selection, num_shards=num_shards)
        self._own_weights = OwnWeights(self._buffer, self._add_again)
        self._copies: WeightCopies = WeightCopies(self._buffer, name=name)
        self._steps = OptimizerSteps(self._buffer, when, name=name, run=self._round_after_step)
        module.register_load_state_dict_pre_hook(InnerPlace(self))

    def _open(self, links: Links, *, init_sync: bool, ranks: Sequence[int] | None = None) -> ProcessGroupTransport:
        """Connect the ranks; collective.

        Ranks that disagree would make different groups and hang. So they compare their options over a group that
        exists, before any group is made.

        Args:
            links: how the ranks reach each other.
            init_sync: whether all parameters and buffers of the module, also outside the vector, start as on rank 0;
                but for ignored ones.
            ranks: the global ranks of a new group, this one among them; None = all.

        Raises:
            ValueError: the ranks do not agree; on every rank, naming who differs and in what.
            RuntimeError, TimeoutError, ConnectionError: see `connect`.
        """
        check_flags(init_sync=init_sync)
        buffer, selection = self._buffer, self._selection
        description = {"wrapper": type(self).__name__, "rounds": self.rounds, **self._description}
        others = selection.others(self.module, buffer.tensors) if init_sync else {}
        shapes = [f"{name} {tuple(x.shape)} {x.dtype}" for name, x in others.items()]
        device = buffer.vector.raw.device
        existing = connect(group_or_world(links.process_group), module_device=device, timeout=links.timeout)
        try:
            check_agreement(existing, {**description, "model": buffer.signature(), "beside what travels": shapes})
            if init_sync:
                broadcast_tensors(existing, [buffer.vector.raw, *others.values()])
        finally:
            existing.close()
        return links.connect(device, ranks=ranks)

    # A forward, and the round of a step, in the order in which things happen.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, after this step's gossip round if it is a training forward; see `is_transformed`."""
        module: Any = self._modules["module"]  # self.module, without a search
        if is_transformed() or type(args) is not tuple:  # a symbol of torch.fx
            return call_plain(module, args, kwargs, wrapper=type(self).__name__)
        self._before_forward()
        # The node's replica averages gradients and shares buffers, so all its processes must call it: in training
        # only, and not after close().
        if self._node is not None and self._trains and not self._is_closed:
            module = self._node.replica
        with record_function(f"{type(self).__name__}.forward"):
            out = module(*args, **kwargs)
        self._steps.has_ended = True
        return out

    @not_compiled
    def _before_forward(self) -> None:
        """[Note: One step is one round]"""
        self._to_estimate()  # [Note: a step that raises]; else it does nothing
        self._trains = torch.is_grad_enabled() and (self._buffer.module.training or self.gossip_in_eval_mode)
        if self._trains and not self._is_checked:
            self._check_surroundings()
        # A model that is frozen for a while, like a GAN's critic, is not trained.
        is_current = self._trains and self._buffer.is_current()
        self._trains = self._trains and (is_current or self._buffer.is_trained())
        if self._is_closed:
            if self._trains and not self._has_warned:
                self._warn_alone()
        elif not self._trains:
            self._evaluate()
        elif torch._C._current_graph_task_id() == -1:
            self._train(is_current=is_current)
        elif not self._has_trained:  # inside a backward: the recomputation of a checkpoint
            raise RuntimeError(
                "got a training forward inside a backward and none before it, expected rounds to run in the "
                "forward; checkpoint parts of the module, or pass use_reentrant=False"
            )

    def _train(self, *, is_current: bool) -> None:
        """A training forward begins."""
        self._has_trained = True
        if self._is_averaged:
            return
        self._is_seen_current = is_current and self._elastic is None  # a donor's state may change what is trained
        try:
            for _ in range(self._steps.num_rounds_due(is_synced=self._sync)):
                self._begin_step()
        finally:
            self._is_seen_current = False

    def _begin_step(self) -> None:
        """The round of an optimizer step, which begins with it."""
        if self._join_config.enable:
            self._notify()
        if not self._is_held:
            self._step_start()
        self._steps.begin()

    def _notify(self) -> None:
        """Tell the other ranks that this one has another batch; for `Join`."""

    def gossip_step(self) -> None:
        """Run the round of an optimizer step now.

        With `rounds="manual"` only this runs rounds: call it once per optimizer step, on all ranks alike, where no
        backward is under way (after `optimizer.step()`, or before the forward). Use it in loops in which a forward of
        the wrapper does not say when a step begins: pipeline schedules, several models, losses computed by the inner
        module. With the other settings of `rounds` it runs the round of the present step early; the next forward or
        optimizer step then starts none for that step. A rank that leaves out a batch alone calls it in its place.

        Raises:
            RuntimeError: inside a backward or `averaged()`, or after `close()`.
            TimeoutError, ConnectionError, FloatingPointError: see the forward.

        Example:
            >>> model = GossipDataParallel(model, rounds="manual")
            >>> loss = model.module.loss(x, y)
            >>> loss.backward()
            >>> optimizer.step()
            >>> model.gossip_step()
        """
        name = type(self).__name__
        if self._is_closed:
            raise RuntimeError(
                f"got gossip_step() after close() of a {name}, expected it before; wrap the module again"
            )
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"got gossip_step() of a {name} inside a backward, which reads the parameters that a round writes; "
                "expected it after the backward, or before the forward"
            )
        if self._is_averaged:
            raise RuntimeError(
                f"got gossip_step() of a {name} inside averaged(), after which each rank goes on from its own model; "
                "expected it outside"
            )
        self._to_estimate()
        self._check_surroundings()
        self._has_trained = True
        self._begin_step()

    def _set_out(self) -> None:
        """Training begins, with the model as it is now, before or after the first round."""
        if self._steps.when is not RoundTime.FORWARD:
            self._engine.set_out(self._gossiped)

    def _round_after_step(self) -> None:
        """The round of `rounds="step"`, in a hook on the optimizer's step."""
        if not self._is_closed:
            self._begin_step()

    def _check_surroundings(self) -> None:
        """Refuse other tools around the wrapper, once, when training begins."""
        if not self._is_checked:
            check_outside(self)
            check_optimizers(self, self._buffer.parameters[0])
            self._is_checked = True

    def _step_start(self) -> None:
        """Changes in the membership, and the round of a step."""
        if self._elastic is not None:
            self._elastic.at_step()
            if self._debias is not None:
                self._debias.limits_steps = bool(self._elastic.membership.lost)
        engine = self._engine if isinstance(self._engine, LockstepEngine) else None
        step = 0 if engine is None else engine.step
        try:
            self._round()
        except FloatingPointError:
            if engine is not None:  # [Note: after infinities]
                engine.step = step
                if self._elastic is not None:
                    self._elastic.membership.repeat_step()
            raise

    def _round(self) -> None:
        """The round of a step, of the tensors that are trained now."""
        is_current = self._is_seen_current or self._buffer.is_current()
        if not is_current or self._travelling.is_due(self._engine):
            self._choose()
            if not self._buffer.is_attached():
                self._reattach()
        if self._own_weights.added:
            self._own_weights.recover()
        self._share_buffers()
        with torch.no_grad(), record_function(f"{type(self).__name__}.mix"):
            try:
                self._to_numerator()
                if self._run(self._engine.round):
                    self._written()
            finally:
                self._to_estimate()
        if self._engine.is_asynchronous or self._engine.is_in_flight:
            self._own_weights.note()

    # The parts of a step, which `flush` and `averaged` use as well.

    def _run(self, act: Callable[[FlatVector], bool]) -> bool:
        """`act`, of the engine, on the vector of this process; in a node one process may act for all."""
        x = self._gossiped
        return act(x) if self._node is None else self._node.run(lambda: act(x))

    @property
    def _gossiped(self) -> FlatVector:
        """The vector, or the shard of it that this process mixes."""
        return self._buffer.vector if self._node is None else self._node.shard(self._buffer.vector)

    def _share_buffers(self) -> None:
        """Every process of a node takes the buffers of the first one, before they are sent."""
        if self._node is not None:
            self._node.share_buffers(self._buffer.vector.buffers)

    def _to_numerator(self) -> None:
        """Storage <- x, which is sent and stepped, where weights move; see `Debias`."""
        if self._debias is not None and self._debias.is_needed:
            self._debias.to_numerator()

    def _to_estimate(self) -> None:
        """Storage <- z = x / w, with which the module computes, where weights move; see `Debias`."""
        if self._debias is not None and self._debias.is_needed:
            self._debias.to_estimate()

    def _written(self) -> None:
        """Parameters were changed in place: [Note: Safe point]."""
        if self._node is not None:
            self._node.gather(self._buffer.vector)
        self._steps.write(self._buffer.parameters)

    @property
    def _is_held(self) -> bool:
        """Whether the parameters are the average that `averaged()` lends, so that corrections must wait outside."""
        return self._is_averaged and self._engine.is_asynchronous

    # Forwards and changes outside of steady training.

    def _evaluate(self) -> None:
        """A forward outside of training, perhaps in an eval mode that the wrapper was not told of."""
        if self.module.training:
            return
        if self._sync:
            self._steps.end()  # as after eval()
        if torch.is_grad_enabled():
            self._steps.evaluate()

    def _warn_alone(self) -> None:
        """Say that a training forward after close() is of this rank alone; once."""
        self._has_warned = True
        name = type(self).__name__
        if isinstance(self._engine, IdleEngine):
            what = f"in a copy of a {name}, which gossips with nobody: it trains alone; wrap its module to gossip"
        else:
            what = (
                f"after close() of a {name}, which gossips no more: this rank trains alone from now on; close() after "
                "the last step, or wrap the module again to gossip"
            )
        warnings.warn(
            f"got a training forward {what}; to evaluate call eval() or use torch.no_grad()",
            stacklevel=levels_to_user(),
        )

    def _choose(self, *, may_leave: bool = True) -> None:
        """Let the vector have the tensors that are trained now, on all ranks at this point: [Note: What travels].

        may_leave: whether frozen tensors may leave the vector: see [Note: what leaves the vector].
        """
        if self._engine.is_asynchronous:
            self._refuse_others()
        else:
            self._travelling.change(self, self._transport, self._averager, may_leave=may_leave)

    def _refuse_others(self) -> None:
        """Raise ValueError where other tensors are trained, of a rank whose peers may ask for its model at any time."""
        buffer = self._buffer
        if not buffer.is_trained():
            return
        if not buffer.is_attached():
            self._reattach()
        if not buffer.is_complete() and not buffer.has_all():
            self._apply_in_flight()
            buffer.attach()
        buffer.keep()
        mine, theirs = first_difference(buffer.signature(), buffer.agreed)
        if mine != theirs:
            raise ValueError(
                f"{self._who}got a model of which {mine} is where it had {theirs}: dtypes, trained tensors or device "
                "have changed since it was wrapped, expected the same, as peers may ask for it at any time; call "
                ".to(), .half() and requires_grad_() before wrapping"
            )

    @torch.no_grad()
    def _reattach(self) -> None:
        """Attach tensors that were put in place of ours; corrections in flight are applied to their values."""
        check_outside(self)
        if self._buffer.is_lent():
            return
        if self._engine.is_in_flight:
            self._buffer.pull()
            self._apply_in_flight()
            self._buffer.push()
        self._buffer.reattach()

    def _apply_in_flight(self) -> None:
        """Apply everything in flight."""
        try:
            if not self._is_held:
                self._own_weights.recover()
            if self._engine.is_in_flight and not self._is_held:
                self._own_weights.flush_at(self._buffer.vector.push_sum_weight)
                self._to_numerator()
                with torch.no_grad():
                    self._run(self._engine.flush)
                self._written()
                self._to_estimate()
                self._own_weights.flushed()
        finally:  # a script that catches the error of a peer goes on with a model
            self._to_estimate()

    @torch.no_grad()
    def _add_again(self) -> None:
        """Add the corrections of the flushes since the last round once more: [Note: Swapped weights]."""
        weight = self._buffer.vector.push_sum_weight
        now = weight.clone()
        weight.copy_(self._own_weights.weight)  # of the numerator that corrections are added to
        self._to_numerator()
        try:
            if self._run(self._engine.add_again):
                self._written()
        finally:
            weight.copy_(now)
            self._to_estimate()

    # The methods of a wrapper around a training loop.

    @property
    def rounds(self) -> str:
        """When rounds run: "forward", "step" or "manual"."""
        return self._steps.when.value

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a forward is outside `no_sync()`; may be set instead, as for DistributedDataParallel.

        Example:
            >>> for k, (x, y) in enumerate(micro_batches):
            ...     model.require_backward_grad_sync = k == len(micro_batches) - 1
            ...     criterion(model(x), y).backward()
        """
        return self._sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        check_flags(require_backward_grad_sync=value)
        self._sync = value

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards inside belong to the same optimizer step as the first forward outside: one round for all.

        Gradient accumulation as with DistributedDataParallel: all micro-batches but the last go in here. `eval()` ends
        a step, so an epoch that breaks off inside leaves no rank out of step with the others. The processes of a node
        average gradients when it ends.
        """
        before, self._sync = self._sync, False
        try:
            with contextlib.nullcontext() if self._node is None else self._node.replica.no_sync():
                yield
        finally:
            self._sync = before

    def train(self, mode: bool = True) -> Self:
        """As `nn.Module.train`, after a flush; eval mode also ends the current step.

        Where other weights stand in the parameters, as an average that is evaluated, corrections stay in flight: see
        [Note: Swapped weights].
        """
        self.before_mode(mode)
        return super().train(mode)

    def before_mode(self, mode: bool) -> None:
        """The module is about to be in train or eval mode."""
        self._to_estimate()  # [Note: a step that raises]
        if not self._own_weights.is_replaced():
            self.flush()
        if not mode:
            self._steps.end()

    def flush(self) -> None:
        """See `AveragingMixin`. Leaves the de-biased estimate in the parameters."""
        if not self._is_closed:
            if not self._buffer.is_attached():
                self._reattach()
            self._apply_in_flight()

    def close(self) -> None:
        """See `AveragingMixin`. Forwards after it are local; a training forward warns, once."""
        if self._is_closed:
            return
        try:
            if self._engine.is_asynchronous:
                self._engine.close()  # before the flush, which applies what peers say meanwhile
            self.flush()
        finally:
            self._is_closed = True
            self._own_weights.close()
            self._copies.close()
            self._steps.close()
            if self._debias is not None:
                self._debias.stop()
            let_go(self)
            self._engine.close()
            self._release()

    def _release(self) -> None:
        """Give back groups, threads and connections, when nothing uses them any more."""
        if self._elastic is not None:
            self._elastic.membership.close()

    def comm_stats(self) -> dict[str, float]:
        """See `AveragingMixin`."""
        if self._elastic is None:
            return super().comm_stats()
        membership = self._elastic.membership
        return {**super().comm_stats(), **membership.stats(), **membership.wait_stats()}

    def extra_repr(self) -> str:
        """The rank and the options, one per line."""
        place = () if self._place is None else (f"rank {self._place[0]} of {self._place[1]}",)
        return "\n".join([*place, *(f"{name}={value}" for name, value in self._description.items())])

    # State: [Note: Where the state is].

    @property
    def own_place(self) -> Place:
        """The rank and the world size that its state belongs to; None with a membership, whose workers change."""
        return None if self._elastic is not None else self._place

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module.state_dict`, flushed and de-biased; gossip state is in its metadata.

        Among several ranks the key "_extra_state" holds the rank: int64 [1].
        """
        self.flush()
        return super().state_dict(*args, **kwargs)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):  # a plain dict of the caller has none: there the key stays
            put_state(destination, prefix, plain(destination.pop(prefix + SUFFIX)), self.own_place)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *args: Any, **kwargs: Any
    ) -> None:
        check_prefix(state_dict, prefix, self.module, wrapper=type(self).__name__)
        self.before_load()
        take_place(state_dict, prefix, local_metadata, self.own_place)
        if state_dict.setdefault(prefix + SUFFIX, local_metadata.get(KEY)) is None:
            warn_stateless()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)

    def before_load(self) -> None:
        """The parameters are about to become others for good."""
        self.flush()
        self._own_weights.forget()
        self._steps.forget_evaluation()

    def get_extra_state(self) -> dict[str, Any]:
        """The round counter, the algorithm's own state, and the rank: plain values and tensors.

        "engine", the algorithm's own state, is read like a dict; tools that keep a value per key keep it as one.
        """
        place = {} if self._place is None else dict(zip(("rank", "world_size"), self._place, strict=True))
        engine = WholeState(self._engine.state_dict())
        return {**self._steps.state_dict(), "engine": engine, **self._copies.state_dict(), **place}

    def set_extra_state(self, state: dict[str, Any] | None) -> None:
        """Take back what `get_extra_state` gave; None starts anew, as after loading other weights into the module.

        Raises:
            ValueError: it is the state of another rank, or of a world of another size; nothing is changed then.
        """
        if state is None:
            self._steps.end()
            self._engine.reset()
            self._set_out()
        else:
            check_place(state, self.own_place)
            self._steps.load_state_dict(state)
            self._engine.load_state_dict(plain(state["engine"]))
        self._copies.load_state_dict(state or {})

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """`.to()`, `.half()` and their like: corrections in flight belong to the old dtype and device."""
        self.flush()
        super()._apply(fn, recurse)
        return self

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        state = self.__dict__.copy()
        if self._engine.is_asynchronous or self._elastic is not None:
            # Its threads answer for one model; a copy is a snapshot that stays local.
            state.update(_engine=IdleEngine(self._engine), _is_closed=True, _elastic=None)
        if self._elastic is not None:
            state["_node"] = None
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """As the module's own would be, without `__reduce_ex__`."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises TypeError, where ranks are connected."""
        if self._place is None:
            return super().__reduce_ex__(protocol)
        raise TypeError(
            f"got a {type(self).__name__} to pickle, which torch.save does too, expected its state, since connections "
            "to other ranks are in no file; save state_dict() to train on, or averaged_state_dict() to use the model; "
            "copy.deepcopy makes copies"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._is_closed:
            self._steps.close()
            self._copies.close()
        else:
            self._own_weights.bind(self._add_again)
            self._steps.bind(self._round_after_step)
            hold(self, is_copy=True)

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_scripting(type(self).__name__, "use torch.jit.script(model.module)")

    # The vector, as `AveragingMixin` reads and writes it.

    def _read(self) -> FlatVector:
        self.flush()
        self._share_buffers()
        self._to_numerator()
        return self._buffer.vector

    def _write(self, vector: FlatVector) -> None:
        self._to_estimate()
        self._steps.write(self._buffer.parameters)

    def _sum_over_ranks(self, x: Tensor) -> None:
        super()._sum_over_ranks(x)
        if self._node is not None:  # whose processes sum with the processes of the same place in other nodes
            self._node.share_buffers([x])

    @property
    def _rank(self) -> int:
        return super()._rank if self._place is None else self._place[0]


def close_when_collected(wrapper: object, engine: Engine) -> None:
    """Close `engine` when `wrapper` is collected, if nobody has closed it by then.

    [Note: Lost wrappers] The threads of an asynchronous engine outlive a wrapper that nobody closed, and would go on
    giving its model to peers.
    """
    weakref.finalize(wrapper, _close_lost, engine, type(wrapper).__name__).atexit = False  # at exit they just end


def _close_lost(engine: Engine, name: str) -> None:
    """Runs in whichever thread collects garbage, which must not wait for peers: so a thread of its own closes."""
    if engine.is_closed:
        return
    has_peers = engine.has_peers
    close_in_thread(engine)
    if has_peers:
        warnings.warn(f"a {name} was lost without close(): it leaves its peers now", ResourceWarning, stacklevel=2)
