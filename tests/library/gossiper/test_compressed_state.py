"""What compressed gossipers keep from round to round: checkpoints, copies, and ranks out of step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gossip_modules import PowerGossip
from gossip_modules.extend import FlatVector, PushPull
from gossip_modules.flat.layout import FlatLayout, TensorSpec
from gossip_modules.graph_manager import CompleteGraph
from gossip_modules.mixing_manager import MetropolisHastingsMixing
from tests.harness.problems import net
from tests.harness.ranks import HangUp, run_ranks, solo_group
from tests.library.gossiper.contract import (
    ANY_NAME,
    GOSSIPERS,
    MIXINGS,
    SPECS,
    bound,
    cases,
    restored,
    ring,
    train,
    vector_of,
    wrap,
)


@cases("star", "bipartite")
def test_a_checkpoint_continues_bit_for_bit(name: str, graph: str) -> None:
    """Also one that is taken before the first round, and one of a gossiper that has itself just been loaded."""

    def body(group: dist.ProcessGroup) -> None:
        for num_rounds in (0, 3):
            gossiper, s = bound(GOSSIPERS[name](), MIXINGS[graph], group), vector_of(group.rank())
            for t in range(num_rounds):
                gossiper.mix(s, t)
            between, resumed = (bound(GOSSIPERS[name](), MIXINGS[graph], group) for _ in range(2))
            between.load_state_dict(restored(gossiper.state_dict()))
            resumed.load_state_dict(restored(between.state_dict()))
            twin = s.clone()
            for t in range(num_rounds, num_rounds + 3):
                gossiper.mix(s, t)
                resumed.mix(twin, t)
                assert torch.equal(s.raw, twin.raw)

    run_ranks(4, body)


BROADCASTS = pytest.mark.parametrize("name", [name for name in GOSSIPERS if "PowerGossip" not in name])
_TENSORS = {
    "Choco": ("sections", {"public", "drift"}),
    "DeepSqueeze": ("sections", {"error"}),
    "Moniqua": ("sections", set()),
    "Sparta": ("sections", set()),
}
_VALUES = {"public": 0.25, "drift": 2.0}
_COUNTS = {"Choco": {"num_messages", "mixing"}}


@BROADCASTS
def test_the_keys_of_a_state_never_change(name: str) -> None:
    """Checkpoints hold them: a renamed key would make every earlier checkpoint unreadable."""
    gossiper, s = bound(GOSSIPERS[name](), ring(1), solo_group()), vector_of(0)
    gossiper.mix(s, 0)
    state, algorithm = gossiper.state_dict(), name.split()[0]
    list_key, names = _TENSORS[algorithm]
    counts = _COUNTS.get(algorithm, {"num_messages"})
    assert set(state) == {"algorithm", "peers", "digests", list_key, *counts}
    assert state["algorithm"] == algorithm
    assert [set(tensors) for tensors in state[list_key]] == [names] * len(state[list_key])
    assert state[list_key]


def test_a_state_written_by_hand_with_these_keys_is_loaded() -> None:
    """CHOCO in a world of one: x <- x + step_size drift, and nothing is exchanged."""
    gossiper, s = bound(GOSSIPERS["Choco SignNorm"](), ring(1), solo_group()), vector_of(0)
    num_compressed = sum(spec.numel for spec in SPECS)
    tensors = {name: torch.full((num_compressed,), value, dtype=torch.float64) for name, value in _VALUES.items()}
    state = {"algorithm": "Choco", "peers": [], "digests": [], "num_messages": 5, "sections": [tensors]}
    gossiper.load_state_dict({"mixing": repr(gossiper.mixing), **state})
    gossiper.mix(s, 5)
    expected = vector_of(0).segments[0][:num_compressed] + 0.3 * _VALUES["drift"]
    torch.testing.assert_close(s.segments[0][:num_compressed], expected, rtol=0, atol=1e-12)
    assert gossiper.state_dict()["num_messages"] == 6


@ANY_NAME
def test_a_loaded_state_is_a_copy(name: str) -> None:
    """The one that it came from goes on before the other one has begun."""

    def body(group: dist.ProcessGroup) -> None:
        gossiper, s = bound(GOSSIPERS[name](), ring(2), group), vector_of(group.rank())
        for t in range(3):
            gossiper.mix(s, t)
        resumed, twin = bound(GOSSIPERS[name](), ring(2), group), s.clone()
        resumed.load_state_dict(gossiper.state_dict())
        for t in range(3, 6):
            gossiper.mix(s, t)
        for t in range(3, 6):
            resumed.mix(twin, t)
        assert torch.equal(s.raw, twin.raw)

    run_ranks(2, body)


@ANY_NAME
def test_an_empty_state_starts_afresh(name: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        results = []
        gossiper = bound(GOSSIPERS[name](), ring(2), group)
        for _ in range(2):
            s = vector_of(group.rank())
            for t in range(3):
                gossiper.mix(s, t)
            results.append(s)
            gossiper.load_state_dict({})
        assert torch.equal(results[0].raw, results[1].raw)

    run_ranks(2, body)


@ANY_NAME
def test_a_copy_goes_its_own_way(name: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        gossiper, s = bound(GOSSIPERS[name](), ring(2), group), vector_of(group.rank())
        for t in range(3):
            gossiper.mix(s, t)
        other, twin = copy.deepcopy(gossiper), s.clone()
        for t in range(3, 6):
            gossiper.mix(s, t)
        for t in range(3, 6):
            other.mix(twin, t)
        assert torch.equal(s.raw, twin.raw)

    run_ranks(2, body)


@BROADCASTS
def test_a_state_of_another_algorithm_is_refused(name: str) -> None:
    gossiper = GOSSIPERS[name]()
    for key, other in GOSSIPERS.items():
        if "PowerGossip" not in key and type(other()) is not type(gossiper):
            donor, s = bound(other(), ring(1), solo_group()), vector_of(0)
            donor.mix(s, 0)
            kinds = type(donor).__name__, type(gossiper).__name__
            message = rf"got state \[.*\] of {kinds[0]}, expected that of {kinds[1]}; load a checkpoint of the same"
            with pytest.raises(ValueError, match=message):
                gossiper.load_state_dict(donor.state_dict())
            with pytest.raises(ValueError, match=r"got state \[.*\] of another algorithm, expected none for PushPull"):
                PushPull().load_state_dict(donor.state_dict())


@pytest.mark.parametrize("name", ["Choco TopK", "DeepSqueeze SignNorm", "PowerGossip"])
def test_a_state_of_another_model_is_refused(name: str) -> None:
    other = FlatLayout.of([(torch.float64, [TensorSpec((6, 6))])])

    def body(group: dist.ProcessGroup) -> None:
        gossiper, s = bound(GOSSIPERS[name](), ring(2), group), vector_of(group.rank())
        gossiper.mix(s, 0)
        resumed = bound(GOSSIPERS[name](), ring(2), group)
        resumed.load_state_dict(gossiper.state_dict())
        with pytest.raises(
            ValueError, match=r"got (the )?state of .*, expected .*; load a checkpoint of the same model"
        ):
            resumed.mix(vector_of(group.rank(), other), 1)

    run_ranks(2, body)


def load_and_mix(gossiper: Any, state: dict[str, Any], s: FlatVector) -> None:
    gossiper.load_state_dict(state)
    gossiper.mix(s, 1)


@pytest.mark.parametrize("name", ["Choco TopK", "PowerGossip"])
def test_a_state_of_other_neighbours_is_refused(name: str) -> None:
    """The state that a rank keeps for its neighbours means nothing among others."""

    def body(group: dist.ProcessGroup) -> None:
        gossiper, s = bound(GOSSIPERS[name](), ring(4), group), vector_of(group.rank())
        gossiper.mix(s, 0)
        resumed = bound(GOSSIPERS[name](), MetropolisHastingsMixing(CompleteGraph(4, peers_per_itr=3)), group)
        with pytest.raises(ValueError, match=r"\w+\(.*\): got (the )?state of .*, expected .*; (load|resume)"):
            load_and_mix(resumed, gossiper.state_dict(), s)

    run_ranks(4, body)


@ANY_NAME
def test_other_tensors_restart_the_state_with_a_warning(name: str) -> None:
    other = FlatLayout.of([(torch.float64, [TensorSpec((6, 6))])])

    def body(group: dist.ProcessGroup) -> None:
        gossiper = bound(GOSSIPERS[name](), ring(2), group)
        s = vector_of(group.rank())
        for t in range(3):
            gossiper.mix(s, t)
        fresh, x, y = bound(GOSSIPERS[name](), ring(2), group), *(vector_of(group.rank(), other) for _ in range(2))
        for t in range(3):
            gossiper.mix(x, t)
            fresh.mix(y, t)
        assert torch.equal(x.raw, y.raw)

    with pytest.warns(UserWarning, match=r"\w+\(.*\): .*(state starts from zero|all else starts anew)"):
        run_ranks(2, body)


@ANY_NAME
def test_ranks_out_of_step_are_named(name: str) -> None:
    """One resumes an older checkpoint: an error on both ends, never silent corruption. [Note: out of step]"""

    def body(group: dist.ProcessGroup) -> None:
        gossiper, s = bound(GOSSIPERS[name](), ring(2), group), vector_of(group.rank())
        for t in range(3):
            gossiper.mix(s, t)
            if t == 0:
                state = restored(gossiper.state_dict())
        if group.rank() == 1:
            gossiper.load_state_dict(state)
        step = 2 if "twice" in name else 1
        got, expected = (step, 3 * step) if group.rank() == 0 else (3 * step, step)
        message = (
            rf"rank {group.rank()}: round 3: rank {1 - group.rank()} sent its message number {got}, expected number "
            rf"{expected}: the two ranks have gossiped in a different number of rounds; resume all ranks from the same "
            "checkpoint"
        )
        with pytest.raises(RuntimeError, match=message):
            gossiper.mix(s, 3)

    run_ranks(2, body)


@pytest.mark.parametrize("name", ["Choco TopK", "PowerGossip rank 2, twice"])
def test_a_peer_that_ends_is_named(name: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        gossiper, s = bound(GOSSIPERS[name](), ring(3), group), vector_of(group.rank())
        for t in range(3):
            if t == 2 and group.rank() == 1:
                raise HangUp
            gossiper.mix(s, t)

    with pytest.raises(
        ConnectionError, match=r"rank [02]: round 2(, header)?: (receive from|send to) rank 1 failed after"
    ):
        run_ranks(3, body)


@pytest.mark.parametrize("name", ["Choco TopK", "Moniqua", "PowerGossip rank 2, twice"])
def test_another_run_of_the_same_number_is_seen(name: str) -> None:
    """Two checkpoints of one step, of two runs: the digest of what was said before tells them apart."""

    def body(group: dist.ProcessGroup) -> None:
        states = []
        for run in range(2):
            gossiper, s = bound(GOSSIPERS[name](), ring(2), group), vector_of(group.rank() + 2 * run)
            for t in range(3):
                gossiper.mix(s, t)
            states.append(gossiper.state_dict())
        gossiper = bound(GOSSIPERS[name](), ring(2), group)
        gossiper.load_state_dict(states[group.rank()])
        message = rf"rank {group.rank()}: round 3: rank {1 - group.rank()} sent digest \d+ before message number"
        with pytest.raises(RuntimeError, match=message):
            gossiper.mix(vector_of(group.rank()), 3)

    run_ranks(2, body)


def test_after_a_failed_round_only_a_checkpoint_goes_on() -> None:
    def body(group: dist.ProcessGroup) -> None:
        gossiper, s = bound(GOSSIPERS["Choco TopK"](), ring(2), group), vector_of(group.rank())
        gossiper.mix(s, 0)
        state = gossiper.state_dict() if group.rank() else {}
        gossiper.load_state_dict(state)
        with pytest.raises(RuntimeError, match="the two ranks have gossiped in a different number of rounds"):
            gossiper.mix(s, 1)
        assert gossiper.state_dict() == {}
        copy.deepcopy(gossiper)
        with pytest.raises(RuntimeError, match=r"got a round after one that failed.* start again from a checkpoint"):
            gossiper.mix(s, 2)

    run_ranks(2, body)


def test_a_wrapper_resumed_from_an_older_step_is_named() -> None:
    """Round counters differ as well then, so headers must meet whatever the round."""

    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(net(0), group, gossiper=PowerGossip(), init_sync=True)
        states = []
        for step in range(4):
            states.append(copy.deepcopy(wrapper.state_dict()))
            train(wrapper, group.rank(), [step])
        if group.rank() == 1:
            wrapper.load_state_dict(states[2])
        with pytest.raises(RuntimeError, match=rf"rank {1 - group.rank()} sent its message number"):
            train(wrapper, group.rank(), [4])

    run_ranks(2, body)
