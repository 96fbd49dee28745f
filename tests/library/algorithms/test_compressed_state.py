"""What algorithms whose ranks send messages keep from round to round: checkpoints, copies, and ranks out of step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gossip_modules import Choco, PowerGossip, TopK
from gossip_modules.extend import PushPull
from gossip_modules.flat.layout import FlatLayout, TensorSpec
from gossip_modules.graph_manager import CompleteGraph
from gossip_modules.mixing_manager import MetropolisHastingsMixing
from tests.harness.problems import net
from tests.harness.ranks import HangUp, run_ranks, solo_group
from tests.library.algorithms.contract import (
    ALGORITHMS,
    ANY_NAME,
    EACH_MEMORY,
    bound,
    restored,
    ring,
    train,
    vector_of,
    wrap,
)

_VECTORS = {"Choco": {"public", "drift"}, "DeepSqueeze": {"error"}}


@ANY_NAME
def test_the_keys_of_a_state_never_change(name: str) -> None:
    """Checkpoints hold them: a renamed key would make every earlier checkpoint unreadable."""
    rounds, s = bound(ALGORITHMS[name](), ring(1), solo_group()), vector_of(0)
    rounds.mix(s, 0)
    state, algorithm = rounds.state_dict(), name.split()[0]
    assert set(state) == {"algorithm", "links", "memory", "messages", "stamps"}
    assert state["algorithm"] == algorithm
    assert set(state["messages"]) == {"numbers", "peers", "digests"}
    assert set(state["memory"].get("vectors", {})) == _VECTORS.get(algorithm, set())
    assert state["memory"].get("weights") == (repr(ring(1)) if algorithm == "Choco" else None)


@EACH_MEMORY
def test_a_reset_starts_afresh(name: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        results = []
        gossiper = bound(ALGORITHMS[name](), ring(2), group)
        for _ in range(2):
            s = vector_of(group.rank())
            for t in range(3):
                gossiper.mix(s, t)
            results.append(s)
            gossiper.restart()
        assert torch.equal(results[0].raw, results[1].raw)

    run_ranks(2, body)


@ANY_NAME
def test_a_state_of_another_algorithm_is_refused(name: str) -> None:
    rounds = bound(ALGORITHMS[name](), ring(1), solo_group())
    for make in ALGORITHMS.values():
        donor, s = bound(make(), ring(1), solo_group()), vector_of(0)
        if donor.algorithm.name != rounds.algorithm.name:
            donor.mix(s, 0)
            own, other = rounds.algorithm.name, donor.algorithm.name
            message = rf"got the state of {other}, expected the state of {own}; wrap as for the saved model"
            with pytest.raises(ValueError, match=message):
                rounds.load_state_dict(donor.state_dict())
            with pytest.raises(ValueError, match=r"got state \[.*\] of another algorithm, expected none for PushPull"):
                PushPull().load_state_dict(donor.state_dict())


@pytest.mark.parametrize("name", ["Choco TopK", "DeepSqueeze SignNorm", "PowerGossip"])
def test_a_state_of_another_model_is_refused(name: str) -> None:
    other = FlatLayout.of([(torch.float64, [TensorSpec((6, 6))])])

    def body(group: dist.ProcessGroup) -> None:
        gossiper, s = bound(ALGORITHMS[name](), ring(2), group), vector_of(group.rank())
        gossiper.mix(s, 0)
        resumed = bound(ALGORITHMS[name](), ring(2), group)
        resumed.load_state_dict(gossiper.state_dict())
        with pytest.raises(ValueError, match=r"got the state of a? ?(vector|link).*, expected .*; (freeze|load)"):
            resumed.mix(vector_of(group.rank(), other), 1)

    run_ranks(2, body)


@pytest.mark.parametrize("name", ["Choco TopK", "PowerGossip"])
def test_a_state_of_other_neighbours_is_refused(name: str) -> None:
    """The state that a rank keeps for its neighbours means nothing among others."""

    def body(group: dist.ProcessGroup) -> None:
        gossiper, s = bound(ALGORITHMS[name](), ring(4), group), vector_of(group.rank())
        gossiper.mix(s, 0)
        resumed = bound(ALGORITHMS[name](), MetropolisHastingsMixing(CompleteGraph(4, peers_per_itr=3)), group)
        message = r"got the state of (vector|links) .*, expected .*; (load|resume)"
        with pytest.raises(ValueError, match=message):  # noqa: PT012 (links are compared at once, vectors in a round)
            resumed.load_state_dict(gossiper.state_dict())
            resumed.mix(s, 1)

    run_ranks(4, body)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in ("Moniqua", "Sparta")])
def test_other_tensors_restart_the_state_with_a_warning(name: str) -> None:
    other = FlatLayout.of([(torch.float64, [TensorSpec((6, 6))])])

    def body(group: dist.ProcessGroup) -> None:
        gossiper = bound(ALGORITHMS[name](), ring(2), group)
        s = vector_of(group.rank())
        for t in range(3):
            gossiper.mix(s, t)
        fresh, x, y = bound(ALGORITHMS[name](), ring(2), group), *(vector_of(group.rank(), other) for _ in range(2))
        for t in range(3):
            gossiper.mix(x, t)
            fresh.mix(y, t)
        assert torch.equal(x.raw, y.raw)

    with pytest.warns(UserWarning, match=r"\w+\(.*\): other tensors are trained than before"):
        run_ranks(2, body)


@EACH_MEMORY
def test_ranks_out_of_step_are_named(name: str) -> None:
    """One resumes an older checkpoint: an error on both ends, never silent corruption.

    See [Note: out of step] of `MessageCheck`.
    """

    def body(group: dist.ProcessGroup) -> None:
        gossiper, s = bound(ALGORITHMS[name](), ring(2), group), vector_of(group.rank())
        for t in range(3):
            gossiper.mix(s, t)
            if t == 0:
                state = restored(gossiper.state_dict())
        if group.rank() == 1:
            gossiper.load_state_dict(state)
        step = getattr(gossiper.algorithm, "num_iterations", 1)
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
        gossiper, s = bound(ALGORITHMS[name](), ring(3), group), vector_of(group.rank())
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
            gossiper, s = bound(ALGORITHMS[name](), ring(2), group), vector_of(group.rank() + 2 * run)
            for t in range(3):
                gossiper.mix(s, t)
            states.append(gossiper.state_dict())
        gossiper = bound(ALGORITHMS[name](), ring(2), group)
        gossiper.load_state_dict(states[group.rank()])
        message = rf"rank {group.rank()}: round 3: rank {1 - group.rank()} sent digest \d+ before message number"
        with pytest.raises(RuntimeError, match=message):
            gossiper.mix(vector_of(group.rank()), 3)

    run_ranks(2, body)


@EACH_MEMORY
def test_a_round_without_an_answer_changes_nothing(name: str) -> None:
    """Neither the model nor the memory; in DeepSqueeze to rounding."""

    def body(group: dist.ProcessGroup) -> None:
        rounds, s = bound(ALGORITHMS[name](), ring(2), group), vector_of(group.rank())
        for t in range(3):
            rounds.mix(s, t)
        if group.rank() == 1:
            raise HangUp
        before, state = s.clone(), copy.deepcopy(rounds.state_dict())
        with pytest.raises(ConnectionError, match=r"rank 0: round 3, header: .* rank 1 failed"):
            rounds.mix(s, 3)
        assert torch.equal(s.raw, before.raw)
        now = rounds.state_dict()
        for kept in (now, state):
            vectors, links = (kept["memory"].pop(key, {}) for key in ("vectors", "links"))
            kept["tensors"] = [vectors, {j: dict(link) for j, link in links.items()}]
        torch.testing.assert_close(now.pop("tensors"), state.pop("tensors"), rtol=0, atol=1e-15)
        assert now == state

    run_ranks(2, body)


def test_after_a_round_without_an_answer_only_a_checkpoint_goes_on() -> None:
    """Its messages may still be on their way, and peers may have applied those of this rank."""

    def body(group: dist.ProcessGroup) -> None:
        rounds, s = bound(ALGORITHMS["Choco TopK"](), ring(2), group), vector_of(group.rank())
        rounds.mix(s, 0)
        state = restored(rounds.state_dict())
        if group.rank():
            rounds.load_state_dict(state)
        else:
            rounds.restart()
        with pytest.raises(RuntimeError, match="the two ranks have gossiped in a different number of rounds"):
            rounds.mix(s, 1)
        for again in (rounds, copy.deepcopy(rounds)):
            with pytest.raises(RuntimeError, match=r"got a round after one that failed.* start again"):
                again.mix(s, 2)

    run_ranks(2, body)


class Interrupted(TopK):
    """Raises as Ctrl-C does while the second message of a peer is added."""

    num_calls = 0

    def _add(self, *args: Any) -> None:
        self.num_calls += 1
        if self.num_calls == 6:
            raise KeyboardInterrupt
        super()._add(*args)


def test_after_a_round_that_ended_while_it_wrote_only_a_checkpoint_goes_on() -> None:
    """A round of two ranks adds three messages: q to the public copy, and both to the drift."""

    def body(group: dist.ProcessGroup) -> None:
        rounds, s = bound(Choco(Interrupted(0.3), step_size=0.3), ring(2), group), vector_of(group.rank())
        rounds.mix(s, 0)
        state = restored(rounds.state_dict())
        with pytest.raises(KeyboardInterrupt):
            rounds.mix(s, 1)
        assert rounds.state_dict() == {"algorithm": "Choco"}
        for again in (rounds, copy.deepcopy(rounds)):
            with pytest.raises(RuntimeError, match=r"got a round after one that failed.* start again"):
                again.mix(s, 2)
        rounds.load_state_dict(state)
        rounds.mix(s, 2)

    run_ranks(2, body)


def test_a_wrapper_resumed_from_an_older_step_is_named() -> None:
    """Round counters differ as well then, so headers must meet whatever the round."""

    def body(group: dist.ProcessGroup) -> None:
        wrapper = wrap(net(0), group, algorithm=PowerGossip(), init_sync=True)
        states = []
        for step in range(4):
            states.append(copy.deepcopy(wrapper.state_dict()))
            train(wrapper, group.rank(), [step])
        if group.rank() == 1:
            wrapper.load_state_dict(states[2])
        with pytest.raises(RuntimeError, match=rf"rank {1 - group.rank()} sent its message number"):
            train(wrapper, group.rank(), [4])

    run_ranks(2, body)
