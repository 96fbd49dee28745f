"""How a script reads its arguments, and how a command of this package ends: one line and code 2 for a user's error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import tyro

_SIGPIPE = 128 + 13  # the exit code of a shell for a program that this signal has ended
Arguments = TypeVar("Arguments")


def read_arguments(
    kind: type[Arguments], *, description: str | None, arguments: Sequence[str] | None = None
) -> Arguments:
    """The instance of a dataclass that `arguments` describe.

    Args:
        kind: its fields are the options; those of a dataclass within it are a group of them in --help.
        description: for --help, above the options, line by line as it is.
        arguments: the arguments of the command; None: those of this process.

    Raises:
        SystemExit: an option that does not exist, or --help.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    markers = (tyro.conf.OmitArgPrefixes,)
    with closed_output_ends():
        if description and not {"-h", "--help"}.isdisjoint(own):
            print(f"{description.strip()}\n")  # not by tyro, which makes a paragraph one line
        return tyro.cli(kind, prog=command(), description="", args=arguments, config=markers)


@contextmanager
def closed_output_ends() -> Iterator[None]:
    """Inside, a closed output, as in `--help | head`, ends the process, as it ends other programs."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it again
        sys.exit(_SIGPIPE)


def command() -> str:
    """How this process was started, such as python -m train.compare."""
    spec = sys.modules["__main__"].__spec__
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else f"python {sys.argv[0]}"


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Run `main` and end the process with the exit code it returns, or 0.

    Args:
        main: raises ValueError for input that is none, and OSError for a file that cannot be read or written.
    """
    try:
        with closed_output_ends():
            exit_code = main()
        sys.exit(exit_code)
    except OSError as error:
        reason = error.strerror or str(error)
        text = f"error: got {error.filename}: {reason}, expected a file that can be read or written; name another"
        print(text, file=sys.stderr)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
