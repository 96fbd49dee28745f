"""Objects in the memory of this process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import Any

from .base import Listed, Medium
from .errors import TooLarge

_lock = threading.Lock()  # of all below
_memories: dict[str, dict[str, tuple[Listed, bytes]]] = {}  # by name: objects by path
_tags = itertools.count()


class MemoryMedium(Medium):
    """Objects in the memory of this process, for threads as workers.

    Args:
        name: the name of the memory. Media of one name share it, also after their ends.
        options: see `Medium`.
    """

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(f"memory://{name}", **options)
        with _lock:
            self._objects = _memories.setdefault(name, {})

    def _create(self, path: str, data: bytes) -> bool:
        with _lock:
            entry = (self._listed(data), data)
            return self._objects.setdefault(path, entry) is entry

    def _put(self, path: str, data: bytes) -> None:
        with _lock:
            self._objects[path] = (self._listed(data), data)

    def _get(self, path: str, max_bytes: int) -> bytes | None:
        with _lock:
            found = self._objects.get(path)
        if found is None:
            return None
        if found[0].num_bytes > max_bytes:
            raise TooLarge
        return found[1]

    def _list(self, prefix: str) -> dict[str, Listed]:
        with _lock:
            found = {path: listed for path, (listed, _) in self._objects.items()}
        return {path: listed for path, listed in found.items() if not prefix or path.startswith(f"{prefix}/")}

    def _listed(self, data: bytes) -> Listed:
        return Listed(str(next(_tags)), len(data), self.clock.now())

    def _delete(self, paths: Iterable[str]) -> None:
        with _lock:
            for path in paths:
                self._objects.pop(path, None)
