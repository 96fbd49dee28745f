"""Steps that torch's hooks do not see: parameters change between forwards, and no optimizer of torch has stepped."""

from __future__ import annotations

import warnings

from torch.optim import Optimizer

from ..state import State, transient
from ..warn import levels_to_user
from .gradient_watch import WatchedGradient

_MANY_CHANGES = 3  # in turn, until they count as steps
_MANY_BACKWARDS = 10  # since the last round
_CAUSES = (
    "optimizer.step is replaced on the instance (a fused step of another tool), replayed from a CUDA graph, or the "
    "loop updates parameters itself"
)


class UnseenSteps(State):
    """Counts the changes of parameters between training forwards without a step of a torch optimizer that holds them.

    [Note: Steps that hooks do not see] Such a change may be an optimizer step: `step` is replaced on the instance,
    replayed from a CUDA graph, or written by hand beside an optimizer that only a scheduler uses. Or it is a part of a
    step that torch's hooks will see: sharpness-aware minimisation moves the parameters for a second forward. The next
    step that hooks see tells, so changes are only counted at first. Three in turn are steps: their rounds are made up
    for, a warning tells, and from then on each change before a forward is a step, until hooks see a step again.

    A gradient of zero changes nothing, on one rank alone maybe. So a gradient that is dropped between two forwards
    counts as a change, too.

    Looking compares samples of the parameters. So a loop with several forwards for each step is not looked at in
    forwards that it has made before between two steps.

    Args:
        name: the class of the wrapper, for messages.

    Attributes:
        are_steps: whether changes are steps at present.
        num_forwards: the training forwards since the last round, beyond the first one outside `no_sync()`, and without
            a step that hooks have seen.
        most_backwards: the most backwards from one round to the next; -1: there was no round.
        num_plain: the forwards in train mode without autograd before the first round: methods without gradients make
            steps of these alone.
    """

    are_steps: bool = transient(False)
    num_plain: int = transient(0)
    num_forwards: int = transient(0)
    most_backwards: int = transient(-1)
    _num_usual: int = transient(0)  # the most of them before a step that hooks have seen
    _num_changes: int = transient(0)  # before these forwards, or gradients dropped
    _has_warned: bool = transient(False)

    def __init__(self, name: str) -> None:
        self._name = name

    def note_forward(self, gradient: WatchedGradient) -> int:
        """A training forward begins after another one and without a step in between; return the rounds that are due.

        Args:
            gradient: knows whether parameters have changed.
        """
        self.num_forwards += 1
        if self.num_forwards > self._num_usual and (gradient.look() or gradient.is_gone()):
            gradient.is_doubtful = False
            self._num_changes += 1
        if self._num_changes < _MANY_CHANGES:
            return 0
        self.are_steps = True
        self._warn(
            f"got {self._num_changes} changes of the parameters of a {self._name}, each after a training forward and "
            f"without a step of a torch optimizer: {_CAUSES}. Rounds for them run now, and from now on each change "
            "before a training forward is a step with a round; to choose where rounds run, wrap with rounds='manual' "
            "and call gossip_step() after each step"
        )
        return self._num_changes + gradient.num_left_out

    def note_step(self) -> None:
        """Hooks have seen a step: the changes since the last round belong to it."""
        self._num_usual = max(self._num_usual, self.num_forwards)
        self.num_forwards = self._num_changes = 0
        self.are_steps = False

    def begin(self, num_backwards: int) -> None:
        """A round has run, after so many backwards since the round before it."""
        self.num_forwards = self._num_changes = self.num_plain = 0
        self.most_backwards = max(self.most_backwards, num_backwards)

    def close(self, gradient: WatchedGradient, *, num_backwards: int) -> None:
        """Training ends; warn where parameters have changed since the last round and no hook has seen a step.

        Args:
            gradient: knows whether parameters have changed.
            num_backwards: the backwards since the last round.
        """
        if num_backwards >= max(_MANY_BACKWARDS, 2 * self.most_backwards) and gradient.is_stepped():
            how = f"after {num_backwards} backwards that have changed parameters"
        elif self.most_backwards < 0 and self.num_plain >= _MANY_BACKWARDS and gradient.is_stepped():
            how = f"after {self.num_plain} forwards without autograd in train mode, with changed parameters,"
        elif not self.are_steps and self._num_changes:
            num_changes = self._num_changes + gradient.look()
            if num_changes == 1:  # the last step, perhaps, whose round comes with the next forward
                return
            how = f"after {num_changes} changes of parameters"
        else:
            return
        self._warn(
            f"closed a {self._name} {how} without a gossip round and without a step of a torch optimizer: ranks have "
            f"trained alone; {_CAUSES}. Expected a training forward of the wrapper outside no_sync() for each step, or "
            "rounds='manual' and a call of gossip_step() after each step"
        )

    def warn_of_capture(self, optimizer: Optimizer) -> None:
        """A step of this optimizer is recorded in a CUDA graph."""
        self._warn(
            f"got a step of {type(optimizer).__name__} in the capture of a CUDA graph: no hook sees its replays, and a "
            f"round of a {self._name} runs only where a training forward of the wrapper comes after one; if the graph "
            "has the forward too, expected rounds='manual' and gossip_step() after each replay"
        )

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(message, stacklevel=levels_to_user())
