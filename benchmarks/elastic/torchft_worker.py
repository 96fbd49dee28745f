"""A worker of torchft's, for comparison: an all-reduce that goes on without the workers that have died.

python -m benchmarks.elastic.torchft_worker --port 0        # the lighthouse, in which replicas meet
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from benchmarks.cluster.torchft_replica import Replica
from benchmarks.elastic.training import Training
from gossip_modules.membership.address import own_address
from gossip_modules.testing import Worker

NAME = "torchft, all-reduce"
"""Of the method."""
REMEDY = "run make cluster-venv, then this command with .venv-cluster/bin/python"
MAX_WORKERS = 8  # of the first generation, of which more than half are needed


@dataclass(frozen=True)
class TorchFTTraining(Training):
    """torchft's DistributedDataParallel and optimizer, as its documentation shows them, until the process is killed."""

    def __call__(self, worker: Worker) -> dict[str, float]:
        """See `Training`."""
        from torchft import DistributedDataParallel, Optimizer

        with self.lines(worker.rank) as say:
            own = self.make_model()
            inner = self.make_optimizer(own)

            def load(state: Mapping[str, Any]) -> None:
                own.load_state_dict(state["model"])
                inner.load_state_dict(state["optimizer"])

            manager = Replica(
                load,
                lambda: {"model": own.state_dict(), "optimizer": inner.state_dict()},
                lighthouse=worker.store,
                host=own_address(worker.store),
                name=f"worker{os.getpid()}",
                min_replicas=self.num_workers // 2 + 1,
                timeout=timedelta(seconds=60),
            ).manager
            model, optimizer = DistributedDataParallel(manager, own), Optimizer(manager, inner)
            say("ready")
            while True:
                start = time.perf_counter()
                self.finish_step(self.loss(model, seed=manager.current_step()), optimizer)
                rank = manager.participating_rank()  # None: a replica that heals
                ms = 1000 * (time.perf_counter() - start)
                say("step", step=manager.current_step(), rank=-1 if rank is None else rank, ms=ms)


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
