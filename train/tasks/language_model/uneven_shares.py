"""Shares of a text that differ from rank to rank in the folders that they come from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gossip_modules import partitions
from train.tasks.language_model.text_folder import Passage, TextFile

BLOCK_BYTES = 4096
"""Of the blocks that text is dealt out in, where each rank gets MIN_BLOCKS of them; of less text they are smaller."""
MIN_BLOCKS = 64


def uneven_share_of(files: Sequence[TextFile], rank: int, world_size: int, *, alpha: float, seed: int) -> list[Passage]:
    """The part of `files` that belongs to `rank`: as many bytes as every other rank's, from folders of its own mix.

    The folder of a file, the first of its path, is its class; files that lie in no folder are a class together. The
    text, class by class, is cut into blocks of equal length, of which each is of the class in which it begins.
    `partitions.dirichlet` deals them out. A line belongs to the block in which it begins, so where lines are longer
    than blocks, of at most 4 KiB, shares are not of equal length. What is left then, less than a block for each rank
    and one more, nobody reads.

    Args:
        files: the files of all ranks.
        rank, world_size: whose part it is, of how many.
        alpha: concentration, > 0; the smaller, the fewer folders a rank sees.
        seed: the same on every rank.

    Raises:
        ValueError: all files are of one class.
    """
    folders = sorted({_folder(file) for file in files if file.size})
    if len(folders) < 2:
        where = f"all in {folders[0]}/" if folders and folders[0] else "none of them in a folder"
        raise ValueError(
            f"got dirichlet_alpha={alpha} and {len(files)} training files, {where}, expected files in two folders at "
            "least, since the folder is what shares differ in; sort files into folders below --data-dir, or pass "
            "--dirichlet-alpha 0"
        )
    ordered = sorted((file for file in files if file.size), key=_folder)  # stable: as before within a folder
    ends = np.cumsum([file.size for file in ordered])
    block = max(1, min(BLOCK_BYTES, int(ends[-1]) // (MIN_BLOCKS * world_size)))
    starts = np.arange(int(ends[-1]) // block) * block
    labels = np.array([folders.index(_folder(file)) for file in ordered])
    of_blocks = labels[np.searchsorted(ends, starts, side="right")]
    shard = np.sort(partitions.dirichlet(of_blocks, world_size, alpha=alpha, seed=seed)[rank])
    return _passages(ordered, ends, starts[shard], block)


def _passages(files: Sequence[TextFile], ends: np.ndarray, starts: np.ndarray, block: int) -> list[Passage]:
    """The blocks that begin at `starts`, ascending, of files that lie one after the other, with these `ends`."""
    passages: list[Passage] = []
    for start in starts.tolist():
        position = start
        while position < start + block:
            number = int(np.searchsorted(ends, position, side="right"))
            file, first = files[number], int(ends[number]) - files[number].size
            end = min(start + block, int(ends[number]))
            begin = position - first
            if passages and passages[-1].file is file and passages[-1].end == begin:
                begin = passages.pop().start  # blocks that follow each other are one passage
            passages.append(Passage(file, begin, end - first))
            position = end
    return passages


def _folder(file: TextFile) -> str:
    """The first folder of its path; "": it lies in none."""
    return file.name.partition("/")[0] if "/" in file.name else ""
