"""The body of a rank's process: a training script of a few lines, its calls timed; and that of the store's process."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from gossip_modules import PairwiseDataParallel, Progress

from .fault import FAULTS, Where
from .methods import make

HOST = "127.0.0.1"
MEETING = timedelta(seconds=60)
"""For all ranks to be there, before anything is measured."""
STEP_SECONDS = 0.02


@dataclass(frozen=True)
class FaultWorld:
    """What all ranks of a cell know.

    Args:
        wrapper: see `make`.
        fault: a name in FAULTS.
        fault_step: the step of a fault of training.
        num_steps: steps that are trained.
        timeout: of the wrapper and of the default group, in seconds.
        port: of the key-value store.
        addresses: of the ranks as workers of dpwa.
        events: the file that ranks append to.
    """

    wrapper: str
    fault: str
    fault_step: int
    num_steps: int
    timeout: float
    port: int
    addresses: Sequence[str]
    events: Path


def serve_store(port: int) -> None:
    """Serve a key-value store until killed."""
    store = dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False)
    while store:
        signal.pause()


def train(world: FaultWorld, rank: int) -> None:
    """Run the script of a rank; an error ends the process as it ends a script, without close()."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it
    Rank(world, rank).run()


class Inputs(IterableDataset[Tensor]):
    """The inputs of a rank, [4, 8], without end.

    Args:
        seed: the seed of the inputs.
        seconds: the time of the last read, which begins when the process that asks for it has ended.
    """

    def __init__(self, seed: int, seconds: float = 0.0) -> None:
        self._seed, self._seconds, self._parent = seed, seconds, os.getpid()

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self._seed)
        while True:
            yield torch.randn(4, 8, generator=generator)
            if os.getppid() != self._parent and get_worker_info() is not None:
                time.sleep(self._seconds)


class Rank:
    """One rank's script: construct, train, save, evaluate the average, average, close.

    It appends to a file of events, a line of JSON each: what it calls and when that returned, that the fault is due
    (who asked kills or stops it then) or has happened, the error that ended it. Lines are whole, whatever kills it.

    Args:
        world: of the rank.
        rank: its number.
    """

    def __init__(self, world: FaultWorld, rank: int) -> None:
        self.world, self.rank, self.fault = world, rank, FAULTS[world.fault]
        self.is_victim = self.rank in self.fault.victims
        self._events = os.open(world.events, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._call = ""

    def run(self) -> None:
        """From the start to the end."""
        try:
            self._script()
        except (Exception, KeyboardInterrupt) as error:
            self._say("error", type=type(error).__name__, text=str(error), call=self._call)
            raise
        self._say("done")

    def _script(self) -> None:
        world = self.world
        world_size, timeout = len(world.addresses), timedelta(seconds=world.timeout)
        store = dist.TCPStore(HOST, world.port, is_master=False, timeout=MEETING)
        store.set(f"up {self.rank}", "")
        store.wait([f"up {rank}" for rank in range(world_size)], MEETING)
        store.set_timeout(timeout)  # as init_process_group does with a store that it makes itself
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=world_size, timeout=timeout)
        # Of the default group, as a script makes it.
        progress = Progress() if self.fault.is_of_store else None
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        dist.barrier()
        self._reach("construction")
        with self._calling("construction"):
            wrapper = make(world.wrapper, module, rank=self.rank, addresses=world.addresses, timeout=timeout)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.01)
        if self.fault.exit_timeouts:
            atexit.register(time.sleep, self.fault.exit_timeouts * world.timeout)
        batches = self._batches()
        for step in range(world.num_steps):
            if step == world.fault_step and self.fault.where == "training" and self._is_over(wrapper):
                break
            if progress is not None:
                with self._calling("progress"):
                    progress.add(1)
            with self._calling("training step"):
                loss = wrapper(next(batches)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if isinstance(wrapper, PairwiseDataParallel):
                wrapper.report_loss(float(loss))
            time.sleep(STEP_SECONDS)
        else:
            self._finish(wrapper)
        with self._calling("close"):
            wrapper.close()
        with self._calling("destroy_process_group"):
            dist.destroy_process_group()

    def _batches(self) -> Iterator[Tensor]:
        if not self.fault.has_loaders:
            return iter(Inputs(self.rank))
        return iter(DataLoader(Inputs(self.rank, 2 * self.world.timeout), batch_size=None, num_workers=2))

    def _finish(self, wrapper: Any) -> None:
        self._reach("checkpoint")
        with self._calling("settle"):
            wrapper.settle()
        with self._calling("state_dict"):
            wrapper.state_dict()
        self._reach("averaged")
        with self._calling("averaged"), wrapper.averaged():
            pass
        self._reach("final average")
        with self._calling("average_"):
            wrapper.average_()

    def _is_over(self, wrapper: Any) -> bool:
        """The fault of a training step, if it is this rank's; returns whether the rank is to leave the loop."""
        what = self.fault.what
        if self.fault.is_of_store:
            if self.rank == 0:
                self._say("due")
            return False
        if not self.is_victim:
            return False
        if what in ("kill", "stop", "interrupt"):
            self._say("due")  # and train on until it comes
            return False
        self._say("fault")
        if what == "raise":
            raise RuntimeError("an error of the training loop")
        if what == "average alone":
            with self._calling("averaged"), wrapper.averaged():
                pass
        return what == "leave"

    def _reach(self, where: Where) -> None:
        """In place of a call that all ranks make, the victim is killed."""
        if self.is_victim and self.fault.where == where:
            self._say("due")
            while where != "construction":
                signal.pause()

    @contextlib.contextmanager
    def _calling(self, call: str) -> Iterator[None]:
        self._call = call
        self._say("enter", call=call)
        yield
        self._say("leave")

    def _say(self, event: str, **values: Any) -> None:
        line = {"rank": self.rank, "event": event, "time": time.monotonic(), **values}
        os.write(self._events, json.dumps(line).encode() + b"\n")
