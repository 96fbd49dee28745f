"""Whether processes are there: asked of their listeners, without being their peer."""

from __future__ import annotations

import enum
import selectors
import time
from collections.abc import Mapping

from .contact import Contact, Packet, is_packet
from .lifelines import connect


class LifeSign(enum.Enum):
    """What became of a question."""

    LIVES = "lives"
    ENDED = "has ended"  # its machine refuses the connection, or another program has its port
    SILENT = "is silent"  # it is stopped, or its machine is out of reach


def probe(contacts: Mapping[int, Contact], *, job: bytes, seconds: float) -> dict[int, LifeSign]:
    """Connect to the listeners of workers of a job; returns when one has answered or all have been heard of.

    Args:
        contacts: of the workers, by worker.
        job: see `digest`.
        seconds: that are waited at most.

    Returns:
        The answers by worker.
    """
    answers, heard = dict.fromkeys(contacts, LifeSign.SILENT), dict.fromkeys(contacts, b"")
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for worker, contact in contacts.items():
            if (line := connect(contact.address)) is not None:
                selector.register(line, selectors.EVENT_READ, worker)
        while selector.get_map() and LifeSign.LIVES not in answers.values():
            for key, _ in selector.select(max(deadline - time.monotonic(), 0.0)):
                worker, expected = key.data, contacts[key.data].packet(Packet.GREETING, job)
                try:
                    data = key.fileobj.recv(64)  # type: ignore[union-attr]
                except ConnectionRefusedError:
                    data = b""
                except OSError:  # no route, or no answer: nothing says that the process has ended
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
                    continue
                heard[worker] += data
                is_greeting = is_packet(heard[worker], expected)
                if is_greeting:
                    answers[worker] = LifeSign.LIVES
                elif not data or is_greeting is False:
                    answers[worker] = LifeSign.ENDED
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
            if time.monotonic() >= deadline:
                break
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
    return answers
