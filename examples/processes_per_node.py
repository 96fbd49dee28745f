"""Several processes per node: exact averages of gradients inside a node, gossip between nodes.

    torchrun --standalone --nproc-per-node 4 examples/processes_per_node.py

Here the four processes of one machine act as two nodes of two. On a cluster, start `torchrun --nnodes 8
--nproc-per-node 4` and pass `nprocs_per_node=4`. Each process gossips its own share of the model, so that all network
cards of a node are used.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from gossip_modules import GossipDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
# Consecutive ranks form a node. The graph has the nodes as its vertices: two here, not four.
model = GossipDataParallel(net, nprocs_per_node=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
draws = torch.Generator().manual_seed(1 + rank)  # every process has data of its own
for _ in range(100):
    x = torch.randn(16, 8, generator=draws)
    loss = mse_loss(model(x), x.sum(dim=1, keepdim=True).sin())
    optimizer.zero_grad()
    loss.backward()  # averages gradients over the node
    optimizer.step()

norm = torch.nn.utils.parameters_to_vector(model.module.parameters()).norm()
norms = [torch.zeros(()) for _ in range(dist.get_world_size())]
dist.all_gather(norms, norm.detach())
if rank == 0:
    for node in range(2):
        first, second = (value.item() for value in norms[2 * node : 2 * node + 2])
        print(f"node {node}: its processes hold {'the same model' if first == second else 'different models'}")
    print(f"the two nodes {'agree' if norms[0] == norms[2] else 'differ'} after their own last step")
distance = model.consensus_distance()
if rank == 0:
    print(f"distance of the models from their average {distance:.2g}")
model.close()
dist.destroy_process_group()
