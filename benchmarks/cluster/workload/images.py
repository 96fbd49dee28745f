"""A folder of images as arrays: decoded and scaled once, for ranks that share them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from tqdm import tqdm

from benchmarks.cluster.workload.image_task import NUM_CLASSES, SIZE, SPLITS


def decode(source: Path, target: Path) -> None:
    """Write <split>.npy, uint8 of shape (N, 3, SIZE, SIZE), and <split>-labels.npy, int64 of shape (N,).

    Args:
        source: folder with train/ and test/, in each a folder per class; at most NUM_CLASSES of them.
        target: folder to write to.

    Raises:
        ValueError: `source` has no such folders, others than each other's, or more classes.
    """
    if missing := [split for split in SPLITS if not (source / split).is_dir()]:
        raise ValueError(
            f"got {source} without {', '.join(missing)}, expected train/ and test/ with a folder per class; see --data"
        )
    folders = [ImageFolder(str(source / split)) for split in SPLITS]
    classes = [folder.classes for folder in folders]
    if classes[0] != classes[1] or len(classes[0]) > NUM_CLASSES:
        raise ValueError(
            f"got the classes {', '.join(classes[0])} in {source / SPLITS[0]} and {', '.join(classes[1])} in "
            f"{source / SPLITS[1]}, expected the same in both, at most {NUM_CLASSES}; see --data"
        )
    target.mkdir(parents=True, exist_ok=True)
    resize = v2.Resize((SIZE, SIZE))
    for split, folder in zip(SPLITS, folders):
        images = np.empty((len(folder), 3, SIZE, SIZE), dtype=np.uint8)
        for index in tqdm(range(len(folder)), desc=split, unit="images", mininterval=5.0):
            images[index] = np.asarray(resize(folder[index][0])).transpose(2, 0, 1)
        np.save(target / f"{split}.npy", images)
        np.save(target / f"{split}-labels.npy", np.asarray(folder.targets, dtype=np.int64))
