"""Bandwidth, overhead, overlap, memory and training on one GPU, in under three minutes.

    .venv/bin/python -m benchmarks.gpu --commit $(git rev-parse --short HEAD) --output benchmarks/results/gpu.csv
    .venv/bin/python -m benchmarks.gpu --sections bandwidth --seconds 30
    .venv/bin/python -m benchmarks.gpu --device cpu --numels 100000 --sections bandwidth steps

Each section writes its rows when it ends. A section that fails leaves a row with its error, and the next one runs. With
`--output`, sections whose rows are in the file are left out.

- bandwidth: the bytes that an operation has to read and write over its time, beside a copy on the device, or beside a
  copy from or to pinned memory.
- steps: the step of a ResNet-18 in `GossipDataParallel`, with rounds off, blocking and overlapped, beside the bare
  step. The peer, a process on the CPU, only takes part in rounds. All take turns; ratios are medians over turns. The
  memory is the peak beside the bare model, in copies of the parameters. The large batch makes a step longer than a
  round, if memory allows it.
- all_reduce: the same for `AllReduceDataParallel` and DistributedDataParallel, with a peer on the same GPU.
- precision: two ranks train a small model under torch.compile and autocast; rows have the distance from plain training.
- lab: 64 workers of a decoder with 10 M parameters in the Lab, eight methods.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.record import append_rows, cpu_model, rows_in
from gossip_modules import (
    D2,
    DPSGD,
    AllReduceDataParallel,
    Choco,
    DiLoCo,
    GossipDataParallel,
    GradientTracking,
    QGDSGDm,
    RingGraph,
    Schedule,
    SignNorm,
)
from gossip_modules.compression import QSGD, Cast, TopK
from gossip_modules.extend import FlatVector, Vector
from gossip_modules.lab import Compute, LabPlan, LabTask, Network, Setting
from gossip_modules.lab.comparison import LabTraining
from gossip_modules.rounds.vector import SentVector
from gossip_modules.transport.exchange import Staging

CPU = torch.device("cpu")
COLUMNS = ("gpu", "section", "case", "figure", "value", "unit", "reference", "ratio", "note")
TIMEOUT = timedelta(seconds=20)
NUM_STEPS = 4  # of a turn
LENGTH, NUM_WORDS = 64, 256
WRAPPERS: Mapping[str, Mapping[str, Any]] = {
    "rounds off": {"schedule": Schedule(gossip_every=10**9)},
    "blocking": {},
    "overlap": {"overlap": True},
}
SILENT = ("bare", "rounds off")  # steps without a peer
Row: TypeAlias = dict[str, Any]
Rows: TypeAlias = Iterable[Row]


def row(case: str, figure: str, value: float, unit: str = "", ratio: float | None = None, reference: str = "") -> Row:
    """Return a row without the section."""
    return {"case": case, "figure": figure, "value": value, "unit": unit, "reference": reference, "ratio": ratio}


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(action: Callable[[], object], device: torch.device, repeats: int = 15) -> float:
    """Return the median time of an action, on the device, after three that do not count."""
    if device.type != "cuda":
        moments = [time.perf_counter()]
        for _ in range(repeats + 3):
            action()
            moments.append(time.perf_counter())
        return 1e3 * statistics.median([b - a for a, b in itertools.pairwise(moments[3:])])
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 4)]
    for event in events[:-1]:
        event.record()
        action()
    events[-1].record()
    events[-1].synchronize()
    return statistics.median([a.elapsed_time(b) for a, b in itertools.pairwise(events[3:])])


def bandwidth(options: argparse.Namespace) -> Rows:
    """Time each operation on vectors of each length and dtype."""
    for numel in options.numels:
        for dtype in (torch.float32, torch.bfloat16):
            yield from bandwidth_of(numel, dtype, options.device)


@torch.no_grad()
def bandwidth_of(numel: int, dtype: torch.dtype, device: torch.device) -> Rows:
    """Time each operation on vectors of one length and dtype; also see the docstring of the module."""
    parts = torch.randn(numel, dtype=dtype, device=device).split(-(-numel // 64))
    x = FlatVector.pack(parts)
    y, size, w = x.clone(), x.layout.num_bytes, torch.full((1,), 1.01, dtype=torch.float64, device=device)
    sent = Vector.of(x)

    def leave_and_take_weights() -> None:
        x.divide_by_weight_(w)
        x.multiply_by_weight_(w)

    operations: dict[str, tuple[Callable[[], object], float]] = {
        "pack": (lambda: FlatVector.pack(parts), 3),  # the new memory is set to zero first
        "copy_": (lambda: x.copy_(y), 2),
        "mix of one message (lerp)": (lambda: x.combine_(0.5, [y], [0.5]), 3),
        "mix of two messages": (lambda: x.combine_(0.5, [y, y], [0.25, 0.25]), 6),
        "correction of one message": (lambda: x.difference_(-0.5, [y], [0.5]), 3),
        "add_ of a correction": (lambda: x.add_(y, alpha=0.5), 3),
        "begin_adding": (lambda: SentVector(sent.parts).begin_adding(), 1),
        "de-bias and back": (leave_and_take_weights, 4),
    }
    copy_ms = milliseconds(lambda: x.raw.copy_(y.raw), device)
    case, copy = f"{numel / 1e6:g} M {str(dtype).removeprefix('torch.')}", 2 * size / copy_ms / 1e6
    yield row(case, "copy on the device", copy, "GB/s", 1.0)
    for name, (action, passes) in operations.items():
        x.raw.copy_(y.raw)
        speed = passes * size / milliseconds(action, device) / 1e6
        yield row(case, name, speed, "GB/s", speed / copy, "copy on the device")
    for name, action in other_ways(x.raw.view(dtype), y.raw.view(dtype)).items():
        x.raw.copy_(y.raw)
        speed = 6 * size / milliseconds(action, device) / 1e6
        yield row(case, f"mix of two messages, {name}", speed, "GB/s", speed / copy, "copy on the device")
    codes = (Cast(torch.bfloat16), SignNorm(), QSGD(8), TopK(0.01)) if dtype is torch.float32 else ()
    for code in codes:
        message = code.message_like(y.segments[0])
        for name, action, passes in (
            ("encode", partial(code.compress, y.segments[0], message), 1),
            ("decode", partial(code.add_decompressed, message, x.segments[0], alpha=0.1), 2),
        ):
            speed = (passes * size + message.numel()) / milliseconds(action, device) / 1e6
            yield row(case, f"{code!r}, {name}", speed, "GB/s", speed / copy, "copy on the device")
    yield from staging(case, x.raw, device)


def other_ways(x: Tensor, y: Tensor) -> dict[str, Callable[[], object]]:
    """Mix narrow vectors as the library does not: by torch's mixed dtypes, and by a kernel that torch compiles."""
    if x.element_size() == 4 or x.device.type != "cuda":
        return {}
    code = "template <typename T> T mix(T x, T y, T z, T a, T b) { return (T(1) - a - b) * x + a * y + b * z; }"
    mix = torch.cuda.jiterator._create_jit_fn(code, a=0.25, b=0.25)
    half = torch.full((1,), 0.5, device=x.device)

    def mixed_dtypes() -> None:
        for chunk, other in zip(x.split(1 << 24), y.split(1 << 24), strict=True):
            torch.add(torch.mul(chunk, half).add_(other, alpha=0.25), other, alpha=0.25, out=chunk)

    def jiterator() -> None:
        for chunk, other in zip(x.split(1 << 24), y.split(1 << 24), strict=True):
            chunk.copy_(mix(chunk, other, other, a=0.25, b=0.25))

    return {"mixed dtypes": mixed_dtypes, "jiterator": jiterator}


def staging(case: str, x: Tensor, device: torch.device) -> Rows:
    """Time the copies to and from pinned memory, beside torch's own in one piece."""
    pinned, staged, size = torch.empty_like(x, device=CPU, pin_memory=device.type == "cuda"), Staging(CPU), x.nbytes
    buffer = staged.buffer_for(x, keep=True)
    for name, raw, ours in (
        ("to the host", lambda: pinned.copy_(x, non_blocking=True), lambda: staged.buffer_for(x, fill=True, keep=True)),
        ("from the host", lambda: x.copy_(pinned, non_blocking=True), lambda: x.copy_(buffer, non_blocking=True)),
    ):
        limit, speed = (size / milliseconds(action, device) / 1e6 for action in (raw, ours))
        yield row(case, f"staging {name}", speed, "GB/s", speed / limit, f"pinned copy {name}, {limit:.1f} GB/s")


def net(options: argparse.Namespace, device: torch.device) -> nn.Module:
    """Return the model of the steps: ResNet-18 for ten classes, or a small one."""
    torch.manual_seed(0)
    if options.tiny:
        return nn.Sequential(nn.Flatten(), nn.Linear(3072, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    import torchvision

    return torchvision.models.resnet18(num_classes=10).to(device)


class TimedModel:
    """A model in a wrapper, its optimizer and its steps; the peer has a loss that takes no time.

    Args:
        model: the wrapped model.
        device: the device of the model.
        is_peer: whether the model only takes part in rounds.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, is_peer: bool) -> None:
        self.model, self.device, self.is_peer = model, device, is_peer
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        self.num_steps = 0

    def step(self, x: Tensor, y: Tensor) -> None:
        """Take a step."""
        self.num_steps += 1
        out = self.model(x)
        loss = out if self.is_peer else cross_entropy(out, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def turn(self, x: Tensor, y: Tensor) -> float:
        """Return the milliseconds per step of a few steps."""
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(NUM_STEPS):
            self.step(x, y)
        synchronize(self.device)
        return 1e3 * (time.perf_counter() - start) / NUM_STEPS


def timed_steps(
    group: dist.ProcessGroup, options: argparse.Namespace, names: Mapping[str, Any], *, peer: torch.device
) -> list[Row]:
    """Let the wrappers take turns on two ranks; return the rows on rank 0.

    Args:
        group: of the two ranks; rank 1 is the peer.
        options: of the command.
        names: for each name the wrapper of a model; None: the bare model.
        peer: the device of the peer.
    """
    is_peer = group.rank() == 1
    device = peer if is_peer else options.device
    rows: list[Row] = []
    trainings: dict[str, TimedModel] = {}
    small = batch_of(options.batch, device, is_peer=is_peer)
    batches = {f"{options.batch} images": small}
    before = bare_peak = 0
    for name, wrap in names.items():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        model = net(options, device)
        if is_peer:
            model.forward = partial(total, list(model.parameters()))
        trainings[name] = training = TimedModel(model if wrap is None else wrap(model), device, is_peer=is_peer)
        for _ in range(3):
            training.step(*small)
        if device.type == "cuda" and not is_peer:
            synchronize(device)
            peak = torch.cuda.max_memory_allocated() - before
            bare_peak = bare_peak or peak
            size = sum(p.nbytes for p in model.parameters())
            rows.append(row(name, "memory beside the bare model", (peak - bare_peak) / size, "models"))
    times: dict[tuple[str, str], list[float]] = {}
    end, order, cycle = time.monotonic() + options.seconds * 0.13, random.Random(0), 0
    while agree(group, cycle < 4 or time.monotonic() < end):
        cycle += 1
        for images, batch in batches.items():
            for name in order.sample(list(names), len(names)):
                if not (is_peer and name in SILENT):
                    times.setdefault((name, images), []).append(trainings[name].turn(*batch))
        if cycle == 2:
            num = agree(group, 0 if is_peer else large_batch(options, times))
            batches[f"{num} images"] = batch_of(num, device, is_peer=is_peer)
            times = {}  # the first turns warm up
    while not is_peer and "rounds off" in names and time.monotonic() < end + options.seconds * 0.04:
        for name in order.sample(SILENT, 2):
            times.setdefault((name, f"{options.batch} images, alternating"), []).append(trainings[name].turn(*small))
    for training in trainings.values():
        if isinstance(training.model, GossipDataParallel | AllReduceDataParallel):
            training.model.close()
    return [] if is_peer else [*rows, *rows_of(times)]


def total(parameters: list[nn.Parameter], x: Tensor) -> Tensor:
    """Return a number that depends on all parameters."""
    return 0.0 * torch.stack([p.sum() for p in parameters]).sum()


def agree(group: dist.ProcessGroup, number: int) -> int:
    """Return the number of rank 0."""
    told = torch.tensor([int(number)])
    group.broadcast(told, 0).wait()
    return int(told)


def batch_of(num: int, device: torch.device, *, is_peer: bool) -> tuple[Tensor, Tensor]:
    """Return random images and labels; the peer needs one."""
    num = 1 if is_peer else num
    return torch.randn(num, 3, 32, 32, device=device), torch.randint(10, (num,), device=device)


def large_batch(options: argparse.Namespace, times: Mapping[tuple[str, str], list[float]]) -> int:
    """Return the images with which a bare step takes 1.25 times as long as a blocking round."""
    last = {name: values[-1] for (name, _), values in times.items()}
    round_ms = max(last.values()) - last["bare"]
    training = TimedModel(net(options, options.device), options.device, is_peer=False)
    trial = batch_of(8 * options.batch, options.device, is_peer=False)
    step_ms = [training.turn(*trial) for _ in range(2)][-1]
    return options.batch * min(max(8, round(8 * 1.25 * round_ms / step_ms)), 128)


def rows_of(times: Mapping[tuple[str, str], list[float]]) -> Iterator[Row]:
    """Return milliseconds per step with the ratio to the bare step, and how well a round hides under compute."""
    median = {key: statistics.median(values) for key, values in times.items()}
    for (name, images), values in times.items():
        ratios = [value / bare for value, bare in zip(values, times["bare", images], strict=True)]
        case, bare = f"{name}, {images}", median["bare", images]
        yield row(case, "step", median[name, images], "ms", statistics.median(ratios), "bare")
        if name == "overlap":
            ratio = median[name, images] / max(bare, median["blocking", images] - bare)
            yield row(case, "step", median[name, images], "ms", ratio, "max(step, round)")


def gossip_steps(group: dist.ProcessGroup, options: argparse.Namespace) -> list[Row]:
    """See `timed_steps`."""
    graph = RingGraph(2)

    def wrap(arguments: Mapping[str, Any], model: nn.Module) -> nn.Module:
        return GossipDataParallel(
            model, graph=graph, process_group=group, comm_device="cpu", timeout=TIMEOUT, **arguments
        )

    # The rounds of the peer leave the GPU alone.
    return timed_steps(group, options, {"bare": None} | {k: partial(wrap, a) for k, a in WRAPPERS.items()}, peer=CPU)


def all_reduce_steps(group: dist.ProcessGroup, options: argparse.Namespace) -> list[Row]:
    """See `timed_steps`."""
    wrap = partial(AllReduceDataParallel, process_group=group, timeout=TIMEOUT)
    plain = partial(DistributedDataParallel, process_group=group)
    names = {"bare": None, "AllReduceDataParallel": wrap, "DDP": plain}
    return timed_steps(group, options, names, peer=options.device)


def precision(group: dist.ProcessGroup, options: argparse.Namespace) -> list[Row]:
    """Train a small model in several ways on two ranks; compare with plain training."""
    device, rows, num_steps = options.device, [], 8
    want = torch.empty(0)
    for case in ("plain", "torch.compile", "autocast bfloat16, GradScaler", "autocast float16, GradScaler"):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 8)).to(device)
        inner: Any = torch.compile(module, backend=options.backend) if case == "torch.compile" else module
        model = GossipDataParallel(
            inner, graph=RingGraph(2), process_group=group, comm_device="cpu", timeout=TIMEOUT, overlap=True
        )
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), torch.GradScaler(device.type)
        generator, dtype = (
            torch.Generator().manual_seed(group.rank()),
            getattr(torch, case.split(",")[0].split()[-1], None),
        )
        for _ in range(num_steps):
            x = torch.randn(64, 32, generator=generator).to(device)
            with torch.autocast(device.type, dtype) if isinstance(dtype, torch.dtype) else nullcontext():
                loss = cross_entropy(model(x), x[:, :8].argmax(1))
            if "GradScaler" in case:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
        model.flush()
        num_rounds = model.comm_stats()["num_rounds"]
        got = torch.cat([p.detach().double().cpu().flatten() for p in module.parameters()])
        want = got if case == "plain" else want
        rows.append(row(case, "relative distance from plain", float((got - want).norm() / want.norm())))
        rows.append(row(case, "rounds", float(num_rounds), "", num_rounds / num_steps, "steps"))
        model.close()
    return rows


def on_pair(body: Callable[..., list[Row]], options: argparse.Namespace) -> list[Row]:
    """Run body(group, options) on two ranks, this process and a new one; return the rows of this one."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # both ranks are on this machine
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        peer = mp.get_context("spawn").Process(target=_as_rank, args=(1, store, body, options), daemon=True)
        peer.start()
        try:
            return _as_rank(0, store, body, options)
        finally:
            peer.join(10)
            peer.kill()


def _as_rank(rank: int, store: str, body: Callable[..., list[Row]], options: argparse.Namespace) -> list[Row]:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=TIMEOUT)
    try:
        group = dist.group.WORLD
        assert group is not None, "made above"
        return body(group, options)
    finally:
        dist.destroy_process_group()


class Decoder(nn.Module):
    """A decoder over bytes.

    Args:
        width: of the layers; 320 gives 10 M parameters with 8 layers.
        num_layers: the number of layers.
    """

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(NUM_WORDS, width), nn.Embedding(LENGTH, width)
        make = partial(nn.TransformerEncoderLayer, width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers, self.head = nn.ModuleList(make() for _ in range(num_layers)), nn.Linear(width, NUM_WORDS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, words: Tensor) -> Tensor:
        """Return the scores of the next words."""
        x = self.embedding(words) + self.places.weight
        for layer in self.layers:
            x = layer(x, self.mask)
        return self.head(x)


def counting(worker: int, step: int, generator: torch.Generator) -> Tensor:
    """Return texts that count in steps of 1 to 8, with one wrong word in ten."""
    draw = partial(torch.randint, generator=generator)
    words = (draw(NUM_WORDS, (4, 1)) + draw(1, 9, (4, 1)) * torch.arange(LENGTH + 1)) % NUM_WORDS
    return torch.where(torch.rand(words.shape, generator=generator) < 0.1, draw(NUM_WORDS, words.shape), words)


def next_word_loss(model: nn.Module, words: Tensor) -> Tensor:
    """Return the cross-entropy of the next words."""
    return cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def lab(options: argparse.Namespace) -> Rows:
    """Train in the Lab for equal times; return loss and time of the last step of each method."""
    device, size = options.device, (32, 1) if options.tiny else (320, 8)
    methods: dict[str, Any] = {"all-reduce": "ar", "SGP": "sgp", "D-PSGD": DPSGD(), "D2": D2(), "QG-DSGDm": QGDSGDm()}
    methods |= {
        "gradient tracking": GradientTracking(),
        "CHOCO, sign": Choco(SignNorm(), step_size=0.45),
        "DiLoCo": DiLoCo(sync_every=8),
    }
    task = LabTask(
        lambda: Decoder(*size).to(device),
        next_word_loss,
        counting,
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    )
    setting = Setting(options.workers, None, Compute(0.1), Network("1 Gbit/s"))
    for name, method in methods.items():
        training, end = LabTraining(LabPlan.of(method), setting, task), time.monotonic() + 0.27 * options.seconds / 8
        moments, z = [time.perf_counter()], training.models.x
        for each in training.run(2000):
            z = each
            synchronize(device)
            moments.append(time.perf_counter())
            if time.monotonic() > end and training.step >= 2:
                break
        tests = [counting(0, step, torch.Generator().manual_seed(step)) for step in range(16)]
        with torch.no_grad():
            loss = float(next_word_loss(training.models.mean_model(z, training.workers), torch.cat(tests).to(device)))
        case = f"{name}, {options.workers} workers of {training.models.x.shape[1] / 1e6:.1f} M, {training.models.by}"
        yield row(case, f"test loss of the average after {training.step} steps", loss, "nats")
        step_ms = 1e3 * statistics.median([b - a for a, b in itertools.pairwise(moments[2:])] or [float("nan")])
        yield row(case, "step of all workers", step_ms, "ms")
        del training, z


SECTIONS: dict[str, Callable[[argparse.Namespace], Rows]] = {
    "bandwidth": bandwidth,
    "steps": partial(on_pair, gossip_steps),
    "all_reduce": partial(on_pair, all_reduce_steps),
    "precision": partial(on_pair, precision),
    "lab": lab,
}


def measure(section: str, options: argparse.Namespace) -> list[Row]:
    """Return the rows of a section; if it fails, the rows before, and one with the error."""
    found: list[Row] = []
    try:
        for each in SECTIONS[section](options):
            found.append({"note": "", **each})
    except Exception as error:  # noqa: BLE001 - the other sections run, and the row has the error
        traceback.print_exc()
        found.append({**row("-", "error", float("nan")), "note": f"{type(error).__name__}: {error}"[:300]})
    if options.device.type == "cuda":
        torch.cuda.empty_cache()
    name = torch.cuda.get_device_name(options.device) if options.device.type == "cuda" else cpu_model()
    rows = [{"gpu": name, "section": section, **each} for each in found]
    return [{key: f"{x:.5g}" if isinstance(x := each[key], float) else x for key in COLUMNS} for each in rows]


def main(arguments: list[str] | None = None) -> None:
    """Run the sections, print and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--sections", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--seconds", type=float, default=140, help="of all sections, roughly")
    parser.add_argument("--numels", type=int, nargs="*", default=[11_000_000, 100_000_000], help="lengths of vectors")
    parser.add_argument("--batch", type=int, default=128, help="images of the small batch")
    parser.add_argument("--workers", type=int, default=64, help="of the Lab")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--tiny", action="store_true", help="small models")
    parser.add_argument("--commit", help="of the library, where there is no git")
    parser.add_argument("--output", type=Path, help="a CSV file to append to")
    options = parser.parse_args(arguments)
    known = rows_in(options.output, COLUMNS).groupby("section") if options.output else ()
    done = {
        section for section, rows in known if rows["figure"].iloc[-1] != "error"
    }  # an error is the last row of a run
    for section in options.sections:
        if section in done:
            print(f"{section}: in {options.output} already", flush=True)
            continue
        start = time.monotonic()
        rows = measure(section, options)
        for each in rows:
            print(" | ".join(str(each[key]) for key in COLUMNS[1:]), flush=True)
        print(f"{section}: {time.monotonic() - start:.0f} s", flush=True)
        if options.output:
            append_rows(
                options.output, [({"commit": options.commit} if options.commit else {}) | each for each in rows], seed=0
            )


if __name__ == "__main__":
    main()
