"""Fine-tuning: the backbone is frozen, then unfrozen. Only what is trained travels.

    torchrun --standalone --nproc-per-node 2 examples/fine_tuning.py

The backbone here is a small network with random weights, so that nothing has to be downloaded. With torchvision it
would be `resnet18(weights="DEFAULT")` without its `fc`, and everything else as it stands.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from gossip_modules import GossipDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
backbone = nn.Sequential(nn.Linear(16, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
head = nn.Linear(128, 3)
teacher = torch.randn(16, 3)  # from the same seed on all ranks, as the weights above are
backbone.requires_grad_(False)  # before wrapping or at any time after it
model = GossipDataParallel(nn.Sequential(backbone, head), gossip_buffers=False)  # BatchNorm statistics stay local
optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
draws = torch.Generator().manual_seed(1 + dist.get_rank())


def train(num_steps: int) -> tuple[float, float]:
    """Returns the mean loss of the last ten steps, and the bytes that this rank sent per step."""
    before, losses = model.comm_stats()["bytes_sent"], []
    for _ in range(num_steps):
        model.train()
        backbone[1].eval()  # a frozen BatchNorm keeps the statistics that it was trained with
        x = torch.randn(32, 16, generator=draws)
        loss = cross_entropy(model(x), (x @ teacher).argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10, (model.comm_stats()["bytes_sent"] - before) / num_steps


num_head, num_all = sum(p.numel() for p in head.parameters()), sum(p.numel() for p in model.parameters())
for phase, num_parameters in (("frozen", num_head), ("unfrozen", num_all)):
    if phase == "unfrozen":  # on all ranks at the same step; it takes effect at the next training forward
        backbone.requires_grad_(True)
        optimizer.add_param_group({"params": list(backbone.parameters()), "lr": 0.01})
    loss, num_bytes = train(100)
    if dist.get_rank() == 0:
        print(f"backbone {phase}: loss {loss:.2f}, {num_parameters} trained parameters, {num_bytes:.0f} bytes per step")
model.close()
dist.destroy_process_group()
