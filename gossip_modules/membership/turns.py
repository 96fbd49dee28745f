"""Turns: the numbers of training steps among those of all workers."""

from __future__ import annotations

from .joining import Joining


class Turns(Joining):
    """The part of `Membership` that counts the steps of all workers.

    [Note: clock] Generations begin at steps of the clock of a membership, which counts calls of `at_step` and begins at
    0 with the job. The steps that `steps` hands out are counted by the wrapper, and go on from what it has loaded from
    a checkpoint. `_steps_before` is the difference, the same on all workers.
    """

    min_workers: int
    _has_stepped = False

    def turn(self, step: int) -> int:
        """The number of this worker's step `step` among the steps of all workers since the start of the job.

        No number is given twice: draw the batch of this number, and workers that come and go repeat none. Left out are
        those of a worker that has died, or has left, from its last step to the first of the next generation, which
        begins without it. One that was declared dead and lives counts on by itself until it joins again. Where the
        wrapper has loaded the checkpoint of an earlier job, `min_workers`, the same on all, count for each step of that
        one.

        Args:
            step: one that `steps` has handed out in this generation.

        Raises:
            ValueError: workers take steps at their own pace, so that a step has no such number.
        """
        participant, view = self._participant, self._require_view()
        assert participant is not None
        if not participant.is_in_lockstep:
            raise ValueError(
                f"got turn({step}) of workers that take steps at their own pace, expected workers in lockstep; draw "
                "batches at random, with a seed of each worker's `number`"
            )
        is_at_start = view.start == 0 and not self._has_stepped  # what it goes on from may have been loaded since
        before = participant.step if is_at_start else self._steps_before
        return max(before, 0) * self.min_workers + view.turns_before(step - before) + self.rank
