"""Objects as files of a folder, which may be on NFS or Lustre."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from .base import Listed, Medium
from .errors import Permanent, Transient

PARTS = ".parts"  # the folder of files that are being written; no path of an object begins with a dot
_ABANDONED = 3600.0  # seconds without a write, after which the process that wrote a file there has ended
_REMEDIES = {
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS),
        "let this user write there (ls -ld, id; mount shows whether it is read-only), or give another folder",
    ),
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT), "make room (df -h, df -i, quota), or give a folder of another file system"
    ),
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EISDIR, errno.EEXIST), "a file is in the place of a folder or the reverse: move it"
    ),
    **dict.fromkeys(
        (errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV),
        "this file system has no hard links, by which one writer of an object wins: give a folder of another one",
    ),
    errno.ENAMETOOLONG: "give a folder with a shorter name",
}


class FolderMedium(Medium):
    """Objects as files of a folder.

    A new file is written under another name and synchronised. `link` then gives it its name unless a file has this
    name, which is atomic on NFS too; `rename` replaces an earlier file. An object is thus absent or whole. NFS clients
    remember for a while that a file is absent: mount with `lookupcache=positive,actimeo=1` to shorten this time.

    Args:
        folder: the absolute path; its parent exists. A process that is killed leaves its unfinished file in ".parts",
            from where it is deleted when a worker starts an hour later.
        options: see `Medium`.

    Raises:
        MailboxError: the folder cannot be made.
    """

    errors = (OSError,)

    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__(f"file://{folder}", **options)
        self._root = folder.rstrip("/")
        self._repeat("open", "", lambda is_retry: self._make_root(), None)

    def _make_root(self) -> None:
        parent = os.path.dirname(self._root)
        if not os.path.exists(parent):
            raise Permanent(f"there is no folder {parent!r}", remedy="mount or make it, or give another one")
        for folder in (self._root, os.path.join(self._root, PARTS)):
            with suppress(FileExistsError):  # a file of this name is an error of the next line
                os.mkdir(folder)
        os.scandir(self._root).close()
        with suppress(OSError):  # a process that only reads may not, and need not
            self._delete_abandoned(os.path.join(self._root, PARTS))

    def _delete_abandoned(self, parts: str) -> None:
        os.utime(parts)  # the time of the file system, which may not be that of this machine
        limit = os.stat(parts).st_mtime - _ABANDONED
        for part in (os.path.join(parts, name) for name in os.listdir(parts)):
            if os.stat(part).st_mtime < limit:
                os.unlink(part)

    def _create(self, path: str, data: bytes) -> bool:
        with self._written(path, data) as (part, target):
            try:
                os.link(part, target)
            except FileExistsError:
                return os.stat(part).st_nlink > 1  # NFS: the link was made, and its answer was lost
            return True

    def _put(self, path: str, data: bytes) -> None:
        with self._written(path, data) as (part, target):
            os.replace(part, target)

    @contextmanager
    def _written(self, path: str, data: bytes) -> Iterator[tuple[str, str]]:
        """The names of a new file with the data, and of the object, whose folder exists."""
        target = os.path.join(self._root, path)
        part = os.path.join(self._root, PARTS, uuid.uuid4().hex)
        try:
            with open(part, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.makedirs(os.path.dirname(target), exist_ok=True)
            yield part, target
        finally:
            with suppress(FileNotFoundError):
                os.unlink(part)

    def _get(self, path: str, max_bytes: int) -> bytes | None:
        with suppress(FileNotFoundError), open(os.path.join(self._root, path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return b"" if size > max_bytes else file.read(size)
        self._check_mounted()
        return None

    def _list(self, prefix: str) -> dict[str, Listed]:
        def raise_unless_gone(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error

        self._check_mounted()
        found = {}
        for folder, _, names in os.walk(os.path.join(self._root, prefix), onerror=raise_unless_gone):
            for place in (os.path.join(folder, name) for name in names):
                with suppress(FileNotFoundError):  # it was deleted meanwhile
                    stat = os.stat(place)
                    tag = f"{stat.st_size}-{stat.st_mtime_ns}-{stat.st_ino}"
                    found[os.path.relpath(place, self._root)] = Listed(tag, stat.st_size, stat.st_mtime)
        return found

    def _delete(self, paths: Iterable[str]) -> None:
        for place in (os.path.join(self._root, path) for path in paths):
            with suppress(FileNotFoundError):
                os.unlink(place)
            with suppress(OSError):  # it is not empty; the root never is
                os.removedirs(os.path.dirname(place))

    def _check_mounted(self) -> None:
        """Raise if the folder is gone, so that an unmounted one does not look empty."""
        os.stat(os.path.join(self._root, PARTS))

    def _failure(self, error: Exception) -> Transient:
        remedy = _REMEDIES.get(getattr(error, "errno", 0))
        return Transient(error) if remedy is None else Permanent(error, remedy=remedy)
