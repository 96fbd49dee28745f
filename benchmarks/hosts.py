"""The cost of a host and of its integration in a step, and the accuracy of gossip in it: on the CPU, over Gloo.

    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.hosts        # 4 ranks, 3 cycles, some minutes

Each host trains a perceptron of 2.2 M parameters on handwritten digits with its own DDP and with gossip; beside it are
a loop of our own with a plain DDP and one with `GossipDataParallel`. So the cost of the host itself is the cost of its
DDP over the loop's DDP, and the cost of an integration is the rest with gossip. All of them take turns in
the same processes, once in each cycle; a cycle has its own seed, in an order of its own. A step is the time from one
forward to the next; its CPU time is of the process, with all threads. The accuracy is
measured on the average of all ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import logging
import os
import random
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.record import RESULTS, write_rows
from gossip_modules import DiLoCo, GossipDataParallel

METHODS: dict[str, dict[str, Any] | None] = {
    "DDP": None,
    "SGP": {},
    "Overlap SGP": {"overlap": True},
    "PowerGossip": {"algorithm": "powergossip"},
    "DiLoCo": {"algorithm": DiLoCo(sync_every=5, momentum=0.5)},  # 0.9 remembers 50 steps, of some 80 in all
}
"""The arguments of GossipDataParallel; None: a host's own DDP."""
OWN = "a loop of our own"
WIDTH, BATCH, RATE, NORM, WARM_UP = 1024, 24, 0.05, 1.0, 5


class DigitNet(nn.Module):
    """A perceptron that notes when each training forward begins."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        sizes = (64, WIDTH, WIDTH, WIDTH, 10)
        linear = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
        self.layers = nn.Sequential(*(part for layer in linear for part in (nn.ReLU(), layer)))
        self.begins: list[tuple[float, float]] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss, by the name that the Trainer expects."""
        if self.training:
            self.begins.append((time.perf_counter(), time.process_time()))
        output = self.layers(x)
        return {"loss": cross_entropy(output, labels), "logits": output}


class HostTask:
    """The digits of one rank in one cycle.

    Args:
        epochs: passes over the images of the rank.
        seed: of the cycle, for the model and for the split into ranks and test images.
        folder: for files of hosts.
    """

    def __init__(self, epochs: int, seed: int, folder: str) -> None:
        self.epochs, self.seed, self.folder = epochs, seed, folder
        pixels, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        x, y = torch.tensor(pixels / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]
        self.x, self.y = x[:360], y[:360]  # to test with
        n = dist.get_world_size()
        mine = slice(360 + dist.get_rank(), 360 + (len(labels) - 360) // n * n, n)  # equally many on all ranks
        rows = [{"x": image, "labels": label} for image, label in zip(x[mine], y[mine], strict=True)]
        data: Any = rows
        self.loader: Any = torch.utils.data.DataLoader(data, batch_size=BATCH, drop_last=True)

    def model(self) -> DigitNet:
        """A new model."""
        return DigitNet(self.seed)

    def batches(self) -> Iterator[Any]:
        """All batches of all epochs."""
        for _ in range(self.epochs):
            yield from self.loader

    def accuracy(self, plain: DigitNet) -> float:
        """The accuracy of the mean of the models of all ranks; collective."""
        plain.eval()
        with torch.no_grad():
            for parameter in plain.parameters():
                dist.all_reduce(parameter.data)
                parameter.div_(dist.get_world_size())
            return float((plain(self.x, self.y)["logits"].argmax(1) == self.y).float().mean())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all runs."""
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def own_loop(task: HostTask, gossip: dict[str, Any] | None) -> DigitNet:
    """The loop that hosts are compared with."""
    plain = task.model()
    model = DistributedDataParallel(plain) if gossip is None else GossipDataParallel(plain, **gossip)
    optimizer = sgd(model)
    for batch in task.batches():
        model(**batch)["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
    _end(model)
    return plain


def accelerate(task: HostTask, gossip: dict[str, Any] | None) -> DigitNet:
    """Hugging Face Accelerate."""
    from accelerate import Accelerator

    from gossip_modules.integrations.accelerate import GossipAccelerator

    host = Accelerator(cpu=True) if gossip is None else GossipAccelerator(cpu=True, gossip=gossip)
    plain = task.model()
    model, optimizer = host.prepare(plain, sgd(plain))
    for batch in task.batches():
        with host.accumulate(model):
            host.backward(model(**batch)["loss"])
            host.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
            optimizer.zero_grad()
    _end(model)
    return plain


def trainer(task: HostTask, gossip: dict[str, Any] | None) -> DigitNet:
    """The Trainer of Hugging Face Transformers."""
    from transformers import Trainer, TrainingArguments

    from gossip_modules.integrations.transformers import GossipTrainerMixin

    options = gossip

    class Plain(Trainer):
        def get_train_dataloader(self) -> Any:
            return task.loader

    class Gossip(GossipTrainerMixin, Plain):
        gossip = options

    settings = TrainingArguments(
        task.folder,
        per_device_train_batch_size=BATCH,
        num_train_epochs=task.epochs,
        max_grad_norm=NORM,
        use_cpu=True,
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        average_tokens_across_devices=False,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
    )
    plain = task.model()
    kind = Plain if gossip is None else Gossip
    host = kind(plain, settings, train_dataset=task.loader.dataset, optimizers=(sgd(plain), None))
    host.train()
    _end(host.model_wrapped)
    return plain


def lightning(task: HostTask, gossip: dict[str, Any] | None) -> DigitNet:
    """The Trainer of Lightning."""
    from lightning.pytorch import LightningModule, Trainer

    from gossip_modules.integrations.lightning import GossipStrategy

    plain = task.model()

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.plain = plain

        def training_step(self, batch: Any, k: int) -> Tensor:
            return self.plain(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return sgd(self)

    Trainer(
        strategy="ddp" if gossip is None else GossipStrategy(gossip),
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_epochs=task.epochs,
        gradient_clip_val=NORM,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        default_root_dir=task.folder,
    ).fit(Module(), task.loader)
    return plain


def fabric(task: HostTask, gossip: dict[str, Any] | None) -> DigitNet:
    """Lightning Fabric."""
    from lightning.fabric import Fabric

    from gossip_modules.integrations.lightning import GossipFabricStrategy

    strategy = "ddp" if gossip is None else GossipFabricStrategy(gossip)
    host = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    host.launch()
    plain = task.model()
    model, optimizer = host.setup(plain, sgd(plain))
    for batch in task.batches():
        host.backward(model(**batch)["loss"])
        host.clip_gradients(model, optimizer, max_norm=NORM)
        optimizer.step()
        optimizer.zero_grad()
    _end(strategy.wrapper_of(model) if isinstance(strategy, GossipFabricStrategy) else model)
    return plain


def _end(model: Any) -> None:
    """Nothing is in flight any more."""
    if isinstance(model, GossipDataParallel):
        model.close()


HOSTS: dict[str, Callable[[HostTask, dict[str, Any] | None], DigitNet]] = {
    OWN: own_loop,
    "Accelerate": accelerate,
    "Trainer of Transformers": trainer,
    "Trainer of Lightning": lightning,
    "Fabric": fabric,
}


def worker(rank: int, options: argparse.Namespace, folder: str) -> None:
    """One rank; rank 0 writes all figures into the folder."""
    size = str(options.ranks)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", ACCELERATE_USE_CPU="true")  # hosts look for them
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    place = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": options.ranks}
    dist.init_process_group("gloo", timeout=timedelta(minutes=2), **place)
    steps: dict[str, list[tuple[float, float]]] = defaultdict(list)
    accuracies: dict[str, list[float]] = defaultdict(list)
    for cycle in range(options.cycles):
        task = HostTask(options.epochs, cycle, f"{folder}/{rank}")
        turns = [(host, method) for host in options.hosts for method in options.methods]
        random.Random(cycle).shuffle(turns)
        for host, method in turns:
            dist.barrier()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                plain = HOSTS[host](task, METHODS[method])
            begins = plain.begins[WARM_UP:]
            key = f"{host}/{method}"
            steps[key] += [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(begins)]
            accuracies[key].append(task.accuracy(plain))
    if rank == 0:
        Path(folder, "figures").write_text(json.dumps([steps, accuracies]))
    dist.destroy_process_group()


def rows_of(steps: dict[str, list[tuple[float, float]]], accuracies: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row for each host and method.

    The times are medians over all steps of rank 0. `over_own_loop` is the ratio of CPU times to our own loop with the
    same method; `of_integration` is that ratio without the milliseconds that the host takes with its own DDP.
    """
    cpu = {key: statistics.median(times[1] for times in own) for key, own in steps.items()}
    rows = []
    for key, own in steps.items():
        host, method = key.split("/")
        over = cpu[key] / cpu[f"{OWN}/{method}"]
        of_host = cpu.get(f"{host}/DDP", float("nan")) - cpu.get(f"{OWN}/DDP", float("nan"))
        alone = over - of_host / cpu[f"{OWN}/{method}"]
        figures: dict[str, Any] = {"cpu_ms": 1e3 * cpu[key], "wall_ms": 1e3 * statistics.median(t[0] for t in own)}
        figures |= {"over_own_loop": over, "of_integration": alone if method != "DDP" else None}
        figures["accuracy"] = statistics.mean(accuracies[key])
        figures = {name: value if value is None else round(value, 4) for name, value in figures.items()}
        rows.append({"host": host, "method": method, "steps": len(own), **figures})
    order = [(host, method) for host in HOSTS for method in METHODS]
    return sorted(rows, key=lambda row: order.index((row["host"], row["method"])))


def main() -> None:
    """Start the ranks, print, and write benchmarks/results/hosts.csv."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--cycles", type=int, default=3, help="with a seed each")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--hosts", nargs="+", choices=list(HOSTS), default=list(HOSTS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--output", type=Path, default=RESULTS / "hosts.csv")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(options, folder), nprocs=options.ranks)
        rows = rows_of(*json.loads(Path(folder, "figures").read_text()))
    for row in rows:
        print(row)
    load = os.getloadavg()[1] if hasattr(os, "getloadavg") else float("nan")
    rows = [{"ranks": options.ranks, "cycles": options.cycles, "epochs": options.epochs, **row} for row in rows]
    write_rows(options.output, [{**row, "load": round(load, 1)} for row in rows], seed=0)


if __name__ == "__main__":
    main()
