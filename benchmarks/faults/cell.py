"""One cell of the table: a world of ranks, its store, the fault, and how each rank ended."""

from __future__ import annotations

import functools
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
from .processes import Processes
from .rank import HOST, STEP_SECONDS, FaultWorld, serve_store, train

START_SECONDS = 90.0
"""For a world to come to its fault; the machine may be busy."""
POLL_SECONDS = 0.005
NUM_STEPS_AFTER = 100
MAX_DELAY = 0.03
"""Seconds, from the beginning of a drawn step or of construction to the signal."""
_PORTS = range(20_000, 30_000)
"""Below those that connections get: an address that is free now is not taken by one before its worker binds it."""


_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}


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

    Args:
        key: which cell.
        folder: of its files; new.
        world_size: ranks of the world.
        timeout: of the wrapper and of the default group, in seconds.
        seed: of the step of the fault and the moment in it.
    """

    def __init__(self, key: Key, folder: Path, *, world_size: int, timeout: float, seed: int) -> None:
        self.key, self.fault, self.timeout = key, FAULTS[key.fault], timeout
        self._world_size, self._processes = world_size, Processes(folder)
        self._draw = random.Random(f"{seed} {'/'.join(map(str, key))}")
        self._path = folder / "events"
        self._path.touch()
        self._num_read = 0
        self._events: list[list[dict[str, Any]]] = [[] for _ in range(world_size)]
        self._due: float | None = None
        self._fault_time: float | None = None
        self._victims = ["store" if victim == STORE else f"{victim}" for victim in self.fault.victims]
        self._hung: set[str] = set()

    def run(self) -> list[dict[str, Any]]:
        """A row for each rank. Processes that still run `3 * timeout + 10` s after the fault are killed, as hung."""
        world = self._world()
        processes, start = self._processes, time.monotonic()
        processes.start("store", functools.partial(serve_store, world.port))
        ranks = [f"{rank}" for rank in range(self._world_size)]
        for name in ranks:
            processes.start(name, functools.partial(train, world, int(name)))
        resumption = None
        while running := {*ranks} & {*processes.running}:
            time.sleep(POLL_SECONDS)
            processes.reap()
            self._read_events()
            now = time.monotonic()
            if self._due is not None and now >= self._due:
                self._due, self._fault_time = None, now
                self._signal_victims(_SIGNALS[self.fault.what])
                seconds = self.fault.stop_seconds(self.timeout)
                resumption = None if seconds is None else now + seconds
            if resumption is not None and now >= resumption:
                resumption = None
                self._signal_victims(signal.SIGCONT)
            limit = start + START_SECONDS if self._fault_time is None else self._fault_time + 3 * self.timeout + 10
            if now >= limit:
                self._hung = running
                break
        for name in (*ranks, "store"):  # the store last: its end is an error to ranks that still wait for it
            processes.signal(name, signal.SIGKILL)
        while processes.running:
            processes.reap(is_waiting=True)
        self._read_events()
        return [self._row(rank) for rank in range(self._world_size)]

    def _world(self) -> FaultWorld:
        fault_step = self._draw.randrange(10, 20)
        # A caller of averaged() waits for as long as the timeout: those who do not wait for it must train on meanwhile.
        seconds_alone = self.timeout + 3 if self.fault.what == "average alone" else 0.0
        port, *ports = free_ports(1 + self._world_size, self._draw)
        return FaultWorld(
            wrapper=self.key.wrapper,
            fault=self.key.fault,
            fault_step=fault_step,
            num_steps=fault_step + NUM_STEPS_AFTER + int(seconds_alone / STEP_SECONDS),
            timeout=self.timeout,
            port=port,
            addresses=[f"tcp://{HOST}:{own}" for own in ports],
            events=self._path,
        )

    def _read_events(self) -> None:
        with self._path.open("rb") as file:
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

    def _signal_victims(self, number: int) -> None:
        for name in self._victims:
            self._processes.signal(name, number)

    def _row(self, rank: int) -> dict[str, Any]:
        events, end, fault_time = self._events[rank], self._processes.ends[f"{rank}"], self._fault_time
        nan = float("nan")
        error = next((event for event in events if event["event"] == "error"), None)
        last = next((event for event in events if event["event"] in ("error", "done")), None)
        last_time = end.time if last is None else last["time"]
        is_victim = rank in self.fault.victims
        row: dict[str, Any] = {
            **self.key._asdict(),
            "victims": " ".join(self._victims),
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
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}


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


def free_ports(count: int, draw: random.Random) -> list[int]:
    """Ports of this machine where nobody listens at the moment."""
    ports: list[int] = []
    while len(ports) < count:
        port = draw.choice(_PORTS)
        with socket.socket() as each:
            try:
                each.bind((HOST, port))
            except OSError:
                continue
        if port not in ports:
            ports.append(port)
    return ports
