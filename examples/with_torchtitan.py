"""torchtitan's debug model in two regions: its own FSDP2 inside a region, `semi_sync` between regions; on CPUs.

torchrun --standalone --nproc-per-node 4 examples/with_torchtitan.py

Needs `pip install torchtitan`. On GPUs leave out `attend` (only on CPUs does torchtitan's attention lack a backward
pass) and the sums for Gloo.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3 import model_registry

from gossip_modules import DiLoCo
from gossip_modules.integrations.semi_sync import semi_sync
from gossip_modules.regions import Regions

attend = partial(scaled_dot_product_attention, is_causal=True)
FlexAttention._compiled_flex_attn = staticmethod(
    lambda q, k, v, enable_gqa, **_: (attend(q, k, v, enable_gqa=enable_gqa), None)
)
dist.init_process_group("gloo")
regions = Regions.of("0-1,2-3")  # a region holds one model, in shards
mesh = regions.mesh("cpu")
model = model_registry("debugmodel").model.build()
apply_fsdp_to_decoder(model, mesh["inside"], param_dtype=torch.float32, reduce_dtype=torch.float32, pp_enabled=False)
for part in model.modules():
    if isinstance(part, FSDPModule):
        part.set_force_sum_reduction_for_comms(True)  # Gloo has no scaled sum
with torch.no_grad():
    model.init_states()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
draws = torch.Generator().manual_seed(1 + dist.get_rank())
positions = torch.arange(32).expand(2, 32).contiguous()
masks, losses = model.get_attention_masks(positions), []
with semi_sync(model, optimizer, mesh=mesh["between"], algorithm=DiLoCo(sync_every=5)) as gossip:
    gossip.declare_regions(regions)
    for _ in range(20):
        tokens = (torch.randint(0, 64, (2, 1), generator=draws) + torch.arange(33)) % 64  # sequences that count
        logits = model(tokens[:, :-1], positions, masks)
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss / regions.size).backward()  # torchtitan's FSDP2 sums gradients
        optimizer.step()  # ends with the round
        optimizer.zero_grad()
        losses.append(loss.item())
    stats, distance = gossip.comm_stats(), gossip.consensus_distance()
if dist.get_rank() == 0:
    between = stats["bytes_sent_between_regions"] / 1e6
    print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}, {between:.1f} MB between regions, which are {distance:.1e} apart")
dist.destroy_process_group()
