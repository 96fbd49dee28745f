"""Contract of every compressor: size, round trip against dense numpy, contraction, randomness, odd values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from gossip_modules.compression import ChunkTopK, TwoBit
from gossip_modules.compression.compressor import Cast, Compressor
from gossip_modules.compression.quantizer import QSGD, Absmax, BlockFloat, SignNorm
from gossip_modules.compression.sparsifier import RandomK, TopK
from tests.library.compression.cases import CASES, energy, kept

DIMENSIONS = [0, 1, 7, 8, 9, 63, 64, 65, 1000, 70_000]
# Where there is no CUDA device, one test says so, which needs both.
DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]
UNBIASED = [name for name, case in CASES.items() if case.is_unbiased]


def vector(d: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal entries, no two of equal magnitude."""
    return torch.from_numpy(np.random.default_rng((seed, d)).standard_normal(d)).to(dtype)


def compressed(compressor: Compressor, x: Tensor, t: int = 0) -> Tensor:
    """The message of x."""
    message = compressor.message_like(x)
    compressor.compress(x, message, t=t)
    return message


def decompressed(compressor: Compressor, x: Tensor, t: int = 0) -> Tensor:
    """C(x)."""
    result = torch.zeros_like(x)
    compressor.add_decompressed(compressed(compressor, x, t), result)
    return result


def raw(message: Tensor) -> bytes:
    """The bytes of a message."""
    return message.cpu().numpy().tobytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_round_trip_is_the_dense_oracle(name: str, dtype: torch.dtype, device: str) -> None:
    """Also: the size, x is not changed, alpha, and a target that holds something."""
    compressor = CASES[name].make()
    for d in DIMENSIONS:
        x, target = vector(d, dtype).to(device), vector(d, dtype, seed=1).to(device)
        x_before, target_before = x.cpu().numpy().copy(), target.cpu().numpy().copy()
        message = compressed(compressor, x, t=5)
        assert message.dtype == torch.uint8
        assert message.numel() == CASES[name].size(d, x.element_size()) == compressor.num_bytes(d, dtype)
        assert (x.cpu().numpy() == x_before).all()
        oracle = CASES[name].oracle(x_before, raw(message), compressor)
        compressor.add_decompressed(message, target, alpha=-0.75)
        compressor.add_decompressed(message, target, alpha=0.5)
        assert (x.cpu().numpy() == x_before).all()
        np.testing.assert_allclose(target.cpu().numpy(), target_before - 0.25 * oracle, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_vector_of_several_chunks_is_the_dense_oracle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are longer than a chunk, too; the largest entries are in the first chunk."""
    monkeypatch.setattr(Absmax, "longest", None)  # chunks of 131,072 entries
    compressor, x = CASES[name].make(), vector(300_001)
    x[:10] *= 100
    message, target, rest = compressor.message_like(x), torch.zeros_like(x), torch.empty_like(x)
    compressor.compress(x, message, t=5, rest=rest)
    compressor.add_decompressed(message, target)
    oracle = CASES[name].oracle(x.numpy(), raw(message), compressor)
    np.testing.assert_allclose(target.numpy(), oracle, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(rest.numpy(), (x - target).numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_rest_equals_a_copy_that_the_message_is_taken_from(name: str, dtype: torch.dtype) -> None:
    """In another vector, and in x itself; the message is the same."""
    compressor = CASES[name].make()
    for d in DIMENSIONS:
        x = vector(d, dtype)
        message, expected = compressed(compressor, x, t=5), x.clone()
        compressor.add_decompressed(message, expected, alpha=-1.0)
        for rest in (torch.full_like(x, 7.0), x):
            again = compressor.message_like(x)
            compressor.compress(x, again, t=5, rest=rest)
            assert raw(again) == raw(message)
            torch.testing.assert_close(rest, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_a_vector_that_requires_a_gradient_has_the_same_message(name: str) -> None:
    compressor, x = CASES[name].make(), vector(100)
    message, expected = compressor.message_like(x), compressed(compressor, x, t=5)
    compressor.compress(x.clone().requires_grad_(), message, t=5)
    assert raw(message) == raw(expected)
    rows = torch.stack([x, 2 * x])
    values = compressor.decompressed(rows.clone().requires_grad_(), t=5)
    torch.testing.assert_close(values, compressor.decompressed(rows, t=5), rtol=0, atol=0)


@pytest.mark.parametrize("narrow", [None, "target", "also"])
@pytest.mark.parametrize("name", CASES)
def test_one_decoding_adds_to_two_vectors(name: str, narrow: str | None) -> None:
    """The second one as alone; the first one up to the rounding of alpha, since products are rounded once each."""
    compressor = CASES[name].make()
    for d in DIMENSIONS:
        target, also = vector(d, seed=1), vector(d, seed=2)
        if narrow == "target":
            target = target.bfloat16()
        elif narrow == "also":
            also = also.bfloat16()
        message, alone, other = compressed(compressor, vector(d), t=5), target.clone(), also.clone()
        compressor.add_decompressed(message, alone, alpha=-0.7)
        compressor.add_decompressed(message, other)
        compressor.add_decompressed(message, target, alpha=-0.7, also=also)
        torch.testing.assert_close(also, other, rtol=0, atol=0)
        torch.testing.assert_close(target, alone, rtol=torch.finfo(target.dtype).eps * 2, atol=1e-6)


def test_two_vectors_of_different_lengths_are_an_error() -> None:
    x = vector(16)
    with pytest.raises(ValueError, match=r"got also=\[8\], expected the shape of target, \[16\]"):
        SignNorm().add_decompressed(compressed(SignNorm(), x), x, also=x[:8].clone())


def test_a_rest_of_another_dtype_is_an_error() -> None:
    x = vector(16)
    with pytest.raises(ValueError, match=r"got a rest torch.float64 \[16\], expected torch.float32 \[16\]"):
        SignNorm().compress(x, SignNorm().message_like(x), rest=x.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_all_rows_at_once_are_the_messages_one_by_one(name: str, dtype: torch.dtype) -> None:
    compressor = CASES[name].make()
    assert compressor.takes_rows
    for n, d in ((3, 0), (1, 7), (4, 1000), (2, 70_001)):
        x = torch.stack([vector(d, dtype, seed) for seed in range(n)])
        expected = torch.stack([decompressed(compressor, row, t=3) for row in x])
        torch.testing.assert_close(compressor.decompressed(x, t=3), expected, rtol=0, atol=0)


@pytest.mark.parametrize("d", [64, 1000])
@pytest.mark.parametrize("name", CASES)
def test_error_is_as_in_the_paper(name: str, d: int) -> None:
    """On average, within 4 standard errors; on vectors that are dense, of few large entries, and of one."""
    compressor, num_rounds = CASES[name].make(), 1
    if CASES[name].is_random:
        num_rounds = 200 if d == 64 else 50
    one = torch.zeros(d)
    one[d // 3] = -2.0
    for x in (vector(d), vector(d).exp().pow(3), one, torch.ones(d)):
        errors = [energy((x - decompressed(compressor, x, t)).numpy()) for t in range(num_rounds)]
        slack = 4 * np.std(errors) / math.sqrt(len(errors)) + 1e-6 * energy(x.numpy())
        assert np.mean(errors) <= CASES[name].error(x.numpy()) + slack


@pytest.mark.parametrize("name", UNBIASED)
def test_the_mean_over_rounds_is_x(name: str) -> None:
    """Within 5 standard errors in each of 40 entries."""
    compressor, x, num_rounds = CASES[name].make(), vector(40), 2000
    samples = torch.stack([decompressed(compressor, x, t) for t in range(num_rounds)]).double()
    assert ((samples.mean(0) - x).abs() <= 5 * samples.std(0) / math.sqrt(num_rounds) + 1e-6).all()


def test_random_k_chooses_all_entries_alike() -> None:
    """Each of 30 entries with probability 1/10: counts over 1000 rounds are within 5 standard deviations of 100."""
    x = torch.ones(30)
    counts = sum(decompressed(RandomK(0.1), x, t) for t in range(1000))
    assert isinstance(counts, Tensor)
    assert counts.sum() == 3000
    assert ((counts - 100).abs() < 5 * math.sqrt(1000 * 0.1 * 0.9)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_messages_follow_from_x_seed_and_round(name: str, device: str) -> None:
    """Two ranks write equal bytes in any order of rounds, whatever the message held before."""
    x = vector(1000).to(device)
    first, second = CASES[name].make(), CASES[name].make()
    assert repr(first) == repr(second)
    forwards = [raw(compressed(first, x, t)) for t in range(3)]
    for t in (2, 0, 1):
        message = second.message_like(x).fill_(0xA5)
        second.compress(x, message, t=t)
        assert raw(message) == forwards[t]
    assert len(set(forwards)) == (3 if CASES[name].is_random else 1)


@pytest.mark.parametrize(
    ("one", "other"), [(RandomK(0.1, seed=0), RandomK(0.1, seed=1)), (QSGD(4, seed=0), QSGD(4, seed=1))], ids=str
)
def test_seeds_differ(one: Compressor, other: Compressor) -> None:
    x = vector(1000)
    assert raw(compressed(one, x)) != raw(compressed(other, x))
    assert repr(one) != repr(other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_equal_targets_stay_equal_bits(name: str, device: str) -> None:
    """Sender and receiver: another place in memory, another number of threads, a message inside a larger buffer."""
    compressor, x, target = CASES[name].make(), vector(70_001).to(device), vector(70_001, seed=1).to(device)
    message = compressed(compressor, x)
    buffer = torch.full((message.numel() + 40,), 7, dtype=torch.uint8, device=device)
    received = buffer[24 : 24 + message.numel()]
    compressor.compress(x, received)
    assert raw(received) == raw(message)
    assert (buffer[:24] == 7).all()
    assert (buffer[24 + message.numel() :] == 7).all()
    elsewhere = torch.zeros(x.numel() + 3, device=device)[3:].copy_(target)
    compressor.add_decompressed(message, target, alpha=0.3)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        compressor.add_decompressed(received, elsewhere, alpha=0.3)
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(target, elsewhere)
    assert raw(received) == raw(message) == raw(compressed(compressor, x))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_a_message_means_the_same_on_both_devices(name: str) -> None:
    compressor, x, target = CASES[name].make(), vector(200_000), vector(200_000, seed=1)
    message, on_gpu = compressed(compressor, x), target.cuda()
    compressor.add_decompressed(message, target, alpha=0.3)
    compressor.add_decompressed(message.cuda(), on_gpu, alpha=0.3)
    assert torch.equal(target, on_gpu.cpu())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_narrow_target_is_rounded_once(name: str, dtype: torch.dtype) -> None:
    compressor, x, narrow = CASES[name].make(), vector(1000), vector(1000, dtype, seed=1)
    wide, message = narrow.float(), compressed(compressor, x)
    compressor.add_decompressed(message, narrow, alpha=0.3)
    compressor.add_decompressed(message, wide, alpha=0.3)
    assert torch.equal(narrow, wide.to(dtype))


@pytest.mark.parametrize("name", CASES)
def test_zeros_stay_zero(name: str) -> None:
    assert not decompressed(CASES[name].make(), torch.zeros(1000)).any()


@pytest.mark.parametrize("scale", [2.0**100, 2.0**-110])
@pytest.mark.parametrize("name", [name for name in CASES if name != "float16"])
def test_scale_does_not_matter(name: str, scale: float) -> None:
    """Powers of two go through every step exactly, though squares of these leave float32."""
    compressor, x = CASES[name].make(), vector(1000)
    assert torch.equal(decompressed(compressor, x * scale), decompressed(compressor, x) * scale)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("random")])
def test_values_that_are_not_finite_show(name: str, bad: float, device: str) -> None:
    x = vector(70_000)
    x[1234] = bad
    assert not decompressed(CASES[name].make(), x.to(device))[1234].isfinite()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        *((torch.float32, size) for size in (1e18, 1e25, 3e38)),
        *((torch.float64, size) for size in (1e100, 1e154, 1e200, 1e308)),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_finite_values_stay_finite(name: str, dtype: torch.dtype, size: float, device: str) -> None:
    """Where squares, sums or scales leave float32 or float64: no infinity, no NaN, no wrong sign."""
    x = torch.full((4000,), size, dtype=dtype, device=device)
    x[::2].mul_(-1)
    x[1000:2000] = 0
    result = decompressed(CASES[name].make(), x)
    assert result.isfinite().all()
    assert not (result * x.sign() < 0).any()
    assert result.any()


def test_largest_numbers_have_a_code() -> None:
    """A norm that float32 has not is replaced by one that is no less than any entry: an even finer grid."""
    x = 3e38 * torch.linspace(-1, 1, 512)
    qsgd, unbiased = QSGD(8), QSGD(8, unbiased=True)
    torch.testing.assert_close(decompressed(unbiased, x), x, rtol=0, atol=3.41e38 / 127)
    shrunk = decompressed(qsgd, torch.ones(1)) / decompressed(unbiased, torch.ones(1))
    torch.testing.assert_close(decompressed(qsgd, x), x * shrunk, rtol=0, atol=3.41e38 / 127)
    torch.testing.assert_close(
        decompressed(SignNorm(), x), x.double().abs().mean().float() * x.sign(), rtol=1e-6, atol=0
    )
    halves = torch.full((64,), 1e200, dtype=torch.float64)
    assert decompressed(SignNorm(), halves)[0] == pytest.approx(torch.finfo(torch.float32).max, rel=1e-5)


def test_bad_entries_stay_in_their_block() -> None:
    for compressor in (
        SignNorm(64),
        TwoBit(64),
        Absmax(4, 64),
        QSGD(4, 64),
        QSGD(8, 64),
        QSGD(2, 64),
        Cast(torch.float16),
        TopK(0.1),
    ):
        x = vector(256)
        x[70], x[75] = math.nan, math.inf
        result = decompressed(compressor, x)
        assert result[:64].isfinite().all(), compressor
        assert result[128:].isfinite().all(), compressor


def test_cast_saturates() -> None:
    x = torch.tensor([1e6, -1e6, 65504.0, 65519.0, math.inf, -math.inf, math.nan, -0.0])
    expected = torch.tensor([65504.0, -65504.0, 65504.0, 65504.0, math.inf, -math.inf, math.nan, 0.0])
    torch.testing.assert_close(decompressed(Cast(torch.float16), x), expected, equal_nan=True, rtol=0, atol=0)
    for narrow in (torch.float16, torch.bfloat16):
        for dtype in (torch.float32, torch.float64):
            huge = torch.tensor([-1.0, 1.0], dtype=dtype) * torch.finfo(dtype).max
            assert decompressed(Cast(narrow), huge).tolist() == [torch.finfo(narrow).min, torch.finfo(narrow).max]


def test_sign_of_zero_is_plus() -> None:
    assert decompressed(SignNorm(), torch.tensor([0.0, -0.0, -3.0, 1.0])).tolist() == [1.0, 1.0, -1.0, 1.0]


@pytest.mark.parametrize(
    "x",
    [
        vector(700_000),
        torch.zeros(700_000),
        torch.ones(700_000),
        torch.cat([torch.zeros(650_000), vector(50_000)]),
        torch.arange(700_000) % 11 * 1e-3 + (torch.arange(700_000) % 11 == 3) * vector(700_000),
        torch.cat([torch.full((3000,), math.nan), vector(697_000)]),
    ],
    ids=["normal", "zeros", "ones", "sparse", "periodic", "nan"],
)
@pytest.mark.parametrize("ratio", [0.01, 1e-5])
def test_top_k_is_exact_whatever_the_sample_says(ratio: float, x: Tensor) -> None:
    """The k kept magnitudes are the k largest, also where the sample is misleading."""
    k = kept(x.numel(), ratio)
    compressor = TopK(ratio)
    values = compressed(compressor, x)[: 4 * k].view(torch.float32).abs().sort().values
    assert torch.equal(values.nan_to_num(nan=9e9), x.abs().topk(k).values.flip(0).nan_to_num(nan=9e9))


def test_top_k_starts_over_where_the_sample_excludes_too_many() -> None:
    """Every entry that is sampled is large, all others are small: the threshold leaves fewer than k."""
    d, k = 700_000, 70_000
    x = vector(d) * 1e-3
    x[:: d // (1 << 16) | 1] += 10.0
    assert (x > 5).sum() < k
    values = compressed(TopK(0.1), x)[: 4 * k].view(torch.float32).abs().sort().values
    assert torch.equal(values, x.abs().topk(k).values.flip(0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cast(torch.float32), "got dtype=torch.float32, expected torch.bfloat16 or torch.float16"),
        (lambda: Cast(torch.int8), "got dtype=torch.int8"),
        (lambda: TopK(0.0), "got ratio=0.0, expected 0 < ratio <= 1"),
        (lambda: TopK(1.1), "got ratio=1.1"),
        (lambda: TopK("0.1"), "got ratio='0.1', expected 0 < ratio <= 1"),  # type: ignore[arg-type]
        (lambda: RandomK(True), "got ratio=True, expected 0 < ratio <= 1"),
        (lambda: TopK(math.nan), "got ratio=nan"),
        (lambda: RandomK(-0.1), "got ratio=-0.1"),
        (lambda: RandomK(0.1, seed=-1), "got seed=-1, expected an integer of at least 0"),
        (lambda: SignNorm(0), "got block_size=0, expected a positive multiple of 8"),
        (lambda: SignNorm(12), "got block_size=12"),
        (lambda: TwoBit(12), "got block_size=12, expected a positive multiple of 8"),
        (lambda: ChunkTopK(0), "got k=0, expected an integer of at least 1; it is the number of entries that are kept"),
        (lambda: ChunkTopK(9, 8), "got k=9, expected at most chunk_size=8; k are kept of each chunk"),
        (lambda: ChunkTopK(values="sign"), "got values='sign', expected a Compressor or None; pass e.g. TwoBit()"),  # type: ignore[arg-type]
        (lambda: QSGD(3), "got bits=3, expected 2, 4 or 8"),
        (lambda: BlockFloat(2), "got bits=2, expected 8 (E4M3) or 4 (E2M1); for 2 bits use TwoBit or Absmax(2)"),
        (lambda: QSGD(8, 4), "got bucket_size=4, expected a positive multiple of 8"),
        (lambda: QSGD(8, seed=-1), "got seed=-1"),
    ],
)
def test_wrong_settings(make: Callable[[], Compressor], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("name", CASES)
def test_wrong_tensors(name: str) -> None:
    compressor, x = CASES[name].make(), vector(100)
    message = compressed(compressor, x)
    for bad in (x.long(), x.half(), x.bfloat16(), x.view(10, 10), vector(200)[::2]):
        with pytest.raises(ValueError, match=r"got torch\..* expected a contiguous vector of .*; flatten it"):
            compressor.compress(bad, message)
        with pytest.raises(ValueError, match=r"expected a contiguous vector"):
            compressor.message_like(bad)
    for target in (x.long(), x.view(10, 10), vector(200)[::2]):
        with pytest.raises(ValueError, match=r"expected a contiguous vector"):
            compressor.add_decompressed(message, target)
    for bad in (message[:-1], message.to(torch.int8), message[None]):
        with pytest.raises(ValueError, match=r"got a message .* expected torch.uint8 \[\d+\].*; make it with"):
            compressor.compress(x, bad)
        with pytest.raises(
            ValueError, match=r"got a message .* expected torch.uint8 \[\d+( or \d+)?\] for 100 elements"
        ):
            compressor.add_decompressed(bad, x)
