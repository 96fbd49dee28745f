"""TextFolder: the text files below a folder, some to learn from, the others to validate on; and the share of a rank."""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, NamedTuple

ROLES = {"train": "train", "valid": "validation", "validation": "validation", "val": "validation", "dev": "validation"}
"""What a word in the name of a file says: wiki.train.tokens, val.txt."""
OPTIONAL = frozenset({"test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "site-packages", "dist-packages"})
"""Folders of the standard library that some systems install apart, or fill with what is not of it."""
PIECE_BYTES = 1 << 20
"""That are decoded at once, up to the end of the line."""


class TextFile(NamedTuple):
    """A file of text."""

    name: str
    """Its path below the folder, with slashes: the same on every machine."""
    path: Path
    size: int
    """In bytes."""


class Passage(NamedTuple):
    """The lines of a file that begin in a range of its bytes."""

    file: TextFile
    start: int
    end: int


@dataclass(frozen=True)
class TextFolder:
    """The files of a run, in the order of the hashes of their names: in no order that their text has a part in.

    Args:
        train: files to learn from, one at least.
        validation: files to validate on, one at least.
    """

    train: tuple[TextFile, ...]
    validation: tuple[TextFile, ...]

    @classmethod
    def find(cls, folder: str, *, patterns: Sequence[str] = (), validation_share: float) -> TextFolder:
        """The text files below `folder`.

        Where files directly in it have "train" and "valid", "validation", "val" or "dev" as a word of their names, as
        those of WikiText and of most other corpora, these are the two sets. Otherwise the hash of its name decides
        for each file: a file is in the same set on every machine, whatever else is in the folder.

        Args:
            folder: where to look; empty: the sources of Python's own standard library.
            patterns: of the names of files, such as *.py; none: all files. Hidden files and folders are left out.
            validation_share: about this share of the files is for validation.

        Raises:
            ValueError: there is no such folder, or one of the two sets has no file, or no text in it.
        """
        found = sorted(_files_below(Path(folder), patterns) if folder else _standard_library(), key=_place)
        where = folder or "Python's standard library"
        if not found:
            raise ValueError(
                f"got {_absence(folder, patterns)}, expected text files; point --data-dir to a folder that has some, "
                "or name them with --files"
            )
        sets = _by_name(found) or _by_hash(found, validation_share)
        for role, files in (("train", sets.train), ("validation", sets.validation)):
            if not sum(file.size for file in files):
                raise ValueError(
                    f"got {len(found)} text files in {where} and no text among them for the {role} set, expected some; "
                    "call files train.* and valid.*, change --validation-share, or add files"
                )
        return sets

    @property
    def digest(self) -> str:
        """A short hash of the names and sizes of all files."""
        listing = "\n".join(f"{file.name} {file.size}" for file in (*self.train, *self.validation))
        return hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def share_of(files: Sequence[TextFile], rank: int, world_size: int) -> list[Passage]:
    """The part of `files` that belongs to `rank`: as many bytes as every other rank's, one after the other."""
    total = sum(file.size for file in files)
    first, last = total * rank // world_size, total * (rank + 1) // world_size
    passages, position = [], 0
    for file in files:
        start, end = max(first - position, 0), min(last - position, file.size)
        if start < end:
            passages.append(Passage(file, start, end))
        position += file.size
    return passages


def beginning(files: Sequence[TextFile], num_bytes: int) -> list[Passage]:
    """The passages that the first `num_bytes` of `files` begin; 0: all of it."""
    left = num_bytes or sum(file.size for file in files)
    passages = []
    for file in files:
        if left > 0 and file.size:
            passages.append(Passage(file, 0, min(left, file.size)))
        left -= file.size
    return passages


def read(passage: Passage) -> Iterator[str]:
    """The text of a passage, in pieces that end with a line: every line is in one passage of a file, and once.

    Raises:
        ValueError: it is not UTF-8 text; file and byte are named.
    """
    with passage.file.path.open("rb") as file:
        start, end = _next_line(file, passage.start), _next_line(file, passage.end)
        file.seek(start)
        while start < end:
            piece = file.read(min(PIECE_BYTES, end - start))
            piece += file.readline() if start + len(piece) < end else b""
            if not piece:
                return  # the file has become shorter
            yield _decoded(piece, passage.file, start)
            start += len(piece)


def _next_line(file: BinaryIO, position: int) -> int:
    """Where the first line begins that does not begin before `position`."""
    if position == 0:
        return 0
    file.seek(position - 1)
    file.readline()
    return file.tell()


def _decoded(piece: bytes, file: TextFile, start: int) -> str:
    place, byte = piece.find(b"\0"), 0
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError as error:
        place, byte = error.start, error.object[error.start]
    if place >= 0:
        raise ValueError(
            f"got byte 0x{byte:02x} at {start + place} of {file.path}, expected UTF-8 text; convert the file, or leave "
            "it out by naming others with --files"
        )
    return text


def _files_below(folder: Path, patterns: Sequence[str], *, without: Container[str] = ()) -> Iterator[TextFile]:
    """Regular files whose names match, but hidden ones, and those in folders called as one of `without`."""
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        for name in names:
            file = Path(path, name)
            is_wanted = not name.startswith(".") and (not patterns or any(fnmatchcase(name, p) for p in patterns))
            if is_wanted and file.is_file():
                yield TextFile(file.relative_to(folder).as_posix(), file, file.stat().st_size)


def _standard_library() -> Iterator[TextFile]:
    """Its modules, without those that are made for one machine."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for file in _files_below(folder, ["*.py"], without=OPTIONAL):
        if not file.path.name.startswith("_sysconfigdata"):
            yield file


def _place(file: TextFile) -> str:
    return hashlib.sha256(file.name.encode("utf-8", "surrogateescape")).hexdigest()


def _by_name(files: Sequence[TextFile]) -> TextFolder | None:
    """The sets that the names of files in the folder itself say; None: they do not name both."""
    sets: dict[str, list[TextFile]] = {"train": [], "validation": []}
    for file in files:
        words = re.split(r"[^a-z]+", file.name.lower())
        roles = {ROLES[word] for word in words if word in ROLES}
        if len(roles) == 1 and "/" not in file.name:
            sets[roles.pop()].append(file)
    return TextFolder(tuple(sets["train"]), tuple(sets["validation"])) if all(sets.values()) else None


def _by_hash(files: Sequence[TextFile], validation_share: float) -> TextFolder:
    bound = int(validation_share * 16**8)
    is_validation = [int(_place(file)[-8:], 16) < bound for file in files]  # the order is that of the first digits
    return TextFolder(
        tuple(file for file, is_held_out in zip(files, is_validation) if not is_held_out),
        tuple(file for file, is_held_out in zip(files, is_validation) if is_held_out),
    )


def _absence(folder: str, patterns: Sequence[str]) -> str:
    if not folder:
        return f"no sources in {sysconfig.get_paths()['stdlib']}"
    if not Path(folder).is_dir():
        return f"{folder!r} (no such folder)"
    return f"no file {' or '.join(patterns)} in {folder}" if patterns else f"no file in {folder}"
