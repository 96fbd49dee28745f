"""Matrices for the consensus experiment, one per worker: pure functions of (name, seed, worker)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FACE_SIZE = 64
_DEFAULT_SIZE = 100


def _normal(seed: int, rank: int, size: int) -> Tensor:
    key = int(np.random.SeedSequence((seed, rank)).generate_state(1, np.uint64)[0] >> np.uint64(1))
    return torch.randn(size, size, generator=torch.Generator().manual_seed(key), device="cpu")


def _sparse(seed: int, rank: int, size: int) -> Tensor:
    matrix = torch.zeros(size, size, device="cpu")
    matrix.view(-1)[rank] = 1.0
    return matrix


DATA: Mapping[str, Callable[[int, int, int], Tensor] | None] = {
    "random": _normal,
    "offset": lambda seed, rank, size: _normal(seed, rank, size) + rank,
    "sparse": _sparse,
    "lognormal": lambda seed, rank, size: _normal(seed, rank, size).exp(),
    "faces": None,
}
"""random: standard normal; offset: with the worker's rank added; sparse: one 1, at the rank; lognormal; faces: the
first picture of another person each (Olivetti, 64 x 64 pixels in [0, 1])."""


def make_matrices(name: str, *, num_workers: int, size: int = 0, seed: int = 0, data_dir: Path) -> list[Tensor]:
    """The matrices of all workers, float32 [size, size].

    Args:
        name: key of DATA.
        num_workers: how many.
        size: rows and columns; 0: 100, or the 64 of faces.
        seed: the seed of all random numbers.
        data_dir: folder that may hold scikit_learn/ with the faces; nothing is ever downloaded.

    Raises:
        ValueError: the faces are not there, or too few or of another size; or a size too small for the workers.
    """
    make = DATA[name]
    if make is None:
        return _faces(num_workers, size, data_dir)
    size = size or _DEFAULT_SIZE
    if size < 1 or size * size < num_workers:
        raise ValueError(f"got matrix_size={size} for {num_workers} workers, expected an entry for each; raise it")
    return [make(seed, rank, size) for rank in range(num_workers)]


def _faces(num_workers: int, size: int, data_dir: Path) -> list[Tensor]:
    from sklearn.datasets import fetch_olivetti_faces

    if size not in (0, FACE_SIZE):
        raise ValueError(f"got matrix_size={size} for faces, expected the {FACE_SIZE} pixels they have; leave it out")
    home = data_dir / "scikit_learn"
    try:
        faces = fetch_olivetti_faces(data_home=str(home), download_if_missing=False)
    except OSError as error:
        raise ValueError(
            f"got no Olivetti faces in {home} ({error}), expected the file that scikit-learn keeps; on a machine with "
            f"internet run sklearn.datasets.fetch_olivetti_faces(data_home={str(home)!r}), or take other --data"
        ) from error
    pictures = [faces.images[np.flatnonzero(faces.target == person)[0]] for person in np.unique(faces.target)]
    if num_workers > len(pictures):
        raise ValueError(f"got {num_workers} workers, expected at most {len(pictures)}, one per person; take fewer")
    return [torch.from_numpy(np.ascontiguousarray(picture, dtype=np.float32)) for picture in pictures[:num_workers]]
