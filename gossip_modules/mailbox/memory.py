"""Objects in the memory of this process."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from .base import Listed, Medium

_memories: dict[str, dict[str, tuple[Listed, bytes]]] = {}  # by name: objects by path


class MemoryMedium(Medium):
    """Objects in the memory of this process, for threads as workers. Each try is one atomic operation of a dict.

    Args:
        name: the name of the memory. Media of one name share it, also after their ends.
        options: see `Medium`.
    """

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(f"memory://{name}", **options)
        self._objects = _memories.setdefault(name, {})

    def _create(self, path: str, data: bytes) -> bool:
        entry = (self._listed(data), data)
        return self._objects.setdefault(path, entry) is entry

    def _put(self, path: str, data: bytes) -> None:
        self._objects[path] = (self._listed(data), data)

    def _get(self, path: str, max_bytes: int) -> bytes | None:
        _, data = self._objects.get(path, (None, None))
        return b"" if data is not None and len(data) > max_bytes else data

    def _list(self, prefix: str) -> dict[str, Listed]:
        start = f"{prefix}/" if prefix else ""
        return {path: listed for path, (listed, _) in self._objects.copy().items() if path.startswith(start)}

    def _listed(self, data: bytes) -> Listed:
        return Listed(uuid.uuid4().hex, len(data), self.clock.now())

    def _delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._objects.pop(path, None)
