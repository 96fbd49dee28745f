"""Drifts that are weighed by the tokens of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules import DiLoCo, GossipDataParallel, Membership, NoLoCo, StreamingDiLoCo, TopK, gossip
from gossip_modules.compression import Absmax
from gossip_modules.graph_manager import CompleteGraph
from gossip_modules.mixing_manager import UniformMixing
from tests.harness.problems import mlp
from tests.harness.quadratics import START, Point, descended, plain_sgd, solve, train_rows
from tests.harness.ranks import run_ranks, solo_group
from tests.harness.reference import flatten
from tests.library.rounds.memories import drivers_of


def train(
    outer: DiLoCo, *, tokens: tuple[int | None, ...] = (1, 2, 3, 4, 5), num_steps: int = 20, resumes: bool = False
) -> Tensor:
    """x of each rank; resumes: from its own checkpoint, in the middle of a period."""

    def body(group: dist.ProcessGroup) -> float:
        rank = group.rank()

        def begin() -> tuple[Point, GossipDataParallel, torch.optim.Optimizer]:
            point = Point()
            wrapper = GossipDataParallel(point, process_group=group, algorithm=outer)
            return point, wrapper, plain_sgd(wrapper.parameters())

        point, wrapper, optimizer = begin()
        for k in range(num_steps):
            optimizer.zero_grad()
            wrapper(rank).backward()
            optimizer.step()
            if (num_tokens := tokens[rank]) is not None:
                wrapper.count_tokens(num_tokens)
            if resumes and k == 7:
                state = wrapper.state_dict()
                wrapper.close()
                point, wrapper, optimizer = begin()
                wrapper.load_state_dict(state)
        wrapper(rank)
        wrapper.close()
        return point.x.item()

    return torch.tensor(run_ranks(len(tokens), body), dtype=torch.float64)


@pytest.mark.parametrize(
    ("options", "resumes"),
    [({}, False), ({"compressor": TopK(1.0)}, False), ({}, True)],
    ids=["plain", "compressed", "resumed"],
)
def test_golden_value(options: dict[str, Any], resumes: bool) -> None:
    """Weights 1, 4, 9, 16, 25, as the steps are equal."""
    found = train(DiLoCo(5, weighted_by="tokens", **options), resumes=resumes)
    torch.testing.assert_close(found, torch.full((5,), 2.2972042506, dtype=torch.float64), rtol=0, atol=1e-9)


def test_equal_tokens_are_equal_weights() -> None:
    outer = DiLoCo(5, weighted_by="tokens")
    torch.testing.assert_close(train(outer, tokens=(7,) * 5), solve(lambda: {"algorithm": DiLoCo(5)}))
    rows = train_rows(outer, UniformMixing(CompleteGraph(5, peers_per_itr=4)), 20)
    torch.testing.assert_close(rows[-1], solve(lambda: {"algorithm": DiLoCo(5)}))


def test_a_rank_without_tokens_has_no_weight_and_fragments_count_for_themselves() -> None:
    outer = StreamingDiLoCo(5, fragments=1, delay=2, arrival="carry", lr=1.0, momentum=0.0, weighted_by="tokens")
    found = train(outer, tokens=(0, 3, 0), num_steps=7)
    x = torch.full((3,), START, dtype=torch.float64)
    s = descended(x, 5)
    torch.testing.assert_close(found, s[1] + descended(s, 2) - s, rtol=0, atol=1e-12)


def test_a_rank_that_forgets_to_count_is_warned_once_for_each_outer_step() -> None:
    with pytest.warns(UserWarning, match=r"DiLoCo: got steps and no call of count_tokens\(\) on this rank") as said:
        train(DiLoCo(5, weighted_by="tokens"), tokens=(3, None), num_steps=11)
    assert len(said) == 2


@pytest.mark.filterwarnings("ignore:.*other tensors are trained than before")
def test_fragments_keep_their_own_counts_when_a_layer_is_frozen() -> None:
    def counts(freezes: bool) -> list[dict[str, float]]:
        model = mlp()
        outer = StreamingDiLoCo(6, fragments=[["0"], ["2"]], weighted_by="tokens")
        wrapper = GossipDataParallel(model, process_group=solo_group(), algorithm=outer)
        for k in range(11):
            wrapper(torch.ones(1, 3)).sum().backward()
            wrapper.count_tokens(k)
            if freezes and k == 6:
                model[0].bias.requires_grad_(False)  # type: ignore[index]
        found = [dict(driver.memory.numbers) for driver in drivers_of(wrapper)]
        wrapper.close()
        return found

    expected = counts(False)
    assert expected[0] != expected[1]
    assert counts(True) == expected


def test_options_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="got weighted_by='steps', expected one of 'tokens', 'num_tokens'"):
        DiLoCo(weighted_by="steps")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="got weighted_by='tokens' with collective='all_reduce', expected 'all_gather'"
    ):
        DiLoCo(weighted_by="tokens", compressor=Absmax(8), collective="all_reduce")
    with pytest.raises(ValueError, match=r"got weights by tokens or steps .*no count .* `model.count_tokens"):
        train(DiLoCo(5, weighted_by="tokens"), tokens=(0, 0), num_steps=6)

    def body(group: dist.ProcessGroup) -> None:
        wrapper = GossipDataParallel(Point(), process_group=group, algorithm=NoLoCo())
        with pytest.raises(ValueError, match=r"got count_tokens\(\) with NoLoCo.*DiLoCo\(weighted_by='tokens'\)"):
            wrapper.count_tokens(1)
        wrapper.close()
        with pytest.raises(ValueError, match=r"got overlap=True with DiLoCo.*weighted_by='tokens'"):
            GossipDataParallel(Point(), process_group=group, overlap=True, algorithm=DiLoCo(weighted_by="tokens"))
        model = gossip(Point(), process_group=group, algorithm=DiLoCo(weighted_by="tokens"))
        for wrong in (-1, 0.5, True):
            with pytest.raises(ValueError, match="expected a whole number of at least 0"):
                model.count_tokens(wrong)
        model.count_tokens(3)
        model.close()

    run_ranks(1, body)


@pytest.mark.parametrize("sync_every", [1, 2])
def test_a_round_at_the_end_of_a_step_needs_its_tokens_before(sync_every: int) -> None:
    """A step without them is refused at once; with them, and after a caught refusal, its round runs."""

    def body(group: dist.ProcessGroup) -> tuple[Tensor, float]:
        algorithm = DiLoCo(sync_every, weighted_by="tokens", lr=1.0, momentum=0.0)
        wrapper = GossipDataParallel(Point(), process_group=group, algorithm=algorithm, rounds="step")
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=1.0)
        for step in range(4):
            for parameter in wrapper.parameters():
                parameter.grad = torch.full_like(parameter, 1.0 - 2.0 * group.rank())
            if step == 2:
                with pytest.raises(ValueError, match=r"rounds='step' and no count_tokens\(\) before it.*'forward'"):
                    optimizer.step()
                wrapper.count_tokens(1 + group.rank())
                wrapper.gossip_step()
            else:
                wrapper.count_tokens(1 + group.rank())
                optimizer.step()
        result = flatten(wrapper.module), wrapper.comm_stats()["num_rounds"]
        wrapper.close()
        return result

    start = flatten(Point())
    # Rank r moves by 2 r - 1 in each step, and weighs (1 + r)^2 H: the mean of a step is (4 - 1) / 5.
    for x, rounds in run_ranks(2, body):
        torch.testing.assert_close(x, start + 4 * 0.6)
        assert rounds == 4 // sync_every


def test_workers_of_a_membership_have_weights() -> None:
    """Two workers: as in a world of two ranks."""
    store, outer = dist.HashStore(), DiLoCo(5, weighted_by="tokens")

    def body(group: dist.ProcessGroup) -> float:
        membership = Membership(store, min_workers=2, max_workers=2, timeout=20.0, min_deadline=20.0, host="127.0.0.1")
        point = Point()
        wrapper = GossipDataParallel(point, membership=membership, algorithm=outer)
        optimizer = plain_sgd(wrapper.parameters())
        membership.track(optimizer=optimizer)
        for _ in membership.steps(20):
            rank = membership.rank
            optimizer.zero_grad()
            wrapper(rank).backward()
            optimizer.step()
            wrapper.count_tokens(rank + 1)
        wrapper(rank)
        wrapper.close()
        return point.x.item()

    found = torch.tensor(run_ranks(2, body), dtype=torch.float64)
    torch.testing.assert_close(found, train(outer, tokens=(1, 2)))
