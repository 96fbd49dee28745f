"""A module whose tensors view one vector trains, moves, loads and copies like any other."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from gossip_modules.extend import FlatBuffer
from gossip_modules.flat.layout import TensorSpec
from tests.harness.problems import fill_, net, train_step
from tests.harness.reference import flatten


def is_view(buffer: FlatBuffer, tensor: Tensor) -> bool:
    """Whether the tensor lives in the vector."""
    start = tensor.data_ptr() - buffer.vector.raw.data_ptr()
    return start >= 0 and start + tensor.numel() * tensor.element_size() <= buffer.vector.raw.numel()


def in_order(module: nn.Module) -> Tensor:
    """What the vector of a module of one dtype holds: matrices by shape, vectors, buffers; float64 [d]."""
    parameters = list(module.parameters())
    matrices = sorted((p for p in parameters if p.dim() > 1), key=lambda p: tuple(p.shape))
    vectors = [p for p in parameters if p.dim() < 2]
    buffers = [b for b in module.buffers() if b.is_floating_point()]
    return torch.cat([x.detach().double().flatten() for x in (*matrices, *vectors, *buffers)])


class Tied(nn.Module):
    """An embedding whose weight is also the output layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.output = nn.Linear(3, 5, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.embedding(tokens))


class LowRank(nn.Module):
    """A frozen layer with a trained correction of rank 1, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(20, 30).requires_grad_(False)
        self.down, self.up = nn.Linear(20, 1, bias=False), nn.Linear(1, 30, bias=False)


# What travels.


def test_values_stay_and_the_vector_is_the_module() -> None:
    model, bare = net(), net()
    buffer = FlatBuffer(model)
    assert torch.equal(flatten(model), flatten(bare))
    assert all(is_view(buffer, tensor) for tensor in buffer.tensors)
    (segment,) = buffer.vector.segments
    assert torch.equal(segment.double(), in_order(bare))
    segment.fill_(2)
    assert bool((flatten(model) == 2).all())
    assert torch.equal(buffer.vector.parameters[0], segment[: sum(p.numel() for p in model.parameters())])


def test_tied_parameters_travel_once_and_stay_tied() -> None:
    model = Tied()
    buffer = FlatBuffer(model)
    assert buffer.vector.segments[0].numel() == 15
    assert model.output.weight is model.embedding.weight
    model.double()
    buffer.attach()
    assert model.output.weight is model.embedding.weight
    model(torch.tensor([1, 2])).sum().backward()
    assert is_view(buffer, model.output.weight)


def test_frozen_parameters_integer_and_transient_buffers_stay() -> None:
    model = LowRank()
    model.register_buffer("running_var", torch.ones(2))
    model.register_buffer("scale", torch.ones(2))
    model.register_buffer("count", torch.ones(2, dtype=torch.int64))
    model.register_buffer("cache", torch.ones(1000), persistent=False)
    buffer = FlatBuffer(model)
    assert buffer.vector.segments[0].numel() == 20 + 30 + 2
    assert not is_view(buffer, model.frozen.weight)
    assert not any(is_view(buffer, model.get_buffer(name)) for name in ("scale", "count", "cache"))
    assert len(buffer.parameters) == 2
    assert FlatBuffer(LowRank(), include_buffers=False).vector.segments[0].numel() == 50


def test_buffers_that_are_not_finite_stay_with_a_warning() -> None:
    model = net()
    model.register_buffer("running_std", torch.tensor([0.0, float("-inf")]))
    model.register_buffer("mask", torch.tensor([0.0, float("-inf")]))  # which stays in any case
    with pytest.warns(UserWarning, match=r"infinite or NaN values stay local: \['running_std'\]"):
        buffer = FlatBuffer(model)
    assert not is_view(buffer, model.get_buffer("running_std"))
    model.get_buffer("running_std").zero_()
    buffer.attach()
    assert not is_view(buffer, model.get_buffer("running_std"))  # decided once, as all ranks must


def test_one_segment_per_dtype() -> None:
    model = net()
    model.get_submodule("second").half()
    model.register_buffer("running_mean", torch.ones(3, dtype=torch.float64))
    model.register_parameter("wave", nn.Parameter(torch.tensor([1 + 2j, 3 - 4j])))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    buffer = FlatBuffer(model)
    assert {x.dtype for x in buffer.vector.segments} == {torch.float32, torch.float16, torch.float64}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert all(is_view(buffer, tensor) for tensor in buffer.tensors)
    wave = model.get_parameter("wave")
    for segment in buffer.vector.segments:
        segment.mul_(2)
    assert torch.equal(wave.detach(), torch.tensor([2 + 4j, 6 - 8j]))


class Mixed(nn.Module):
    """Matrices of several shapes in no order, vectors, a scalar, buffers, complex numbers and other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))
        self.wide = nn.Linear(5, 3, bias=False)
        self.register_buffer("running_mean", torch.zeros(6))
        self.conv = nn.Conv2d(2, 3, 2)
        self.also_wide = nn.Linear(5, 3)
        self.wave = nn.Parameter(torch.zeros(3, 2, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.zeros(()))
        self.tied = self.wide
        self.register_buffer("moving_var", torch.zeros(2, 2))
        self.register_parameter("narrow", nn.Parameter(torch.zeros(2, 2, dtype=torch.float16)))
        self.register_buffer("narrow_running_mean", torch.zeros(2, dtype=torch.float16))


@pytest.mark.parametrize("channels_last", [False, True])
def test_order_is_matrices_by_shape_then_vectors_then_buffers(channels_last: bool) -> None:
    model = Mixed()
    if channels_last:
        model.conv.to(memory_format=torch.channels_last)
    buffer = FlatBuffer(model)
    layout = {segment.dtype: segment.specs for segment in buffer.vector.layout.segments}
    unnamed = {dtype: tuple(spec._replace(name="") for spec in specs) for dtype, specs in layout.items()}
    assert unnamed == {
        torch.float32: (
            *(TensorSpec((3, 2, 2)), TensorSpec((3, 2, 2, 2)), TensorSpec((3, 5)), TensorSpec((3, 5))),
            *(TensorSpec((4,)), TensorSpec((1,)), TensorSpec((3,)), TensorSpec((3,))),
            *(TensorSpec((6,), True), TensorSpec((2, 2), True)),
        ),
        torch.float16: (TensorSpec((2, 2)), TensorSpec((2,), True)),
    }
    offset, (segment,) = 0, [x for x in buffer.vector.segments if x.dtype is torch.float32]
    for spec, tensor in zip(layout[torch.float32], (x for x in buffer.tensors if x.dtype is not torch.float16)):
        assert tensor.data_ptr() == segment.data_ptr() + 4 * offset
        offset += spec.numel
    assert {x.dtype: x.numel() for x in buffer.vector.buffers} == {torch.float32: 6 + 4, torch.float16: 2}


def test_rows_of_a_part_are_filters_in_any_memory_format() -> None:
    """Dim 0 by the rest, in the order of memory: what a code of matrices sees."""
    model = nn.Conv2d(2, 3, 2, bias=False).to(memory_format=torch.channels_last)
    buffer = FlatBuffer(model)
    (segment,) = buffer.vector.layout.segments
    assert [spec.shape for _, spec in segment.places()] == [(3, 2, 2, 2)]
    for k in range(3):
        model.weight.detach()[k] = k
    assert buffer.vector.segments[0].view(3, 8).tolist() == [[float(k)] * 8 for k in range(3)]


def test_narrow_dtypes_are_mixed_in_float32() -> None:
    """W x rounded once: mixing in bfloat16 itself would round after every message."""
    vectors = []
    for seed in range(4):
        layer = fill_(nn.Linear(40, 30), seed).bfloat16()
        vectors.append(FlatBuffer(layer).vector)
    weights = [0.1, 0.2, 0.4]
    exact = 0.3 * vectors[0].segments[0].double()
    for weight, vector in zip(weights, vectors[1:], strict=True):
        exact += weight * vector.segments[0].double()
    vectors[0].combine_(0.3, vectors[1:], weights)
    # Equal but for the few that float32 puts on the other side of a tie.
    assert float((vectors[0].segments[0] != exact.bfloat16()).float().mean()) < 0.01


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_padding_divides_into_shards(num_shards: int) -> None:
    buffer = FlatBuffer(net(), num_shards=num_shards)
    shards = [buffer.vector.shard(i, num_shards) for i in range(num_shards)]
    assert len({x.raw.numel() for x in shards}) == 1
    assert sum(x.segments[0].numel() for x in shards if x.segments) == buffer.vector.segments[0].numel()
    for i, shard in enumerate(shards):
        for segment in shard.segments:
            segment.fill_(i + 1)
    assert bool((buffer.vector.segments[0] > 0).all())


def test_complex_parameters_lie_at_multiples_of_their_size() -> None:
    """A complex128 beside an odd number of float64, which share a segment."""
    model = nn.Module()
    model.register_parameter("odd", nn.Parameter(torch.ones(3, 3, dtype=torch.float64)))
    model.register_parameter("pair", nn.Parameter(torch.full((3,), 1 + 2j, dtype=torch.complex128)))
    buffer = FlatBuffer(model)
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in buffer.tensors)
    assert bool((model.get_parameter("pair") == 1 + 2j).all())


# What moves the tensors.


@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.double, nn.Module.bfloat16])
def test_casts_are_taken_in_again(cast: Callable[[nn.Module], nn.Module]) -> None:
    model = net()
    buffer = FlatBuffer(model)
    buffer.vector.push_sum_weight.fill_(0.75)
    cast(model)
    assert not buffer.is_attached()
    expected = flatten(model)
    buffer.attach()
    assert buffer.is_attached()
    assert torch.equal(flatten(model), expected)
    assert buffer.vector.segments[0].dtype is next(model.parameters()).dtype
    assert all(is_view(buffer, tensor) for tensor in buffer.tensors)
    assert float(buffer.vector.push_sum_weight) == 0.75


def test_channels_last_stays_channels_last() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv2d(4, 2, 1), nn.Conv3d(2, 3, 2)).double()
    model[0].to(memory_format=torch.channels_last)
    model[2].to(memory_format=torch.channels_last_3d)
    strides = {name: p.stride() for name, p in model.named_parameters()}
    expected = flatten(model)
    buffer = FlatBuffer(model)
    assert {name: p.stride() for name, p in model.named_parameters()} == strides
    assert torch.equal(flatten(model), expected)
    assert any("strides (12, 1, 6, 3)" in line for line in buffer.signature())
    buffer.vector.segments[0].mul_(2)
    assert torch.equal(flatten(model), 2 * expected)


def test_load_state_dict_fills_the_vector() -> None:
    model = net(0)
    buffer = FlatBuffer(model)
    model.load_state_dict(net(1).state_dict())
    assert buffer.is_attached()
    assert torch.equal(buffer.vector.segments[0].double(), in_order(net(1)))


def test_load_state_dict_with_assign_is_taken_in_again() -> None:
    model = net(0)
    buffer = FlatBuffer(model)
    model.load_state_dict(net(1).state_dict(), assign=True)
    assert not buffer.is_attached()
    buffer.attach()
    assert torch.equal(buffer.vector.segments[0].double(), in_order(net(1)))
    assert all(p.requires_grad for p in buffer.parameters)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("is_first", [False, True])
def test_optimizers_keep_the_views_and_their_results(name: str, is_first: bool) -> None:
    """Bit-identical to training the bare module, whether the optimizer or the buffer is made first."""
    model, bare = net(), net()
    optimizer = OPTIMIZERS[name](model.parameters()) if is_first else None
    buffer = FlatBuffer(model)
    optimizer = optimizer or OPTIMIZERS[name](model.parameters())
    other = OPTIMIZERS[name](bare.parameters())
    for step in range(4):
        train_step(model, optimizer, 0, step)
        train_step(bare, other, 0, step)
    assert buffer.is_attached()
    assert torch.equal(buffer.vector.segments[0].double(), in_order(bare))


def test_compiled_module_sees_the_vector() -> None:
    model = net()
    buffer = FlatBuffer(model)
    compiled = torch.compile(model.eval(), backend="eager")
    x = torch.ones(2, 3)
    torch.testing.assert_close(compiled(x), model(x))
    buffer.vector.segments[0].mul_(0.5)
    torch.testing.assert_close(compiled(x), model(x))


# Copies.


def test_deepcopy_of_the_module_is_separate() -> None:
    model = net()
    buffer = FlatBuffer(model)
    twin = copy.deepcopy(model)
    expected = flatten(model)
    assert torch.equal(flatten(twin), expected)
    assert not any(is_view(buffer, p) for p in twin.parameters())
    buffer.vector.segments[0].zero_()
    assert torch.equal(flatten(twin), expected)


def test_deepcopy_of_the_buffer_is_attached_to_its_own_module() -> None:
    buffer = FlatBuffer(net())
    twin = copy.deepcopy(buffer)
    assert not twin.is_attached()
    twin.attach()
    twin.vector.segments[0].zero_()
    assert bool((flatten(twin.module) == 0).all())
    assert torch.equal(flatten(buffer.module), flatten(net()))


def test_pickling_the_module_costs_its_own_size() -> None:
    """Not the whole vector for every parameter."""
    model = nn.Sequential(*(fill_(nn.Linear(50, 50), seed) for seed in range(10)))
    before = len(pickle.dumps(model))
    FlatBuffer(model)
    data = pickle.dumps(model)
    assert len(data) < 1.1 * before
    twin = pickle.loads(data)  # noqa: S301 (made two lines above)
    assert torch.equal(flatten(twin), flatten(model))
    assert all(type(p) is nn.Parameter and p.requires_grad for p in twin.parameters())


# Mistakes.


def overlapping() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.bias = nn.Parameter(layer.weight.detach()[0])
    return layer


def on_several_devices() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


MISTAKES: list[tuple[Callable[[], nn.Module], str]] = [
    (nn.Identity, r"got a module without trainable parameters, expected at least one .*; wrap the module"),
    (lambda: nn.Linear(2, 2).requires_grad_(False), r"got a module without trainable parameters"),
    (
        on_several_devices,
        r"several devices: cpu \(first: '0.weight'\), meta \(first: '1.weight'\); expected one device; move .*\.to\(\)",
    ),
    (lambda: nn.Linear(2, 2, device="meta"), r"on the meta device, expected values; materialise"),
    (lambda: nn.LazyLinear(2), r"uninitialised lazy parameter 'weight', expected known shapes; run one forward"),
    (overlapping, r"got 'bias' and 'weight', distinct tensors that overlap in memory.* tie them"),
]


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_mistakes_are_named(number: int) -> None:
    make, message = MISTAKES[number]
    module = make()
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        FlatBuffer(module)


def test_parameters_with_another_name_stay_in_the_vector() -> None:
    model = nn.Linear(3, 2)
    buffer, values = FlatBuffer(model), model.weight.detach().clone()
    for name in ("weight", "bias"):
        prune.l1_unstructured(model, name, amount=0.5)
    assert not buffer.is_attached()
    buffer.reattach()
    assert [slot.name for slot in buffer.slots] == ["weight_orig", "bias_orig"]
    assert buffer.is_attached()
    torch.testing.assert_close(model.get_parameter("weight_orig"), values, rtol=0, atol=0)
    buffer.vector.segments[0].zero_()
    assert not model.get_parameter("weight_orig").any()


def test_signature_tells_names_shapes_dtypes_and_strides() -> None:
    assert FlatBuffer(net()).signature() == [
        *("second.weight (2, 4) torch.float32", "first.weight (4, 3) torch.float32"),
        *("first.bias (4,) torch.float32", "norm.weight (4,) torch.float32", "norm.bias (4,) torch.float32"),
        "second.bias (2,) torch.float32",
        *("norm.running_mean (4,) torch.float32", "norm.running_var (4,) torch.float32"),
    ]
