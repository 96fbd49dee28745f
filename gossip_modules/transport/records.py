"""Records: what the ranks of a group leave for each other in a key-value store."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .bounded_store import BoundedStore
from .progress import job_store

_REQUEST = timedelta(seconds=0.4)


class Records:
    """A list of JSON values in a key-value store. All ranks append to it, and each reads the new values.

    Args:
        store: of the ranks; no other code uses its keys.
    """

    def __init__(self, store: BoundedStore) -> None:
        self._store = store
        self._num_read = 0
        self._reading = threading.Lock()

    @classmethod
    def of(cls, group: dist.ProcessGroup, prefix: str) -> Records | None:
        """Records under a prefix in the store of the job if torch knows the group, else in the group's own store.

        None: the group has no store.
        """
        store: dist.Store | None
        try:
            store = job_store() if is_of_job(group) else group.get_group_store()
        except (AttributeError, RuntimeError):  # an older torch, or a group without
            return None
        return None if store is None else cls(BoundedStore(dist.PrefixStore(prefix, store), timeout=_REQUEST))

    def append(self, record: Any) -> None:
        """Append a JSON value, if the store answers: without it errors tell less, and come late."""
        try:
            number = self._store.add("count", 1, what="counting a record")
            self._store.set(str(number), json.dumps(record), what="leaving a record")
        except (ConnectionError, RuntimeError):  # it is gone, or cannot count
            return

    def skip(self) -> None:
        """Ignore the values so far. Raises as `new`."""
        self._num_read = self._store.add("count", 0, what="counting records")

    def new(self) -> list[Any]:
        """The values that were appended since the last call.

        Raises:
            ConnectionError, RuntimeError: the store does not answer, or cannot count.
        """
        records = []
        with self._reading:
            count = self._store.add("count", 0, what="looking for records")
            while self._num_read < count:
                text = self._store.get(str(self._num_read + 1), what="reading a record")
                if text is None:  # it is counted and not there yet
                    break
                records.append(json.loads(text))
                self._num_read += 1
        return records


def is_of_job(group: dist.ProcessGroup) -> bool:
    """Whether torch.distributed knows the group, so that it has the store of the job."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map
