"""What happens to a rank, where, and to which: the rows of the table. Imports little: the command starts with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

What = Literal["kill", "stop", "raise", "interrupt", "leave", "average alone"]
Where = Literal["construction", "training", "checkpoint", "averaged", "final average"]
STORE = -1
"""The victim that is no rank: the process of the key-value store."""


@dataclass(frozen=True)
class Fault:
    """Something that happens to the victims, once.

    Attributes:
        title: for the table.
        victims: ranks, or (STORE,).
        what: kill -9; SIGSTOP; SIGINT; an exception in the training loop; the end of the loop, close() and exit code 0;
            or a call of averaged() that the others do not make.
        where: in a drawn training step, at a drawn moment within construction, or in place of a call that all ranks
            make together.
        num_timeouts: how long a stop lasts, in timeouts; 0 = for ever.
        has_loaders: whether each rank has loader processes, which read on for two timeouts after its end.
        exit_timeouts: how long the exit handlers of a rank take, in timeouts.
    """

    title: str
    victims: tuple[int, ...]
    what: What
    where: Where = "training"
    num_timeouts: float = 0.0
    has_loaders: bool = False
    exit_timeouts: float = 0.0

    @property
    def is_survived(self) -> bool:
        """Whether training must go on as if nothing had happened. After all others every survivor gets an error."""
        return self.what == "stop" and 0 < self.num_timeouts < 1

    @property
    def is_of_store(self) -> bool:
        """Whether it is the key-value store that stops answering, and no rank."""
        return self.victims == (STORE,)

    def stop_seconds(self, timeout: float) -> float | None:
        """After which the victim goes on; None = it does not."""
        return self.num_timeouts * timeout if self.num_timeouts else None


FAULTS: dict[str, Fault] = {
    "kill-0": Fault("kill -9 of rank 0", (0,), "kill"),
    "kill-odd": Fault("kill -9 of rank 1", (1,), "kill"),
    "kill-even": Fault("kill -9 of rank 2", (2,), "kill"),
    "kill-two": Fault("kill -9 of ranks 1 and 2", (1, 2), "kill"),
    "stop-short": Fault("SIGSTOP for half the timeout", (2,), "stop", num_timeouts=0.5),
    "stop-long": Fault("SIGSTOP for 2.5 timeouts", (2,), "stop", num_timeouts=2.5),
    "exception": Fault("exception in the loop", (1,), "raise"),
    "early-exit": Fault("leaves the loop early", (2,), "leave"),
    "kill-construction": Fault("kill -9 during construction", (1,), "kill", "construction"),
    "kill-checkpoint": Fault("kill -9 before settle() and state_dict()", (2,), "kill", "checkpoint"),
    "kill-averaged": Fault("kill -9 before averaged()", (1,), "kill", "averaged"),
    "kill-final": Fault("kill -9 before the final average", (2,), "kill", "final average"),
    "averaged-alone": Fault("averaged() by one rank alone", (1,), "average alone"),
    "kill-loaders": Fault("kill -9 of rank 1 with loader processes", (1,), "kill", has_loaders=True),
    "slow-exit": Fault("exception in the loop, slow exit", (1,), "raise", exit_timeouts=1.5),
    "interrupt": Fault("Ctrl-C of rank 1, slow exit", (1,), "interrupt", exit_timeouts=1.5),
    "suspended": Fault("suspended for 1.5 timeouts", (1,), "stop", num_timeouts=1.5),
    "store-frozen": Fault("SIGSTOP of the key-value store", (STORE,), "stop"),
}
"""By name. Rank 1 is an active rank of AD-PSGD, ranks 0 and 2 are passive ones."""
