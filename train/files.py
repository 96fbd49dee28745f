"""Files that are written whole or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


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
