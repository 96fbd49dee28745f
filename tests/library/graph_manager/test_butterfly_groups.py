"""Butterfly groups: against the formula of the paper, and as a partition that mixes everyone in every world."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gossip_modules.graph_manager.butterfly_groups import ButterflyGroups, default_group_size

WORLDS = (*range(1, 10), 12, 15, 16, 17, 32)


def group_sizes(world_size: int) -> list[int]:
    """All powers of two that fit."""
    return [1 << i for i in range(world_size.bit_length())]


def rounds(n: int) -> range:
    """Rounds that show all groups of a world."""
    return range(n.bit_length() if n.bit_count() == 1 else 2 * n)


CASES = [(n, size) for n in WORLDS for size in group_sizes(n)]
POWERS = [(n, size) for n, size in CASES if n.bit_count() == 1]


def formula(rank: int, t: int, num_bits: int, num_masks: int) -> set[int]:
    """The ranks that differ from `rank` only in bits t g, ..., t g + g - 1 modulo p."""
    free = sum(1 << (t * num_masks + i) % num_bits for i in range(num_masks))
    return {other for other in range(1 << num_bits) if (other ^ rank) & ~free == 0}


def averaging_matrix(groups: ButterflyGroups, t: int) -> Tensor:
    """W(t), float64 [n, n]."""
    W = torch.zeros(groups.world_size, groups.world_size, dtype=torch.float64)
    for rank in range(groups.world_size):
        W[rank, list(groups.members(rank, t))] = 1 / groups.num_members(rank, t)
    return W


@pytest.mark.parametrize(("n", "size"), POWERS)
def test_members_are_those_of_the_paper(n: int, size: int) -> None:
    groups = ButterflyGroups(n, group_size=size)
    for t in range(13):
        for rank in range(n):
            expected = formula(rank, t, n.bit_length() - 1, size.bit_length() - 1)
            assert groups.members(rank, t) == tuple(sorted(expected))
            assert groups.num_members(rank, t) == size


def test_the_example_of_the_paper() -> None:
    groups = ButterflyGroups(8, group_size=4)
    assert [groups.masks(t) for t in range(4)] == [(1, 2), (4, 1), (2, 4), (1, 2)]
    assert groups.members(5, 1) == (0, 1, 4, 5)
    assert groups.members(6, 1) == (2, 3, 6, 7)


@pytest.mark.parametrize(("n", "size"), CASES)
def test_groups_are_a_partition(n: int, size: int) -> None:
    groups = ButterflyGroups(n, group_size=size)
    for t in rounds(n):
        for rank in range(n):
            members = groups.members(rank, t)
            assert rank in members
            assert all(groups.members(other, t) == members for other in members)
            # A rank that is left over joins the group of one that is not.
            assert len(members) == 1 if size == 1 else size <= len(members) <= 2 * size


@pytest.mark.parametrize(("n", "size"), CASES)
def test_phases_give_all_members_the_mean_of_their_group(n: int, size: int) -> None:
    groups = ButterflyGroups(n, group_size=size)
    for t in rounds(n):
        heard = [{rank} for rank in range(n)]  # whose vectors are in the mean of each rank
        todo = [list(groups.phases(rank, t)) for rank in range(n)]
        outgoing: dict[tuple[int, int], set[int]] = {}
        posted = [0] * n  # phases whose message is out
        while any(todo):
            num_left = sum(map(len, todo))
            for rank in range(n):
                while todo[rank]:
                    out_peer, in_peer, is_first, weight = todo[rank][0]
                    num_phases = len(groups.phases(rank, t))
                    if out_peer is not None and posted[rank] == num_phases - len(todo[rank]):
                        outgoing[rank, out_peer] = heard[rank]
                    posted[rank] = num_phases - len(todo[rank]) + 1
                    if in_peer is not None:
                        if (in_peer, rank) not in outgoing:
                            break
                        message = outgoing.pop((in_peer, rank))
                        theirs = weight if is_first else 1 - weight
                        both = len(message) + len(heard[rank])
                        assert theirs == 1 or not message & heard[rank], "counted twice"
                        assert theirs == 1 or theirs == pytest.approx(len(message) / both)
                        heard[rank] = message if theirs == 1 else heard[rank] | message
                    todo[rank].pop(0)
            assert sum(map(len, todo)) < num_left, "all wait for each other"
        assert not outgoing, "a message that nobody receives"
        assert [tuple(sorted(ranks)) for ranks in heard] == [groups.members(rank, t) for rank in range(n)]


@pytest.mark.parametrize(("n", "size"), [case for case in POWERS if case[1] > 1])
@pytest.mark.parametrize("start", [0, 1, 5])
def test_the_average_is_exact_after_log_s_p_rounds(n: int, size: int, start: int) -> None:
    groups = ButterflyGroups(n, group_size=size)
    product = torch.eye(n, dtype=torch.float64)
    num_rounds = 0
    while size**num_rounds < n:
        assert num_rounds == 0 or (product - 1 / n).abs().max() > 1e-9
        product = averaging_matrix(groups, start + num_rounds) @ product
        num_rounds += 1
    assert num_rounds == groups.num_rounds_to_mix
    torch.testing.assert_close(product, torch.full((n, n), 1 / n, dtype=torch.float64))


@pytest.mark.parametrize(("n", "size"), [case for case in CASES if case[1] > 1])
def test_every_world_converges(n: int, size: int) -> None:
    groups = ButterflyGroups(n, group_size=size)
    product = torch.eye(n, dtype=torch.float64)
    for t in range(4 * n):
        product = averaging_matrix(groups, t) @ product
    assert (product - 1 / n).abs().max() < 1e-3


def test_groups_of_one_say_nothing() -> None:
    groups = ButterflyGroups(6, group_size=1)
    assert groups.num_rounds_to_mix == 0
    assert all(groups.members(rank, t) == (rank,) and not groups.phases(rank, t) for rank in range(6) for t in range(6))


def test_the_default_size_is_the_root_of_the_world_rounded_up() -> None:
    sizes = {n: default_group_size(n) for n in (1, 2, 3, 4, 7, 8, 16, 17, 32, 64, 100, 256)}
    assert sizes == {1: 1, 2: 2, 3: 2, 4: 2, 7: 2, 8: 4, 16: 4, 17: 4, 32: 8, 64: 8, 100: 8, 256: 16}
    assert ButterflyGroups(64).group_size == 8


@pytest.mark.parametrize("size", [0, -2, 3, 8, 16])
def test_a_size_that_does_not_fit_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=rf"got group_size={size} for 6 ranks, expected a power of two from 1 to 4"):
        ButterflyGroups(6, group_size=size)


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="got world_size=0, expected at least 1"):
        ButterflyGroups(0)
    for rank, t in ((8, 0), (-1, 0), (0, -1)):
        with pytest.raises(ValueError, match=f"got rank={rank}, t={t}, expected rank 0 to 7 and t >= 0"):
            ButterflyGroups(8).members(rank, t)


def test_repr_is_complete() -> None:
    assert repr(ButterflyGroups(8)) == "ButterflyGroups(8, group_size=4)"
