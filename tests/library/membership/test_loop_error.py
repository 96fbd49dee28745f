"""Whether a loop over a generator was left by an error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator

import pytest

from gossip_modules.membership.watcher import ends_by_error

found: list[bool] = []


def steps() -> Iterator[int]:
    for step in range(3):
        try:
            yield step
        except GeneratorExit:
            found.append(ends_by_error(sys._getframe().f_back))
            raise


def bar(loop: Iterable[int]) -> Iterator[int]:
    """As tqdm."""
    try:
        yield from loop
    finally:
        found.append(False)
        found.pop()


def by_a_call() -> None:
    for _ in steps():
        int("x")


def by_raise() -> None:
    for _ in steps():
        raise MemoryError


def by_an_operator() -> None:
    for step in steps():
        print(1 / step)


def by_raise_of_what_was_caught() -> None:
    for _ in steps():
        try:
            int("x")
        except ValueError:
            raise


def by_an_error_from_another() -> None:
    for _ in steps():
        try:
            int("x")
        except ValueError as error:
            raise KeyError from error


def after_finally() -> None:
    for _ in steps():
        try:
            int("x")
        finally:
            print()


def out_of_a_context() -> None:
    for _ in steps():
        with contextlib.nullcontext():
            int("x")


def in_enumerate() -> None:
    for _ in enumerate(steps()):
        int("x")


def in_a_bar() -> None:
    for _ in bar(steps()):
        int("x")


def and_is_caught_beside_it() -> None:
    try:
        for _ in steps():
            int("x")
    except ValueError:
        print()


def by_exit() -> None:
    for _ in steps():
        sys.exit(3)


def by_break() -> None:
    for _ in steps():
        break


def by_return() -> int:
    for step in steps():
        return step
    return 0


def by_break_out_of_a_bar() -> None:
    for _ in bar(steps()):
        break


def by_break_after_an_error() -> None:
    errors = []
    for _ in steps():
        try:
            int("x")
        except ValueError as error:
            errors.append(error)
        break


def by_return_of_a_function_that_keeps_it() -> int:
    loop = steps()
    for step in loop:
        if step == 1:
            break
    return 1


def by_close() -> None:
    loop = steps()
    next(loop)
    loop.close()  # type: ignore[attr-defined]


def by_del() -> None:
    loop = steps()
    next(loop)
    del loop


ERRORS = [
    by_a_call,
    by_raise,
    by_an_operator,
    by_raise_of_what_was_caught,
    by_an_error_from_another,
    after_finally,
    out_of_a_context,
    in_enumerate,
    in_a_bar,
    and_is_caught_beside_it,
    by_exit,
]
ENDS = [
    by_break,
    by_return,
    by_break_out_of_a_bar,
    by_break_after_an_error,
    by_return_of_a_function_that_keeps_it,
    by_close,
    by_del,
]


@pytest.mark.parametrize("leave", [*ERRORS, *ENDS])
def test_a_loop_tells_an_error_from_another_end(leave: Callable[[], object]) -> None:
    found.clear()
    with contextlib.suppress(Exception, SystemExit):
        leave()
    assert found == [leave in ERRORS]
