"""A graph of your own: two racks with fast links inside and one slow link between them.

    torchrun --standalone --nproc-per-node 4 examples/own_graph.py

A graph is a pure function of the rank and the round, so ranks need not tell each other whom they will send to. This one
talks inside the rack, and to the other rack in one round of every `world_size / 2`.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from gossip_modules import GossipDataParallel
from gossip_modules.graph_manager import GraphManager
from gossip_modules.mixing_manager import UniformMixing


class TwoRacks(GraphManager):
    """Round after round the next peer of the row: all mates in the rack, then the same place in the other rack."""

    def phone_book(self, rank: int) -> Sequence[int]:
        """The peers of `rank`, in the order in which it sends to them."""
        size = self.world_size // 2
        first = rank // size * size  # of the rack
        mates = [first + (rank - first + shift) % size for shift in range(1, size)]
        return [*mates, (rank + size) % self.world_size]


dist.init_process_group("gloo")
rank = dist.get_rank()
graph = TwoRacks(dist.get_world_size())
mixing = UniformMixing(graph)
if rank == 0:
    for t in range(graph.period):
        print(f"round {t}: " + ", ".join(f"{r} -> {graph.out_peers(r, t)[0]}" for r in range(graph.world_size)))
    print(f"doubly stochastic: {mixing.is_doubly_stochastic}; spectral gap {mixing.spectral_gap():.2f} (1: exact)")

torch.manual_seed(0)
net = nn.Linear(8, 1)
model = GossipDataParallel(net, graph=graph)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
draws = torch.Generator().manual_seed(1 + rank)
for _ in range(100):
    x = torch.randn(16, 8, generator=draws)
    loss = mse_loss(model(x), x.sum(dim=1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
with model.averaged():
    error = (net.weight - 1).abs().max().item()
if rank == 0:
    print(f"largest error of the averaged weights {error:.1e}")
model.close()
dist.destroy_process_group()
