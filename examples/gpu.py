"""Gossip on GPUs, with mixed precision; on the CPU where there is no GPU.

    torchrun --standalone --nproc-per-node 2 examples/gpu.py

Where each rank has a GPU of its own, parameters travel from GPU to GPU over NCCL. Where ranks share a GPU, they travel
over Gloo, through pinned CPU memory. `overlap=True` runs each round under the forward and backward of the next step.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from gossip_modules import GossipDataParallel

local_rank, ranks_here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
num_gpus = torch.cuda.device_count()
device = torch.device("cuda", local_rank % num_gpus) if num_gpus else torch.device("cpu")
if num_gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if num_gpus >= ranks_here else "gloo")

teacher = torch.randn(32, 10, generator=torch.Generator().manual_seed(0)).to(device)
draws = torch.Generator().manual_seed(1 + dist.get_rank())
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)  # move first, then wrap
model = GossipDataParallel(net, overlap=True)  # no device_ids: it takes the device that the parameters are on
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(120):
    x = torch.randn(64, 32, generator=draws).to(device)
    y = (x @ teacher).argmax(dim=1)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f} on {device}")

x = torch.randn(2000, 32, generator=torch.Generator().manual_seed(99)).to(device)
model.eval()
with model.averaged(), torch.no_grad():
    accuracy = (model(x).argmax(dim=1) == (x @ teacher).argmax(dim=1)).float().mean().item()
if dist.get_rank() == 0:
    print(f"{dist.get_backend()} on {device.type}: accuracy of the averaged model {accuracy:.1%}")
    print(f"training waited {model.comm_stats()['wait_seconds']:.2f} s for gossip in 120 steps")
model.close()
dist.destroy_process_group()
