"""A rank at work in the sanitiser: a model that shows when it is torn, what to do with it, and what ranks share."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules.wrappers.base import GossipWrapper

LENGTH = 4_096
"""Of the model, float64: 32 kB, which a socket takes at once."""
LONG = 1 << 19
"""4 MB, more than sockets hold: what is written over on its way arrives in two parts."""
START = 100.0
"""Models begin there and beyond, so that a sum of two, or memory that was never written, is no mean of models."""
TOLERANCE = 1e-9


class Probe(nn.Module):
    """One parameter, float64 [length], whose entries are all equal, always: a torn copy shows at once.

    Its gradient is the same for all entries, and so is each step of an optimizer.
    """

    def __init__(self, start: float, length: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.full((length,), start, dtype=torch.float64))

    def value(self) -> float:
        """What all entries are."""
        low, high = (float(x) for x in self.values.detach().aminmax())
        # Vectorised loops round the last elements another way.
        assert high - low <= TOLERANCE * (1 + abs(low)), f"a torn model: entries from {low} to {high}"
        assert low - low == 0, f"got {low}, expected a finite number"
        return low

    def forward(self, scale: float) -> Tensor:
        self.value()
        return self.values.mean() * scale


class Board:
    """What the ranks of an episode share: a barrier, a place to write, a clock, and counts for the watchdog.

    Attributes:
        length: of each rank's model.
        progress: of each rank, how many things it has done.
        doing: of each rank, the last of them.
        counts: of all ranks, by name.
        error: that a rank met first.
    """

    def __init__(self, world_size: int, seed: int, *, length: int, seconds: float, patience: float) -> None:
        self.world_size, self.seed, self.length, self.patience = world_size, seed, length, patience
        self.progress = [0] * world_size
        self.doing = ["opening"] * world_size
        self.counts: Counter[str] = Counter()
        self.error: BaseException | None = None
        self._deadline = time.monotonic() + seconds
        self._slots: list[Any] = [None] * world_size
        self._barrier = threading.Barrier(world_size)
        self._lock = threading.Lock()
        self._never = threading.Event()

    @property
    def is_over(self) -> bool:
        """Whether it is time to close."""
        return time.monotonic() > self._deadline

    def tell(self, rank: int, what: str) -> None:
        """This rank has done something."""
        with self._lock:
            self.progress[rank] += 1
            self.doing[rank] = what
            self.counts[what] += 1

    def count(self, what: str, number: int) -> None:
        """For the summary."""
        with self._lock:
            self.counts[what] += number

    def gather(self, rank: int, value: Any) -> list[Any]:
        """The values of all ranks, in rank order; waits for all."""
        self._slots[rank] = value
        self._barrier.wait(4 * self.patience)
        values = list(self._slots)
        self._barrier.wait(4 * self.patience)
        return values

    def wait_a_little(self) -> None:
        """Between two looks of the watchdog."""
        self._never.wait(0.02)

    def fail(self, error: BaseException) -> None:
        """A rank has failed: the others need not wait for it. The first error is kept."""
        self.error = self.error or error
        self._barrier.abort()


class Rank:
    """One rank at work: its model, optimizer and wrapper, and what it has added to the model itself.

    Attributes:
        draw: its own generator.
        plan: a generator that is the same on all ranks.
        added: the sum of all steps of the optimizer since the last meeting.
        before: the values of all ranks then.
        addresses, period: what the engine was opened with.
        rising, falling: the sums of those that went up, and down, in the whole episode.
    """

    def __init__(self, group: dist.ProcessGroup, board: Board) -> None:
        self.group, self.board, self.rank = group, board, group.rank()
        self.draw = random.Random(f"{board.seed} rank {self.rank}")
        self.plan = random.Random(f"{board.seed} plan")
        self.timeout = timedelta(seconds=2 * board.patience)  # the watchdog comes first
        self.module = Probe(START + self.rank, board.length)
        self.wrapper: GossipWrapper
        make = self.plan.choice((self._sgd, self._adamw))
        learning_rate = self.plan.choice((0.0, 0.1, 0.1))
        self.optimizer = make(learning_rate)
        self.added = self.rising = self.falling = 0.0
        self.before = [START + other for other in range(board.world_size)]
        self.addresses: list[str] = []
        self.period = 0

    def _sgd(self, learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.module.parameters(), lr=self.board.length * learning_rate, momentum=0.5)

    def _adamw(self, learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.module.parameters(), lr=learning_rate, weight_decay=0.0)

    def gather(self, value: Any) -> list[Any]:
        """See `Board.gather`."""
        return self.board.gather(self.rank, value)

    def done(self, what: str) -> None:
        """See `Board.tell`."""
        self.board.tell(self.rank, what)

    # What a rank does on its own.

    def train(self) -> None:
        """A step, of two forwards now and then."""
        if self.draw.random() < 0.2:
            with self.wrapper.no_sync():
                self.wrapper(0.0).backward()
        self.wrapper(self.draw.choice((-1.0, 1.0))).backward()
        before = self.module.value()
        self.optimizer.step()
        self.optimizer.zero_grad()
        step = self.module.value() - before
        self.added += step
        self.rising += max(step, 0.0)
        self.falling += min(step, 0.0)

    def evaluate(self) -> None:
        """Peers must not change a model that is evaluated."""
        self.wrapper.eval()
        value = self.module.value()
        for _ in range(self.draw.randrange(3)):
            with torch.no_grad():
                self.wrapper(1.0)
            assert self.module.value() == value, "the model has changed in eval mode"
        self.wrapper.train()

    def save(self) -> None:
        """A checkpoint is the model as it is, and in one piece."""
        state = self.wrapper.state_dict()
        assert torch.equal(state["module.values"], self.module.values.detach())
        self.module.value()

    def copy(self) -> None:
        """A copy is a local model."""
        twin = copy.deepcopy(self.wrapper)
        value = twin.module.value()  # type: ignore[operator]
        twin._has_warned = True  # that it trains alone, as is meant here
        twin(1.0)
        assert twin.module.value() == value  # type: ignore[operator]
        twin.close()
