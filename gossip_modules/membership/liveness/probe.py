"""Whether processes are there: asked of their listeners, without being their peer."""

from __future__ import annotations

import enum
import selectors
import time
from collections.abc import Mapping

from .lifelines import GREETING, Address, connect


class LifeSign(enum.Enum):
    """What became of a question."""

    LIVES = "lives"
    ENDED = "has ended"  # its machine refuses the connection, or another program has its port
    SILENT = "is silent"  # it is stopped, or its machine is out of reach


def probe(addresses: Mapping[int, Address], *, job: bytes, seconds: float) -> dict[int, LifeSign]:
    """Connect to the listeners of workers of a job; returns when one has answered or all have been heard of.

    Args:
        addresses: of the listeners, by worker.
        job: as in `Lifelines`.
        seconds: that are waited at most.

    Returns:
        The answers by worker.
    """
    answers, heard = dict.fromkeys(addresses, LifeSign.SILENT), dict.fromkeys(addresses, b"")
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for worker, address in addresses.items():
            if (line := connect(address)) is not None:
                selector.register(line, selectors.EVENT_READ, worker)
        while selector.get_map() and LifeSign.LIVES not in answers.values():
            for key, _ in selector.select(max(deadline - time.monotonic(), 0.0)):
                worker, expected = key.data, GREETING.pack(job, key.data)
                try:
                    data = key.fileobj.recv(64)  # type: ignore[union-attr]
                except ConnectionRefusedError:
                    data = b""
                except OSError:  # no route, or no answer: nothing says that the process has ended
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
                    continue
                heard[worker] += data
                if heard[worker].startswith(expected):
                    answers[worker] = LifeSign.LIVES
                elif not data or not expected.startswith(heard[worker]):
                    answers[worker] = LifeSign.ENDED
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
            if time.monotonic() >= deadline:
                break
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
    return answers
