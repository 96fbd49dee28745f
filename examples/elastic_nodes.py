"""Nodes that die and come back as one, each with several processes that train one model.

    python -m gossip_modules.membership.serve --host 127.0.0.1 &           # the store, once
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/elastic_nodes.py
    torchrun --standalone --nproc-per-node 2 examples/elastic_nodes.py

Each of the last two lines starts a node: here or on a machine of its own, with STORE=host:29400. Kill one process of
the first with `kill -9`: torchrun ends the other and starts both anew, and they go on from the step that the rest has
come to. The variable gives each attempt of a node a store of its own: in the one that torchrun keeps, new processes
would find the addresses of dead ones.
"""

import logging
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from gossip_modules import GossipDataParallel, Membership

logging.basicConfig(level=logging.INFO, format="%(message)s")  # one line for each change
dist.init_process_group("gloo")  # of this node: `--standalone` makes each node a world of its own
per_node, local_rank = dist.get_world_size(), dist.get_rank()
teacher = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))  # what is to be learnt

store = os.environ.get("STORE", "127.0.0.1:29400")
membership = Membership(store, min_workers=2)  # nodes
net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
model = GossipDataParallel(net, membership=membership, nprocs_per_node=per_node)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
membership.track(optimizer=optimizer)  # what a node that joins gets beside the model

first = membership.join()
print(f"process {local_rank} of node {membership.number} trains from step {first}", flush=True)
loss = torch.tensor(float("nan"))  # of a node that comes when all steps are done
for step in membership.steps(int(os.environ.get("STEPS", "2000"))):
    rank = per_node * membership.rank + local_rank  # of this process among those of all nodes
    x = torch.randn(32, 20, generator=torch.Generator().manual_seed(1000 * step + rank))
    loss = cross_entropy(model(x), (x @ teacher).argmax(dim=1))  # gossips, then computes
    optimizer.zero_grad()
    loss.backward()  # averages gradients over the node
    optimizer.step()
    time.sleep(0.01)

print(f"process {local_rank} of node {membership.number} ends with loss {loss.item():.3f}")
model.close()
dist.destroy_process_group()
