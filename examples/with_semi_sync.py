"""A loop that calls the parts of a model by itself, as torchtitan and torchft have it, inside `semi_sync`.

torchrun --standalone --nproc-per-node 2 examples/with_semi_sync.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from gossip_modules import DiLoCo
from gossip_modules.integrations.semi_sync import semi_sync

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
torch.manual_seed(0)
teacher = torch.randn(20, 4)
model_parts = [nn.Sequential(nn.Linear(20, 64), nn.ReLU()), nn.Linear(64, 4)]  # the stages of a pipeline, say
optimizer = torch.optim.AdamW([p for part in model_parts for p in part.parameters()], lr=3e-3)
draws = torch.Generator().manual_seed(1 + dist.get_rank())
with semi_sync(model_parts, optimizer, mesh=mesh["replicate"], algorithm=DiLoCo(sync_every=10)) as gossip:
    for _ in range(200):
        x = torch.randn(32, 20, generator=draws)
        loss = cross_entropy(model_parts[1](model_parts[0](x)), (x @ teacher).argmax(dim=1))
        loss.backward()
        optimizer.step()  # ends with the round
        optimizer.zero_grad()
    x = torch.randn(2000, 20)
    with gossip.averaged(), torch.no_grad():
        accuracy = (
            (model_parts[1](model_parts[0](x)).argmax(dim=1) == (x @ teacher).argmax(dim=1)).float().mean().item()
        )
    num_rounds = gossip.comm_stats()["num_rounds"]
if dist.get_rank() == 0:
    print(f"averaged model: accuracy {accuracy:.1%} after {num_rounds:.0f} rounds")
dist.destroy_process_group()
