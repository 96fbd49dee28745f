"""An algorithm of your own: each round averages a random tenth of the entries, the same ones on all ranks.

    torchrun --standalone --nproc-per-node 4 examples/own_algorithm.py

An algorithm writes its settings and one round, which asks for communication with `yield`. Overlap, errors that name a
peer, checkpoints, memberships and the simulator are the library's.
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
    """x <- x + sum_j W_ij (q_j - q_i), where q = x in the entries that this round draws."""

    ratio: float = 0.1
    needs_symmetric_weights: ClassVar[bool] = True  # the default graph is then an undirected ring

    def round(self, v: Vectors, m: Memory, k: int) -> Generator[Any, Any, None]:
        received = yield Share(v.encode(RandomK(self.ratio), v.x))
        received.add_to(v.x)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = GossipDataParallel(nn.Linear(1000, 1), algorithm=RandomShare(0.1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.008)
draws = torch.Generator().manual_seed(1 + dist.get_rank())
for _ in range(300):
    x = torch.randn(16, 1000, generator=draws)
    optimizer.zero_grad()
    mse_loss(model(x), x.sum(dim=1, keepdim=True)).backward()
    optimizer.step()
distance, share = model.consensus_distance(), model.comm_stats()["bytes_sent"] / (2 * 300 * 1001 * 4)
if dist.get_rank() == 0:
    print(f"distance from the average {distance:.1e}; sent {share:.0%} of what plain gossip sends")
model.close()
dist.destroy_process_group()
