"""Errors that a user can mend: said in one line by one rank, without a traceback, and the process ends with code 2."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from train.job.rank_environment import rank_environment

EXIT_CODE = 2
PATIENCE = 15.0
"""Seconds that another rank waits for rank 0, which as a rule meets the same error, to speak and end the job."""


class UsageError(ValueError):
    """What a user asked for is impossible: got, expected, remedy."""


class DataError(UsageError):
    """A file that a user has to replace. Other ranks read other files, so the rank that meets it says so itself."""


@contextmanager
def usage_errors() -> Iterator[None]:
    """A ValueError within is the user's, and so is a package that is missing."""
    try:
        yield
    except UsageError:
        raise
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from error


def own_rank() -> int:
    """Of this process, by its launcher; 0 where that contradicts itself."""
    try:
        return rank_environment(os.environ).rank
    except ValueError:
        return 0


def leave(exit_code: int) -> NoReturn:
    """End this process now.

    Not by sys.exit: after an error the interpreter takes process groups apart whose threads still wait for peers, and
    may wait with them, while torchrun waits for this process before it starts all again.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def refuse(error: object, rank: int) -> NoReturn:
    """Say `error` and end with code 2: at once if this is rank 0, or if no other rank says it.

    Another rank says it only where the end of rank 0 does not end this process.
    """
    if rank and not isinstance(error, DataError):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # from torchrun, as soon as rank 0 has ended
        time.sleep(PATIENCE)
    print(f"error: {f'rank {rank}: ' if rank else ''}{error}", file=sys.stderr)
    leave(EXIT_CODE)
