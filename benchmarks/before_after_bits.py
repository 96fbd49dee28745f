"""Whether training gives the bits that it gave with an earlier commit's library, and keeps as many copies of the model.

    OMP_NUM_THREADS=1 python -m benchmarks.before_after_bits 269d8cf

Both sides train each method for nine steps on four ranks, which are threads, from one model on the same data, with a
learning rate that changes and a layer of BatchNorm. The parameters and buffers of all ranks are compared bit by bit.
Copies are the bytes of all tensors that are alive after the last step, in models: parameters, gradients and momentum
are three of them. Ranks meet before each step, so that a rank of WAGMA is less than a round late. The bits of
asynchronous methods depend on time, so only their copies are compared. Names of methods after the commit limit the
comparison to these methods, and its rows are appended:

    OMP_NUM_THREADS=1 python -m benchmarks.before_after_bits e375a819 AD-PSGD WAGMA
"""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

NUM_RANKS, NUM_STEPS = 4, 9
NUM_PARAMETERS = 51 * 200 + 2 * 200 + 201 * 30
RULES = ("D2()", "ExactDiffusion()", "GradientTracking()", "QGDSGDm()", "DecentLaM()")
OUTER = (
    "DiLoCo(3)",
    "DiLoCo(3, compressor=QSGD(4, bucket_size=32, unbiased=True))",
    "StreamingDiLoCo(4, fragments=2, delay=1)",
    "EagerDiLoCo(3)",
    "SparseLoCo(3)",
    "SlowMo(3)",
    "SlowMo(3, gossip_every=1)",
    "NoLoCo(3)",
    "GASLoC(3)",
)
GOSSIPERS = (
    "Choco(SignNorm(), step_size=0.4)",
    "Choco(TopK(0.2), step_size=0.1)",
    "DeepSqueeze(SignNorm(), step_size=0.05)",
    "Moniqua(theta=8.0)",
    "Sparta(0.2)",
    "PowerGossip()",
    "RelaySGD()",
)
WRITTEN: dict[str, dict[str, str]] = {
    "SGP": {},
    "D-PSGD": {"push_sum": "False"},
    "D-PSGD, bfloat16 messages": {"push_sum": "False", "wire_dtype": "torch.bfloat16"},
    "Gossip-PGA": {"push_sum": "False", "schedule": "Schedule(average_every=3)"},
    "SlowMo(3, gossip_every=1).over(PowerGossip())": {
        "outer": "SlowMo(3, gossip_every=1)",
        "gossiper": "PowerGossip()",
    },
    **{text: {"rule": text} for text in RULES},
    **{text: {"outer": text} for text in OUTER},
    **{text: {"gossiper": text} for text in GOSSIPERS},
}
"""The arguments of the wrapper, by the names that both sides know."""


ASYNCHRONOUS = {"AD-PSGD": "BilatGossipDataParallel", "WAGMA": "GroupAverageDataParallel"}
"""The wrappers of asynchronous methods."""


def make_model(dtype: torch.dtype) -> nn.Module:
    """The model with which training begins."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(50, 200), nn.BatchNorm1d(200), nn.Tanh(), nn.Linear(200, 30)).to(dtype)


def live_bytes() -> int:
    """The bytes of all tensors in this process that are alive."""
    gc.collect()
    storages = {}
    for tensor in (x for x in gc.get_objects() if isinstance(x, torch.Tensor)):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def train(make: Callable[[dist.ProcessGroup, nn.Module], Any], dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """The parameters and buffers of all ranks after training, float64 [ranks, elements]; the copies of a model."""
    from gossip_modules import testing

    generator = torch.Generator().manual_seed(3)
    data = torch.randn(NUM_RANKS, NUM_STEPS, 6, 50, generator=generator).to(dtype)
    labels = torch.randn(NUM_RANKS, NUM_STEPS, 6, 30, generator=generator).to(dtype)
    meet, ends = threading.Barrier(NUM_RANKS), [torch.empty(0)] * NUM_RANKS
    models, copies = [make_model(dtype) for _ in range(NUM_RANKS)], [0.0]
    model_bytes = sum(x.nbytes for x in (*models[0].parameters(), *models[0].buffers()))
    others = live_bytes() - NUM_RANKS * model_bytes

    def body(group: dist.ProcessGroup) -> None:
        rank, model = group.rank(), models[group.rank()]
        wrapper = make(group, model)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.05, momentum=0.9)
        for step in range(NUM_STEPS):
            optimizer.param_groups[0]["lr"] = 0.05 if step < 5 else 0.025
            meet.wait(60)
            (wrapper(data[rank, step]) - labels[rank, step]).pow(2).mean().backward()
            optimizer.step()
            if step < NUM_STEPS - 1:
                optimizer.zero_grad()
        meet.wait(60)
        if rank == 0:
            copies[0] = (live_bytes() - others) / NUM_RANKS / model_bytes
        meet.wait(60)
        wrapper.settle()
        tensors = (*model.parameters(), *model.buffers())
        ends[rank] = torch.cat([x.detach().double().flatten() for x in tensors])
        wrapper.close()

    testing.run_ranks(NUM_RANKS, body)
    return torch.stack(ends), copies[0]


def train_all(path: Path, methods: Sequence[str]) -> None:
    """Train methods with the library that is imported, and save the ends."""
    import gossip_modules

    warnings.simplefilter("ignore")  # older names of arguments, which both sides know
    modules = [importlib.import_module(f"gossip_modules{name}") for name in ("", ".compression")]
    names = {name: value for module in reversed(modules) for name, value in vars(module).items()} | {"torch": torch}
    ends: dict[tuple[str, str, bool], tuple[torch.Tensor, float] | str] = {}
    for method in set(methods) & ASYNCHRONOUS.keys():
        wrapper = getattr(gossip_modules, ASYNCHRONOUS[method])
        ends[method, str(torch.float32), False] = train(
            lambda group, model: wrapper(model, process_group=group, timeout=60),  # noqa: B023 (called here)
            torch.float32,
        )
    for method, arguments in ((method, WRITTEN[method]) for method in WRITTEN if method in methods):
        for dtype in (torch.float32, torch.bfloat16):
            for overlap in (False, True):

                def make(group: dist.ProcessGroup, model: nn.Module) -> Any:
                    made = {name: eval(text, names) for name, text in arguments.items()}  # noqa: B023 (own texts)
                    options: dict[str, Any] = {"process_group": group, "overlap": overlap, "timeout": 60}  # noqa: B023
                    return gossip_modules.GossipDataParallel(model, **options, **made)

                try:
                    ends[method, str(dtype), overlap] = train(make, dtype)
                except ValueError as error:
                    ends[method, str(dtype), overlap] = str(error)
    torch.save(ends, path)


def compare(before: str, folder: Path, methods: Sequence[str]) -> list[dict[str, object]]:
    """A row for each training that both sides run."""
    from benchmarks.record import ROOT
    from benchmarks.step_time import extract

    extract(before, folder / "before")
    ends: list[dict[Any, Any]] = []
    for tree in (folder / "before", ROOT):
        path = folder / f"{len(ends)}.pt"
        command = [sys.executable, str(Path(__file__)), str(path), *methods]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tree)}, cwd=folder, check=True)
        ends.append(torch.load(path, weights_only=True))
    rows: list[dict[str, object]] = []
    for key in ends[0]:
        old, new = (side[key] for side in ends)
        if isinstance(old, str) or isinstance(new, str):
            print(*key, "refused", "before" if isinstance(old, str) else "now", sep="  ")
            continue
        differences = (old[0] - new[0]).abs()
        parameters, buffers = differences[:, :NUM_PARAMETERS].max(), differences[:, NUM_PARAMETERS:].max()
        rows.append(
            {
                "before": before,
                "method": key[0],
                "dtype": key[1].removeprefix("torch."),
                "rounds": "overlapped" if key[2] else "blocking",
                "parameters": None if key[0] in ASYNCHRONOUS else float(parameters),
                "buffers": None if key[0] in ASYNCHRONOUS else float(buffers),
                "copies_before": round(old[1], 3),
                "copies_after": round(new[1], 3),
            }
        )
        print(*rows[-1].values(), sep="  ", flush=True)
    return rows


if __name__ == "__main__":
    every = (*WRITTEN, *ASYNCHRONOUS)
    if len(sys.argv) < 2 or not set(sys.argv[2:]) <= set(every):
        raise SystemExit(
            f"usage: python -m benchmarks.before_after_bits COMMIT [METHOD ...]\nmethods: {', '.join(every)}"
        )
    first, *names = sys.argv[1:]
    if first.endswith(".pt"):
        train_all(Path(first), names)
    else:
        from benchmarks.record import RESULTS, append_rows, write_rows

        write = append_rows if names else write_rows
        with tempfile.TemporaryDirectory() as temporary:
            write(RESULTS / "before_after_bits.csv", compare(first, Path(temporary), names or every), seed=0)
