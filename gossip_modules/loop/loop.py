"""Where one optimizer step of the user's loop ends and the next begins, so that each step has one gossip round."""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ..flat.buffer import FlatBuffer
from ..state import Restart, branch, leaf, transient
from ..warn import levels_to_user
from .copies import WeightCopies
from .debias import Debias
from .equal_steps import EqualSteps
from .gradient_watch import WatchedGradient
from .hooks import Methods, Observer, StepListener, existing_optimizers, holds_any, num_running
from .lost_corrections import LostCorrections
from .moment import NUM_ROUND_TRIP_ULPS, Moment
from .owner import Owner, no_owner
from .trained_weights import TrainedWeights
from .turn import Turn
from .unseen_steps import UnseenSteps

_MANY_STEPS = 100  # without a round, under RoundTime.MANUAL
_MANY_IN_TURN = 3  # optimizer steps, each after gradients that were dropped
_MANY_ELSEWHERE = 10  # steps of an optimizer over a copy of the model


class RoundTime(Enum):
    """When the round of an optimizer step runs, relative to the user's loop: the argument `rounds=` of wrappers."""

    FORWARD = "forward"
    STEP = "step"
    MANUAL = "manual"

    @classmethod
    def of(cls, value: object) -> RoundTime:
        """Raise ValueError where `value` names none of them."""
        try:
            return cls(value)
        except ValueError:
            raise ValueError(
                f"got rounds={value!r}, expected 'forward' (a round before the first training forward of each "
                "optimizer step), 'step' (after each optimizer step) or 'manual' (only in gossip_step())"
            ) from None


class _Evaluation(NamedTuple):
    """A forward in eval mode that autograd has recorded: the parameters then, and the backwards before it."""

    begin: Moment
    num_backwards: int


class Loop(Observer):
    """The one observer of the training loop of a model: where steps begin and end, and which code writes parameters.

    It finds the first training forward of each optimizer step, notices steps without a round, and has the objects that
    act at the steps of optimizers, in one order: see `listeners`.

    [Note: One step is one round] Hooks on `torch.optim.Optimizer` count the steps over the model's parameters. A
    training forward begins a new optimizer step if an optimizer has stepped since the last round. So a second forward
    of one step (gradient accumulation, a closure of LBFGS, the second pass of sharpness-aware minimisation, a second
    try after running out of memory) has no round of its own. Where no optimizer of torch holds the parameters, as in a
    loop that updates them by hand, each training forward outside `no_sync()` is a step. Where one does and hooks do not
    see its steps: see [Note: Steps that hooks do not see] of `UnseenSteps`.

    [Note: Steps that do not count] Tools step an optimizer to make its state: torch.distributed.checkpoint does, with
    gradients of zero and a learning rate of 0. A step does not count if it changes nothing and neither a training
    forward nor a backward has come since the optimizer's last step. With one of these it counts, also without a change:
    at a learning rate of 0 in a warm-up, or where the gradients of one rank are zero, the other ranks wait for it.

    [Note: Steps that are left out] A rank may leave out a step alone, as with `GradScaler`. The other ranks wait for it
    in the round, so it must still take part. A step was left out if a forward outside `no_sync()` and a backward have
    ended since the last round, gradients were dropped since then (set to None, zeroed, or frozen), parameters are as
    the round left them, and this thread has stepped no other optimizer. A loop that drops gradients after the next
    forward tells so in the next backward: the round is made up for at the next step then. The hook for this is on one
    parameter, the smallest with a gradient. Methods for many tasks drop gradients between forwards of one step. Without
    `no_sync()` their steps look left out, and a warning tells of it.

    Args:
        buffer: has the parameters.
        owner: the model, which is not kept alive.
        when: when rounds run.
        name: the class of the wrapper, for messages.
        max_flushes: the flushes that `Owner.add_again` tells apart.

    Attributes:
        turn: lets one thread at a time change the weights.
        gradient: the watched gradient; `note_gossip_write` is called after writes of gossip.
        debias: the push-sum weights, where they move.
        copies: the copies of the weights in the hands of optimizers.
        trained_weights: tells the weights of training from others in their place.
        equal_steps: notices another tool that makes ranks equal.
        lost_corrections: notices steps that take back the corrections of rounds.
        next_look: the step from which on `before_round` is to be called.
        num_owed: the rounds of `RoundTime.STEP` that are to run now, or have failed; the last is of the present step.
        has_ended: set to True by the wrapper after each forward that did not raise. (An attribute rather than a method,
            as torch.compile traces the end of a forward without a break.)
    """

    # Whether the next training forward begins a step, whatever came before: from the begin, or `end`, to a round.
    _is_step_start: bool = leaf(True, name="is_step_start", is_needed=True)
    _is_synced: bool = leaf(False)  # whether a training forward outside no_sync() has ended since the last round
    has_ended: bool = leaf(False, is_saved=False)
    copies: WeightCopies = branch(is_flat=True)
    debias: Debias | None = None
    # A copy has optimizers of its own, of which nothing is known; its model is bound again.
    _counts: dict[int, int] = leaf({}, is_saved=False, is_copied=False)  # steps since the last round, by optimizer
    _last_of: dict[int, tuple[int, int]] = transient({})  # as `_last`, by optimizer
    _is_watched: bool | None = transient(None)  # whether an optimizer of torch holds parameters; None: not known yet
    _evaluation: _Evaluation | None = transient(None)
    _before: Moment | None = transient(None)  # before a step that may be none
    _num_backwards: int = transient(0)  # as of the watched gradient, at the last round
    _owner: Callable[[], Owner | None] = transient(no_owner)

    def __init__(self, buffer: FlatBuffer, owner: Owner, *, when: RoundTime, name: str, max_flushes: int) -> None:
        self.when, self.name = when, name
        self.turn = Turn()
        self.copies = WeightCopies(buffer, name=name, in_steps=when is RoundTime.STEP)
        self.trained_weights = TrainedWeights(buffer, self.turn, max_flushes=max_flushes)
        self.equal_steps = EqualSteps(buffer, name=name)
        self.lost_corrections = LostCorrections(buffer, name=name)
        self.next_look = 0
        self._is_step_start = when is RoundTime.FORWARD
        self._is_last_synced = False  # the last training forward that began was outside no_sync()
        self._num_extra = 0  # training forwards of this step beyond the first, outside no_sync()
        self._num_made_up = 0  # rounds of left-out steps, since the last optimizer step
        self._num_in_turn = 0  # optimizer steps one after the other, each after rounds of left-out steps
        self._is_inside = False  # an optimizer's step, which evaluates a closure as often as it likes
        self._num_at_step = 0  # training forwards before the step of `_is_inside`
        self._num_without = 0  # optimizer steps since the last round, or since the start
        self.num_owed = 0
        self._round_thread = 0  # the thread of the last round, or of the start
        self._has_warned = self._has_raised = self._has_told_of_mode = False
        self._thread = 0  # the thread of the last training forward
        self._num_elsewhere = 0  # steps over tensors with the shapes of the parameters, before any step over these
        self._num_forwards = 0  # training forwards so far
        self._last = (0, 0)  # the forwards and backwards before the last step
        self.gradient = WatchedGradient(buffer)
        self._unseen = UnseenSteps(name)
        self.bind(owner)
        super().__init__(buffer)

    def bind(self, owner: Owner) -> None:
        """Serve this model, which is not kept alive."""
        self._owner = weakref.ref(owner)
        self.trained_weights.owner = self._owner
        if self.debias is not None:
            self.debias.owner = self._owner

    def move_weights(self) -> None:
        """Ranks send push-sum weights, which leave one: see `Debias`."""
        self.debias = self.copies.debias = Debias(self.buffer, self.turn, self._owner)
        self.debias.subscribe()

    # The listeners.

    @property
    def listeners(self) -> tuple[StepListener, ...]:
        """See `Observer`: at the end of a step, numerators are to be seen before `Debias` divides them."""
        debias = () if self.debias is None else (self.debias,)
        return self.equal_steps, self.copies, self.lost_corrections, *debias, self.trained_weights, *self._listeners

    def start(self) -> None:
        """Training begins, with the parameters as they are now."""
        self.gradient.begin()
        self._num_backwards, self._round_thread = self.gradient.num_backwards, threading.get_ident()

    def end_training(self) -> None:
        """Training has ended; warn where parameters have changed without a round and without a step of an optimizer."""
        if not self._counts:
            self._unseen.close(self.gradient, num_backwards=self.gradient.num_backwards - self._num_backwards)

    def close(self) -> None:
        """Observe no more; storage holds the estimate from now on; idempotent."""
        super().close()
        if self.debias is not None:
            self.debias.to_estimate()
        for listener in self.listeners:
            listener.close()
        self.gradient.close()

    def before_round(self, step: int, transport: object) -> None:
        """Look for copies of weights, and for other tools that write them, at the step `next_look` or later.

        Args:
            step: the number of the step.
            transport: the transport of all ranks; None: they change.

        Raises:
            RuntimeError: see `EqualSteps` and `LostCorrections`.
        """
        masters, equal, lost = self.copies.masters, self.equal_steps, self.lost_corrections
        if masters.is_looking:
            masters.look()
        try:
            if step >= equal.start:
                equal.before_round(step, transport)
            if step >= lost.start:
                lost.before_round(followed=masters.followed)
        finally:
            self.next_look = min(equal.start, lost.start)

    def after_round(self) -> None:
        """Note the corrections of a round, and bring them to copies."""
        self.copies.masters.after_round()
        self.lost_corrections.after_round()

    # What the wrapper tells and asks, in the order of a loop.

    @property
    def is_due(self) -> bool:
        """Whether a training forward now would begin an optimizer step."""
        self._note_forward()
        if self._is_step_start:
            return True
        if self._counts or not self._sees_optimizers():
            return self._is_synced
        if self._is_evaluated_again:
            return False
        gradient = self.gradient
        return self._is_synced and (gradient.is_dropped() or (self._unseen.are_steps and gradient.is_stepped()))

    @property
    def _is_evaluated_again(self) -> bool:
        """Whether a forward now is a later one of a closure in a running step, before which it may drop gradients."""
        is_later = self._is_inside and self._num_forwards > self._num_at_step
        return is_later and num_running(sys._getframe()) > 0  # a step that raised has not told of its end

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped since the last round; the next forward runs the next round."""
        return bool(self._counts) and self.when is RoundTime.FORWARD

    def num_rounds_due(self, *, is_synced: bool) -> int:
        """The number of rounds to run before a training forward.

        A round is due where `_is_step_start` is set, or where a training forward outside `no_sync()` has ended since
        the last round (`_is_synced`) and since then one of these has happened, in the order in which they are asked:

        - an optimizer has stepped: `_counts` has its steps;
        - no optimizer of torch holds the parameters: `_sees_optimizers`, which sets `_is_watched`;
        - this rank has dropped its gradients, so that it has left out a step: `gradient.is_dropped`;
        - steps that no hook sees are known from before, `_unseen.are_steps`, and the parameters are written.

        Else the forward belongs to the step that is under way. It is counted for a warning (`_num_extra`), or is a
        later one of a closure (`_is_inside`, `_num_at_step`), and its backward may tell of a step that was left out
        (`gradient.is_doubtful`). The next call makes `_is_synced` of the flags `_is_last_synced` and `has_ended`.
        `_num_made_up` counts rounds of left-out steps for a warning. A round clears the flags of its step: `begin`.

        Args:
            is_synced: whether the forward is outside `no_sync()`.

        Returns:
            1, and one more for each left-out step, where a step begins. In a step, and where rounds run elsewhere
            (`when`), the rounds of steps that no hook has seen, or that were left out: mostly 0.
        """
        self._evaluation = None
        if self._num_elsewhere and self.gradient.is_stepped():
            self._num_elsewhere = 0  # a tool writes what that optimizer steps, as masters, over the parameters
        self._is_synced |= self._is_last_synced and self.has_ended
        is_due = (self._is_synced and bool(self._counts)) or self.is_due
        self._num_forwards += 1
        self._is_last_synced, self.has_ended, self._thread = is_synced, False, threading.get_ident()
        if self.when is not RoundTime.FORWARD:
            return self._num_without_hook()
        if not is_due:
            self._num_extra += is_synced and self._is_synced and not self._is_inside
            self.gradient.is_doubtful = self._is_synced and not self._is_evaluated_again
            return self._num_unseen()
        is_known = self._is_step_start or self._counts or self._unseen.are_steps
        is_made_up = not (is_known or not self._sees_optimizers())
        self._num_made_up += is_made_up + self.gradient.num_left_out
        return 1 + self.gradient.num_left_out

    def _note_forward(self) -> None:
        """What is known of the last training forward. After an error it may be tried again, in the same step."""
        self._is_synced |= self._is_last_synced and self.has_ended

    def _num_unseen(self) -> int:
        """The rounds to run for steps that hooks have not seen; a training forward begins and no step has begun."""
        if not self._is_synced or self._is_inside or self._unseen.are_steps:
            return 0
        num_rounds = self._unseen.note_forward(self.gradient)
        if num_rounds:
            self._num_extra = 0
        return num_rounds

    def _num_without_hook(self) -> int:
        """The rounds to run in a forward if rounds run elsewhere: of steps that were left out, or that no hook saw."""
        if self.when is RoundTime.MANUAL:
            return 0
        if self._is_synced and not self._counts and not self._sees_optimizers():
            self._raise_once(
                "got rounds='step' and no torch.optim.Optimizer over the parameters, expected one whose steps start "
                "the rounds; pass rounds='forward', or rounds='manual' and call gossip_step() after each update"
            )
        if self._is_evaluated_again:
            return 0
        if self._is_synced and self.gradient.is_dropped():
            self._num_made_up += 1
            return 1
        self.gradient.is_doubtful = self._is_synced
        if self._is_synced and self._unseen.are_steps:
            return 1 + self.gradient.num_left_out if self.gradient.is_stepped() else 0
        return self._num_unseen()

    def note_plain_forward(self) -> None:
        """A forward in train mode begins without autograd."""
        self._unseen.num_plain += 1

    def begin(self) -> None:
        """A round has run: the next step begins."""
        if self._num_extra:
            self._warn_of_extra_forwards()
        self._is_step_start = self._is_synced = self.has_ended = False
        self._num_without, self.num_owed = 0, max(self.num_owed - 1, 0)
        self._counts.clear()
        gradient, unseen = self.gradient, self._unseen
        num_backwards = gradient.num_backwards - self._num_backwards
        if num_backwards > unseen.most_backwards or unseen.num_forwards or unseen.num_plain:
            unseen.begin(num_backwards)
        self._num_backwards, self._round_thread = gradient.num_backwards, threading.get_ident()
        gradient.begin()

    def end(self) -> None:
        """Evaluation begins, or state has been loaded: the next training forward begins a step."""
        self._is_step_start = self.when is RoundTime.FORWARD

    def state_dict(self, *, joins: bool = False, has_links: bool = True) -> dict[str, Any]:
        """See `State`: whether the next training forward begins a step, or would after an optimizer step."""
        return {**super().state_dict(joins=joins, has_links=has_links), "is_step_start": self.is_due}

    def collect(self) -> None:
        """See `State`."""
        self._note_forward()

    def from_layout(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `State`. States of older versions have "is_step_start" alone."""
        return {"is_synced": state["is_step_start"], **state} if "is_step_start" in state else state

    def restarted(self, event: Restart) -> None:
        """See `State`."""
        self._is_step_start = self._is_step_start and self.when is RoundTime.FORWARD

    def take_left_out(self) -> int:
        """The number of rounds to run now for left-out steps, before ranks meet outside of rounds."""
        num_left_out, self.gradient.num_left_out = self.gradient.num_left_out, 0
        return num_left_out

    def _make_up(self, optimizer: Optimizer, count: int) -> None:
        """Run the rounds of left-out steps before the forward of this step, now that it has ended."""
        num_left_out = self.take_left_out()
        self._num_made_up += num_left_out
        for _ in range(num_left_out):
            self._run()
            self._counts[id(optimizer)], self._is_synced = count, True  # the next forward begins a step all the same

    def _run(self) -> None:
        if (owner := self._owner()) is not None:
            owner.round_after_step()

    def evaluate(self) -> None:
        """A forward in eval mode begins that autograd records: an evaluation (adversarial examples, saliency maps), or
        training in eval mode, where each rank would train alone without a word.

        Raises:
            RuntimeError: since the last such forward, without a training forward in between, gradients were computed
                and parameters were written; once.
        """
        if self.when is not RoundTime.FORWARD or self._has_told_of_mode:
            return
        last, trained = self._evaluation, [x for x in self.buffer.parameters if x.requires_grad]
        self._evaluation = _Evaluation(Moment(counted=trained), self.gradient.num_backwards)
        if last is not None and last.num_backwards < self.gradient.num_backwards and last.begin.num_writes():
            self._evaluation = None
            self._has_raised = self._has_told_of_mode = True  # the user has been told that steps have no rounds
            raise RuntimeError(
                f"got an optimizer step after a forward in eval mode, which starts no gossip round: expected training "
                f"forwards in train mode; call model.train() before the training loop, or, to train in eval mode (with "
                f"frozen BatchNorm statistics, say), wrap with {self.name}(..., gossip_in_eval_mode=True)"
            )

    def forget_evaluation(self) -> None:
        """The parameters are about to become others for good."""
        self._evaluation = None
        self._unseen.begin(0)
        self._num_backwards = self.gradient.num_backwards

    # See `StepListener`. A round after a step needs what other listeners note of that step, so this is the last one.

    def other_step(self, optimizer: Optimizer) -> None:
        """See `Observer`: a loop that steps another model leaves out no step of this one."""
        thread = threading.get_ident()
        if thread == self._round_thread:
            self.gradient.value = None
        if not self._is_watched and self._num_elsewhere < _MANY_ELSEWHERE and self._thread == thread:
            self._thread = 0  # the next forward sets it: other models may step between forwards of this one
            self._note_copy(optimizer)

    def before_step(self, optimizer: Optimizer) -> None:
        """See `StepListener`."""
        gradient = self.gradient
        self._is_watched = self._is_inside = True
        self._num_at_step = self._num_forwards
        if gradient.parameter is not None and gradient.parameter.grad is None:
            gradient.choose()
        now = self._num_forwards, gradient.num_backwards
        is_doubtful = self._last_of.get(id(optimizer), self._last) == now
        if is_doubtful and torch._C._current_graph_task_id() == -1 and not self.buffer.is_captured():
            self._before = Moment(self.buffer.parameters)

    def end_step(self, optimizer: Optimizer, listeners: Methods) -> None:
        """See `Observer`, and [Note: Steps that do not count]."""
        self._is_inside = False
        before, self._before = self._before, None
        if before is not None:
            is_weighted = bool((self.buffer.vector.push_sum_weight != 1).any())
            if not before.has_changed(num_ulps=NUM_ROUND_TRIP_ULPS if is_weighted else 0):
                return
        for method in listeners:
            if (call := method()) is not None:
                call(optimizer)
        self._count(optimizer)

    def _count(self, optimizer: Optimizer) -> None:
        """A step of this optimizer counts.

        Raises:
            RuntimeError: the second step of one optimizer without a round, or after forwards in eval mode; once. Or a
                step inside a backward with `RoundTime.STEP`.
        """
        self._last = self._last_of[id(optimizer)] = self._num_forwards, self.gradient.num_backwards
        if self._unseen.num_forwards or self._unseen.are_steps:
            self._unseen.note_step()
        if self.when is not RoundTime.MANUAL and self.buffer.is_capturable and self.buffer.is_captured():
            self._unseen.warn_of_capture(optimizer)
        if self._num_extra:
            self._warn_of_extra_forwards()
        is_first = not self._counts
        count = self._counts[id(optimizer)] = self._counts.get(id(optimizer), 0) + 1
        self._num_without += 1
        if self._num_made_up or self._num_in_turn:
            self._note_made_up(is_first=is_first or count == 2)
        if self.when is RoundTime.FORWARD:
            if self.gradient.num_left_out:
                self._make_up(optimizer, count)
            if count == 2:
                if self._evaluation is not None:  # the forwards are in eval mode: that error says so
                    self.evaluate()
                self._raise_once(
                    f"got two steps of {type(optimizer).__name__} over parameters of a {self.name} without a gossip "
                    "round between them: this rank trains alone; expected a training forward of the wrapper for each "
                    "step. Causes: all forwards of a step are inside no_sync() (leave the last one outside), as in "
                    "LocalSGD of Accelerate (leave it out, and wrap with algorithm=LocalSGD(sync_every=...)); the loss "
                    "is computed by the inner module or by one of its methods (call the wrapper itself); or no forward "
                    "can say when a step begins (wrap with rounds='step', or with rounds='manual' and call "
                    "gossip_step() after each step)"
                )
        elif self.when is RoundTime.STEP:
            if torch._C._current_graph_task_id() != -1:
                raise RuntimeError(
                    f"got a step of {type(optimizer).__name__} inside a backward of a {self.name} with rounds='step': "
                    "the round after it would write parameters that the backward reads; expected rounds='forward' (a "
                    "round before the next forward), or rounds='manual' and gossip_step() after the backward"
                )
            # Several optimizers that step after one forward have one round together: after the first of them.
            self._note_forward()
            if is_first or count == 2 or self._is_synced:
                self.num_owed += 1 + self.gradient.num_left_out
                self._num_made_up += self.gradient.num_left_out
                for _ in range(self.num_owed):
                    self._run()
                self._counts[id(optimizer)] = 1
            else:  # its step is part of what had that round
                self.gradient.begin()
        elif self._num_without == _MANY_STEPS:
            warnings.warn(
                f"got {_MANY_STEPS} optimizer steps without a round of a {self.name} with rounds='manual': ranks "
                "train alone between rounds; expected a call of gossip_step() now and then, or rounds='forward'",
                stacklevel=levels_to_user(),
            )

    # Messages, each once.

    def _note_made_up(self, *, is_first: bool) -> None:
        """An optimizer has stepped. A rank seldom leaves out a step before each of some steps in turn."""
        if self._num_made_up:
            self._num_in_turn, self._num_made_up = self._num_in_turn + 1, 0
            if self._num_in_turn == _MANY_IN_TURN:
                warnings.warn(
                    f"got {_MANY_IN_TURN} optimizer steps of a {self.name}, each after gradients that were dropped: "
                    "rounds were run for the dropped ones as for steps that this rank has left out; if they are of one "
                    "step (gradients of several losses, say), put all forwards of a step but the last in no_sync()",
                    stacklevel=levels_to_user(),
                )
        elif is_first:
            self._num_in_turn = 0

    def _note_copy(self, optimizer: Optimizer) -> None:
        """No optimizer has stepped the parameters yet, and this one steps others, of a copy of the model maybe."""
        stepped = sorted(parameter.shape for group in optimizer.param_groups for parameter in group["params"])
        self._num_elsewhere += stepped == sorted(parameter.shape for parameter in self.buffer.parameters)
        if self._num_elsewhere == _MANY_ELSEWHERE:
            warnings.warn(
                f"got {_MANY_ELSEWHERE} steps of {type(optimizer).__name__} over tensors with the shapes of the "
                f"parameters of a {self.name}, and no step over these: gossip mixes a model that nothing trains; "
                "expected an optimizer of model.parameters(), not of the parameters of a copy",
                stacklevel=levels_to_user(),
            )

    def _warn_of_extra_forwards(self) -> None:
        num_extra, self._num_extra = self._num_extra, 0
        if self._has_warned or self.gradient.num_left_out:
            return
        self._has_warned = True
        warnings.warn(
            f"got {num_extra + 1} training forwards of a {self.name} and one optimizer step, expected one forward: "
            "the gossip round runs at the first one, and the others belong to the same step; put all forwards of a "
            "step but the last in no_sync(), which says so",
            stacklevel=levels_to_user(),
        )

    def _raise_once(self, message: str) -> None:
        if not self._has_raised:
            self._has_raised = True
            raise RuntimeError(message)

    def _sees_optimizers(self) -> bool:
        """Whether a torch optimizer holds parameters of the model: it has stepped, or one search of memory finds it."""
        if self._is_watched is None:
            parameters = self.buffer.parameters
            self._is_watched = any(holds_any(optimizer, parameters) for optimizer in existing_optimizers())
        return self._is_watched

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_is_step_start": self.is_due}
