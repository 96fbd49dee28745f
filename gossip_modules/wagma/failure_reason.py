"""FailureReason: what the rank at fault did, as a number to send and as a sentence for errors."""

from __future__ import annotations

from enum import IntEnum


class FailureReason(IntEnum):
    """What the rank at fault did."""

    UNKNOWN = 0
    DIED = 1  # its connection closed although it had not shut down
    SILENT = 2  # it answers no status request
    ABSENT = 3  # it answers, but does not come to where others wait for it
    CLOSED = 4  # it shut down, and others go on
    LEFT = 5  # its own code raised an error

    def sentence(self, rank: int) -> str:
        """The sentence for errors, with the rank at fault."""
        return (
            f"rank {rank} failed; its own error says why",
            f"rank {rank} died: its connection closed before it shut down",
            f"rank {rank} does not answer: it is stopped or cut off",
            f"rank {rank} did not come; all ranks must take equal steps and call settle(), averaged(), close() alike",
            f"ranks [{rank}] have closed; call settle() on all ranks before close(), after equal steps on all of them",
            f"rank {rank} left after an error in its own code",
        )[self]
