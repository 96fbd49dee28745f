"""Push-sum, the round of SGP: sums of models and of weights are kept, and the weight is sent where it leaves one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules.algorithms.sgp import PushSum
from gossip_modules.extend import FlatVector
from gossip_modules.mixing_manager import UniformMixing
from tests.harness.ranks import run_ranks
from tests.library.rounds.bound import DIGRAPH, DOUBLY_STOCHASTIC, bound, value_of


def test_push_sum_finds_the_mean_on_an_irregular_digraph() -> None:
    mixing = UniformMixing(DIGRAPH)
    assert not mixing.is_doubly_stochastic

    def body(group: dist.ProcessGroup) -> tuple[Tensor, FlatVector]:
        gossiper = bound(PushSum(), mixing, group)
        s = FlatVector.over(value_of(group.rank()))
        for t in range(3):
            gossiper.mix(s, t)
        return gossiper.average(value_of(group.rank()), num_rounds=100), s

    results = run_ranks(4, body)
    x = torch.stack([value_of(rank) for rank in range(4)])
    for average, _ in results:
        torch.testing.assert_close(average, x.mean(0), rtol=0, atol=1e-12)
    # On the way there: sums of x and of w are kept, and neither is even.
    torch.testing.assert_close(sum(s.segments[0] for _, s in results), x.sum(0), rtol=0, atol=1e-12)
    weights = torch.cat([s.push_sum_weight for _, s in results])
    assert float(weights.sum()) == pytest.approx(4, abs=1e-12)
    assert float(weights.max() - weights.min()) > 0.1


def test_weight_travels_only_where_it_must() -> None:
    def body(group: dist.ProcessGroup) -> None:
        for mixing, num_bytes in ((DOUBLY_STOCHASTIC[0], 40), (UniformMixing(DIGRAPH), 48)):
            gossiper = bound(PushSum(), mixing, group)
            gossiper.mix(value_of(group.rank()), 0)
            num_peers = len(mixing.graph.out_peers(group.rank(), 0))
            assert gossiper.transport.num_bytes_sent == num_peers * num_bytes
            assert gossiper.is_weighted is (num_bytes == 48)

    run_ranks(4, body)
