"""A run in a folder: workers are killed while they write, and a reader reads all objects meanwhile."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.mailbox.faults import compared_anchors
from benchmarks.mailbox.job import WireRun
from benchmarks.mailbox.training import KEY, WireTraining
from gossip_modules.mailbox.folder import PARTS
from gossip_modules.mailbox.follower import open_run
from gossip_modules.mailbox.medium import Medium

_PAUSE = 0.7  # the longest time between two kills, in seconds
_WRITE_SECONDS = 30.0  # in which a worker writes a file
_TWO_HOURS = 7200.0
_MAX_BYTES = 1 << 30


def measure(training: WireTraining, *, kills: int, seed: int) -> dict[str, Any]:
    """One row; messages have nine megabytes, and a worker is killed while it has an unfinished file open."""
    training = replace(training, address="", layers=(64, 32768, 8), learning_rate=1e-4, step_ms=10.0, sync_every=4)
    draw, counts = random.Random(seed), Counter[str]()
    with WireRun(training) as job:
        ranks = job.start(training.num_workers)
        job.until_step(ranks, 2 * training.sync_every)
        reader = open_run(f"file://{job.folder}/run", timeout=30.0, key=KEY)
        for _ in range(kills):
            end = time.time() + draw.uniform(0, _PAUSE)
            while time.time() < end:
                job.turn()
                _read(reader, counts)
            job.backend.kill(_writer(job))
            (new,) = job.start()
            job.until_step([new], job.last_step(new) + 1)
        job.end_at(0)
        job.until(lambda: not job.backend.running, 120.0)
        parts = job.folder / "run" / PARTS
        left = list(parts.iterdir())
        sizes = [path.stat().st_size for path in left]
        for path in left:
            before = time.time() - _TWO_HOURS
            os.utime(path, (before, before))
        open_run(f"file://{job.folder}/run", timeout=30.0, key=KEY).close()
        num_anchors, num_different = compared_anchors({rank: job.lines(rank) for rank in range(job.num_started)})
        return {
            "method": training.method,
            "num_workers": training.num_workers,
            "kills": kills,
            "survivors_that_failed": len(job.backend.errors),
            "hung": len(job.backend.running),
            "objects_read": counts["read"],
            "objects_gone_meanwhile": counts["gone"],
            "objects_refused": reader.counts.refused,
            "unfinished_files": len(left),
            "unfinished_bytes": sum(sizes),
            "unfinished_after_two_hours": len(list(parts.iterdir())),
            "anchors_compared": num_anchors,
            "anchors_that_differ": num_different,
        }


def _writer(job: WireRun) -> int:
    """The rank of a worker that has an unfinished file open, but not the first one."""
    parts, deadline = str(job.folder / "run" / PARTS), time.time() + _WRITE_SECONDS
    while time.time() < deadline:
        for rank in sorted(job.backend.running - {0}):
            with contextlib.suppress(OSError):  # it has closed a file meanwhile
                files = Path(f"/proc/{job.backend.pid(rank)}/fd")
                if any(os.readlink(file).startswith(parts) for file in files.iterdir()):
                    return rank
    raise RuntimeError(f"got no worker that writes in {_WRITE_SECONDS:g} s, expected one message in a round")


def _read(reader: Medium, counts: Counter[str]) -> None:
    """Read the newest objects."""
    for path in sorted(reader.list())[-20:]:
        assert not path.startswith("."), "an unfinished file is no object"
        counts["gone" if reader.get(path, max_bytes=_MAX_BYTES) is None else "read"] += 1
