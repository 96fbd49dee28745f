"""Whom an error names as dead, late or gone."""

from __future__ import annotations

import re

_NUMBERS = r"\[?\d+(?:(?:, and |, | and | to )\d+)*\]?"
_RANKS = re.compile(rf"(?P<members>\b(?:among|of)(?: all)? )?\branks? (?P<numbers>{_NUMBERS})", re.IGNORECASE)
_WORKERS = re.compile(r"'w(\d+)'")


def accused(text: str, *, rank: int) -> set[int]:
    """The ranks that the message of an error on `rank` names, itself apart.

    "rank 2", "ranks 1 and 2", "ranks [1, 2]", "ranks 1 to 3" and "worker 'w2'" name; lists of members do not: those
    that `rank` itself is in, and those after "among" or "of".
    """
    found = {int(worker) for worker in _WORKERS.findall(text)}
    for match in _RANKS.finditer(text):
        ranks = _ranks_in(match["numbers"])
        is_list = len(ranks) > 1
        if not is_list or (rank not in ranks and not match["members"]):
            found |= ranks
    return found - {rank}


def _ranks_in(numbers: str) -> set[int]:
    ranks: set[int] = set()
    for first, last in re.findall(r"(\d+)(?: to (\d+))?", numbers):
        ranks |= set(range(int(first), int(last or first) + 1))
    return ranks
