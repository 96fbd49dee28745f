"""A folder of small images, scaled once, so that runs of a minute do not spend it on decoding."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from torchvision.datasets.folder import pil_loader
from torchvision.transforms import v2

SPLITS = ("train", "test")
MANIFEST = ".small_images.json"


def shrink(source: Path, target: Path, *, size: int, train_images_per_class: int) -> Path:
    """Copy <split>/<class>/ of `source` to `target`, scaled to size x size pixels; returns `target`.

    Files are uncompressed BMP, so that nothing is lost and reading is cheap. Does nothing where `target` was made from
    the same arguments before.

    Args:
        source: folder with train/ and test/, in each a folder per class.
        target: folder to make; what another call has left there, whole or broken off, is replaced.
        size: side in pixels; scaled as train/tasks/images/data.py does.
        train_images_per_class: the first ones by name; 0: all. Test images are all taken.

    Raises:
        ValueError: `source` has no such folders, overlaps with `target`, or `target` holds what no call has made.
    """
    if missing := [split for split in SPLITS if not (source / split).is_dir()]:
        raise ValueError(
            f"got {source} without {', '.join(missing)}, expected train/ and test/ with a folder per class"
        )
    here, there = source.resolve(), target.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise ValueError(f"got target {target} and source {source}, expected folders apart; choose another target")
    made_of = {"source": str(here), "size": size, "train_images_per_class": train_images_per_class}
    manifest = target / MANIFEST
    if manifest.is_file():
        if json.loads(manifest.read_text()) == {**made_of, "is_complete": True}:
            return target
    elif target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(
            f"got target {target}, which is there and not made by this function (it has no {MANIFEST}), expected a new "
            "or empty folder; choose another one, or move it away"
        )
    target.mkdir(parents=True, exist_ok=True)
    _write(manifest, {**made_of, "is_complete": False})  # so that a call that is broken off may be repeated
    for split in SPLITS:
        shutil.rmtree(target / split, ignore_errors=True)
        for folder in sorted(path for path in (source / split).iterdir() if path.is_dir()):
            limit = train_images_per_class if split == "train" and train_images_per_class else None
            _shrink_class(sorted(folder.iterdir())[:limit], target / split / folder.name, size)
    _write(manifest, {**made_of, "is_complete": True})
    return target


def _write(manifest: Path, values: dict[str, Any]) -> None:
    """Never half written: a manifest is what allows a folder to be deleted."""
    temporary = manifest.with_suffix(".tmp")
    temporary.write_text(json.dumps(values))
    temporary.replace(manifest)


def _shrink_class(paths: list[Path], target: Path, size: int) -> None:
    target.mkdir(parents=True)
    resize = v2.Resize((size, size))
    for path in paths:
        resize(pil_loader(str(path))).save(target / f"{path.stem}.bmp")
