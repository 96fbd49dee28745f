"""One cell of the table: a world of ranks, its store, the fault, and how each rank ended."""

from __future__ import annotations

import json
import random
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .accused import accused
from .fault import FAULTS, STORE, Fault
from .fork_server import End, ForkServer

START_SECONDS = 90.0
"""For a world to come to its fault; the machine may be busy."""
STEP_SECONDS = 0.02
NUM_STEPS_AFTER = 100
MAX_DELAY = 0.03
"""Seconds, from the beginning of a drawn step or of construction to the signal."""
_PORTS = range(20_000, 30_000)
"""Below those that connections get: an address that is free now is not taken by one before its worker binds it."""


class Key(NamedTuple):
    """Which cell."""

    wrapper: str
    fault: str
    repeat: int


class Call(NamedTuple):
    """A call of the library that a rank made; the times are of time.monotonic()."""

    name: str
    start: float
    end: float


class Cell:
    """A world that is started, gets its fault, and is watched until all its processes have ended or been killed.

    Whoever made it calls `poll` every few milliseconds, and `note` for each of its processes that has ended.

    Args:
        server: starts the processes.
        folder: of its files; new.
        limit: seconds from the fault until all that still run are killed, as hung.
    """

    def __init__(
        self, key: Key, server: ForkServer, folder: Path, *, world_size: int, timeout: float, seed: int, limit: float
    ) -> None:
        self.key, self.fault, self.timeout = key, FAULTS[key.fault], timeout
        self._server, self._folder, self._limit = server, folder, limit
        self._name = "/".join(map(str, key))
        self._world_size = world_size
        self._draw = random.Random(f"{seed} {self._name}")
        self._ends: dict[str, End] = {}
        self._started: list[str] = []
        self._events: list[list[dict[str, Any]]] = [[] for _ in range(world_size)]
        self._num_read = 0
        self._due: float | None = None
        self._fault_time: float | None = None
        self._resumption: float | None = None  # of stopped victims
        self._is_killed = False
        self._hung: set[str] = set()
        self._start_time = time.monotonic()
        folder.mkdir(parents=True)
        self._start("store", {"role": "store", "port_file": str(folder / "port")})

    @property
    def is_over(self) -> bool:
        """Whether all processes have ended."""
        return len(self._started) > 1 and all(name in self._ends for name in self._started)

    def note(self, end: End) -> bool:
        """Take down the end of a process; returns whether it is one of this cell's."""
        world, name = end.name.rsplit("/", 1)
        if world != self._name:
            return False
        self._ends[name] = end
        return True

    def poll(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        if len(self._started) == 1:
            self._start_ranks()
        self._read_events()
        if self._due is not None and now >= self._due:
            self._due = None
            self._strike(now)
        if self._resumption is not None and now >= self._resumption:
            self._resumption = None
            self._signal(self._victims, signal.SIGCONT)
        ranks = {f"{rank}" for rank in range(self._world_size)}
        running = ranks - set(self._ends)
        limit = self._start_time + START_SECONDS if self._fault_time is None else self._fault_time + self._limit
        is_done = len(self._started) > 1 and not running
        if not self._is_killed and (is_done or now >= limit):
            self._is_killed = True
            self._hung = running
            # The store last: its end is an error to ranks that still wait for it.
            self._signal(self._started[::-1], signal.SIGKILL)

    def rows(self) -> list[dict[str, Any]]:
        """How each rank ended, when all have."""
        return [self._row(rank) for rank in range(self._world_size)]

    @property
    def _victims(self) -> list[str]:
        return ["store" if victim == STORE else f"{victim}" for victim in self.fault.victims]

    def _start(self, name: str, task: dict[str, Any]) -> None:
        self._started.append(name)
        self._server.start(f"{self._name}/{name}", task, self._folder / f"{name}.log")

    def _start_ranks(self) -> None:
        port_file = self._folder / "port"
        if not port_file.exists():
            return
        fault_step = self._draw.randrange(10, 20)
        # A caller of averaged() waits for as long as the timeout: those who do not wait for it must train on meanwhile.
        seconds_alone = self.timeout + 3 if self.fault.what == "average alone" else 0.0
        addresses = free_addresses(self._world_size, self._draw)
        for rank in range(self._world_size):
            task = {
                "role": "rank",
                "rank": rank,
                "wrapper": self.key.wrapper,
                "fault": self.key.fault,
                "fault_step": fault_step,
                "num_steps": fault_step + NUM_STEPS_AFTER + int(seconds_alone / STEP_SECONDS),
                "step_seconds": STEP_SECONDS,
                "timeout": self.timeout,
                "port": int(port_file.read_text()),
                "addresses": addresses,
                "events": str(self._folder / "events"),
            }
            self._start(f"{rank}", task)

    def _read_events(self) -> None:
        path = self._folder / "events"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._num_read)
            *lines, _ = file.read().split(b"\n")
        for line in lines:
            self._num_read += len(line) + 1
            event = json.loads(line)
            self._events[event["rank"]].append(event)
            if event["event"] == "due" and self._due is None and self._fault_time is None:
                is_drawn = self.fault.where in ("training", "construction")
                self._due = event["time"] + (self._draw.uniform(0, MAX_DELAY) if is_drawn else 0.0)
            elif event["event"] == "fault":
                self._fault_time = event["time"]

    def _strike(self, now: float) -> None:
        """Kill or stop all victims at once."""
        self._signal(self._victims, signal.SIGKILL if self.fault.what == "kill" else signal.SIGSTOP)
        self._fault_time = now
        seconds = self.fault.stop_seconds(self.timeout)
        if seconds is not None:
            self._resumption = now + seconds

    def _signal(self, names: Sequence[str], number: int) -> None:
        for name in names:
            if name not in self._ends:
                self._server.signal(f"{self._name}/{name}", number)

    def _row(self, rank: int) -> dict[str, Any]:
        events, end, fault_time = self._events[rank], self._ends[f"{rank}"], self._fault_time
        nan = float("nan")
        error = next((event for event in events if event["event"] == "error"), None)
        last = next((event for event in events if event["event"] in ("error", "done")), None)
        last_time = end.time if last is None else last["time"]
        is_victim = rank in self.fault.victims
        row: dict[str, Any] = {
            "rank": rank,
            "role": "victim" if is_victim else "survivor",
            "seconds": nan if fault_time is None else last_time - fault_time,
            "exit_code": end.exit_code,
            "exit_seconds": end.time - last_time,
            "hung": f"{rank}" in self._hung,
        }
        text = ""
        if error is not None:
            text = error["text"]
            row |= {"call": error["call"], "error_type": error["type"], "error": " ".join(text.split())[:300]}
        row |= blame(text, rank=rank, fault=self.fault, world_size=self._world_size)
        if fault_time is not None:
            stopped = (fault_time, fault_time + (self.fault.stop_seconds(self.timeout) or 0.0)) if is_victim else None
            call, seconds = longest(calls_of(events, last_time), since=fault_time, stopped=stopped)
            row |= {"wait_call": call, "wait_seconds": seconds}
            row["beyond_timeout_seconds"] = max(0.0, seconds - self.timeout)
        return row


def blame(text: str, *, rank: int, fault: Fault, world_size: int) -> dict[str, Any]:
    """The columns that say whom an error names.

    Who called averaged() alone is to name the others. Of all other victims nothing is asked.
    """
    named = accused(text, rank=rank) if text else set()
    columns: dict[str, Any] = {"named": " ".join(map(str, sorted(named)))}
    culprits = set(fault.victims)
    if rank in culprits:
        if fault.what != "average alone":
            return columns
        culprits = set(range(world_size)) - {rank}
    if not text:
        return columns
    names_the_dead = "store" in text if fault.is_of_store else bool(named & culprits)
    return columns | {"names_the_dead": names_the_dead, "names_an_innocent": bool(named - culprits)}


def calls_of(events: Sequence[dict[str, Any]], end: float) -> list[Call]:
    """What a rank has called; the last call may have ended by an error, or never."""
    calls = []
    for i, event in enumerate(events):
        if event["event"] == "enter":
            after = next((later["time"] for later in events[i + 1 :] if later["event"] in ("leave", "error")), end)
            calls.append(Call(event["call"], event["time"], after))
    return calls


def longest(calls: Sequence[Call], *, since: float, stopped: tuple[float, float] | None) -> tuple[str, float]:
    """The name and the seconds of the call that took longest, counting from `since`, without those of being stopped."""
    name, seconds = "", 0.0
    for call in calls:
        start = max(call.start, since)
        duration = call.end - start
        if stopped is not None:
            duration -= max(0.0, min(call.end, stopped[1]) - max(start, stopped[0]))
        if duration > seconds:
            name, seconds = call.name, duration
    return name, seconds


def free_addresses(num_addresses: int, draw: random.Random) -> list[str]:
    """Addresses "tcp://127.0.0.1:port" where nobody listens at the moment."""
    ports: list[int] = []
    while len(ports) < num_addresses:
        port = draw.choice(_PORTS)
        with socket.socket() as each:
            try:
                each.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in ports:
            ports.append(port)
    return [f"tcp://127.0.0.1:{port}" for port in ports]
