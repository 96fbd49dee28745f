"""A plain training loop, with GossipDataParallel where DistributedDataParallel would be.

    torchrun --standalone --nproc-per-node 4 examples/plain_loop.py

Each rank trains on data of its own and, before every forward, averages its parameters with those of one peer
(Stochastic Gradient Push). What is evaluated and saved is the average over all ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from gossip_modules import GossipDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
teacher = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))  # the same on all ranks: what is to be learnt
draws = torch.Generator().manual_seed(1 + rank)  # different on each rank: its share of the data


def batch(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs and the class that the teacher gives them."""
    x = torch.randn(size, 20, generator=generator)
    return x, (x @ teacher).argmax(dim=1)


torch.manual_seed(0)
model = GossipDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
for _ in range(200):
    x, y = batch(32, draws)
    loss = cross_entropy(model(x), y)  # gossips, then computes
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

test_x, test_y = batch(2000, torch.Generator().manual_seed(99))
model.eval()  # applies what is still in flight; no rounds are run in eval mode
with model.averaged(), torch.no_grad():  # call it on every rank: for the length of the block all hold the average
    accuracy = (model(test_x).argmax(dim=1) == test_y).float().mean().item()
distance = model.consensus_distance()  # this too is computed by all ranks together
megabytes = model.comm_stats()["bytes_sent"] / 1e6
if rank == 0:
    print(f"averaged model: accuracy {accuracy:.1%}")
    print(f"distance of the ranks' own models from it {distance:.2g}; sent per rank {megabytes:.1f} MB")
model.close()
dist.destroy_process_group()
