"""Where one optimizer step of the user's loop ends and the next begins, so that each step has one gossip round."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..flat.buffer import FlatBuffer
from ..flat.samples import Samples
from ..flat.step_hooks import Stepped, existing_optimizers, holds_any
from ..flat.transformed import not_compiled
from ..old_calls import levels_to_user

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


class OptimizerSteps(Stepped):
    """Says which training forward of a model begins an optimizer step, and notices steps that no round belongs to.

    [Note: One step is one round] Hooks on `torch.optim.Optimizer` count the steps over the model's parameters. A
    training forward begins a new optimizer step if an optimizer has stepped since the last round. So a second forward
    of one step (gradient accumulation, a closure of LBFGS, the second pass of sharpness-aware minimisation, a forward
    that is tried again after it ran out of memory) has no round of its own. Where no optimizer of torch holds the
    parameters, as in a loop that updates them by hand, each training forward outside `no_sync()` is a step.

    [Note: Steps that are left out] A rank may leave out a step alone, as with `GradScaler`, and must still take part in
    the round for which the other ranks wait. A step was left out if a forward outside `no_sync()` and a backward have
    ended since the last round, gradients were dropped since then (set to None, zeroed, or frozen), parameters are as
    the round left them, and this thread has stepped no other optimizer. A loop that drops gradients after the next
    forward tells so in the next backward: the round is made up for at the next step then. The hook for this is on one
    parameter, the smallest that has a gradient. A loop that drops gradients between forwards of one step, as methods
    for many tasks do, looks the same, without `no_sync()`: a warning tells of it.

    Args:
        buffer: has the parameters.
        when: when rounds run.
        name: the class of the wrapper, for messages.
        run: runs the round of a step; called after optimizer steps under `RoundTime.STEP`.

    Attributes:
        has_ended: set to True by the wrapper after each forward that did not raise. (An attribute rather than a method,
            as torch.compile traces the end of a forward without a break.)
    """

    def __init__(self, buffer: FlatBuffer, when: RoundTime, *, name: str, run: Callable[[], None]) -> None:
        self.when = when
        self._buffer, self._name = buffer, name
        self.bind(run)
        self._is_due = when is RoundTime.FORWARD  # the next training forward begins a step, whatever came before
        self._is_synced = False  # a training forward outside no_sync() has ended since the last round
        self._is_last_synced = False  # the last one that began was outside no_sync()
        self._num_extra = 0  # training forwards of this step beyond the first, outside no_sync()
        self._num_made_up = 0  # rounds of steps that were left out, since the last optimizer step
        self._num_in_turn = 0  # optimizer steps one after the other with such rounds before each
        self._counts: dict[int, int] = {}  # steps since the last round, by optimizer
        self._is_inside = False  # an optimizer's step, which evaluates a closure as often as it likes
        self._num_without = 0  # optimizer steps since the last round, or since the start
        self._num_owed = 0  # rounds of RoundTime.STEP that are to run now, or have failed
        self._is_watched: bool | None = None  # whether an optimizer of torch holds parameters; None: not known yet
        self._has_warned = self._has_raised = False
        self._thread, self._num_elsewhere = 0, 0  # of the last forward; steps over tensors like the parameters
        self._gradient = _WatchedGradient()
        self._unsynced = UnsyncedSteps()
        self.has_ended = False
        super().__init__()

    def bind(self, run: Callable[[], None]) -> None:
        """Call `run`, a bound method, for the rounds after optimizer steps; it does not keep its object alive."""
        self._run = weakref.WeakMethod(run)

    def close(self) -> None:
        """Count no more; idempotent."""
        super().close()
        self._gradient.close()

    # What the wrapper tells and asks, in the order of a loop.

    @property
    def is_due(self) -> bool:
        """Whether a training forward now would begin an optimizer step."""
        self._note_forward()
        if self._is_due:
            return True
        if self._counts or not self._sees_optimizers():
            return self._is_synced
        return self._is_synced and self._gradient.is_dropped()

    def num_rounds_due(self, *, is_synced: bool) -> int:
        """The number of rounds to run before a training forward.

        Args:
            is_synced: whether the forward is outside `no_sync()`.
        """
        if self._unsynced.is_watching:
            self._unsynced.forget()
        is_due = self.is_due
        self._is_last_synced, self.has_ended, self._thread = is_synced, False, threading.get_ident()
        if self.when is not RoundTime.FORWARD:
            num_left_out = self._num_left_out()
            self._num_made_up += num_left_out
            return num_left_out
        if not is_due:
            self._num_extra += is_synced and self._is_synced and not self._is_inside
            self._gradient.is_doubtful = self._is_synced
            return 0
        is_made_up = not (self._is_due or self._counts or not self._sees_optimizers())
        self._num_made_up += is_made_up + self._gradient.num_left_out
        return 1 + self._gradient.num_left_out

    def _note_forward(self) -> None:
        """What is known of the last training forward. One that raised may be tried again, in the same step."""
        self._is_synced |= self._is_last_synced and self.has_ended

    def _num_left_out(self) -> int:
        """The rounds of steps that were left out, where rounds do not run in forwards."""
        if self.when is RoundTime.MANUAL:
            return 0
        if self._is_synced and not self._counts and not self._sees_optimizers():
            self._raise_once(
                "got rounds='step' and no torch.optim.Optimizer over the parameters, expected one whose steps start "
                "the rounds; pass rounds='forward', or rounds='manual' and call gossip_step() after each update"
            )
        if self._is_synced and self._gradient.is_dropped():
            return 1
        self._gradient.is_doubtful = self._is_synced
        return 0

    def begin(self) -> None:
        """A round has run: the next step begins."""
        if self._num_extra:
            self._warn_of_extra_forwards()
        self._is_due = self._is_synced = self.has_ended = False
        self._num_without = 0
        self._counts.clear()
        self._gradient.watch(self._buffer)

    def written(self) -> None:
        """Gossip has changed the parameters in place, which is no change by the loop."""
        with self._gradient.own_write():
            self._buffer.written()

    def end(self) -> None:
        """Evaluation begins, or state has been loaded: the next training forward begins a step."""
        self._is_due = self.when is RoundTime.FORWARD

    def state_dict(self) -> dict[str, bool]:
        """Where the loop is: whether the next training forward begins a step, or would after an optimizer step."""
        return {"is_step_start": self.is_due, "is_synced": self._is_synced}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a loop where `state_dict()` was taken; states of older versions have "is_step_start" alone."""
        self._counts.clear()
        is_due = state["is_step_start"]
        self._is_due = is_due and self.when is RoundTime.FORWARD
        self._is_synced, self.has_ended = state.get("is_synced", is_due), False

    def take_left_out(self) -> int:
        """The number of rounds to run now for steps that were left out, before ranks meet outside of rounds."""
        num_left_out, self._gradient.num_left_out = self._gradient.num_left_out, 0
        return num_left_out

    def _make_up(self, optimizer: Optimizer, count: int) -> None:
        """Run the rounds of steps that were left out before the forward of this step, now that it has ended."""
        num_left_out = self.take_left_out()
        self._num_made_up += num_left_out
        for _ in range(num_left_out):
            if (run := self._run()) is not None:
                run()
            self._counts[id(optimizer)], self._is_synced = count, True  # the next forward begins a step all the same

    def evaluate(self) -> None:
        """A forward in eval mode that autograd records begins.

        Raises:
            RuntimeError: see `UnsyncedSteps.check`.
        """
        if self.when is RoundTime.FORWARD:
            try:
                self._unsynced.check(self._buffer, name=self._name)
            except RuntimeError:
                self._has_raised = True  # the user has been told that steps have no rounds
                raise

    def forget_evaluation(self) -> None:
        """The parameters are about to become others for good."""
        self._unsynced.forget()

    # See `Stepped`.

    order = 1  # a round after a step needs what other members note of that step

    def other_step(self, optimizer: Optimizer) -> None:
        """See `Stepped`: a loop that steps another model leaves out no step of this one."""
        self._gradient.forget()
        if not self._is_watched and self._num_elsewhere < _MANY_ELSEWHERE and self._thread == threading.get_ident():
            self._thread = 0  # the next forward sets it: other models may step between forwards of this one
            self._note_copy(optimizer)

    def before_step(self, optimizer: Optimizer) -> None:
        """See `Stepped`."""
        self._is_watched = self._is_inside = True
        self._gradient.choose(self._buffer.parameters)

    def after_step(self, optimizer: Optimizer) -> None:
        """See `Stepped`.

        Raises:
            RuntimeError: the second step of one optimizer without a round; once.
        """
        self._is_inside = False
        if self._num_extra:
            self._warn_of_extra_forwards()
        is_first = not self._counts
        count = self._counts[id(optimizer)] = self._counts.get(id(optimizer), 0) + 1
        self._num_without += 1
        self._note_made_up(is_first=is_first or count == 2)
        if self.when is RoundTime.FORWARD:
            self._make_up(optimizer, count)
            if count == 2:
                self._raise_once(
                    f"got two steps of {type(optimizer).__name__} over parameters of a {self._name} without a gossip "
                    "round between them: this rank trains alone; expected a training forward of the wrapper for each "
                    "step. Causes: all forwards of a step are inside no_sync() (leave the last one outside), as in "
                    "LocalSGD of Accelerate (leave it out, and wrap with algorithm=LocalSGD(sync_every=...)); the loss "
                    "is computed by the inner module or by one of its methods (call the wrapper itself); or no forward "
                    "can say when a step begins (wrap with rounds='step', or with rounds='manual' and call "
                    "gossip_step() after each step)"
                )
        elif self.when is RoundTime.STEP:
            # Several optimizers that step after one forward have one round together: after the first of them.
            self._note_forward()
            if is_first or count == 2 or self._is_synced:
                self._num_owed += 1 + self._gradient.num_left_out
                self._num_made_up += self._gradient.num_left_out
                while self._num_owed and (run := self._run()) is not None:
                    run()
                    self._num_owed -= 1
                self._counts[id(optimizer)] = 1
            else:  # its step is part of what had that round
                self._gradient.watch(self._buffer)
        elif self._num_without == _MANY_STEPS:
            warnings.warn(
                f"got {_MANY_STEPS} optimizer steps without a round of a {self._name} with rounds='manual': ranks "
                "train alone between rounds; expected a call of gossip_step() now and then, or rounds='forward'",
                stacklevel=levels_to_user(),
            )

    # Messages, each once.

    def _note_made_up(self, *, is_first: bool) -> None:
        """An optimizer has stepped. A rank that leaves out steps seldom does so before each of some steps in turn."""
        if self._num_made_up:
            self._num_in_turn, self._num_made_up = self._num_in_turn + 1, 0
            if self._num_in_turn == _MANY_IN_TURN:
                warnings.warn(
                    f"got {_MANY_IN_TURN} optimizer steps of a {self._name}, each after gradients that were dropped: "
                    "rounds were run for the dropped ones as for steps that this rank has left out; if they are of one "
                    "step (gradients of several losses, say), put all forwards of a step but the last in no_sync()",
                    stacklevel=levels_to_user(),
                )
        elif is_first:
            self._num_in_turn = 0

    def _note_copy(self, optimizer: Optimizer) -> None:
        """No optimizer has stepped the parameters yet, and this one steps others, of a copy of the model maybe."""
        stepped = sorted(parameter.shape for group in optimizer.param_groups for parameter in group["params"])
        self._num_elsewhere += stepped == sorted(parameter.shape for parameter in self._buffer.parameters)
        if self._num_elsewhere == _MANY_ELSEWHERE:
            warnings.warn(
                f"got {_MANY_ELSEWHERE} steps of {type(optimizer).__name__} over tensors with the shapes of the "
                f"parameters of a {self._name}, and no step over these: gossip mixes a model that nothing trains; "
                "expected an optimizer of model.parameters(), not of the parameters of a copy",
                stacklevel=levels_to_user(),
            )

    def _warn_of_extra_forwards(self) -> None:
        num_extra, self._num_extra = self._num_extra, 0
        if self._has_warned or self._gradient.num_left_out:
            return
        self._has_warned = True
        warnings.warn(
            f"got {num_extra + 1} training forwards of a {self._name} and one optimizer step, expected one forward: "
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
            parameters = self._buffer.parameters
            self._is_watched = any(holds_any(optimizer, parameters) for optimizer in existing_optimizers())
        return self._is_watched

    def __getstate__(self) -> dict[str, Any]:
        # A copy has optimizers of its own, of which nothing is known.
        fresh = {"_counts": {}, "_gradient": _WatchedGradient(), "_unsynced": UnsyncedSteps(), "_run": None}
        return {**self.__dict__, **fresh, "_is_due": self.is_due, "_is_watched": None}


class _WatchedGradient:
    """One gradient of a model, to notice that it was dropped without a step: [Note: Steps that are left out].

    It is noted when a backward has ended: one that raised may be tried again, in the same step.

    Attributes:
        is_doubtful: whether a forward has come that is of a new step if its backward finds the gradient dropped.
        num_left_out: the steps since the last round that were found to be left out after the forward of the next one.
    """

    def __init__(self) -> None:
        self.num_left_out = 0
        self.is_doubtful = False
        self._buffer: FlatBuffer | None = None
        self._parameters: Sequence[Tensor] = ()
        self._parameter: Tensor | None = None
        self._version = 0  # of the parameter, as the round has left it
        self._samples = Samples(())  # of the parameters after the round
        self._has_samples = False
        self._unused: set[int] = set()  # ids of parameters that had no gradient when an optimizer stepped
        self._gradient: Tensor | None = None  # after the last backward; of a small parameter, so a few bytes
        self._gradient_version = 0
        self._thread = 0
        self._handle: Any = None

    def watch(self, buffer: FlatBuffer) -> None:
        """A step begins."""
        self.num_left_out, self.is_doubtful, self._gradient = 0, False, None
        self._buffer = buffer
        if buffer.parameters is not self._parameters:
            self.close()
            self._parameters = buffer.parameters
            self._samples = Samples(buffer.vector.parameters)
        if self._parameter is None or not self._parameter.requires_grad:
            trained = [parameter for parameter in self._parameters if parameter.requires_grad]
            used = [parameter for parameter in trained if id(parameter) not in self._unused]
            self._watch_smallest(used or trained)
        if self._parameter is not None:
            self._version = self._parameter._version
        self._samples.take()
        self._has_samples = True
        self._thread = threading.get_ident()

    def choose(self, parameters: Sequence[Tensor]) -> None:
        """An optimizer is about to step: watch a parameter that has a gradient, from the next round on."""
        if self._parameter is not None and self._parameter.grad is None and parameters is self._parameters:
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            self._unused.update(id(parameter) for parameter in trained if parameter.grad is None)
            self._watch_smallest([parameter for parameter in trained if parameter.grad is not None])

    def _watch_smallest(self, parameters: Sequence[Tensor]) -> None:
        if not parameters:
            return
        if self._handle is not None:
            self._handle.remove()
        self._parameter = min(parameters, key=Tensor.numel)
        source = self._parameter if self._buffer is None else self._buffer.gradient_source(self._parameter)
        self._handle = source.register_post_accumulate_grad_hook(_weakly(self._note))
        self._version, self._gradient = self._parameter._version, None

    def is_dropped(self) -> bool:
        """Whether a gradient was computed since the last round, and is not there any more, or was changed."""
        if self._gradient is None or self._parameter is None:
            return False
        is_there = self._parameter.grad is self._gradient and self._gradient._version == self._gradient_version
        is_there = is_there and self._parameter.requires_grad  # else another part is trained now
        return not is_there and not self._is_stepped()

    def _is_stepped(self) -> bool:
        """Whether parameters have changed since the round."""
        assert self._parameter is not None, "is watched"
        is_written = self._parameter._version != self._version
        return is_written or (self._has_samples and not self._samples.equal(self._samples.values))

    @contextlib.contextmanager
    def own_write(self) -> Iterator[None]:
        """Inside, the version of the parameter changes by a round, which is no change by the loop."""
        is_as_it_was = self._parameter is not None and self._parameter._version == self._version
        yield
        self._has_samples = False  # until the next round, since they may be numerators now
        if is_as_it_was and self._parameter is not None:
            self._version = self._parameter._version

    def forget(self) -> None:
        """An optimizer has stepped; in which thread it did says whether the loop of this model is meant."""
        if threading.get_ident() == self._thread:
            self._gradient = None

    def _note(self, source: Tensor) -> None:
        """A backward has accumulated the gradient, or the whole gradient of a shard, which follows at its end."""
        parameter, before, version = self._parameter, self._gradient, self._gradient_version
        gradient = source.grad
        # With create_graph=True autograd adds to a new tensor.
        is_added = gradient is not None and (
            gradient.requires_grad or (gradient is before and gradient._version == version + 1)
        )

        def note() -> None:
            if parameter is None or parameter is not self._parameter:
                return
            is_same = is_added if source is parameter else parameter.grad is before
            if self.is_doubtful and self._gradient is not None and not is_same and not self._is_stepped():
                self.num_left_out += 1
            self.is_doubtful = False
            self._gradient = parameter.grad
            self._gradient_version = 0 if self._gradient is None else self._gradient._version

        engine = torch.autograd.Variable._execution_engine
        # `fully_shard` makes the gradients of shards in a callback of its own, which was queued before this one.
        engine.queue_callback(note if source is parameter else lambda: engine.queue_callback(note))

    def close(self) -> None:
        """Watch no more; idempotent."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._parameters, self._parameter, self._gradient = (), None, None
        self._samples, self._has_samples = Samples(()), False
        self._unused.clear()


def _weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """The bound method, for the hook of a tensor, which is not to keep its object alive."""
    reference = weakref.WeakMethod(method)

    @not_compiled
    def call(tensor: Tensor) -> None:
        if (found := reference()) is not None:
            found(tensor)

    return call


class UnsyncedSteps:
    """Notices that a model is trained in eval mode, where each rank would train alone without a word.

    A forward in eval mode is an evaluation, even where autograd records it (adversarial examples, saliency maps). It
    is training where gradients of parameters are computed after it and parameters have changed by the next forward.
    In a forward of train mode the wrapper calls `forget()`, where `is_watching`.

    Attributes:
        is_watching: whether a forward in eval mode was the last one, so that there is something to forget.
    """

    def __init__(self) -> None:
        self._has_told = False
        self._handle: torch.utils.hooks.RemovableHandle | None = None
        self.forget()

    def forget(self) -> None:
        """The last forward in eval mode counts no more: a forward trains, or a checkpoint is about to be loaded."""
        if self._handle is not None:
            self._handle.remove()
        self._handle, self.is_watching, self._has_gradients = None, False, False
        self._versions: list[int] = []

    def check(self, buffer: FlatBuffer, *, name: str) -> None:
        """A forward in eval mode that autograd records.

        Args:
            buffer: has the parameters that the wrapper gossips.
            name: of the wrapper's class.

        Raises:
            RuntimeError: since the last such forward, without a round in between, gradients were computed and
                parameters were stepped. Once for each wrapper.
        """
        trained = [parameter for parameter in buffer.parameters if parameter.requires_grad]
        versions = [parameter._version for parameter in trained]
        is_step = self._has_gradients and self.is_watching and versions != self._versions
        self.forget()
        if self._has_told or not trained:
            return
        if is_step:
            self._has_told = True
            raise RuntimeError(
                f"got an optimizer step after a forward in eval mode, which starts no gossip round: expected training "
                f"forwards in train mode; call model.train() before the training loop, or, to train in eval mode (with "
                f"frozen BatchNorm statistics, say), wrap with {name}(..., gossip_in_eval_mode=True)"
            )
        self.is_watching, self._versions = True, versions

        def note(*_: object) -> None:
            self._has_gradients = True

        sources = [buffer.gradient_source(parameter) for parameter in trained]
        self._handle = torch.autograd.graph.register_multi_grad_hook(sources, note, mode="any")
