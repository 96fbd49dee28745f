"""A worker of torchft's, for comparison: an all-reduce that goes on without the workers that have died.

python -m benchmarks.elastic.torchft_worker --port 0        # the lighthouse, in which replicas meet
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from benchmarks.cluster.torchft_replica import Replica
from benchmarks.elastic.worker import ElasticJob, make_model, say, take_steps
from gossip_modules.membership.liveness.address import own_address

NAME = "torchft, all-reduce"
"""Of the method."""
LIGHTHOUSE = ("-m", "benchmarks.elastic.torchft_worker")
"""What python runs, as of `StoreProcess`."""
REMEDY = "run make cluster-venv, then this command with .venv-cluster/bin/python"
MAX_WORKERS = 8  # of the first generation, of which more than half are needed


def train(job: ElasticJob) -> None:
    """torchft's DistributedDataParallel and optimizer, as its documentation shows them, until it is killed."""
    from torchft import DistributedDataParallel, Optimizer

    own = make_model(job.width, job.seed)
    inner = torch.optim.SGD(own.parameters(), lr=1 / job.width, momentum=0.9)

    def load(state: Mapping[str, Any]) -> None:
        own.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    replica = Replica(
        load,
        lambda: {"model": own.state_dict(), "optimizer": inner.state_dict()},
        lighthouse=job.address,
        host=own_address(job.address),
        name=f"worker{os.getpid()}",
        min_replicas=job.num_workers // 2 + 1,
        timeout=timedelta(seconds=60),
    )
    manager = replica.manager
    model, optimizer = DistributedDataParallel(manager, own), Optimizer(manager, inner)
    say(event="ready", at=time.time())

    def place() -> tuple[int, int]:
        rank = manager.participating_rank()
        return manager.current_step(), -1 if rank is None else rank  # a replica that heals has none

    take_steps(job, model, optimizer, place)


def main() -> None:
    """A lighthouse, until the process is killed."""
    from torchft.coordination import LighthouseServer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="of the lighthouse; 0: a free one")
    # As in torchft's README: a shorter time to join gives quorums of another majority in each step.
    server = LighthouseServer(f"0.0.0.0:{parser.parse_args().port}", MAX_WORKERS // 2 + 1, join_timeout_ms=10_000)
    print(f"lighthouse on port {server.address().rsplit(':', 1)[1]}", flush=True)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 2)  # it logs some lines for each step
    threading.Event().wait()


if __name__ == "__main__":
    main()
