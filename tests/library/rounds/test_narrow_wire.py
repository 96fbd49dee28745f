"""Messages in fewer bits, the global average, and mistakes."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules import GossipDataParallel, MatchaGraph, RingGraph, connect
from gossip_modules.extend import FlatVector, GlobalAverage, PushPull, PushSum
from gossip_modules.flat.layout import FlatLayout, TensorSpec
from gossip_modules.graph_manager import select_graph
from gossip_modules.mixing_manager import LaplacianMixing, MatrixMixing, MixingManager, UniformMixing
from gossip_modules.rounds.wire import code_of
from tests.harness.problems import loss_of, net, sgd
from tests.harness.ranks import CPU, TIMEOUT, run_ranks, solo_group
from tests.library.rounds.bound import DIGRAPH, DOUBLY_STOCHASTIC, bound, value_of

# See [Note: narrow wire] of `PushPull`.

WIRES = [torch.bfloat16, torch.float16, torch.int8]
STEP = {**{dtype: torch.finfo(dtype).eps for dtype in WIRES[:2]}, torch.int8: 1 / 127}
"""The step from one number of a wire to the next, in units of the largest one."""


def rounded(x: Tensor, wire_dtype: torch.dtype) -> Tensor:
    """The numbers that a wire sends for the rows of x."""
    return code_of(wire_dtype).decompressed(x)


NARROW: list[tuple[Callable[..., PushPull], MixingManager]] = [
    (PushPull, DOUBLY_STOCHASTIC[0]),
    (PushSum, DOUBLY_STOCHASTIC[2]),
    (PushSum, UniformMixing(DIGRAPH)),
]


@pytest.mark.parametrize("wire_dtype", WIRES)
@pytest.mark.parametrize(("make", "mixing"), NARROW, ids=str)
def test_the_law_holds_for_the_sent_vector(
    make: Callable[..., PushPull], mixing: MixingManager, wire_dtype: Any
) -> None:
    """x + (W - I) round(x), weight included; `difference` is the same correction."""

    def body(group: dist.ProcessGroup) -> list[FlatVector]:
        gossiper, x = bound(make(wire_dtype=wire_dtype), mixing, group), FlatVector.over(value_of(group.rank()))
        seen = [x.clone()]
        for t in range(4):
            s = x.clone()
            gossiper.start(s, t)
            alpha = gossiper.difference(s)
            corrected = x.clone().add_(s, alpha=alpha)
            gossiper.mix(x, t)
            torch.testing.assert_close(corrected.segments[0], x.segments[0], rtol=0, atol=1e-12)
            torch.testing.assert_close(corrected.push_sum_weight, x.push_sum_weight, rtol=0, atol=1e-12)
            seen.append(x.clone())
        return seen

    rounds = list(zip(*run_ranks(4, body), strict=True))
    for t, (before, after) in enumerate(pairwise(rounds)):
        x, got = (torch.stack([v.segments[0] for v in row]) for row in (before, after))
        w, weights = (torch.cat([v.push_sum_weight for v in row]) for row in (before, after))
        law = mixing.matrix(t) - torch.eye(4)
        torch.testing.assert_close(got, x + law @ rounded(x, wire_dtype), rtol=0, atol=1e-12)
        torch.testing.assert_close(weights, w + law @ w, rtol=0, atol=1e-12)


@pytest.mark.parametrize("wire_dtype", WIRES)
@pytest.mark.parametrize(("make", "mixing"), NARROW, ids=str)
def test_narrow_wire_keeps_the_total(make: Callable[..., PushPull], mixing: MixingManager, wire_dtype: Any) -> None:
    """To the rounding of float32 in memory over 50 rounds, and ranks agree to the resolution of the wire."""

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        gossiper = bound(make(wire_dtype=wire_dtype), mixing, group)
        s = FlatVector.over(value_of(group.rank(), (64,), torch.float32))
        for t in range(50):
            gossiper.mix(s, t)
        return s.segments[0].double(), s.push_sum_weight

    ranks = run_ranks(4, body)
    x, weights = torch.stack([x for x, _ in ranks]), torch.cat([w for _, w in ranks])
    total = sum(value_of(rank, (64,), torch.float32).double() for rank in range(4))
    torch.testing.assert_close(x.sum(0), total, rtol=0, atol=2e-5)
    assert float(weights.sum()) == pytest.approx(4, abs=1e-12)
    spread = x / weights[:, None] - total / 4
    assert float(spread.abs().max()) < 10 * STEP[wire_dtype]


def test_narrow_wire_halves_the_bytes() -> None:
    layout = FlatLayout.of([(torch.float32, 160), (torch.bfloat16, 64), (torch.float64, 64)])

    def body(group: dist.ProcessGroup) -> None:
        gossiper = bound(PushSum(wire_dtype=torch.bfloat16), UniformMixing(RingGraph(2)), group)
        gossiper.mix(FlatVector.zeros(layout, CPU), 0)
        assert gossiper.transport.num_bytes_sent == 2 * (160 + 64 + 64)
        wide = bound(PushSum(), UniformMixing(RingGraph(2)), group)
        x = torch.zeros(160)
        for make in (gossiper, wide):
            before = make.transport.num_bytes_sent
            make.mix(x, 1)
            assert make.transport.num_bytes_sent - before == (320 if make is gossiper else 640)

    run_ranks(2, body)


def test_narrow_wire_leaves_narrow_segments_alone() -> None:
    """bfloat16 travels as it is, whatever the wire: float16 would cut its range."""
    layout = FlatLayout.of([(torch.bfloat16, 8), (torch.float32, 8)])

    def body(group: dist.ProcessGroup) -> None:
        gossiper = bound(PushPull(wire_dtype=torch.float16), UniformMixing(RingGraph(2)), group)
        s = FlatVector.zeros(layout, CPU)
        s.segments[0].fill_(1e30 * (1 + group.rank()))
        s.segments[1].fill_(1.0 + group.rank())
        gossiper.mix(s, 0)
        torch.testing.assert_close(s.segments[0].double(), torch.full((8,), 1.5e30).double(), rtol=0.01, atol=0)
        torch.testing.assert_close(s.segments[1], torch.full((8,), 1.5))

    run_ranks(2, body)


def test_half_precision_saturates() -> None:
    """Numbers beyond 65,504 move by as much as the wire can say, and nothing becomes infinite."""

    def body(group: dist.ProcessGroup) -> Tensor:
        gossiper = bound(PushPull(wire_dtype=torch.float16), UniformMixing(RingGraph(2)), group)
        return gossiper.mix(torch.tensor([1e6, -1e6, 70000.0, 1.0]) * (1 - group.rank()), 0)

    first, second = run_ranks(2, body)
    torch.testing.assert_close(first, torch.tensor([1e6 - 32752, -1e6 + 32752, 70000 - 32752, 0.5]))
    torch.testing.assert_close(second, torch.tensor([32752.0, -32752, 32752, 0.5]))


@pytest.mark.parametrize("make", [PushPull, PushSum])
@pytest.mark.parametrize("wire_dtype", [torch.float32, torch.uint8, torch.float64, "bfloat16"])
def test_other_wires_are_refused(make: Callable[..., PushPull], wire_dtype: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"got wire_dtype={wire_dtype}, expected None, torch.bfloat16, torch.float16 or torch.int8"
    ):
        make(wire_dtype=wire_dtype)


def test_ranks_compare_the_wire() -> None:
    shown = {repr(make(wire_dtype=wire)) for make in (PushPull, PushSum) for wire in (None, *WIRES)}
    assert len(shown) == 8


def test_wrapper_takes_a_wire_or_a_gossiper() -> None:
    def body(group: dist.ProcessGroup) -> None:
        for push_sum in (True, False):
            options: dict[str, Any] = {"push_sum": push_sum, "init_sync": False, "process_group": group}
            sent = []
            for wire_dtype in (None, torch.bfloat16, torch.int8):
                wrapper = GossipDataParallel(net(group.rank()), wire_dtype=wire_dtype, **options)
                before = wrapper.comm_stats()["bytes_sent"]
                loss_of(wrapper, group.rank(), 0)
                sent.append(wrapper.comm_stats()["bytes_sent"] - before)
            # 34 parameters and 8 statistics, in whole cache lines; with int8 the statistics have a line of their own
            assert sent == [192, 128, 128]
            with pytest.raises(ValueError, match=r"got wire_dtype=torch.float16 with PushPull\(\), expected"):
                GossipDataParallel(net(), algorithm=PushPull(), wire_dtype=torch.float16, **options)

    run_ranks(2, body)


@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("overlap", [False, True])
def test_training_over_a_narrow_wire_loses_no_gradient_step(overlap: bool, wire_dtype: torch.dtype) -> None:
    """Float64 in memory: the total of all models is what they began with and what their optimizers did."""

    def body(group: dist.ProcessGroup) -> Tensor:
        model = net(group.rank()).double()
        x = torch.cat([p.detach().flatten() for p in model.parameters()])
        wrapper = GossipDataParallel(
            model,
            graph=RingGraph(3, peers_per_itr=2),
            algorithm=PushPull(wire_dtype=wire_dtype),
            push_sum=False,
            overlap=overlap,
            init_sync=False,
            process_group=group,
        )
        optimizer = sgd(model)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(wrapper, group.rank(), step).backward()
            before = torch.cat([p.detach().flatten() for p in model.parameters()])
            optimizer.step()
            x += torch.cat([p.detach().flatten() for p in model.parameters()]) - before
        wrapper.close()
        return torch.cat([p.detach().flatten() for p in model.parameters()]) - x

    lost = torch.stack(run_ranks(3, body))
    assert float(lost.sum(0).abs().max()) < 1e-13
    assert float(lost.abs().max()) > 1e-3, "nothing was mixed"


def test_global_average_is_exact_and_resets_the_weight() -> None:
    layout = FlatLayout.of([(torch.float32, 3), (torch.bfloat16, 64)])

    def body(group: dist.ProcessGroup) -> FlatVector:
        averager = GlobalAverage(connect(group, module_device=CPU, timeout=TIMEOUT))
        s = FlatVector.zeros(layout, CPU)
        for segment in s.segments:
            segment.copy_(value_of(group.rank(), tuple(segment.shape)))
        s.push_sum_weight.fill_(0.5 if group.rank() == 0 else 1.25)
        difference, before = s.clone(), s.clone()
        averager.start(difference, 0)
        alpha = averager.difference(difference)
        averager.mix(s, 0)
        before.add_(difference, alpha=alpha)
        torch.testing.assert_close(before.segments[0], s.segments[0])
        assert float(before.push_sum_weight) == float(s.push_sum_weight) == 1
        return s

    results = run_ranks(3, body)
    for k, (numel, dtype) in enumerate(((3, torch.float32), (64, torch.bfloat16))):
        mean = torch.stack([value_of(rank, (numel,)).to(dtype).double() for rank in range(3)]).mean(0)
        for s in results:
            torch.testing.assert_close(s.segments[k], mean.to(dtype))
            assert torch.equal(s.segments[k], results[0].segments[k])


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16, torch.int8])
def test_statistics_stay_positive_where_self_weights_are_negative(wire_dtype: torch.dtype | None) -> None:
    """Node 1 of this graph has five links and the self-weight -0.43; its running variance is 100 times the others'."""
    mixing = LaplacianMixing(MatchaGraph(select_graph(0), budget=1.0))
    layout = FlatLayout.of([(torch.float32, [TensorSpec((3, 2)), TensorSpec((4,), is_buffer=True)])])

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        gossiper = bound(PushPull(wire_dtype=wire_dtype), mixing, group)
        results = []
        for is_difference in (False, True):
            s = FlatVector.zeros(layout, CPU)
            s.segments[0][:6] = 1.0 + group.rank()
            s.segments[0][6:] = 100.0 if group.rank() == 1 else 1.0
            before = s.clone()
            gossiper.start(s, 0)
            if is_difference:
                alpha = gossiper.difference(s)
                s = before.add_(s, alpha=alpha)
            else:
                gossiper.finish(s)
            results.append(s.segments[0])
        return results[0], results[1]

    ranks = run_ranks(8, body)
    x = torch.stack([finished for finished, _ in ranks]).double()
    torch.testing.assert_close(torch.stack([summed for _, summed in ranks]).double(), x, rtol=1e-5, atol=1e-4)
    start = torch.arange(1.0, 9.0, dtype=torch.float64)
    torch.testing.assert_close(x[:, 0], mixing.matrix(0) @ start, rtol=0, atol=1e-5)
    assert float(mixing.matrix(0)[1, 1]) < -0.4
    assert float(x[:, 6:].min()) > -1e-4
    torch.testing.assert_close(x[:, 6:].sum(0), torch.full((4,), 107.0, dtype=torch.float64), rtol=1e-5, atol=0)


# Eight bits.


def test_eight_bits_leave_statistics_alone_and_round_moments() -> None:
    """Of numbers whose largest one is 1,000 times as large as the others, 8 bits would leave nothing of these."""
    specs = [
        TensorSpec((3, 100)),
        TensorSpec((64,), is_buffer=True, name="moment", takes_code=True),
        TensorSpec((64,), is_buffer=True, name="variance"),
    ]
    layout = FlatLayout.of([(torch.float32, specs), (torch.bfloat16, 64)])

    def body(group: dist.ProcessGroup) -> FlatVector:
        gossiper = bound(PushPull(wire_dtype=torch.int8), UniformMixing(RingGraph(2)), group)
        s = FlatVector.zeros(layout, CPU)
        for x in s.segments:
            x.fill_(1.0 + group.rank())
            x[:300:64] = 1000.0
        s.segments[0][300] = s.segments[0][364] = 1000.0
        gossiper.mix(s, 0)
        assert gossiper.transport.num_bytes_sent == 320 + 128 + 256 + 128  # 300, 64, 64 exact and 64 entries
        return s

    for s in run_ranks(2, body):
        x, narrow = s.segments
        parameters, moment, variance = x[:300], x[300:364], x[364:]
        assert torch.equal(variance[1:], torch.full((63,), 1.5))
        for rounded_part in (parameters[:64], moment, narrow.float()):  # 1 and 2 are below half a step of 1000 / 127
            assert rounded_part[0] == 1000
            assert rounded_part[1:].unique().tolist() in ([1.0], [2.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_eight_bits_keep_equal_models_and_bring_others_together(dtype: torch.dtype) -> None:
    """Each number moves by half the difference of the rounded ones."""
    values = value_of(0, (200,), torch.float32).to(dtype)

    def body(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        gossiper = bound(PushPull(wire_dtype=torch.int8), UniformMixing(RingGraph(2)), group)
        equal, own = FlatVector.over(values.clone()), FlatVector.over(values * (1 + group.rank()))
        for t in (0, 1):
            gossiper.mix(equal, t)
            gossiper.mix(own, t)
        return equal.segments[0], own.segments[0]

    for equal, own in run_ranks(2, body):
        torch.testing.assert_close(equal, values, rtol=torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)
        torch.testing.assert_close(own.double(), 1.5 * values.double(), rtol=0.01, atol=0.03)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_number_in_eight_bits_reaches_its_block_only(bad: float) -> None:
    def body(group: dist.ProcessGroup) -> tuple[Tensor, list[FlatVector]]:
        gossiper = bound(PushPull(wire_dtype=torch.int8), UniformMixing(RingGraph(2)), group)
        x = torch.ones(200)
        x[70] = bad if group.rank() == 0 else 1.0
        gossiper.mix(x, 0)
        return x, list(gossiper.received)

    (_, of_second), (second, of_first) = run_ranks(2, body)
    assert not second[64:128].isfinite().any()
    assert second[:64].isfinite().all()
    assert second[128:].isfinite().all()
    assert of_second[0].segments[0].isfinite().all(), "the first rank sees that it has received nothing bad"
    assert not of_first[0].segments[0].isfinite().all()


# Mistakes.


def test_one_round_at_a_time() -> None:
    gossiper = bound(PushPull(), UniformMixing(RingGraph(1)), solo_group())
    s = FlatVector.over(value_of(0))
    with pytest.raises(AssertionError, match=r"no round is in flight: start\(\) comes first"):
        gossiper.finish(s)
    gossiper.start(s, 0)
    with pytest.raises(AssertionError, match=r"a round is in flight: finish\(\) it"):
        gossiper.start(s, 1)


WRONG: list[tuple[Callable[[], PushPull], MixingManager, str]] = [
    (PushPull, UniformMixing(DIGRAPH), r"got UniformMixing\(.* whose rows do not sum to one, .* use push_sum=True"),
    (
        PushSum,
        MatrixMixing(RingGraph(2), [[0.5, 0.5], [0.25, 0.75]]),
        r"got MatrixMixing\(.* whose columns do not sum to one, expected column-stochastic .*; use push_sum=False",
    ),
    (PushSum, UniformMixing(RingGraph(3)), r"got a graph of 3 ranks, expected 1, the size of the process group; build"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_mixing_is_refused(number: int) -> None:
    make, mixing, message = WRONG[number]
    with pytest.raises(ValueError, match=re.compile(message)):
        bound(make(), mixing, solo_group())


def test_state_of_another_algorithm_is_refused() -> None:
    gossiper = PushSum()
    gossiper.load_state_dict(gossiper.state_dict())
    with pytest.raises(ValueError, match=r"got state \['hat'\] of another algorithm, expected none for PushSum\(\)"):
        gossiper.load_state_dict({"hat": torch.ones(1)})
