"""States: declared attributes, which are saved, loaded, copied and begun anew by one call on the root."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from gossip_modules.state import Restart, State, branch, leaf, transient


class Links(State):
    numbers: dict[int, int] = leaf({}, is_by_peer=True)


class Part(State):
    momentum: Tensor = leaf(torch.zeros(2), average="on_request")
    anchor: Tensor = leaf(torch.zeros(2), average="reset", join="zero")
    total: Tensor = leaf(torch.zeros(2), generation="reset")
    rate: float | None = leaf(None)
    has_begun: bool = leaf(False, is_saved=False, average="reset", generation="reset")


class Root(State):
    t: int = leaf(0, is_needed=True)
    _names: set[str] = leaf(set(), name="agreed", save=sorted, load=set)
    part: Part = branch()
    pieces: list[Part] = branch()
    links: Links = branch(is_flat=True)
    missing: Part | None = branch()
    thread: threading.Thread | None = transient(None)
    buffer: list[int] = transient([])
    kept: list[int] = leaf([], is_saved=False, is_copied=False)

    def __init__(self) -> None:
        self.part, self.pieces, self.links = Part(), [Part(), Part()], Links()


def filled() -> Root:
    """A tree without any value that it starts with."""
    root = Root()
    root.t, root._names, root.links.numbers = 7, {"b", "a"}, {1: 10, 2: 20}
    root.thread, root.buffer, root.kept = threading.current_thread(), [1], [2]
    for k, part in enumerate((root.part, *root.pieces)):
        part.momentum, part.anchor, part.total = (torch.full((2,), 10.0 * k + j) for j in range(3))
        part.rate, part.has_begun = 0.5, True
    return root


def check_equal(one: Any, other: Any) -> None:
    if isinstance(one, Mapping):
        assert one.keys() == other.keys()
        for name in one:
            check_equal(one[name], other[name])
    elif isinstance(one, list):
        for x, y in zip(one, other, strict=True):
            check_equal(x, y)
    elif isinstance(one, Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def test_a_loaded_state_is_a_copy_and_equal() -> None:
    one, other = filled(), Root()
    state = one.state_dict()
    assert state["agreed"] == ["a", "b"]
    assert state["numbers"] == {1: 10, 2: 20}
    assert [part["rate"] for part in state["pieces"]] == [0.5, 0.5]
    other.load_state_dict(state)
    check_equal(other.state_dict(), state)
    assert other._names == {"a", "b"}
    other.part.momentum.fill_(77)
    other.links.numbers[1] = 0
    check_equal(one.state_dict(), filled().state_dict())


def test_each_object_starts_with_values_of_its_own() -> None:
    one, other = Root(), Root()
    one.links.numbers[3] = 4
    one.buffer.append(5)
    one.part.momentum.fill_(6)
    check_equal(other.state_dict(), Root().state_dict())
    assert not other.buffer


def test_an_empty_state_restarts_all_but_transient_values() -> None:
    root = filled()
    root.load_state_dict({})
    check_equal(root.state_dict(), Root().state_dict())
    assert not root.part.has_begun
    assert not root.kept
    assert root.thread is not None
    assert root.buffer == [1]


def test_a_value_that_a_state_lacks_begins_anew() -> None:
    root = filled()
    root.load_state_dict({"t": 3, "part": {"rate": 0.25}})
    assert (root.t, root.part.rate, root.pieces[0].rate, root.links.numbers) == (3, 0.25, None, {})
    assert not root.part.momentum.any()


RESTARTED = {
    Restart.ALL: {"momentum", "anchor", "total", "rate", "has_begun"},
    Restart.REQUEST: {"momentum", "anchor", "has_begun"},
    Restart.AVERAGE: {"anchor", "has_begun"},
    Restart.GENERATION: {"total", "has_begun"},
}


@pytest.mark.parametrize("event", Restart)
def test_an_event_restarts_the_leaves_that_declare_it(event: Restart) -> None:
    root, before, start = filled(), filled(), Part()
    root.restart(event)
    for part, old in zip((root.part, *root.pieces), (before.part, *before.pieces), strict=True):
        for name in RESTARTED[Restart.ALL]:
            check_equal(getattr(part, name), getattr(start if name in RESTARTED[event] else old, name))
    assert (root.t == 0) == (event is Restart.ALL)


def test_a_joining_worker_gets_neither_links_nor_values_of_one_worker() -> None:
    state = filled().state_dict(joins=True)
    assert set(state) == {"t", "agreed", "part", "pieces"}
    assert all(set(part) == {"momentum", "rate"} for part in (state["part"], *state["pieces"]))
    assert "numbers" not in filled().state_dict(has_links=False)


def test_peers_get_other_ranks() -> None:
    root = filled()
    root.renumber({2: 0})
    assert root.links.numbers == {0: 20}


def test_a_copy_has_all_but_transient_values() -> None:
    root = filled()
    copied = copy.deepcopy(root)
    check_equal(copied.state_dict(), root.state_dict())
    assert copied.part.has_begun
    assert copied.thread is None
    assert not copied.buffer
    assert not copied.kept
    copied.part.momentum.fill_(77)
    check_equal(root.state_dict(), filled().state_dict())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"moments": []}, r"got a state of .* of version unknown with the entries \[.*'moments'.*expected version 1"),
        ({"version": 2}, "of version 2"),
        ({"t": None}, "expected version 1"),
        ({"pieces": [{}, {"moments": 3}]}, "'moments'"),
    ],
)
def test_a_state_of_another_layout_is_refused_and_changes_nothing(change: dict[str, Any], match: str) -> None:
    root, other = Root(), filled()
    state = {name: value for name, value in {**other.state_dict(), **change}.items() if value is not None}
    with pytest.raises(ValueError, match=match):
        root.load_state_dict(state)
    check_equal(root.state_dict(), Root().state_dict())
    root.load_state_dict({**other.state_dict(), "version": 1})
    check_equal(root.state_dict(), other.state_dict())


class Model(State):
    """x_i <- x_i + (W - I) s at the step where a round is due, beside one optimizer step per step."""

    k: int = leaf(0)
    x: Tensor = leaf(torch.zeros(4, 3, dtype=torch.float64))
    flight: tuple[int, Tensor] | None = leaf(None)

    def step(self, mixing: Tensor, target: Tensor, *, first: int, delay: int) -> None:
        if self.flight is not None and self.k >= self.flight[0]:
            self.x += self.flight[1]
            self.flight = None
        if self.flight is None and self.k % (delay + 1) == first:
            self.flight = self.k + delay, mixing @ self.x - self.x
        self.x -= 0.1 * (self.x - target)
        self.k += 1


@pytest.mark.parametrize("delay", [1, 3])
@pytest.mark.parametrize("resumed_at", [3, 8, 17])
def test_a_run_goes_on_bit_equal_from_a_state_with_a_round_in_flight(delay: int, resumed_at: int) -> None:
    mixing = (torch.eye(4, dtype=torch.float64) + torch.eye(4, dtype=torch.float64).roll(1, 0)) / 2
    target = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    straight, resumed = Model(), Model()
    for k in range(40):
        if k == resumed_at:
            state, resumed = resumed.state_dict(), Model()
            resumed.load_state_dict(state)
        for model in (straight, resumed):
            model.step(mixing, target, first=0, delay=delay)
    assert torch.equal(straight.x, resumed.x)
