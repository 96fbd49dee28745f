"""Regions: their text, the regions that round trips show, and the mesh over them."""

from __future__ import annotations

import itertools
import random

import pytest

from gossip_modules.regions import INSIDE_SECONDS, Regions, find_regions


def trips(places: list[float], *, seconds: float = 0.02, inside: float = 0.0002) -> dict[tuple[int, int], float]:
    """Round trips of hosts at places on a line."""
    pairs = itertools.combinations(range(len(places)), 2)
    return {(u, v): inside + seconds * abs(places[u] - places[v]) for u, v in pairs}


HOSTS = "abcdef"


@pytest.mark.parametrize("text", ["0-3,4-7", "0,1-2", "0+2,1+3", "0-1+4,2-3", "0-5"])
def test_a_text_of_regions_is_read_and_written_alike(text: str) -> None:
    assert str(Regions.of(text)) == text
    assert Regions.of(Regions.of(text).members) == Regions.of(Regions.of(text)) == Regions.of(text)


@pytest.mark.parametrize("wrong", ["", "0-1,1-2", "0-1,3", "a-b", "0-1,,2", "1-2", "3-0"])
def test_wrong_regions(wrong: str) -> None:
    with pytest.raises(ValueError, match="expected regions of ranks, each rank from 0 on once, such as '0-3,4-7'"):
        Regions.of(wrong)


def test_regions_of_ranks() -> None:
    regions = Regions.of("0+2,1+3")
    assert [regions.of_rank(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert regions.separate(0, 1)
    assert not regions.separate(1, 3)
    assert Regions.of("0-1,2-3,4-5").size == 2
    for text in ("0+2,1+3", "0-2,3"):
        with pytest.raises(ValueError, match=r"got regions .*expected equally many consecutive ranks in each"):
            assert Regions.of(text).size


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([0, 0, 1, 1], "0-1,2-3"),
        ([0, 1, 0, 1], "0+2,1+3"),  # hosts are not in the order of regions
        ([0, 0, 0, 1], "0-2,3"),
        ([0, 0, 1, 1, 3, 3], "0-1,2-3,4-5"),  # 20, 40 and 60 ms
        ([0, 0, 0, 0], "0-3"),
        ([0, 1], "0,1"),
    ],
)
def test_hosts_are_grouped_by_a_gap_in_round_trips(places: list[float], expected: str) -> None:
    found = find_regions(trips(places), HOSTS[: len(places)])
    assert str(found.regions) == expected
    if found.between is None:
        assert len(found.regions.members) == 1
    else:
        assert found.between >= 0.02
        assert found.inside is None or found.inside < 0.001


def test_noise_of_a_factor_of_two_changes_nothing() -> None:
    draw = random.Random(0)
    for _ in range(100):
        noisy = {pair: draw.uniform(1, 2) * seconds for pair, seconds in trips([0, 0, 0, 1, 1, 1]).items()}
        assert str(find_regions(noisy, HOSTS).regions) == "0-2,3-5"


def test_short_round_trips_are_one_region_however_large_their_ratios() -> None:
    found = find_regions({(0, 1): 1e-5, (0, 2): INSIDE_SECONDS, (1, 2): INSIDE_SECONDS}, HOSTS[:3])
    assert str(found.regions) == "0-2"
    assert (found.inside, found.between) == (INSIDE_SECONDS, None)


def test_ranks_of_one_host_are_in_one_region_and_pairs_may_be_missing() -> None:
    found = find_regions({(0, 2): 0.03, (0, 1): 5e-4}, ["a", "a", "b", "b"])
    assert str(found.regions) == "0-1,2-3"
    assert (found.inside, found.between) == (5e-4, 0.03)


def test_one_host_is_one_region() -> None:
    assert str(find_regions({}, ["a"]).regions) == "0"


def test_one_late_pair_between_near_hosts_does_not_part_them() -> None:
    late = {**trips([0, 0, 0]), (0, 1): 0.5}  # both are near to the third host
    assert str(find_regions(late, HOSTS[:3]).regions) == "0-2"
