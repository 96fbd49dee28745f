"""Shares of a text that are uneven in its folders: how long, what they cover, how uneven, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from train.tasks.language_model.text_folder import Passage, TextFile, read, share_of
from train.tasks.language_model.uneven_shares import BLOCK_BYTES, uneven_share_of

SIZES = {"a": 30_000, "b": 50_000, "c": 20_000, "": 25_000}  # of each of two files


def files_of(folder: Path, sizes: dict[str, int] = SIZES) -> list[TextFile]:
    """Two files in each folder, lines of ten bytes, no two of them the same."""
    files = []
    for number in (1, 2):
        for name, size in sizes.items():
            path = folder / name / "deep" / f"{number}.txt" if name else folder / f"{number}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{name or '-'}{number}{i:07}\n" for i in range(size // 10)))
            files.append(TextFile(path.relative_to(folder).as_posix(), path, size))
    return files


def shares(files: list[TextFile], num_ranks: int, alpha: float, seed: int = 1) -> list[list[Passage]]:
    return [uneven_share_of(files, rank, num_ranks, alpha=alpha, seed=seed) for rank in range(num_ranks)]


def lines_of(passages: list[Passage]) -> list[str]:
    return "".join(piece for passage in passages for piece in read(passage)).splitlines()


def folders_of(passages: list[Passage]) -> Counter[str]:
    """The number of lines from each folder."""
    return Counter(line[0] for line in lines_of(passages))


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
@pytest.mark.parametrize("alpha", [0.05, 100.0])
def test_shares_are_of_equal_length_disjoint_and_leave_out_less_than_a_block_for_each(
    tmp_path: Path, num_ranks: int, alpha: float
) -> None:
    files = files_of(tmp_path)
    all_shares = shares(files, num_ranks, alpha)
    total = sum(file.size for file in files)
    block = min(BLOCK_BYTES, total // (64 * num_ranks))
    sizes = {sum(passage.end - passage.start for passage in share) for share in all_shares}
    assert sizes == {total // block // num_ranks * block}
    assert total - num_ranks * sizes.pop() < (num_ranks + 1) * block
    lines = [line for share in all_shares for line in lines_of(share)]
    assert len(set(lines)) == len(lines), "every line is read once"
    assert len(lines) > 0.97 * total / 10


def test_alpha_sets_how_uneven_the_folders_of_a_share_are(tmp_path: Path) -> None:
    files = files_of(tmp_path)

    def largest(alpha: float) -> float:
        counts = [folders_of(share) for share in shares(files, 4, alpha)]
        return float(np.mean([max(count.values()) / count.total() for count in counts]))

    assert largest(0.05) > 0.65
    assert largest(1000.0) < 0.5  # 0.4 would be even
    assert shares(files, 4, 0.1) == shares(files, 4, 0.1)
    assert shares(files, 4, 0.1) != shares(files, 4, 0.1, seed=2)
    even = [folders_of(share_of(files, rank, 4)) for rank in range(4)]
    assert folders_of(uneven_share_of(files, 0, 4, alpha=0.05, seed=1)) != even[0]


def test_blocks_that_follow_each_other_are_one_passage(tmp_path: Path) -> None:
    """As the end of a passage is marked in the packed text."""
    files = files_of(tmp_path)
    (share,) = shares(files, 1, 0.5)
    assert len(share) == len(files)


def test_long_texts_are_dealt_out_in_blocks_of_one_size() -> None:
    """Files are not read for that."""
    files = [TextFile(f"{name}/x.txt", Path(name), 3_000_000) for name in "abc"]
    num_blocks = 9_000_000 // BLOCK_BYTES
    for share in shares(files, 2, 10.0):
        assert sum(passage.end - passage.start for passage in share) == num_blocks // 2 * BLOCK_BYTES
        assert len(share) > 100, "blocks of a folder are drawn at random"


@pytest.mark.parametrize(("sizes", "where"), [({"a": 900}, "all in a/"), ({"": 900}, "none of them in a folder")])
def test_one_folder_alone_is_refused(tmp_path: Path, sizes: dict[str, int], where: str) -> None:
    files = files_of(tmp_path, sizes)
    with pytest.raises(ValueError, match=rf"got dirichlet_alpha=0\.1 and 2 training files, {where}, expected files in"):
        uneven_share_of(files, 0, 2, alpha=0.1, seed=1)
