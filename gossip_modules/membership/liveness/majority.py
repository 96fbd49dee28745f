"""Which workers are left out of the next generation, and whether enough remain to form one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..view import Accusation, Member


def left_out(
    members: Sequence[int],
    candidates: Mapping[int, Member],
    accusations: Sequence[Accusation],
    left: Mapping[int, str],
    *,
    on_partition: str,
) -> dict[int, str] | None:
    """Who is left out, and why; None: too few would remain. See [Note: majority] of `Roster`.

    Args:
        members: of the generation that trains.
        candidates: for the next one.
        accusations: in their order.
        left: why each of those who have said so leaves.
        on_partition: "majority" or "both".
    """

    def is_enough(gone: Mapping[int, str]) -> bool:
        return on_partition == "both" or has_majority(members, gone, accusations, left)

    gone = dict(left)
    for accusation in accusations:
        if accusation.by not in gone and accusation.of not in gone:
            gone[accusation.of] = accusation.why
    if is_enough(gone):
        return gone
    gone = dict(left)
    while open_ones := [a for a in accusations if a.by not in gone and a.of not in gone]:
        count = {worker: sum(worker in (a.by, a.of) for a in open_ones) for worker in candidates if worker not in gone}
        worst = max(count, key=lambda worker: (count[worker], candidates[worker].number))
        gone[worst] = next((a.why for a in open_ones if a.of == worst), None) or next(
            f"it said of worker {candidates[a.of].number}: {a.why}" for a in open_ones if a.by == worst
        )
    return gone if is_enough(gone) else None


def has_majority(
    members: Sequence[int], gone: Mapping[int, str], accusations: Sequence[Accusation], left: Mapping[int, str]
) -> bool:
    """Whether those who are not gone are more than half of the members whose end was not seen, or half with the first.

    Args:
        members: of the generation that trains.
        gone: those who would be left out.
        accusations: who accuses from outside proves nothing about those inside.
        left: have said so.
    """
    ended = {a.of for a in accusations if a.is_sure and a.by not in gone} | set(left)
    counted = [worker for worker in members if worker not in ended]
    remaining = [worker for worker in counted if worker not in gone]
    if not counted:
        return True
    return 2 * len(remaining) > len(counted) or (2 * len(remaining) == len(counted) and remaining[0] == counted[0])


def add_accusation(accusations: list[Accusation], new: Accusation) -> bool:
    """Append an accusation, or put it in the place of what was less sure or holds less long; whether that is new.

    Args:
        accusations: in their order; changed.
        new: the same worker may accuse the same one again, when that has ended.
    """
    for i, old in enumerate(accusations):
        if (old.by, old.of) == (new.by, new.of):
            is_surer = new.is_sure and not old.is_sure
            holds_longer = old.generation > 0 == new.generation and not old.is_sure
            if is_surer or holds_longer:
                accusations[i] = new
            return is_surer
    accusations.append(new)
    return True
