"""Two laws of an exchange among all ranks: it takes effect on all of them or on none, and a lost rank may end it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol

from ..flat.vector import FlatVector

LOST = (ConnectionError, TimeoutError)
"""The errors of a wait for a rank that is gone or late."""


class Confirming(Protocol):
    """The part of a `Transport` that these laws use."""

    @property
    def is_elastic(self) -> bool: ...

    def barrier(self, *, what: str) -> None: ...


@contextlib.contextmanager
def all_or_none(transport: Confirming, *, what: str, restores: FlatVector | None = None) -> Iterator[None]:
    """A context for an exchange among all ranks, which takes effect on all of them or on none.

    [Note: all or none] If a rank of an elastic transport fails during an exchange, some ranks may have the result, and
    the others never get it. So a barrier after the exchange confirms that all ranks have the result, and a rank uses
    the result only after the barrier. A rank without this confirmation keeps the values from before the exchange. Only
    if a rank dies during the confirmation, some ranks may have used the result. The next exchange makes the ranks equal
    again. Over a transport that is not elastic the training of all ranks ends with the error, so nothing is confirmed.

    Args:
        transport: the transport of the exchange.
        what: the name of the exchange, for errors.
        restores: a vector that the exchange writes; it gets its values back if the exchange fails. This takes a copy
            on an elastic transport.

    Raises:
        ConnectionError, TimeoutError: a rank is gone or late. The exchange has no effect on this rank.
    """
    if not transport.is_elastic:
        yield
        return
    before = None if restores is None else restores.clone()
    try:
        yield
        transport.barrier(what=f"end of {what}")
    except BaseException:
        if restores is not None and before is not None:
            restores.copy_(before)
        raise


class MayBeLost:
    """A context for an exchange that a lost rank ends: training goes on without the exchange.

    [Note: a lost rank ends the exchange] If a rank of an elastic transport is lost, the others form another generation,
    which begins at a later step. Until then they train on. So the error of the lost rank ends the block, and nothing is
    raised. Over a transport that is not elastic, and for every other error, the error is raised.

    Args:
        transport: the transport of the exchange.

    Attributes:
        has_lost: whether a lost rank has ended the block.

    Example:
        >>> with MayBeLost(transport) as exchange:
        ...     transport.all_reduce(x, what="a sum")
        >>> if exchange.has_lost:
        ...     restart(x)
    """

    def __init__(self, transport: Confirming) -> None:
        self._transport = transport
        self.has_lost = False

    def __enter__(self) -> MayBeLost:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self.has_lost = isinstance(error, LOST) and self._transport.is_elastic
        return self.has_lost
