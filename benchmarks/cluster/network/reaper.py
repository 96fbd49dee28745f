"""Teardown that a SIGKILL cannot prevent: a small process of its own that waits for the end of its parent.

    python -m benchmarks.cluster.network.reaper PREFIX < pipe

The pipe's other end is the parent's alone, so it closes with the parent, however that ends. Then the namespaces whose
names begin with PREFIX, and the processes in them, are removed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.cluster.network import namespaces

ROOT = Path(__file__).resolve().parents[3]


class Reaper:
    """Removes the namespaces of `prefix` when this object is closed, or this process has died.

    Args:
        prefix: of their names.
    """

    def __init__(self, prefix: str) -> None:
        reader, self._writer = os.pipe()  # not inherited: only this process holds the writer
        command = [sys.executable, "-m", "benchmarks.cluster.network.reaper", prefix]
        # A session of its own: Ctrl-C and a signal to the parent's process group pass it by.
        self._process = subprocess.Popen(
            command, stdin=reader, stdout=subprocess.DEVNULL, cwd=ROOT, start_new_session=True
        )
        os.close(reader)

    def close(self) -> None:
        """Wait until everything is removed. Idempotent.

        Raises:
            RuntimeError: something could not be removed; it is on stderr.
        """
        if self._writer < 0:
            return
        os.close(self._writer)
        self._writer = -1
        status = self._process.wait(timeout=3 * namespaces.COMMAND_SECONDS)
        if status:
            raise RuntimeError(
                f"got exit code {status} of the process that removes namespaces, expected 0; see its error, and "
                "`ip netns list` for what is left"
            )


def main() -> None:
    """Wait for the end of stdin, then remove."""
    (prefix,) = sys.argv[1:]
    while os.read(0, 1):
        pass  # nothing is written; an end of file is the end of the parent
    while existing := namespaces.names(prefix):
        namespaces.remove(existing)
        time.sleep(0.2)  # an `ip netns add` of the parent may have outlived it


if __name__ == "__main__":
    main()
