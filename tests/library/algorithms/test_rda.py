"""RDA: the lengths and the directions of drifts are averaged apart, for each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from gossip_modules import QSGD, RDA, DiLoCo, EagerDiLoCo, GossipDataParallel, IsoLoCo, MuLoCo, StreamingDiLoCo
from gossip_modules.methods.chosen import read_algorithm
from gossip_modules.rounds.stacked import Stacked
from gossip_modules.wrappers.choices import Choices
from tests.harness.closes import Closes
from tests.harness.ranks import run_ranks

SHAPES: dict[str, tuple[int, ...]] = {"embed": (5, 2), "weight": (3, 4), "bias": (3,), "kernel": (2, 2, 2)}
SIZES = [int(np.prod(shape)) for shape in SHAPES.values()]
WHOLE = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
"""The elements of each tensor, in the order of the module."""
NUM_RANKS = 3
RATES: dict[str, Any] = {"lr": 0.7, "momentum": 0.5}
Array = NDArray[np.float64]


class Model(nn.Module):
    """Tensors of zeros; those of one dimension may have another dtype."""

    def __init__(self, vectors: torch.dtype = torch.float64) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            dtype = vectors if len(shape) == 1 else torch.float64
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self) -> Tensor:
        return sum((x.sum() for x in self.parameters()), torch.zeros(()))


def step_of(rank: int, k: int) -> Array:
    """The step of a rank, float64 [d]; ranks have steps of different length."""
    return (1 + rank) * np.random.default_rng(100 * k + rank).standard_normal(sum(SIZES))


def merged(drifts: Array, weights: Sequence[float], tensors: Sequence[NDArray[np.int64]] = WHOLE) -> Array:
    """The law: the merge of drifts [n, d] with these weights; elements that are in no tensor have the mean."""
    result = np.average(drifts, axis=0, weights=weights)
    for place in tensors:
        total, length, direction = 0.0, 0.0, np.zeros(len(place))
        for own, w in zip(drifts[:, place], weights, strict=True):
            size = np.sqrt((own**2).sum())
            total, length = total + w, length + w * size
            direction += w * own / size if size > 0 else 0.0
        size = np.sqrt((direction**2).sum())
        result[place] = length / total * direction / size if size > 0 else 0.0
    return result


def law(
    num_steps: int, every: int, *, weights: Sequence[float] = (1, 1, 1), tensors: Sequence[NDArray[np.int64]] = WHOLE
) -> Array:
    """The model [d] after this number of steps, a multiple of the period."""
    phi = m = np.zeros(sum(SIZES))
    for first in range(0, num_steps, every):
        drifts = [
            sum((step_of(rank, first + k) for k in range(every)), np.zeros(len(phi))) for rank in range(NUM_RANKS)
        ]
        drift = merged(np.stack(drifts), weights, tensors)
        m = 0.5 * m + drift
        phi = phi - 0.7 * (drift + 0.5 * m)
    return phi


def train(
    outer: DiLoCo, num_steps: int, *, tokens: Sequence[int] | None = None, vectors: torch.dtype = torch.float64
) -> Tensor:
    """The models of all ranks after this number of steps, float64 [n, d]."""

    def body(group: dist.ProcessGroup) -> Tensor:
        model = Model(vectors)
        wrapper = GossipDataParallel(model, process_group=group, algorithm=outer)
        for k in range(num_steps):
            wrapper()
            with torch.no_grad():
                steps = torch.from_numpy(step_of(group.rank(), k)).split(SIZES)
                for x, step in zip(model.parameters(), steps, strict=True):
                    x.sub_(step.view(x.shape))
            if tokens is not None:
                wrapper.count_tokens(tokens[group.rank()])
        wrapper()
        wrapper.close()
        return torch.cat([x.detach().double().flatten() for x in model.parameters()])

    return torch.stack(run_ranks(NUM_RANKS, body))


def check_equal(found: Tensor, expected: Array, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, torch.from_numpy(expected).expand_as(found), rtol=0, atol=tolerance)


def test_ranks_and_rows_are_the_law() -> None:
    outer = DiLoCo(2, merge=RDA(), **RATES)
    check_equal(train(outer, 6), law(6, 2))
    rows, driver = (
        torch.zeros(NUM_RANKS, sum(SIZES), dtype=torch.float64),
        Stacked(outer, None, NUM_RANKS, shapes=list(SHAPES.values())),
    )
    for k in range(7):
        driver.step(rows, k)
        rows -= torch.from_numpy(np.stack([step_of(rank, k) for rank in range(NUM_RANKS)])) if k < 6 else 0.0
    check_equal(rows, law(6, 2))


@pytest.mark.parametrize(
    ("weighted_by", "weights"), [("tokens", (2, 18, 50)), ("num_tokens", (2, 6, 10)), ("num_steps", (1, 1, 1))]
)
def test_ranks_have_weights(weighted_by: Any, weights: tuple[int, ...]) -> None:
    found = train(DiLoCo(2, merge=RDA(), weighted_by=weighted_by, **RATES), 4, tokens=(1, 3, 5))
    check_equal(found, law(4, 2, weights=weights))


def test_tensors_of_several_dtypes() -> None:
    check_equal(train(DiLoCo(2, merge=RDA(), **RATES), 4, vectors=torch.float32), law(4, 2), 1e-5)


def test_tensors_that_are_left_out_have_the_mean() -> None:
    found = train(DiLoCo(2, merge=RDA(without=["embed", "bias"]), weighted_by="tokens", **RATES), 4, tokens=(1, 2, 3))
    check_equal(found, law(4, 2, weights=(1, 4, 9), tensors=[WHOLE[1], WHOLE[3]]))


def test_named_fragments_have_whole_tensors() -> None:
    outer = DiLoCo(2, fragments=[["embed", "bias"], ["weight", "kernel"]], merge=RDA(without=["bias"]), **RATES)
    first = np.concatenate([WHOLE[0], WHOLE[2]])
    check_equal(train(outer, 4)[:, first], law(4, 2, tensors=[WHOLE[0]])[first])


def test_a_tensor_that_fragments_cut_counts_by_its_pieces() -> None:
    """In a model runs end at multiples of 64 elements, in rows at their middle; the second one has the first round."""
    drifts = np.random.default_rng(0).standard_normal((NUM_RANKS, 160))
    outer = DiLoCo(2, fragments=2, merge=RDA(), lr=1.0, momentum=0.0)

    def body(group: dist.ProcessGroup) -> Tensor:
        layer = nn.Linear(8, 20, bias=False).double()
        with torch.no_grad():
            layer.weight.zero_()
        wrapper = GossipDataParallel(layer, process_group=group, algorithm=outer)
        wrapper(torch.ones(1, 8, dtype=torch.float64))
        with torch.no_grad():
            layer.weight.sub_(torch.from_numpy(drifts[group.rank()]).view(20, 8))
        wrapper(torch.ones(1, 8, dtype=torch.float64))
        wrapper.close()
        return layer.weight.detach().flatten()

    rows, driver = torch.zeros(NUM_RANKS, 160, dtype=torch.float64), Stacked(outer, None, NUM_RANKS, shapes=[(20, 8)])
    driver.step(rows, 0)
    rows -= torch.from_numpy(drifts)
    driver.step(rows, 1)
    for found, cut in ((torch.stack(run_ranks(NUM_RANKS, body)), 128), (rows, 80)):
        check_equal(found[:, cut:], -merged(drifts[:, cut:], (1, 1, 1), [np.arange(160 - cut)]))
        torch.testing.assert_close(found[:, :cut], -torch.from_numpy(drifts[:, :cut]))


@pytest.mark.parametrize(
    "drifts",
    [
        [[0.0, 0.0], [3.0, 4.0]],
        [[0.0, 0.0], [0.0, 0.0]],
        [[1.0, -2.0], [-1.0, 2.0]],
        [[1e-40, 0.0], [3.0, 4.0]],
    ],
    ids=["one is zero", "all are zero", "opposites", "too small to divide by"],
)
def test_drifts_without_a_direction(drifts: list[list[float]]) -> None:
    """A zero has no direction, and its length counts; drifts that cancel have none together."""
    closes = Closes(DiLoCo(1, merge=RDA(), lr=1.0, momentum=0.0), torch.zeros(2), 2)
    for x, drift in zip(closes.x, drifts, strict=True):
        x.sub_(torch.tensor(drift))
    closes.close([0, 1])
    expected = [-1.5, -2.0] if [3.0, 4.0] in drifts else [0.0, 0.0]  # half of the length of 5, along (3, 4)
    for x in closes.x:
        torch.testing.assert_close(x, torch.tensor(expected))


def test_equal_drifts_are_the_mean_and_a_lost_round_changes_nothing() -> None:
    start = torch.zeros(3, dtype=torch.float64)
    closes = Closes(DiLoCo(1, merge=RDA(), weighted_by="num_steps", **RATES), start, 2)
    drift = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    for number, in_time in enumerate(([0], [0, 1])):
        for x, memory in zip(closes.x, closes.memories, strict=True):
            x.sub_(drift)
            memory.count_tokens(1)
        closes.close(in_time)
        if not number:
            torch.testing.assert_close(closes.x[1], -drift)
    # Rank 1 has a drift of twice the length and twice the weight in the second outer step: (1 + 2 2) / 3.
    phi, m = start, start
    for length in (1.0, 5 / 3):
        m = 0.5 * m + length * drift
        phi = phi - 0.7 * (length * drift + 0.5 * m)
    for x in closes.x:
        torch.testing.assert_close(x, phi, rtol=0, atol=1e-12)


def test_methods_with_its_arguments() -> None:
    """MuLoCo has the outer step of DiLoCo, and IsoLoCo changes matrices after the merge."""
    check_equal(train(MuLoCo(2, merge=RDA(), **RATES), 4), law(4, 2))
    vectors = np.concatenate([WHOLE[2], WHOLE[3]])
    check_equal(train(IsoLoCo(2, merge=RDA(), **RATES), 4)[:, vectors], law(4, 2)[vectors])
    text = "DiLoCo(merge=RDA(without=['embed']))"
    assert read_algorithm(text).made == DiLoCo(merge=RDA(without=["embed"]))
    assert read_algorithm(text).text == text


def test_options_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"DiLoCo: got merge='rda', expected RDA\(\), or None"):
        DiLoCo(merge="rda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"got merge=RDA.* with compressor=QSGD.*leave the compressor out"):
        DiLoCo(merge=RDA(), compressor=QSGD(4))
    with pytest.raises(ValueError, match=r"got merge=RDA.* with arrival='adaptive', expected 'carry' or 'blend'"):
        StreamingDiLoCo(merge=RDA(), arrival="adaptive")
    with pytest.raises(ValueError, match=r"RDA: got without='embed', expected a list of names"):
        RDA(without="embed")
    with pytest.raises(
        ValueError, match=r"hold in shards \(nprocs_per_node=2.*needs the lengths of whole tensors; take"
    ):
        Choices(algorithm=DiLoCo(merge=RDA())).check(overlap=False, init_sync=True, nprocs_per_node=2)
    with pytest.raises(TypeError, match="merge"):
        EagerDiLoCo(merge=RDA())  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="rows have no named modules"):
        Stacked(DiLoCo(merge=RDA(without=["embed"])), None, 2)

    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match=r"but \['wte'\] are names of no module, parameter or buffer of the model"):
            GossipDataParallel(Model(), process_group=group, algorithm=DiLoCo(merge=RDA(without=["wte"])))

    run_ranks(1, body)
