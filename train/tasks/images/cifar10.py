"""CIFAR-10 as files that are there already: a folder or an archive in any of the forms in which it is handed out."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeAlias

import numpy as np
from PIL import Image

SIDE = 32
NUM_CLASSES = 10
_ROW = 1 + 3 * SIDE * SIDE  # the label, then the pixels of each channel
_PYTHON, _BINARY = "cifar-10-batches-py", "cifar-10-batches-bin"
_TRAIN, _TEST = ("train",), ("test", "val")
_IMAGES = (".jpg", ".jpeg", ".png", ".bmp")
_ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip")
_EXPECTED = (
    "cifar-10-batches-py/ or cifar-10-batches-bin/ of its authors, train/ and test/ with a folder of images "
    "for each class, or an archive of one of these"
)


class LabelledImages(NamedTuple):
    """Images, uint8 [N, 3, 32, 32], and their labels, int64 [N]; class 0 is airplane, 9 truck."""

    images: np.ndarray
    labels: np.ndarray


Splits: TypeAlias = tuple[LabelledImages, LabelledImages]
"""The training set and the test set."""


def read_cifar10(path: Path, *, read_python: Callable[[Path], Splits]) -> Splits:
    """The training set and the test set below `path`, of which nothing is written to or fetched.

    Args:
        path: the folder that has the data, that folder itself, or an archive.
        read_python: reads the folder that holds cifar-10-batches-py, and checks it before.

    Raises:
        ValueError: there is no such data, more than one archive of them, or files that are not whole.
    """
    if path.is_file():
        return _read_archive(path, read_python)
    for folder in (path, path.parent) if path.name in (_PYTHON, _BINARY) else (path,):
        if (folder / _BINARY).is_dir():
            return _of_rows(*(_rows(folder / _BINARY, names) for names in _binary_names()))
        if (folder / _PYTHON).is_dir():
            return read_python(folder)
    if (path / _TRAIN[0]).is_dir():
        return _of_images(_files_below(path), path)
    archives = sorted(file for file in path.glob("*") if file.is_file() and _is_archive(file.name))
    named = [file for file in archives if "cifar" in file.name.lower()] or archives
    if len(named) == 1:
        return _read_archive(named[0], read_python)
    what = f"archives {', '.join(file.name for file in named)}" if named else _contents(path)
    raise ValueError(f"got no CIFAR-10 in {str(path)!r} ({what}), expected {_EXPECTED}")


def _contents(folder: Path) -> str:
    if not folder.is_dir():
        return "no such file or folder"
    names = sorted(path.name for path in folder.iterdir())
    return f"with {', '.join(names[:5])}{' ...' if names[5:] else ''}" if names else "empty"


def _is_archive(name: str) -> bool:
    return name.lower().endswith(_ARCHIVES)


def _read_archive(path: Path, read_python: Callable[[Path], Splits]) -> Splits:
    try:
        with TemporaryDirectory() as folder:
            if not _unpack_python(path, Path(folder)):
                return _of_images(_files_of(path), path)
            if (Path(folder) / _BINARY).is_dir():
                return _of_rows(*(_rows(Path(folder) / _BINARY, names) for names in _binary_names()))
            return read_python(Path(folder))
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"got {str(path)!r}, which cannot be read ({reason}), expected {_EXPECTED}") from error


def _unpack_python(path: Path, folder: Path) -> bool:
    """Unpack the files of batches, of either kind, into `folder`; whether there were any."""
    is_found = False
    for name, read in _members(path):
        parts = PurePosixPath(name).parts
        if len(parts) < 2 or parts[-2] not in (_PYTHON, _BINARY):
            if PurePosixPath(name).suffix.lower() in _IMAGES:
                return False  # images stand in no archive of batches
            continue
        (folder / parts[-2]).mkdir(exist_ok=True)
        (folder / parts[-2] / parts[-1]).write_bytes(read())
        is_found = True
    return is_found


def _members(path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """The files of an archive, in its order: names, and what reads each of them."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if not info.is_dir():
                    yield info.filename, partial(archive.read, info)
        return
    with tarfile.open(path) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            if file is not None:
                yield member.name, file.read


def _files_of(path: Path) -> Iterator[tuple[tuple[str, ...], bytes]]:
    """The images of an archive: the parts of their names, and their bytes."""
    for name, read in _members(path):
        parts = PurePosixPath(name).parts
        if len(parts) >= 3 and PurePosixPath(name).suffix.lower() in _IMAGES:
            yield parts, read()


def _files_below(folder: Path) -> Iterator[tuple[tuple[str, ...], bytes]]:
    for path in sorted(folder.glob("*/*/*")):
        if path.suffix.lower() in _IMAGES:
            yield path.parts, path.read_bytes()


def _of_images(files: Iterator[tuple[tuple[str, ...], bytes]], where: Path) -> Splits:
    """Images as <train or test>/<class>/<name>, in the order of their names."""
    found: dict[bool, list[tuple[str, str, np.ndarray]]] = {True: [], False: []}
    for parts, data in files:
        *_, split, kind, name = parts
        if split not in (*_TRAIN, *_TEST):
            continue
        try:
            pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        except (OSError, SyntaxError, ValueError) as error:
            raise ValueError(
                f"got {'/'.join(parts[-3:])} in {str(where)!r} that does not decode ({error}), expected an image; "
                "replace it"
            ) from error
        if pixels.shape != (SIDE, SIDE, 3):
            raise ValueError(
                f"got {'/'.join(parts[-3:])} in {str(where)!r} of {pixels.shape[1]} x {pixels.shape[0]} pixels, "
                f"expected {SIDE} x {SIDE}, as in CIFAR-10; pass --dataset imagefolder for other images"
            )
        found[split in _TRAIN].append((kind, name, pixels))
    classes = sorted({kind for images in found.values() for kind, *_ in images})
    if len(classes) != NUM_CLASSES or not all(found.values()):
        raise ValueError(
            f"got {len(found[True])} images for training and {len(found[False])} for tests of {len(classes)} classes "
            f"in {str(where)!r}, expected {_EXPECTED}"
        )
    train, test = (_split(images, classes) for images in (found[True], found[False]))
    return train, test


def _split(images: list[tuple[str, str, np.ndarray]], classes: list[str]) -> LabelledImages:
    images.sort(key=lambda image: image[:2])
    pixels = np.stack([pixels for *_, pixels in images]).transpose(0, 3, 1, 2)
    return LabelledImages(np.ascontiguousarray(pixels), np.array([classes.index(kind) for kind, *_ in images]))


def _binary_names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(f"data_batch_{number}.bin" for number in range(1, 6)), ("test_batch.bin",)


def _rows(folder: Path, names: tuple[str, ...]) -> np.ndarray:
    """The rows of these files, uint8 [N, 3073]."""
    rows = []
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"got no {name} in {str(folder)!r}, expected it; unpack the archive again")
        data = np.fromfile(folder / name, dtype=np.uint8)
        if len(data) == 0 or len(data) % _ROW or data[::_ROW].max() >= NUM_CLASSES:
            raise ValueError(
                f"got {name} of {len(data)} bytes in {str(folder)!r}, expected whole rows of {_ROW} that begin with a "
                "class from 0 to 9; unpack the archive again"
            )
        rows.append(data.reshape(-1, _ROW))
    return np.concatenate(rows)


def _of_rows(train: np.ndarray, test: np.ndarray) -> Splits:
    first, second = (
        LabelledImages(rows[:, 1:].reshape(-1, 3, SIDE, SIDE), rows[:, 0].astype(np.int64)) for rows in (train, test)
    )
    return first, second
