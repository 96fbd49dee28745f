"""The arithmetic of one point of R^d against plain tensors."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import Tensor

from gossip_modules.extend import FlatVector
from gossip_modules.flat.layout import ALIGNMENT, FlatLayout, TensorSpec
from gossip_modules.flat.vector import SCRATCH_NUMEL, add_

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LAYOUT = FlatLayout.of([(torch.float32, 7), (torch.bfloat16, 5), (torch.float64, 3)])


def random_vector(seed: int, layout: FlatLayout = LAYOUT) -> FlatVector:
    """Values and weight from this seed."""
    generator = torch.Generator().manual_seed(seed)
    vector = FlatVector.zeros(layout, torch.device("cpu"))
    for segment in vector.segments:
        segment.copy_(torch.randn(segment.shape, generator=generator))
    vector.push_sum_weight.copy_(torch.rand(1, generator=generator, dtype=torch.float64) + 0.5)
    return vector


def tensors(vector: FlatVector) -> list[Tensor]:
    """Segments and weight in float64, copies."""
    return [x.to(torch.float64, copy=True) for x in (*vector.segments, vector.push_sum_weight)]


def assert_close(vector: FlatVector, expected: list[Tensor]) -> None:
    """Each segment to two roundings of its dtype."""
    for x, want in zip((*vector.segments, vector.push_sum_weight), expected, strict=True):
        tolerance = 2 * torch.finfo(x.dtype).eps * max(float(want.abs().max()), 1.0)
        torch.testing.assert_close(x.double(), want, rtol=0, atol=tolerance)


def test_segments_are_aligned_and_do_not_overlap() -> None:
    layout = FlatLayout.of([(dtype, numel) for dtype, numel in zip(DTYPES, (1, 0, 33, 100), strict=True)], num_shards=3)
    assert layout.num_bytes % (3 * ALIGNMENT) == 0
    stop = 0
    for segment in layout.segments:
        assert segment.start % ALIGNMENT == 0
        assert segment.start >= stop
        stop = segment.stop
    assert stop <= layout.num_bytes


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_shards_partition_every_segment(num_shards: int) -> None:
    vector = random_vector(0, FlatLayout.of([(torch.float32, 50), (torch.bfloat16, 99)], num_shards))
    shards = [vector.shard(i, num_shards) for i in range(num_shards)]
    for dtype, whole in zip((torch.float32, torch.bfloat16), vector.segments, strict=True):
        assert torch.equal(torch.cat([x for shard in shards for x in shard.segments if x.dtype is dtype]), whole)
    shards[0].push_sum_weight.fill_(3)
    assert float(vector.push_sum_weight) == 3, "shards share the weight"


SPECS = [
    *map(TensorSpec, [(3, 5), (2, 2, 3), (7,), (), (0, 4)]),
    TensorSpec((4, 6), True),
    *map(TensorSpec, [(1, 9), (9, 1)]),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_cut_keeps_all_elements_and_whole_rows(spec: TensorSpec) -> None:
    """Cut anywhere: no element is lost, a matrix is whole rows of the same shape, buffers stay buffers."""
    row = prod(spec.shape[1:])
    for first in range(spec.numel + 1):
        for last in range(first + 1, spec.numel + 1):
            cuts = list(spec.cut(first, last))
            assert sum(cut.numel for cut in cuts) == last - first
            assert all(cut.is_buffer is spec.is_buffer and cut.numel > 0 for cut in cuts)
            place = first
            for cut in cuts:
                if cut.is_matrix:
                    assert cut.shape[1:] == spec.shape[1:]
                    assert place % row == 0
                place += cut.numel
            whole = max(last // row - -(-first // row), 0) * row if spec.is_matrix and row else 0
            assert sum(cut.numel for cut in cuts if cut.is_matrix) == whole, "some whole row is no matrix"
    assert list(spec.cut(0, spec.numel)) == [spec]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
def test_shards_know_their_tensors(num_shards: int) -> None:
    layout = FlatLayout.of([(torch.float32, SPECS), (torch.float64, SPECS[::-1]), (torch.bfloat16, 9)], num_shards)
    size = layout.num_bytes // num_shards
    numels: dict[torch.dtype, int] = {}
    for index in range(num_shards):
        for segment in layout.cut(index * size, (index + 1) * size).segments:
            assert sum(spec.numel for spec in segment.specs) == segment.numel
            numels[segment.dtype] = numels.get(segment.dtype, 0) + segment.numel
    assert numels == {segment.dtype: segment.numel for segment in layout.segments}


def test_places_are_those_of_the_tensors() -> None:
    layout = FlatLayout.of([(torch.float32, SPECS), (torch.float64, 5)])
    known, unknown = layout.segments
    assert [spec for _, spec in known.places()] == SPECS
    assert [first for first, _ in known.places()] == [0, 15, 27, 34, 35, 35, 59, 68]
    assert list(unknown.places()) == [(0, TensorSpec((5,)))]


def test_matrices_are_parameters_of_two_dimensions_or_more() -> None:
    assert [spec.is_matrix for spec in SPECS] == [True, True, False, False, True, False, True, True]
    assert [spec.numel for spec in SPECS] == [15, 12, 7, 1, 0, 24, 9, 9]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
def test_addition_of_two_dtypes_rounds_once(dtype: torch.dtype, other: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SCRATCH_NUMEL + 5, generator=generator).to(dtype)
    y = torch.randn(SCRATCH_NUMEL + 5, generator=generator).to(other)
    expected = x.double() + 0.3 * y.double()
    add_(x, y, alpha=0.3)
    tolerance = 1.01 * max(torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps) if dtype.itemsize < 8 else 1e-15
    assert bool(((x.double() - expected).abs() <= tolerance * (1 + expected.abs() + y.double().abs())).all())


def test_narrow_messages_are_added_to_wide_segments() -> None:
    x = random_vector(0)
    narrow = FlatVector.zeros(LAYOUT.with_dtypes(lambda dtype: torch.bfloat16), torch.device("cpu"))
    expected = []
    for mine, theirs in zip(x.segments, narrow.segments, strict=True):
        theirs.copy_(torch.arange(theirs.numel()))
        expected.append(mine.double() - 0.5 * theirs.double())
    weight = float(x.push_sum_weight)
    x.add_segments_(narrow, alpha=-0.5)
    assert_close(x, [*expected, torch.tensor([weight], dtype=torch.float64)])


@pytest.mark.parametrize(
    ("scale", "weights"), [(0.5, [0.5]), (0.25, [0.25, 0.5]), (0.0, [1.0]), (1.0, []), (1.5, [-0.5]), (0.5, [0.25])]
)
def test_combine_is_a_linear_combination(scale: float, weights: list[float]) -> None:
    x, others = random_vector(0), [random_vector(1 + i) for i in range(len(weights))]
    expected = [
        scale * own + sum(w * message for w, message in zip(weights, messages, strict=True))
        for own, *messages in zip(*map(tensors, (x, *others)), strict=True)
    ]
    assert_close(x.combine_(scale, others, weights), expected)


@pytest.mark.parametrize("weights", [[0.5], [1 / 3, 1 / 3], [0.1, 0.2, 0.3]])
def test_combine_leaves_agreement_exactly_alone(weights: list[float]) -> None:
    x = random_vector(0)
    before = x.clone()
    x.combine_(1 - sum(weights), [before.clone() for _ in weights], weights)
    assert torch.equal(x.raw, before.raw)
    assert torch.equal(x.push_sum_weight, before.push_sum_weight)


@pytest.mark.parametrize(
    ("own", "weights"), [(0.5, [0.5]), (0.2, [0.5, 0.3]), (1.0, []), (1.0, [0.0]), (0.5, [0, 0.5])]
)
def test_difference_is_the_correction(own: float, weights: list[float]) -> None:
    """x + alpha * difference(s) with x = s is the mixed vector."""
    s, others = random_vector(0), [random_vector(1 + i) for i in range(len(weights))]
    x = s.clone()
    mixed = s.clone().combine_(own, others, weights)
    alpha = s.difference_(own - 1, others, weights)
    for got, want in zip(tensors(x.add_(s, alpha=alpha)), tensors(mixed), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-2 if want.numel() == 5 else 1e-6)  # 5: the bfloat16s


def test_narrow_segments_longer_than_a_chunk() -> None:
    layout = FlatLayout.of([(torch.bfloat16, SCRATCH_NUMEL + 3)])
    x, y = random_vector(0, layout), random_vector(1, layout)
    expected = (0.5 * x.segments[0].float() + 0.5 * y.segments[0].float()).bfloat16()
    x.combine_(0.5, [y], [0.5])
    assert torch.equal(x.segments[0], expected)


def test_narrow_corrections_are_rounded_once() -> None:
    """Summed in float32: one rounding for the correction and one for adding it, whatever the number of messages."""
    layout, weights = FlatLayout.of([(torch.bfloat16, 4096)]), [0.2, 0.15, 0.3, 0.1, 0.05]
    s, others = random_vector(0, layout), [random_vector(1 + i, layout) for i in range(len(weights))]
    x = s.clone()
    exact = 0.2 * tensors(s)[0]
    for weight, other in zip(weights, others, strict=True):
        exact += weight * tensors(other)[0]
    alpha = s.difference_(0.2 - 1, others, weights)
    x.add_(s, alpha=alpha)
    correction, mixed = alpha * tensors(s)[0], tensors(x)[0]
    half_ulp = torch.finfo(torch.bfloat16).eps / 2
    assert bool(((mixed - exact).abs() <= 1.001 * half_ulp * (correction.abs() + mixed.abs())).all())


def test_weight_transitions_are_inverse() -> None:
    x = random_vector(0)
    before, w = tensors(x), float(x.push_sum_weight)
    x.divide_by_weight_()
    assert_close(x, [*(segment / w for segment in before[:-1]), before[-1]])
    x.multiply_by_weight_()
    assert_close(x, before)


def test_pack_and_unpack_round_trip() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(3, 2, generator=generator).to(dtype) for dtype in (*DTYPES, torch.float32)]
    vector = FlatVector.pack(inputs)
    assert [x.dtype for x in vector.segments] == list(DTYPES)
    outputs = [torch.zeros_like(x).requires_grad_() for x in inputs]
    vector.unpack_to(outputs)
    assert all(torch.equal(x, y) for x, y in zip(inputs, outputs, strict=True))


def test_over_shares_memory_with_any_shape() -> None:
    for x in (torch.ones(2, 3, 4), torch.ones((), dtype=torch.float64), torch.ones(3, dtype=torch.complex64)):
        vector = FlatVector.over(x)
        vector.segments[0].mul_(2)
        assert bool((x.real == 2).all())
        assert vector.layout.num_bytes == x.numel() * x.element_size()


@pytest.mark.parametrize("x", [torch.ones(2, 3).t(), torch.ones(3, dtype=torch.int64)])
def test_over_names_tensors_that_cannot_be_shared(x: Tensor) -> None:
    with pytest.raises(ValueError, match=r"got a tensor of .* with strides .*, expected a contiguous .*; pass x"):
        FlatVector.over(x)


def test_copies_are_separate() -> None:
    x = random_vector(0)
    y, z = x.clone(), x.like()
    x.raw.zero_()
    x.push_sum_weight.zero_()
    assert torch.equal(y.raw, random_vector(0).raw)
    assert float(z.push_sum_weight) == 1
    assert not z.raw.any()
    assert torch.equal(z.copy_(y).push_sum_weight, y.push_sum_weight)
