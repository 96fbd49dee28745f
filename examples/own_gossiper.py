"""An algorithm of your own: each round averages a random tenth of the entries, the same ones on all ranks.

    torchrun --standalone --nproc-per-node 4 examples/own_gossiper.py

A gossiper writes two methods: `encode` says what peers get, `decode` adds (W(t) - I) of what was sent. Rounds, overlap,
errors that name a peer, checkpoints and evaluation are the wrapper's.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from gossip_modules import GossipDataParallel
from gossip_modules.extend import FlatVector, Gossiper
from gossip_modules.mixing_manager import MixingWeights


class RandomShare(Gossiper):
    """x[I] <- sum_j W_ij x_j[I], where I is a random share of the entries, drawn anew in each round."""

    needs_symmetric_weights = True  # the default graph is then an undirected ring

    def __init__(self, share: float) -> None:
        self.share = share

    def start(self, s: FlatVector, t: int) -> None:
        self.generator = torch.Generator().manual_seed(t)  # all ranks draw the same entries
        super().start(s, t)

    def encode(self, s: FlatVector, out_peers: Sequence[int], in_peers: Sequence[int]) -> Any:
        draws = (torch.rand(len(x), generator=self.generator) < self.share for x in s.segments)
        self.chosen = [draw.nonzero().flatten() for draw in draws]  # a segment holds all entries of one dtype
        self.own = [x[chosen] for x, chosen in zip(s.segments, self.chosen)]
        self.inbox = {j: [torch.empty_like(x) for x in self.own] for j in in_peers}
        return dict.fromkeys(out_peers, self.own), self.inbox

    def decode(self, s: FlatVector, weights: MixingWeights) -> None:
        messages = [(self.own, weights.own - 1), *((self.inbox[j], weight) for j, weight in weights.inp.items())]
        for message, weight in messages:
            for x, chosen, values in zip(s.segments, self.chosen, message):
                x.index_add_(0, chosen, values, alpha=weight)


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
