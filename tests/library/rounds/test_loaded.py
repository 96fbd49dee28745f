"""States in checkpoints: a state in the layout of another version is refused, and nothing has changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch.distributed as dist

from gossip_modules import DiLoCo, SlowMo, StreamingDiLoCo
from gossip_modules.algorithms.choco import LinkChoco
from gossip_modules.extend import Algorithm
from tests.harness.ranks import run_ranks
from tests.library.rounds.test_transactions import ALGORITHMS, NUM_RANKS, Rank, check_equal

KEPT = [a for a in ALGORITHMS if not isinstance(a, LinkChoco)]


def trained(group: dist.ProcessGroup, algorithm: Algorithm, num_rounds: int = 4) -> Rank:
    rank = Rank(group, algorithm)
    for _ in range(num_rounds):
        rank.train()
        rank.round()
    rank.engine.flush(rank.x)
    return rank


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """The layout of the first versions: the tensors beside the name of the algorithm, and no memory."""
    memory = state["memory"]
    tensors = {**memory.get("vectors", {}), **{f"link {j}": link for j, link in memory.get("links", {}).items()}}
    return {"algorithm": state["algorithm"], "graph": "RingGraph(3)", **tensors}


def newer(state: dict[str, Any]) -> dict[str, Any]:
    """The layout of a later version."""
    return {**state, "memory": {**state["memory"], "version": 2}}


def unknown(state: dict[str, Any]) -> dict[str, Any]:
    """A memory with an entry that no version here has."""
    return {**state, "memory": {**state["memory"], "moments": []}}


def without_memory(state: dict[str, Any]) -> dict[str, Any]:
    """All but the memory."""
    return {name: value for name, value in state.items() if name != "memory"}


LAYOUTS = {flat: "unknown", newer: "2", unknown: "", without_memory: "unknown"}


def parts_of(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The state of each fragment."""
    return state.get("fragments", [state])


@pytest.mark.parametrize("algorithm", KEPT, ids=repr)
def test_a_state_of_another_layout_is_refused_and_changes_nothing(algorithm: Algorithm) -> None:
    """Also if only the last fragment of several is in the other layout."""

    def body(group: dist.ProcessGroup) -> None:
        rank = trained(group, algorithm)
        saved = copy.deepcopy(rank.engine.state_dict())
        for change in LAYOUTS:
            other = copy.deepcopy(saved)
            last = parts_of(other["gossiper"])[-1]
            if change is flat and len(flat(last)) == 2:
                continue  # the algorithm keeps nothing
            changed = change(last)
            last.clear()
            last.update(changed)
            other["t"], other["step"] = 77, 78
            with pytest.raises(ValueError, match=r"got a state of .* of version .*, expected version 1 with entries"):
                rank.engine.load_state_dict(other)
            check_equal(rank.engine.state_dict(), saved)
        rank.engine.load_state_dict(saved)
        rank.train()
        rank.round()

    run_ranks(NUM_RANKS, body)


def renamed(memory: dict[str, Any]) -> bool:
    """Give all vectors of a memory other names; returns whether it has any."""
    for name in list(memory.get("vectors", {})):
        for entries in (memory["vectors"], memory["policies"]):
            entries[f"old {name}"] = entries.pop(name)
    return bool(memory.get("vectors")) or ("inner" in memory and renamed(memory["inner"]))


@pytest.mark.parametrize("algorithm", KEPT, ids=repr)
def test_vectors_of_other_names_are_not_begun_anew(algorithm: Algorithm) -> None:
    """The round is refused before it sends anything, each time, and the state is still there."""

    def body(group: dist.ProcessGroup) -> None:
        rank = trained(group, algorithm)
        saved = copy.deepcopy(rank.engine.state_dict())
        other = copy.deepcopy(saved)
        if not any([renamed(part["memory"]) for part in parts_of(other["gossiper"])]):  # noqa: C419
            return
        rank.engine.load_state_dict(other)
        for _ in range(2):
            before = rank.x.raw.clone()
            with pytest.raises(ValueError, match=r"got a state with the vectors \[.*old .*\], expected \[.* in their"):
                rank.round()
            check_equal(rank.x.raw, before)
        rank.engine.load_state_dict(saved)
        rank.round()

    run_ranks(NUM_RANKS, body)


def test_states_without_a_version_are_loaded() -> None:
    """States of version 0.2.0 have none, and have None for values that are not there."""

    def body(group: dist.ProcessGroup) -> None:
        for algorithm in (DiLoCo(2), StreamingDiLoCo(4, fragments=2), SlowMo(2)):
            one, other = (trained(group, algorithm) for _ in range(2))
            state = copy.deepcopy(one.engine.state_dict())
            for part in parts_of(state["gossiper"]):
                assert part["memory"].pop("version") == 1
                part["optimizer"] = {"sgd_step": None, "step_rates": None, "inner_rate": None}
            other.engine.load_state_dict(state)
            for rank in (one, other):
                rank.round()
            check_equal(one.driver.memory.state_dict(), other.driver.memory.state_dict())

    run_ranks(NUM_RANKS, body)
