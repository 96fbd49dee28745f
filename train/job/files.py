"""Files that are written whole or not at all, in folders that other ranks list and empty meanwhile."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

_GONE = (errno.ENOENT, errno.ESTALE)
"""What a system says of a file or folder that another process has removed, on this machine or from another one."""


def paths_in(folder: Path, pattern: str) -> list[Path]:
    """The entries of `folder` whose names match `pattern`, sorted; none where the folder is gone.

    Path.glob raises when another rank removes the folder between two of its system calls.
    """
    try:
        with os.scandir(folder) as entries:
            return sorted(folder / entry.name for entry in entries if fnmatchcase(entry.name, pattern))
    except OSError as error:
        if error.errno in _GONE:
            return []
        raise


def remove_file(path: Path) -> None:
    """Delete a file, unless it is gone already."""
    try:
        path.unlink()
    except OSError as error:
        if error.errno not in _GONE:
            raise


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary file and put it at `path`: a reader sees the old file or the whole new one.

    Raises:
        OSError: it could not be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except Exception as error:  # torch's own, on a full disk, does not name the file
        raise OSError(
            f"got {path}, expected a file that can be written ({error}); free space or choose another folder"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    # A rename is durable once its folder is.
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal, read a few megabytes at a time."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()
