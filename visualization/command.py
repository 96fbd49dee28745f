"""Commands of this package: what a user can mend is one line and exit code 2, not a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Run `main` and end the process with the exit code it returns, or 0.

    Args:
        main: raises ValueError for input that is none, and OSError for a file that cannot be read or written.
    """
    try:
        sys.exit(main())
    except OSError as error:
        reason = error.strerror or str(error)
        text = f"error: got {error.filename}: {reason}, expected a file that can be read or written; name another"
        print(text, file=sys.stderr)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
