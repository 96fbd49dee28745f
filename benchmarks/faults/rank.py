"""The body of a rank's process: a training script of a few lines, its calls timed; and that of the store's process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gossip_modules import PairwiseDataParallel, Progress

from .fault import FAULTS, Where
from .methods import make

HOST = "127.0.0.1"
MEETING = timedelta(seconds=60)
"""For all ranks to be there, before anything is measured."""


def run(task: dict[str, Any]) -> None:
    """Do what `Cell` asks for."""
    if task["role"] == "store":
        serve_store(Path(task["port_file"]))
    else:
        Rank(task).live()


def serve_store(port_file: Path) -> None:
    """Serve a key-value store until killed. Its port appears in the file."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    part = port_file.with_suffix(".part")
    part.write_text(str(store.port))
    part.rename(port_file)
    while True:
        signal.pause()


class Rank:
    """One rank's script: construct, train, save, evaluate the average, average, close.

    It appends to a file of events, a line of JSON each: what it calls and when that returned, that the fault is due
    (who asked kills or stops it then) or has happened, the error that ended it. Lines are whole, whatever kills it.

    Args:
        task: plain values, as `Cell` gives them.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        self.task, self.rank, self.fault = task, int(task["rank"]), FAULTS[task["fault"]]
        self.is_victim = self.rank in self.fault.victims
        self._events = os.open(task["events"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._call = ""

    def live(self) -> None:
        """From the start to the end; an error ends the process as it ends a script, without close()."""
        torch.set_num_threads(1)
        try:
            self._script()
        except Exception as error:
            self._say("error", type=type(error).__name__, text=str(error), call=self._call)
            raise
        self._say("done")

    def _script(self) -> None:
        task = self.task
        world_size, timeout = len(task["addresses"]), timedelta(seconds=task["timeout"])
        store = dist.TCPStore(HOST, task["port"], is_master=False, timeout=MEETING)
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
            wrapper = make(task["wrapper"], module, rank=self.rank, addresses=task["addresses"], timeout=timeout)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(self.rank)
        for step in range(task["num_steps"]):
            if step == task["fault_step"] and self.fault.where == "training" and self._is_over(wrapper):
                break
            if progress is not None:
                with self._calling("progress"):
                    progress.add(1)
            with self._calling("training step"):
                loss = wrapper(torch.randn(4, 8, generator=generator)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if isinstance(wrapper, PairwiseDataParallel):
                wrapper.report_loss(float(loss))
            time.sleep(task["step_seconds"])
        else:
            self._finish(wrapper)
        with self._calling("close"):
            wrapper.close()
        with self._calling("destroy_process_group"):
            dist.destroy_process_group()

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
        if what in ("kill", "stop"):
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
