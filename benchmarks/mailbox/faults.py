"""Workers that reach one S3 server and nothing else, while two are killed, one is started, and the store is away."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cluster.network import namespaces
from benchmarks.cluster.network.namespaces import ClusterUnavailableError
from benchmarks.mailbox.job import WireRun, ledger
from benchmarks.mailbox.network import StoreNetwork
from benchmarks.mailbox.training import PUSH_SUM, WireTraining

KILLED = (1, 2)
"""The ranks that die."""
END_SECONDS = 120.0
_ROUNDS = 4  # before, between and after the faults

Lines = Mapping[int, Sequence[Mapping[str, Any]]]


def measure(training: WireTraining, *, outage: float) -> dict[str, Any]:
    """One row: the script of faults, and what must hold."""
    num_workers = training.num_workers
    with StoreNetwork(num_workers) as network, WireRun(training, network) as job:
        ranks = job.start(num_workers)
        _rounds(job, ranks)
        listening = [network.listening(host) for host in network.hosts]
        for rank in KILLED:
            job.backend.kill(rank)
        alive = [rank for rank in ranks if rank not in KILLED]
        _rounds(job, alive)
        alive += job.start()
        _rounds(job, alive)
        before = {rank: job.last_step(rank) for rank in alive}
        network.cut()
        job.until(lambda: False, outage)
        network.mend()
        ended = time.time()
        steps = min(job.last_step(rank) - before[rank] for rank in alive)
        _rounds(job, alive)
        job.end_at(0)
        job.until(lambda: not job.backend.running, END_SECONDS)
        results, lines = dict(job.backend.results), {rank: job.lines(rank) for rank in range(job.num_started)}
        num_anchors, num_different = compared_anchors(lines)
        common, is_equal = last_anchors({rank: lines[rank] for rank in results}, since=ended)
        row = {
            "method": training.method,
            "num_workers": num_workers,
            "sync_every": training.sync_every,
            "grace_s": training.grace,
            "poll_s": training.poll,
            "outage_s": outage,
            "killed": len(KILLED),
            "started_again": 1,
            "survivors": len(alive),
            "survivors_that_failed": len(job.backend.errors),
            "hung": len(job.backend.running),
            "listening_sockets": sum(bool(text) for text in listening),
            "reachable_workers": sum(_reaches(network, a, b) for a in range(num_workers) for b in range(num_workers)),
            "limit_s": training.grace + 2 * training.poll,
            "longest_wait_s": round(max((each.get("longest_wait", 0.0) for each in results.values()), default=0.0), 3),
            "longest_forward_s": round(max(line["ms"] for rank in results for line in lines[rank][1:]) / 1000, 3),
            "least_steps_in_outage": steps,
            "least_seconds_of_steps": round(steps * training.step_ms / 1000, 1),
            "rounds_after": _num_rounds(lines, results, since=ended),
            "anchors_compared": num_anchors,
            "anchors_that_differ": num_different,
            "anchors_after_outage_on_all": common,
            "last_anchor_equal": is_equal,
            "weight_error": weight_error(job.requests(), results) if training.method == PUSH_SUM else "",
        }
        return row


def _rounds(job: WireRun, ranks: Sequence[int]) -> None:
    """Let each of these workers take the steps of some rounds."""
    steps = _ROUNDS * job.training.sync_every  # type: ignore[attr-defined]
    for rank in ranks:
        job.until_step([rank], job.last_step(rank) + steps)


def _reaches(network: StoreNetwork, rank: int, other: int) -> bool:
    """Whether a worker has a route to another one."""
    try:
        namespaces.run("ip", "-n", network.hosts[rank], "route", "get", network.address(other))
    except ClusterUnavailableError:
        return False
    return rank != other


def _num_rounds(lines: Lines, results: Mapping[int, Any], *, since: float) -> int:
    """The least number of new anchors of a worker after a time; for methods without one, its steps."""
    return min(sum(len(line["anchors"]) for line in lines[rank] if line["at"] > since) for rank in results)


def compared_anchors(lines: Lines) -> tuple[int, int]:
    """The number of anchors that several workers have had, and of those that are not the same on all of them."""
    found: dict[str, list[str]] = {}
    for own in lines.values():
        for line in own:
            for name, digest in line["anchors"].items():
                found.setdefault(name, []).append(digest)
    return sum(len(each) > 1 for each in found.values()), sum(len(set(each)) > 1 for each in found.values())


def last_anchors(lines: Lines, *, since: float) -> tuple[int, str]:
    """The number of anchors of after a time that all these workers have had, and whether the last one is equal."""
    own = [
        {name: digest for line in each if line["at"] > since for name, digest in line["anchors"].items()}
        for each in lines.values()
    ]
    common = set.intersection(*map(set, own)) if own else set()
    if not common:
        return 0, ""
    last = max(common, key=lambda name: int(name.split("/")[1]))
    return len(common), "yes" if len({each[last] for each in own}) == 1 else "no"


def weight_error(requests: Sequence[Mapping[str, Any]], results: Mapping[int, Mapping[str, Any]]) -> float:
    """The largest difference between the weight of a worker and its weight by the requests to the server.

    The weights of the latter kind, with those in the mail, sum to the number of workers that have begun.
    """
    weights, lying = ledger(requests)
    own = [abs(each["weight"] - weights[each["number"]]) for each in results.values()]
    return max([*own, abs(sum(weights.values()) + lying - len(weights))])
