"""A sanitiser for threads: asynchronous engines at work while seeded delays push their threads about.

    python -m tests.harness.sanitizer --engine adpsgd --seconds 60 --seed 0
    python -m tests.harness.sanitizer --engine wagma --seconds 5 --seed 17      # the episode that an error named, again

Ranks are threads of one process over real connections. Between any two lines of the modules that share state between
threads a thread may be held up, for as long as its own generator says. What ranks do, and what must hold whatever they
do, is in `tests/harness/workloads.py`. When no rank makes progress that is a deadlock: the stacks of all threads are
printed. Each episode has a seed of its own, which an error names. The seed fixes all that is drawn, not what the
operating system does, so an error that took a rare coincidence may need a few attempts to come back.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch._dynamo  # optimizers import it at their first use: traced, that can take longer than PATIENCE
import torch.distributed as dist

import gossip_modules
from tests.harness.ranks import run_ranks
from tests.harness.ranks_at_work import LENGTH, LONG, Board, Rank
from tests.harness.workloads import WORKLOADS, Workload

_THREADED = {  # modules that share state between threads
    "engine": ("background", "liveness", "overlap", "snapshots"),
    "transport": ("listener", "threads"),
    "ad_psgd": ("engine", "exchange", "shared_model"),
    "wagma": ("engine", "group_average", "group_result", "worker"),
    "dpwa": ("averager", "engine", "fetcher", "peer_scores", "protocol", "server", "wrapper"),
}
_LIBRARY = Path(gossip_modules.__file__).parent
ASYNCHRONOUS = tuple(_LIBRARY / folder / f"{name}.py" for folder, names in _THREADED.items() for name in names)
PATIENCE = 20.0  # seconds without progress that count as a deadlock
EPISODE = 3.0  # seconds
HOT = 0.1  # of all lines, for each thread


class Finding(Exception):
    """An engine did what it must not; the message names the seed."""


class Delays:
    """Holds threads up between the lines of some files, as drawn from (seed, name of the thread).

    Anywhere for a moment now and then; and for long, and often, at a few lines that are drawn first: an error that
    shows only while two threads are each at a certain line is met far sooner than by equal delays everywhere.

    Args:
        seed: of everything.
        where: how the paths of those files begin.
        longest: of a delay, in seconds.
    """

    def __init__(self, seed: int, *, where: Sequence[Path] = ASYNCHRONOUS, longest: float = 0.01) -> None:
        self._seed = seed
        self._where = tuple(map(str, where))
        self._longest = longest
        self._local = threading.local()
        self._names: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def active(self) -> Iterator[None]:
        """For threads that are started inside; they also change places as often as Python can make them."""
        before, interval = threading.gettrace(), sys.getswitchinterval()
        threading.settrace(self._on_call)
        sys.setswitchinterval(1e-5)
        try:
            yield
        finally:
            sys.setswitchinterval(interval)
            threading.settrace(before)

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        return self._on_line if frame.f_code.co_filename.startswith(self._where) else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if event == "line":
            self._delay(frame)
        return self._on_line

    def _delay(self, frame: FrameType) -> None:
        if not hasattr(self._local, "random"):
            name = threading.current_thread().name
            with self._lock:
                self._names[name] += 1
                self._local.name = f"{self._seed} {name} {self._names[name]}"
            self._local.random, self._local.hot = random.Random(self._local.name), {}
        draw, line = self._local.random.random(), (frame.f_code, frame.f_lineno)
        is_hot = self._local.hot.get(line)
        if is_hot is None:
            place = f"{frame.f_code.co_name} {frame.f_lineno - frame.f_code.co_firstlineno}"
            is_hot = random.Random(f"{self._local.name} {place}").random() < HOT
            self._local.hot[line] = is_hot
        if is_hot and draw < 0.3:
            time.sleep(draw / 0.3 * self._longest)
        elif draw < 0.02:
            time.sleep(draw / 0.02 * self._longest / 20)
        elif draw < 0.2:
            time.sleep(0)


def run_episode(
    workload: Workload,
    seed: int,
    *,
    seconds: float = EPISODE,
    patience: float = PATIENCE,
    length: int | None = None,
    where: Sequence[Path] = ASYNCHRONOUS,
) -> Board:
    """One life of a world of ranks, from opening to closing; returns the board with its counts.

    Args:
        workload: which engine, and what must hold.
        seed: of the world's size, of what ranks do and of all delays.
        seconds: after which ranks begin to close.
        patience: seconds without progress of some rank that count as a deadlock.
        length: of the model; None: drawn, every third is LONG.
        where: see `Delays`.

    Raises:
        Finding: something does not hold, or a deadlock. Threads may be left behind.
    """
    draw = random.Random(f"{seed} world")
    world_size, drawn = draw.choice(workload.world_sizes), draw.choice((LENGTH, LENGTH, LONG))
    board = Board(world_size, seed, length=length or drawn, seconds=seconds, patience=patience)
    outcome: Future[None] = Future()

    def body(group: dist.ProcessGroup) -> None:
        threading.current_thread().name = f"rank-{group.rank()}"
        torch.set_num_threads(1)
        try:
            workload.live(Rank(group, board))
        except BaseException as error:
            board.fail(error)
            raise

    def run() -> None:
        try:
            run_ranks(board.world_size, body)
        except BaseException as error:  # noqa: BLE001 (raised below)
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    with Delays(seed, where=where).active():
        threading.Thread(target=run, name="sanitizer", daemon=True).start()
        stuck = _watch(board, outcome, patience)
    again = f"python -m tests.harness.sanitizer --engine {workload.name} --seed {seed} --seconds {seconds:g}"
    again += f" --length {length}" if length else ""
    if stuck:
        board.fail(TimeoutError("no progress"))
        raise Finding(f"seed {seed}: no progress of {stuck} for {patience:g} s; again: {again}\n{_stacks()}")
    error = board.error or outcome.exception()
    if error is not None:
        raise Finding(f"seed {seed}: {type(error).__name__}: {error}; again: {again}") from error
    return board


def _watch(board: Board, outcome: Future[None], patience: float) -> str:
    """Return when the episode is over or a rank has failed, or the names of ranks that are stuck."""
    seen, since = list(board.progress), [time.monotonic()] * board.world_size
    while not outcome.done() and board.error is None:
        now = time.monotonic()
        for rank, count in enumerate(board.progress):
            if count != seen[rank]:
                seen[rank], since[rank] = count, now
        if now - max(since) > patience:
            return ", ".join(f"rank {rank} (after {board.doing[rank]})" for rank in range(board.world_size))
        board.wait_a_little()
    return ""


def _stacks() -> str:
    """Where all threads are."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"--- {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Episode after episode until the time is over; 1 when something was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(WORKLOADS), required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first episode; the next has the next one")
    parser.add_argument("--length", type=int, help="of the model; drawn if not given")
    parser.add_argument("--patience", type=float, default=PATIENCE)
    options = parser.parse_args(arguments)
    try:
        limits = {"seconds": options.seconds, "patience": options.patience}
        return _run(WORKLOADS[options.engine], options.seed, length=options.length, **limits)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _run(workload: Workload, first_seed: int, *, length: int | None, seconds: float, patience: float) -> int:
    seed, counts = first_seed, Counter[str]()
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        # Where even the watchdog cannot run, as in a deadlock of the interpreter lock.
        faulthandler.dump_traceback_later(EPISODE + 8 * patience, exit=True, file=2)
        print(f"{workload.name}: seed {seed}", end=" ", flush=True)
        try:
            board = run_episode(workload, seed, seconds=min(EPISODE, left), patience=patience, length=length)
        except Finding as finding:
            print(f"\n{finding}", flush=True)
            traceback.print_exception(finding.__cause__)
            return 1
        print(f"{board.world_size} ranks of {board.length} numbers, {dict(board.counts)}", flush=True)
        counts += board.counts
        seed += 1
    print(f"{workload.name}: {seed - first_seed} episodes without a finding: {dict(counts)}", flush=True)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads that are stuck cannot be ended
