"""The body of a rank's process that does not do what it should. Imports little: every process waits for it."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection

REPLIES = {"garbage": b"\x00 no JSON", "list": b"[]", "error": b'{"error": "ValueError: no"}', "fine": b'{"x": 1}'}
SECONDS = 60.0
"""Longer than anybody waits."""


def misbehave(connection: Connection, what: str) -> None:
    """Be ready, then do as `what` says: raises, dies, hangs, or a key of REPLIES."""
    connection.send_bytes(b'{"ready": 0}')
    connection.recv_bytes()
    if what == "raises":
        raise RuntimeError("as told")
    if what == "dies":
        print("my last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if what in REPLIES:
        connection.send_bytes(REPLIES[what])
    time.sleep(SECONDS)
