"""ElasticPace: how far a run is whose workers come and go, in lockstep or each at its own pace."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gossip_modules as gm
from gossip_modules.extend import Algorithm
from gossip_modules.methods import METHODS
from train.run_config import RunConfig
from train.tasks.base import MicroBatch, Task
from train.training.elastic.history import History
from train.training.elastic.shared_count import SharedCount

_PATIENCE = 30.0  # seconds for which workers at their own pace try to meet at the end of a run


class ElasticPace(ABC):
    """How the workers of a run count the batches that all of them have read: its position.

    Epochs, the learning rate, checkpoints and the end follow the position. Given to `Membership.track`.

    Args:
        membership: who takes part.
        history: the history of the run.
    """

    meets: bool
    """Whether the models can be averaged at the end of an epoch: all workers come to it in the same step, or the
    average needs no other worker."""
    is_by_mail = False
    """Whether workers share a mailbox alone, and each has results of its own."""

    def __init__(self, membership: gm.Membership, history: History) -> None:
        self._membership, self._history = membership, history

    @abstractmethod
    def position(self, step: int) -> int:
        """The number of batches that all have read before this worker's step `step`, the current or the next one."""

    def count_step(self) -> None:
        """This worker has taken a step."""

    def first_batch(self, position: int) -> int:
        """The number of the batch that this worker reads first, of every `world_size`-th one, from `position` on."""
        return position + self._membership.rank

    def stream(self, task: Task, position: int) -> Iterator[Sequence[MicroBatch]]:
        """The batches of this worker in this generation, from a position on."""
        return task.dealt_stream(self.first_batch(position), self._membership.world_size)

    @property
    def may_meet(self) -> bool:
        """Whether all may come together now, at the end of the run."""
        return True

    def gives_up(self) -> bool:
        """After they have not come together: whether this worker leaves, or trains on until it tries again."""
        return True

    def close(self) -> None:
        """Idempotent."""

    def state_dict(self) -> dict[str, Any]:
        """Of a donor, for who joins."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from that of a donor."""


class CommonSteps(ElasticPace):
    """Step k of one worker is step k of all: the position follows from it, see `Membership.turn`.

    Workers of WAGMA leave out steps that others have passed, and wait for each other in `settle()`.
    """

    meets = True

    def position(self, step: int) -> int:
        """See `ElasticPace`."""
        return self._history.first_turn + self._membership.turn(step) - self._membership.rank


class OwnSteps(ElasticPace):
    """Each worker takes steps at its own pace: the position is the number of those that all have taken. AD-PSGD.

    [Note: meeting at the end] Workers come to the end of an epoch at different moments, and maybe in different
    generations of the membership, so they do not meet there. At the end of the run they have to, for the averaged
    model. Who finds that a generation has begun, or a worker has died, meanwhile trains on into the next generation,
    and tries again there, as the others do.

    Args:
        membership, history: see `ElasticPace`.
        store: the store of the run.
        name: the name of the run, in the store.
    """

    meets = False

    def __init__(self, membership: gm.Membership, history: History, *, store: str, name: str) -> None:
        super().__init__(membership, history)
        self._store, self._name = store, name
        self._count: SharedCount | None = None
        self._position = 0
        self._failed_in, self._deadline = -1, 0.0

    def position(self, step: int) -> int:
        """See `ElasticPace`; as it was after this worker's last step."""
        return max(self._position, self._history.first_turn)

    def count_step(self) -> None:
        """See `ElasticPace`."""
        if self._count is None:  # another life of the job has another first generation: it counts anew
            name = f"{self._name}/{self._history.changes[0]['generation']}"
            self._count = SharedCount(self._store, name, start=self.position(0))
        self._count.add(1)
        self._position = self._count.total

    def first_batch(self, position: int) -> int:
        """See `ElasticPace`. Each knows another position: from a multiple on, shares have nothing in common."""
        return super().first_batch(position - position % self._membership.world_size)

    @property
    def may_meet(self) -> bool:
        """See `ElasticPace`: not in a generation in which it has failed."""
        return self._membership.generation != self._failed_in

    def gives_up(self) -> bool:
        """See `ElasticPace`."""
        self._failed_in = self._membership.generation
        self._deadline = self._deadline or time.monotonic() + _PATIENCE
        return time.monotonic() > self._deadline

    def close(self) -> None:
        """See `ElasticPace`."""
        if self._count is not None:
            self._count.close()

    def state_dict(self) -> dict[str, Any]:
        """See `ElasticPace`."""
        return {"position": self.position(0)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `ElasticPace`."""
        self.close()
        self._position, self._count = int(state["position"]), None


class MailedSteps(ElasticPace):
    """Each worker takes steps at its own pace, over a mailbox: the position is its own number of steps times founders.

    A worker reads all items in an order of its own, which depends on the seed and on its number. It ends after as many
    steps as each founder would take in lockstep, and waits for nobody.

    Args:
        membership, history: see `ElasticPace`.
        founders: the number of workers for which epochs are counted.
        end: the position at the end of the run.
        meets: whether the method has an anchor, which is the average.
    """

    is_by_mail = True

    def __init__(self, membership: gm.Membership, history: History, *, founders: int, end: int, meets: bool) -> None:
        super().__init__(membership, history)
        self._founders, self._end, self.meets = founders, end, meets

    def position(self, step: int) -> int:
        """See `ElasticPace`."""
        return step * self._founders

    def first_batch(self, position: int) -> int:
        """See `ElasticPace`: the epochs of one worker are no epochs of another one, so their orders differ."""
        return self._membership.number * self._end + position // self._founders

    def stream(self, task: Task, position: int) -> Iterator[Sequence[MicroBatch]]:
        """See `ElasticPace`."""
        return task.dealt_stream(self.first_batch(position), 1)

    @property
    def may_meet(self) -> bool:
        """See `ElasticPace`."""
        return self.meets


def elastic_pace(config: RunConfig, membership: gm.Membership, history: History, *, end: int) -> ElasticPace:
    """The pace of a run; end: the position at its end."""
    if config.is_by_mail:
        made = config.chosen.made
        meets = isinstance(made, Algorithm) and made.has_equal_memory
        return MailedSteps(membership, history, founders=config.min_workers, end=end, meets=meets)
    if METHODS[config.recipe].pace == "shared_steps":
        return OwnSteps(membership, history, store=config.store, name=str(config.run_dir))
    return CommonSteps(membership, history)
