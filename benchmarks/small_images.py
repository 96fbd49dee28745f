"""A folder of small images, scaled once, so that runs of a minute do not spend it on decoding."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from torchvision.datasets.folder import pil_loader
from torchvision.transforms import v2

SPLITS = ("train", "test")
MANIFEST = "manifest.json"


def shrink(source: Path, target: Path, *, size: int, train_images_per_class: int) -> Path:
    """Copy <split>/<class>/ of `source` to `target`, scaled to size x size pixels; returns `target`.

    Files are uncompressed BMP, so that nothing is lost and reading is cheap. Does nothing where `target` was made from
    the same arguments before.

    Args:
        source: folder with train/ and test/, in each a folder per class.
        target: folder to make; what another call has left there is replaced.
        size: side in pixels; scaled as train/data.py does.
        train_images_per_class: the first ones by name; 0: all. Test images are all taken.

    Raises:
        ValueError: `source` has no such folders.
    """
    if missing := [split for split in SPLITS if not (source / split).is_dir()]:
        raise ValueError(
            f"got {source} without {', '.join(missing)}, expected train/ and test/ with a folder per class"
        )
    made_of = {"source": str(source.resolve()), "size": size, "train_images_per_class": train_images_per_class}
    manifest = target / MANIFEST
    if manifest.is_file() and json.loads(manifest.read_text()) == made_of:
        return target
    shutil.rmtree(target, ignore_errors=True)
    for split in SPLITS:
        for folder in sorted(path for path in (source / split).iterdir() if path.is_dir()):
            limit = train_images_per_class if split == "train" and train_images_per_class else None
            _shrink_class(sorted(folder.iterdir())[:limit], target / split / folder.name, size)
    manifest.write_text(json.dumps(made_of))
    return target


def _shrink_class(paths: list[Path], target: Path, size: int) -> None:
    target.mkdir(parents=True)
    resize = v2.Resize((size, size))
    for path in paths:
        resize(pil_loader(str(path))).save(target / f"{path.stem}.bmp")
