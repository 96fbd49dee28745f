"""What a wrapper does in a forward: a gossip round at the first training forward of each optimizer step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from ..engine.engine import Engine, IdleEngine, LockstepEngine
from ..flat.buffer import FlatBuffer
from ..flat.transformed import call_plain, is_transformed, not_compiled
from ..flat.vector import FlatVector
from ..membership.participant import ModelParticipant
from ..transport.change_board import first_difference
from .composition import check_optimizers, check_outside
from .debias import Debias
from .foreign.user_line import levels_to_user
from .join import UnevenInputs
from .node import Node
from .optimizer_steps import OptimizerSteps, RoundTime
from .travelling import Travelling
from .unsynced_steps import UnsyncedSteps
from .weights.own import OwnWeights


class TrainingStep(nn.Module):
    """The forward of a gossip wrapper, from the call to the engine's round, in the order in which it happens.

    `GossipWrapper` explains when rounds run and what travels. A wrapper sets the attributes below in its constructor;
    `_debias`, `_node` and `_elastic` stay None where there are none.

    [Note: after infinities] A script may catch the FloatingPointError of `on_nonfinite="raise"`, mend the model and go
    on. In lockstep its next forward is of the same step, so that it does what the others do in the round in which they
    wait for it; had the step been counted, they might average where it gossips. With a membership, what is in flight is
    applied before a generation begins or a worker gets a copy of the model, so that neither is left half done.
    """

    module: nn.Module
    gossip_in_eval_mode: bool
    _buffer: FlatBuffer
    _engine: Engine
    _debias: Debias | None = None
    _node: Node | None = None
    _elastic: ModelParticipant | None = None
    _steps: OptimizerSteps
    _unsynced_steps: UnsyncedSteps
    _travelling: Travelling
    _transport: Any
    _averager: Any
    _sync: bool  # False inside no_sync()
    _own_weights: OwnWeights
    _who: str = ""  # this worker, in front of errors, where ranks have no numbers
    _is_closed: bool
    _is_averaged: bool  # inside averaged()
    _is_checked: bool  # what is around the wrapper
    _has_trained: bool
    _has_warned: bool = False  # of training after close()
    _trains: bool  # in this forward
    _is_seen_current: bool = False  # the buffer, in this forward: a walk over all tensors that a round need not repeat

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, after this step's gossip round if it is a training forward; see `is_transformed`."""
        if is_transformed() or type(args) is not tuple:  # a symbol of torch.fx
            return call_plain(self.module, args, kwargs, wrapper=type(self).__name__)
        self._before_forward()
        with record_function(f"{type(self).__name__}.forward"):
            # The node's replica averages gradients and shares buffers, so all its processes must call it: in training
            # only, and not after close().
            is_node = self._node is not None and self._trains and not self._is_closed
            module = self._node.replica if is_node else self.module  # type: ignore[union-attr]
            out = module(*args, **kwargs)
        self._steps.has_ended = True
        return out

    @not_compiled
    def _before_forward(self) -> None:
        """[Note: One step is one round]"""
        self._to_estimate()  # [Note: a step that raises]; else it does nothing
        self._trains = torch.is_grad_enabled() and (self.module.training or self.gossip_in_eval_mode)
        if self._trains:
            self._check_surroundings()
        # A model that is frozen for a while, like a GAN's critic, is not trained.
        is_current = self._trains and self._buffer.is_current()
        self._trains = self._trains and (is_current or self._buffer.is_trained())
        if self._is_closed:
            if self._trains and not self._has_warned:
                self._warn_alone()
            return
        if not self._trains:
            self._evaluate()
            return
        if torch._C._current_graph_task_id() != -1:  # inside a backward: the recomputation of a checkpoint
            self._check_has_trained()
            return
        self._has_trained = True
        if self._unsynced_steps.is_watching:
            self._unsynced_steps.forget()
        if not self._is_averaged:
            self._is_seen_current = is_current and self._elastic is None  # a donor's state may change what is trained
            try:
                for _ in range(self._steps.num_rounds_due(is_synced=self._sync)):
                    self._begin_step()
            finally:
                self._is_seen_current = False

    def _begin_step(self) -> None:
        """The round of an optimizer step, which begins with it."""
        if isinstance(self, UnevenInputs) and self._join_config.enable:
            self._notify()
        if not self._is_held:
            self._step_start()
        self._steps.begin()

    def gossip_step(self) -> None:
        """Run the round of an optimizer step now.

        With `rounds="manual"` this is what runs rounds: call it once per optimizer step, on all ranks alike, where no
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
        if self._steps.rounds is not RoundTime.FORWARD:
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
        """What has changed in the membership, and the round of a step."""
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
                    self._elastic.membership._is_again = True
            raise

    def _round(self) -> None:
        """The round of a step, of what is trained now."""
        is_current = self._is_seen_current or self._buffer.is_current()
        if not is_current or self._travelling.is_due(self._engine):
            self._choose()
            if not self._buffer.is_attached():
                self._reattach()
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

    def _run(self, act: Callable[[FlatVector], bool]) -> bool:
        """`act`, of the engine, on what this process mixes; in a node one process may do so for all."""
        x = self._gossiped
        return act(x) if self._node is None else self._node.run(lambda: act(x))

    # The parts of a step, which `flush` and `averaged` use as well.

    @property
    def _gossiped(self) -> FlatVector:
        """What this process mixes: the vector, or its shard of it."""
        return self._buffer.vector if self._node is None else self._node.shard(self._buffer.vector)

    def _share_buffers(self) -> None:
        """Every process of a node takes the buffers of the first one, before they travel."""
        if self._node is not None:
            self._node.share_buffers(self._buffer.buffer_segments)

    def _to_numerator(self) -> None:
        """Storage <- x, what is sent and stepped, where weights move; see `Debias`."""
        if self._debias is not None and self._debias.is_needed:
            self._debias.to_numerator()

    def _to_estimate(self) -> None:
        """Storage <- z = x / w, what the module computes with, where weights move; see `Debias`."""
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

    # What happens only when something has changed, or outside training.

    def _evaluate(self) -> None:
        """A forward that is none of training, perhaps in an eval mode that the wrapper was not told of."""
        if self.module.training:
            return
        if self._sync:
            self._steps.end()  # as after eval()
        if torch.is_grad_enabled() and self._steps.rounds is RoundTime.FORWARD:
            try:
                self._unsynced_steps.check(self._buffer.parameters, name=type(self).__name__)
            except RuntimeError:
                self._steps.be_quiet()
                raise

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

    def _check_has_trained(self) -> None:
        """Raise RuntimeError if the first training forward of all is the recomputation of a checkpoint."""
        if not self._has_trained:
            raise RuntimeError(
                "got a training forward inside a backward and none before it, expected rounds to run in the "
                "forward; checkpoint parts of the module, or pass use_reentrant=False"
            )

    def _choose(self, *, may_leave: bool = True) -> None:
        """Make what is trained now what travels, on all ranks at this point: see [Note: What travels].

        may_leave: whether frozen tensors may leave the vector: see [Note: what leaves the vector].
        """
        if self._engine.is_asynchronous:
            self._refuse_others()
            return
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
        """Attach tensors that were put in place of ours; what is in flight is applied to their values."""
        check_outside(self)
        if self._buffer.is_lent():
            return
        if self._engine.is_in_flight:
            self._buffer.pull()
            self._apply_in_flight()
            self._buffer.push()
        self._buffer.reattach()

    def _apply_in_flight(self) -> None:
        """Apply what is in flight."""
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
        finally:  # who catches the error of a peer goes on with a model
            self._to_estimate()

    @torch.no_grad()
    def _add_again(self) -> None:
        """Add the corrections of the flushes since the last round once more: [Note: Swapped weights]."""
        weight = self._buffer.vector.push_sum_weight
        now = weight.clone()
        weight.copy_(self._own_weights.weight)  # that of the numerator which corrections are added to
        self._to_numerator()
        try:
            if self._run(self._engine.add_again):
                self._written()
        finally:
            weight.copy_(now)
            self._to_estimate()
