"""What each worker of a run over a mailbox does: it trains a small network, and writes a line of JSON for each step."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.elastic.training import RESOURCES_EVERY, Training
from benchmarks.mailbox.server import VARIABLES
from gossip_modules import DiLoCo, GossipDataParallel, Membership, NoLoCo, StreamingDiLoCo
from gossip_modules.mailbox.mail_rounds import MailRounds
from gossip_modules.mailbox.push_sum import PushSumByMail
from gossip_modules.testing import Worker
from gossip_modules.transport.job_key import VARIABLE

KEY = "the key of the job"
PUSH_SUM = "push-sum"
METHODS = ("DiLoCo", "Streaming DiLoCo", "NoLoCo", PUSH_SUM)


def methods(sync_every: int) -> dict[str, Callable[..., Any]]:
    """The wrappers by name, with a message every so many steps."""
    delay = max(sync_every // 4, 1)
    return {
        "DiLoCo": partial(GossipDataParallel, algorithm=DiLoCo(sync_every=sync_every)),
        "Streaming DiLoCo": partial(
            GossipDataParallel, algorithm=StreamingDiLoCo(sync_every=sync_every, fragments=2, delay=delay)
        ),
        "NoLoCo": partial(GossipDataParallel, algorithm=NoLoCo(sync_every=sync_every)),
        PUSH_SUM: partial(GossipDataParallel, algorithm=None, push_sum=True, schedule=sync_every),
    }


@dataclass(frozen=True)
class WireTraining(Training):
    """The task of all workers of a run over a mailbox; picklable, as processes get it.

    Args:
        sync_every: steps between two messages.
        grace, poll, interval, save_every, timeout: see `MailMembership`.
        quorum: see `MailMembership`; 0: its default.
        address: of the run, "s3://bucket/run" or "file:///folder"; "": of the folder of the job.
    """

    sync_every: int = 20
    grace: float = 10.0
    poll: float = 1.0
    interval: float = 10.0
    save_every: int = 4
    timeout: float = 300.0
    quorum: int = 0
    address: str = "s3://bucket/run"

    def __call__(self, worker: Worker) -> dict[str, Any]:
        """Train as one worker until the file `LAST` is there; returns its number, its weight and its figures."""
        os.environ.update(VARIABLES, AWS_ENDPOINT_URL=f"http://{worker.store}")
        os.environ[VARIABLE] = KEY
        with self.lines(worker.rank) as say:
            membership: Any = Membership(
                self.address or f"file://{self.folder}/run",
                min_workers=self.num_workers,
                quorum=self.quorum or None,
                grace=self.grace,
                poll=self.poll,
                interval=self.interval,
                save_every=self.save_every,
                timeout=self.timeout,
            )
            model = methods(self.sync_every)[self.method](self.make_model(), membership=membership)
            optimizer = self.make_optimizer(model)
            say("ready", number=membership.number)
            anchors = Anchors(model)
            for step in membership.steps(1 << 60):
                begins = time.perf_counter()
                if self.last_step() >= 0:
                    break
                loss = self.loss(model, seed=100 * step + membership.number)
                forward = time.perf_counter() - begins
                say("step", **_line(model, membership, step), anchors=anchors.news(), ms=1000 * forward)
                self.finish_step(loss, optimizer)
            model.close()
        return _result(membership, model)


class Anchors:
    """The anchors of the fragments of a model, by the number of rounds that they contain.

    Args:
        model: the wrapped model.
    """

    def __init__(self, model: Any) -> None:
        self._mixer, self._vector = _mixer(model), model._local.buffer.vector
        self._known: dict[int, int] = {}

    @torch.no_grad()
    def news(self) -> dict[str, str]:
        """The digests of new anchors, by "fragment/number of rounds"."""
        if not isinstance(self._mixer, MailRounds) or not self._mixer.algorithm.has_equal_memory:
            return {}
        news = {}
        for p, driver in enumerate(self._mixer.drivers):
            number = driver.next.get("average", 0)
            if driver.has_begun and number != self._known.get(p):
                self._known[p] = number
                with self._mixer._part(p, self._vector.clone()) as part:
                    driver._recover(part)
                    data = part.raw.numpy().tobytes()
                news[f"{p}/{number}"] = hashlib.sha256(data).hexdigest()[:16]
        return news


def _mixer(model: Any) -> Any:
    return model._local.engine.mixer


def _weight(model: Any) -> float:
    mixer = _mixer(model)
    return float(mixer.weight) if isinstance(mixer, PushSumByMail) else 1.0


def _line(model: Any, membership: Any, step: int) -> dict[str, Any]:
    """The state of a worker after the round of a step."""
    line = {"step": step, "number": membership.number, "members": membership.members, "weight": _weight(model)}
    if step % RESOURCES_EVERY == 0:
        status = dict(row.split(":", 1) for row in Path("/proc/self/status").read_text().splitlines() if ":" in row)
        line |= {
            "threads": int(status["Threads"]),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "megabytes": int(status["VmRSS"].split()[0]) / 1024,
        }
    return line


def _result(membership: Any, model: Any) -> dict[str, Any]:
    """The state of a worker after its end."""
    return {"number": membership.number, "weight": _weight(model), **model.comm_stats()}
