"""Lightning Fabric: `GossipFabricStrategy` in place of "ddp". pip install '.[lightning]'

torchrun --standalone --nproc-per-node 2 examples/with_fabric.py
"""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn.functional import cross_entropy

from gossip_modules import Choco, SignNorm
from gossip_modules.integrations.lightning import GossipFabricStrategy

strategy = GossipFabricStrategy({"algorithm": Choco(SignNorm(), step_size=0.45)})
fabric = Fabric(accelerator="cpu", devices=2, precision="bf16-mixed", strategy=strategy)
fabric.launch()
torch.manual_seed(0)
x, teacher = torch.randn(4096, 20), torch.randn(20, 4)
data = torch.utils.data.TensorDataset(x, (x @ teacher).argmax(dim=1))
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=16, shuffle=True))
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
for k, (inputs, target) in enumerate(loader):  # each rank has its share of the batches
    is_accumulating = k % 2 == 0
    with fabric.no_backward_sync(model, enabled=is_accumulating):
        fabric.backward(cross_entropy(model(inputs), target))
    if not is_accumulating:
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
wrapper = strategy.wrapper_of(model)
with wrapper.averaged(), torch.no_grad():
    accuracy = (model(x).argmax(dim=1) == (x @ teacher).argmax(dim=1)).float().mean().item()
fabric.print(f"averaged model: accuracy {accuracy:.1%} after {wrapper.comm_stats()['num_rounds']:.0f} rounds")
wrapper.close()
