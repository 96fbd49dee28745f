"""Does compressing pay? Encode and decode times against the time that the bytes saved take on a link.

    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.compression
    .venv/bin/python -m benchmarks.compression --device cuda --repeats 50
    .venv/bin/python -m benchmarks.compression --num-elements 25600000 --output compression.csv

First the compressors alone, on a normal vector as long as the parameters of ResNet-18; then whole rounds, on a
ResNet-18 with its buffers, between two ranks of which the other is an echo. "Encode" is what a sender does once a
round, "decode" is adding its own message and that of one neighbour; times are medians, on a CPU of the processor time
of one thread. "Saved" is the time that one message takes less than float32 would, at 1 Gbit/s; the columns after it are
that time over encode + decode at three speeds. Where it is above 1, compressing pays even with a single neighbour.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, Python looks beside this file only

from benchmarks.record import write_rows
from gossip_modules import QSGD, Choco, DeepSqueeze, Moniqua, PowerGossip, RandomK, RingGraph, SignNorm, TopK
from gossip_modules.compression import Cast, Compressor
from gossip_modules.extend import Algorithm, FlatBuffer, Mixer, PushPull
from gossip_modules.mixing_manager import MetropolisHastingsMixing
from gossip_modules.rounds.rounds import Rounds
from gossip_modules.transport.deadline import Deadline
from gossip_modules.transport.traffic import PeerTraffic

COMPRESSORS: tuple[Compressor, ...] = (
    Cast(torch.bfloat16),
    Cast(torch.float16),
    TopK(0.1),
    TopK(0.01),
    TopK(0.001),
    RandomK(0.1),
    RandomK(0.01),
    SignNorm(),
    SignNorm(None),
    QSGD(8),
    QSGD(4),
    QSGD(2),
)
ALGORITHMS: tuple[tuple[str, Algorithm], ...] = (
    ("CHOCO, sign", Choco(SignNorm(), step_size=0.45)),
    ("CHOCO, top 1 %", Choco(TopK(0.01), step_size=0.0375)),
    ("DeepSqueeze, sign", DeepSqueeze(SignNorm(), step_size=0.01)),
    ("Moniqua, 8 bits", Moniqua(theta=1.0)),
    ("Moniqua, 2 bits", Moniqua(theta=1.0, bits=2, step_size=0.1)),
    ("PowerGossip, rank 1, 1 iteration", PowerGossip()),
    ("PowerGossip, rank 1, 2 iterations", PowerGossip(num_iterations=2)),
    ("PowerGossip, rank 4, 1 iteration", PowerGossip(rank=4)),
)
LINKS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10}  # bits per second
RESNET18_PARAMETERS = 11_181_642  # for ten classes


@dataclass(frozen=True)
class Codec:
    """What is measured: any way of turning a vector into a message and adding messages to a vector.

    Attributes:
        name: for the table.
        encode: what a sender does once a round.
        decode: what is done with its own message and that of one neighbour.
        num_bytes: the size of one message.
    """

    name: str
    encode: Callable[[], object]
    decode: Callable[[], object]
    num_bytes: int


@dataclass(frozen=True)
class Row:
    """One measured codec. Times are in milliseconds, medians."""

    name: str
    num_bytes: int
    plain_bytes: int
    encode_ms: float
    decode_ms: float

    def saved_ms(self, bits_per_second: float) -> float:
        """The time that the bytes saved take on a link."""
        return (self.plain_bytes - self.num_bytes) * 8 / bits_per_second * 1e3

    def ratio(self, bits_per_second: float) -> float:
        """Time saved over time spent; compressing pays above 1."""
        return self.saved_ms(bits_per_second) / (self.encode_ms + self.decode_ms)


def milliseconds(action: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median time of an action, after three that do not count."""
    return statistics.median([timed(action, device) for _ in range(repeats + 3)][3:]) * 1e3


def timed(action: Callable[[], object], device: torch.device) -> float:
    """Seconds of processor time that an action takes; on CUDA seconds until the device has done it.

    Processor time of this one thread is hardly changed by what else the machine does.
    """
    start = now(device)
    action()
    return now(device) - start


def now(device: torch.device) -> float:
    """Seconds on the clock that `timed` reads."""
    if device.type != "cuda":
        return time.thread_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def measure(codecs: Iterable[Codec], plain_bytes: int, device: torch.device, repeats: int) -> Iterable[Row]:
    """Time each codec against messages of `plain_bytes`."""
    for codec in codecs:
        encode_ms = milliseconds(codec.encode, device, repeats)
        decode_ms = milliseconds(codec.decode, device, repeats)
        yield Row(codec.name, codec.num_bytes, plain_bytes, encode_ms, decode_ms)


def codecs_of(compressors: Iterable[Compressor], x: Tensor) -> Iterable[Codec]:
    """A codec per compressor; decoding adds the same message twice, with weights that cancel."""
    target = torch.zeros_like(x)
    for compressor in compressors:
        message = compressor.message_like(x)

        def decode(compressor: Compressor = compressor, message: Tensor = message) -> None:
            compressor.add_decompressed(message, target, alpha=-0.5)
            compressor.add_decompressed(message, target, alpha=0.5)

        yield Codec(repr(compressor), partial(compressor.compress, x, message), decode, message.numel())


class Echo:
    """A transport between two ranks, of which the other says what this one says.

    Attributes:
        asked_at: when the first message of a round was there to be sent; None: not yet.
        copy_seconds: the time that copying messages has taken.
    """

    rank = 0
    world_size = 2
    names: Sequence[int] = (0, 1)
    timeout = timedelta(minutes=5)
    is_elastic = False
    lost: frozenset[int] = frozenset()
    num_bytes_sent = 0
    asked_at: float | None = None
    copy_seconds = 0.0

    def __init__(self, device: torch.device) -> None:
        self.device, self.traffic = device, PeerTraffic()

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
        start = now(self.device)
        self.asked_at = start if self.asked_at is None else self.asked_at
        self.num_chunks = max(map(len, sends.values()), default=0)
        for peer, tensors in sends.items():
            for x, y in zip(tensors, recvs[peer], strict=True):
                y.copy_(x)
                self.num_bytes_sent += x.numel() * x.element_size()
        self.copy_seconds += now(self.device) - start
        return self

    def wait(self, timeout: timedelta | None = None) -> None:
        """Done already."""

    def arrivals(self) -> Iterator[int]:
        """See `gossip_modules.transport.base.Pending`."""
        yield from range(self.num_chunks)

    def within(self, deadline: Deadline) -> AbstractContextManager[None]:
        """See `gossip_modules.transport.base.Transport`."""
        return nullcontext()

    def all_reduce(self, x: Tensor, *, what: str) -> None:
        """See `gossip_modules.transport.base.Transport`."""
        x.mul_(2)

    def broadcast(self, x: Tensor, *, source: int, what: str) -> None:
        """See `gossip_modules.transport.base.Transport`."""

    def all_gather(self, out: Tensor, x: Tensor, *, what: str) -> None:
        """See `gossip_modules.transport.base.Transport`."""
        out.view(2, -1).copy_(x.expand(2, -1))


def measure_rounds(device: torch.device, repeats: int) -> Iterable[Row]:
    """Whole rounds on a ResNet-18: encode ends where the first message is sent; decode is all after it."""
    from torchvision.models import resnet18

    s = FlatBuffer(resnet18(num_classes=10).to(device)).vector
    mixing = MetropolisHastingsMixing(RingGraph(2))
    mixers: list[tuple[str, Mixer]] = [("PushPull, bfloat16 wire", PushPull(wire_dtype=torch.bfloat16))]
    mixers += [(name, Rounds(algorithm, PushPull())) for name, algorithm in ALGORITHMS]
    for name, mixer in mixers:
        echo = Echo(device)
        mixer.bind(mixing, echo)
        # Two rounds a time: PowerGossip's are of two kinds.
        seconds: dict[str, list[float]] = {"encode": [], "decode": []}
        for t in range(2 * repeats + 4):
            if t == 4:
                echo.num_bytes_sent = 0
            echo.asked_at, echo.copy_seconds, start = None, 0.0, now(device)
            mixer.mix(s, t)
            end = now(device)
            assert echo.asked_at is not None, "a round has a message"
            seconds["encode"].append(echo.asked_at - start)
            seconds["decode"].append(end - echo.asked_at - echo.copy_seconds)
        pairs = {key: [(x + y) / 2 for x, y in zip(v[4::2], v[5::2])] for key, v in seconds.items()}
        encode_ms, decode_ms = (statistics.median(pairs[key]) * 1e3 for key in ("encode", "decode"))
        yield Row(name, echo.num_bytes_sent // (2 * repeats), s.raw.numel(), encode_ms, decode_ms)


def print_table(rows: Iterable[Row]) -> list[Row]:
    """Print rows as they come; returns them."""
    print(
        "| codec | bytes per message | times fewer | encode ms | decode ms | ms saved at 1 Gbit/s | "
        + " | ".join(f"ratio at {link}" for link in LINKS)
        + " |"
    )
    print("|---" + "|---:" * (5 + len(LINKS)) + "|")
    measured = []
    for row in rows:
        print(
            f"| {row.name} | {row.num_bytes:,} | {row.plain_bytes / row.num_bytes:.1f} | {row.encode_ms:.2f} "
            f"| {row.decode_ms:.2f} | {row.saved_ms(LINKS['1 Gbit/s']):.1f} | "
            + " | ".join(f"{row.ratio(speed):.2f}" for speed in LINKS.values())
            + " |",
            flush=True,
        )
        measured.append(row)
    return measured


def csv_rows(rows: Iterable[Row]) -> list[dict[str, object]]:
    """The measured columns, what is saved and the ratios, one line per codec."""
    return [
        {
            **{key: round(value, 3) if isinstance(value, float) else value for key, value in asdict(row).items()},
            "saved_ms": round(row.saved_ms(LINKS["1 Gbit/s"]), 1),
            **{f"ratio_at_{speed / 1e9:g}_gbit": round(row.ratio(speed), 2) for speed in LINKS.values()},
        }
        for row in rows
    ]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--num-elements", type=int, default=RESNET18_PARAMETERS, help="length of the vector")
    parser.add_argument("--repeats", type=int, default=15, help="the median of so many is reported")
    parser.add_argument("--output", type=Path, help="a CSV file to write as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    x = torch.randn(arguments.num_elements, generator=torch.Generator().manual_seed(0)).to(device)
    plain_bytes = x.numel() * x.element_size()
    rows = print_table(measure(codecs_of(COMPRESSORS, x), plain_bytes, device, arguments.repeats))
    print()
    with torch.no_grad():
        rows += print_table(measure_rounds(device, arguments.repeats))
    if arguments.output:
        write_rows(arguments.output, csv_rows(rows), seed=0)


if __name__ == "__main__":
    main()
