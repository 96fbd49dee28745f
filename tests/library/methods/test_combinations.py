"""Every method in rounds trains with a feature or refuses it with a reason, as docs/methods/combinations.md says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from gossip_modules import GossipDataParallel
from gossip_modules.methods import METHODS
from tests.harness.ranks import run_ranks
from tests.library.membership.conftest import _no_thread_stays
from tests.library.methods import combinations
from tests.library.methods.combinations import (
    COLUMNS,
    FAILS,
    NODES,
    NUM_RANKS,
    ROWS,
    TITLES,
    WORKS,
    Trained,
    failures,
    found_on,
    measure_among_ranks,
    measure_in_membership,
    measure_in_nodes,
    page_of,
    verdict,
)

__all__ = ["_no_thread_stays"]

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "methods" / "combinations.md").read_text(encoding="utf-8")
REMEDY = "make the page with `python -m tests.library.methods.combinations > docs/methods/combinations.md`"


def test_the_rows_are_the_methods_of_the_wrapper() -> None:
    in_rounds = {name for name, method in METHODS.items() if method.example.startswith("GossipDataParallel(")}
    assert set(ROWS) - set(TITLES) == in_rounds


SAMPLE = ("sgp", "choco", "diloco", "d2")
"""Rows that every run of the tests measures; the long tests measure the others."""


@pytest.mark.parametrize("row", [row if row in SAMPLE else pytest.param(row, marks=pytest.mark.soak) for row in ROWS])
def test_a_method_with_each_feature_acts_as_the_page_states(row: str) -> None:
    found = {**measure_among_ranks(row), **measure_in_membership(row)}
    assert not failures(found)
    stated = found_on(PAGE)[row]
    assert found == {column: text for column, text in stated.items() if column != NODES}, REMEDY


@pytest.mark.soak
@pytest.mark.e2e
def test_methods_with_nodes_of_two_act_as_the_page_states() -> None:
    found = measure_in_nodes()
    assert not {row: cells for row, cells in found.items() if failures(cells)}
    assert found == {row: {NODES: cells[NODES]} for row, cells in found_on(PAGE).items()}, REMEDY


def test_the_page_is_a_function_of_its_cells() -> None:
    found = found_on(PAGE)
    assert list(found) == list(ROWS)
    assert all(list(cells) == list(COLUMNS) for cells in found.values())
    assert page_of(found) == PAGE, REMEDY


GOOD = Trained(distance=0.5, alone=1.0, before=2.0, after=1.0)


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([GOOD] * 4, WORKS),
        (["X: got a with b, expected c: it cannot; leave b out"] * 4, "c: it cannot; leave b out"),
        (["got a, expected c, since it cannot"] * 4, "c, since it cannot"),
        ([GOOD] * 3 + [GOOD._replace(distance=1.0)], FAILS),
        ([GOOD] * 3 + [GOOD._replace(after=2.0)], FAILS),
        ([GOOD._replace(least=5, asked=5)] * 4, WORKS),
        ([GOOD] * 3 + [GOOD._replace(least=4, asked=5)], FAILS),
        ([GOOD] * 3 + [GOOD._replace(after=float("nan"))], FAILS),
        ([GOOD] * 3 + ["got a, expected c: it cannot"], FAILS),
        (["got a, expected c: it cannot"] * 3 + ["got a, expected d: it cannot"], FAILS),
        (["got a, expected c"] * 4, FAILS),
        (["it does not work"] * 4, FAILS),
    ],
)
def test_a_cell_has_the_result_of_all_ranks(results: list[Trained | str], expected: str) -> None:
    assert verdict(results).partition(": got")[0] == expected


def test_a_combination_that_raises_is_named_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both columns train in one group, which ends with the error of the first one."""
    train = combinations.train

    def train_or_raise(rank: int, row: str, column: str, group: dist.ProcessGroup | None) -> Trained | str:
        if column == "overlap":
            raise RuntimeError("broken")
        return train(rank, row, column, group)

    monkeypatch.setattr(combinations, "train", train_or_raise)
    found = measure_among_ranks("dpsgd", ["overlap", "plain"])
    assert found == {"overlap": "fails: RuntimeError: broken", "plain": WORKS}


def test_training_without_rounds_is_no_combination_that_works() -> None:
    """The bounds on distance and loss tell a wrapper that communicates from one that does not."""

    def body(group: dist.ProcessGroup) -> Trained:
        wrapper = GossipDataParallel(combinations.model(), process_group=group, rounds="manual")
        optimizer = combinations.optimizer_of(wrapper)
        for _ in range(combinations.NUM_STEPS):
            combinations.train_step(wrapper, optimizer, [group.rank()])
        return combinations.close(wrapper, tuple((rank,) for rank in range(NUM_RANKS)), combinations.NUM_STEPS)

    results = run_ranks(NUM_RANKS, body)
    assert results[0].distance == pytest.approx(results[0].alone)
    assert verdict(results).startswith(FAILS)
