"""Objects in the memory of this process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import Any

from .base import Medium
from .errors import TooLarge

_lock = threading.Lock()  # of all below
_memories: dict[str, dict[str, tuple[str, bytes]]] = {}  # by name: objects by path, each with its tag
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
            entry = (str(next(_tags)), data)
            return self._objects.setdefault(path, entry) is entry

    def _put(self, path: str, data: bytes) -> None:
        with _lock:
            self._objects[path] = (str(next(_tags)), data)

    def _get(self, path: str, max_bytes: int) -> bytes | None:
        with _lock:
            _, data = self._objects.get(path, ("", None))
        if data is not None and len(data) > max_bytes:
            raise TooLarge
        return data

    def _list(self, prefix: str) -> dict[str, str]:
        with _lock:
            return {
                path: tag for path, (tag, _) in self._objects.items() if not prefix or path.startswith(f"{prefix}/")
            }

    def _delete(self, paths: Iterable[str]) -> None:
        with _lock:
            for path in paths:
                self._objects.pop(path, None)
