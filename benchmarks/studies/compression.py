"""Compression: processor time to encode and decode, beside the time that the saved bytes take on a link.

    python -m benchmarks.studies compression --output benchmarks/results/compression.csv

Compressors alone work on a normal vector as long as the parameters of ResNet-18. Methods run whole rounds on a
ResNet-18 with its buffers, between two ranks of which the other is an `Echo`. "Encode" is the work of a sender in a
round, and "decode" adds its own message and the message of one neighbour. Times are medians of the processor time of
one thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.studies.computed import Cell, Computed
from gossip_modules import QSGD, Choco, DeepSqueeze, Moniqua, PowerGossip, RandomK, RingGraph, SignNorm, TopK
from gossip_modules.compression import Absmax, Cast, ChunkTopK, Compressor, Identity, TwoBit
from gossip_modules.extend import Algorithm, FlatBuffer, Mixer, PushPull
from gossip_modules.flat.vector import FlatVector
from gossip_modules.mixing_manager import MetropolisHastingsMixing
from gossip_modules.rounds.rounds import Rounds
from gossip_modules.transport.deadline import Deadline
from gossip_modules.transport.traffic import PeerTraffic

COMPRESSORS: tuple[Compressor, ...] = (
    Identity(),  # two passes over memory, the unit of `lab.plan.CODE_PASSES`
    *(Cast(torch.bfloat16), Cast(torch.float16)),
    *(TopK(0.1), TopK(0.01), TopK(0.001), RandomK(0.1), RandomK(0.01)),
    *(SignNorm(), SignNorm(None), QSGD(8), QSGD(4), QSGD(2), Absmax(8), Absmax(4, 32), ChunkTopK(64, values=TwoBit())),
)
ALGORITHMS: Mapping[str, Algorithm] = {
    "CHOCO, sign": Choco(SignNorm(), step_size=0.45),
    "CHOCO, top 1 %": Choco(TopK(0.01), step_size=0.0375),
    "DeepSqueeze, sign": DeepSqueeze(SignNorm(), step_size=0.01),
    "Moniqua, 8 bits": Moniqua(theta=1.0),
    "Moniqua, 2 bits": Moniqua(theta=1.0, bits=2, step_size=0.1),
    "PowerGossip, rank 1, 1 iteration": PowerGossip(),
    "PowerGossip, rank 1, 2 iterations": PowerGossip(num_iterations=2),
    "PowerGossip, rank 4, 1 iteration": PowerGossip(rank=4),
}
GBITS = (0.1, 1, 10)
"""Rates of links."""
PARAMETERS = 11_181_642
"""Of a ResNet-18 for ten classes."""
WARM, REPEATS = 3, 9


def cells(rows: Callable[[], Any]) -> Iterator[Cell]:
    """Yield a cell for each compressor, then for each method."""
    for compressor in COMPRESSORS:
        yield {"name": repr(compressor)}, partial(of_compressor, compressor)
    yield {"name": "PushPull, bfloat16 messages"}, lambda: of_rounds(PushPull(wire_dtype=torch.bfloat16))
    for name, algorithm in ALGORITHMS.items():
        yield {"name": name}, partial(_of_algorithm, algorithm)


def _of_algorithm(algorithm: Algorithm) -> Mapping[str, Any]:
    return of_rounds(Rounds(algorithm, PushPull()))


def figures(num_bytes: int, plain_bytes: int, encode_ms: float, decode_ms: float) -> Mapping[str, Any]:
    """Return the columns of a row: a ratio is the time that the saved bytes take on a link, over the time spent."""
    saved_ms = {gbit: (plain_bytes - num_bytes) * 8 / gbit / 1e6 for gbit in GBITS}
    spent_ms = encode_ms + decode_ms
    return {
        "num_bytes": num_bytes,
        "plain_bytes": plain_bytes,
        "encode_ms": round(encode_ms, 3),
        "decode_ms": round(decode_ms, 3),
        "saved_ms": round(saved_ms[1], 1),
        **{f"ratio_at_{gbit:g}_gbit": round(saved / spent_ms, 2) for gbit, saved in saved_ms.items()},
    }


def milliseconds(action: Callable[[], object]) -> float:
    """Return the median processor time of this thread in an action."""
    times = []
    for _ in range(WARM + REPEATS):
        start = time.thread_time()
        action()
        times.append(time.thread_time() - start)
    return 1e3 * statistics.median(times[WARM:])


@lru_cache
def normal_vector() -> Tensor:
    """Return the vector that compressors alone work on, float32 [PARAMETERS]."""
    return torch.randn(PARAMETERS, generator=torch.Generator().manual_seed(0))


def of_compressor(compressor: Compressor) -> Mapping[str, Any]:
    """Return the row of a compressor by itself; decoding adds one message twice, with weights that cancel."""
    x = normal_vector()
    target, message = torch.zeros_like(x), compressor.message_like(x)

    def decode() -> None:
        compressor.add_decompressed(message, target, alpha=-0.5)
        compressor.add_decompressed(message, target, alpha=0.5)

    encode_ms = milliseconds(partial(compressor.compress, x, message))
    return figures(message.numel(), x.nbytes, encode_ms, milliseconds(decode))


@lru_cache
def resnet() -> FlatVector:
    """Return the parameters and buffers of a ResNet-18 as one vector."""
    from torchvision.models import resnet18

    torch.manual_seed(0)
    return FlatBuffer(resnet18(num_classes=10)).vector


@torch.no_grad()
def of_rounds(mixer: Mixer) -> Mapping[str, Any]:
    """Return the row of a method: encoding ends with the first message, and all after it is decoding.

    PowerGossip has rounds of two kinds, so a time is a mean over two rounds.
    """
    s, echo = resnet(), Echo()
    mixer.bind(MetropolisHastingsMixing(RingGraph(2)), echo)
    times: list[tuple[float, float]] = []
    for t in range(2 * (WARM + REPEATS)):
        if t == 2 * WARM:
            echo.num_bytes_sent = 0
        echo.asked_at, echo.copy_seconds, start = None, 0.0, time.thread_time()
        mixer.mix(s, t)
        end = time.thread_time()
        assert echo.asked_at is not None, "a round has a message"
        times.append((echo.asked_at - start, end - echo.asked_at - echo.copy_seconds))
    pairs = [[(x + y) / 2 for x, y in zip(a, b, strict=True)] for a, b in zip(times[::2], times[1::2], strict=True)]
    encode_ms, decode_ms = (1e3 * statistics.median(part) for part in zip(*pairs[WARM:], strict=True))
    return figures(echo.num_bytes_sent // (2 * REPEATS), s.raw.numel(), encode_ms, decode_ms)


class Echo:
    """A transport between two ranks, of which the other sends each message back.

    Attributes:
        asked_at: the processor time when the first message of a round could be sent; None: not yet.
        copy_seconds: the processor time of copies of messages.
    """

    rank = 0
    world_size = 2
    names: Sequence[int] = (0, 1)
    device = torch.device("cpu")
    timeout = timedelta(minutes=5)
    is_elastic = False
    lost: frozenset[int] = frozenset()
    num_bytes_sent = 0
    asked_at: float | None = None
    copy_seconds = 0.0

    def __init__(self) -> None:
        self.traffic = PeerTraffic()

    def exchange(
        self,
        sends: Mapping[int, Sequence[Tensor]],
        recvs: Mapping[int, Sequence[Tensor]],
        *,
        tag: int,
        what: str = "",
        fill: Callable[[int], None] | None = None,
    ) -> Echo:
        """See `gossip_modules.transport.base.Transport`."""
        assert fill is None, "only an engine that overlaps fills"
        start = time.thread_time()
        self.asked_at = start if self.asked_at is None else self.asked_at
        self.num_chunks = max(map(len, sends.values()), default=0)
        for peer, tensors in sends.items():
            for x, y in zip(tensors, recvs[peer], strict=True):
                y.copy_(x)
                self.num_bytes_sent += x.nbytes
        self.copy_seconds += time.thread_time() - start
        return self

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return at once."""

    def arrivals(self) -> Iterator[int]:
        """See `gossip_modules.transport.base.Pending`."""
        yield from range(self.num_chunks)

    def within(self, deadline: Deadline) -> AbstractContextManager[None]:
        """See `gossip_modules.transport.base.Transport`."""
        return nullcontext()

    def all_reduce(self, x: Tensor, *, what: str) -> None:
        """See `gossip_modules.transport.base.Transport`."""
        x.mul_(2)

    def barrier(self, *, what: str) -> None:
        """See `gossip_modules.transport.base.Transport`."""

    def broadcast(self, x: Tensor, *, source: int, what: str) -> None:
        """See `gossip_modules.transport.base.Transport`."""

    def all_to_all(self, out: Tensor, x: Tensor, *, what: str) -> None:
        """See `gossip_modules.transport.base.Transport`."""
        out.copy_(x)

    def all_gather(self, out: Tensor, x: Tensor, *, what: str) -> None:
        """See `gossip_modules.transport.base.Transport`."""
        out.view(2, -1).copy_(x.expand(2, -1))


COMPRESSION: Mapping[str, Computed] = {
    "compression": Computed(
        cells,
        (
            *("name", "num_bytes", "plain_bytes", "encode_ms", "decode_ms", "saved_ms"),
            *(f"ratio_at_{gbit:g}_gbit" for gbit in GBITS),
        ),
    )
}
"""The study by its name."""
