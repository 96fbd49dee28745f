"""An algorithm of your own: each round averages a random tenth of the entries, the same ones on all ranks.

    torchrun --standalone --nproc-per-node 4 examples/own_algorithm.py

An algorithm writes one method: `round` asks for messages or averages with `yield`, and changes the model by the answer.
Rounds, overlap, errors that name a peer, checkpoints, evaluation and workers that fail are the wrapper's.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from gossip_modules import GossipDataParallel, RandomK
from gossip_modules.extend import Algorithm, Memory, Share, Vectors


@dataclass(frozen=True)
class RandomShare(Algorithm):
    """x[I] <- sum_j W_ij x_j[I], where I is a random share of the entries, drawn anew in each round."""

    share: float
    needs_symmetric_weights: ClassVar[bool] = True  # the default graph is then an undirected ring

    def round(self, v: Vectors, m: Memory, k: int) -> Generator[Share, Any, None]:
        """RandomK draws from the number of the round, so that all ranks send the same entries."""
        received = yield Share(v.encode(RandomK(self.share), v.x))
        received.add_to(v.x)  # (W - I) of the messages


dist.init_process_group("gloo")
torch.manual_seed(0)
model = GossipDataParallel(nn.Linear(100, 1), algorithm=RandomShare(0.1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
draws = torch.Generator().manual_seed(1 + dist.get_rank())
for _ in range(300):
    x = torch.randn(16, 100, generator=draws)
    optimizer.zero_grad()
    mse_loss(model(x), x.sum(dim=1, keepdim=True)).backward()
    optimizer.step()
distance, share = model.consensus_distance(), model.comm_stats()["bytes_sent"] / (2 * 300 * 101 * 4)
if dist.get_rank() == 0:
    print(f"distance from the average {distance:.1e}; sent {share:.0%} of what plain gossip sends")
model.close()
dist.destroy_process_group()
