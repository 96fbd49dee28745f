"""Hugging Face Accelerate: `GossipAccelerator` in place of `Accelerator`. pip install '.[accelerate]'

    torchrun --standalone --nproc-per-node 2 examples/with_accelerate.py

Two micro-batches form an optimizer step, and each step has one round of DiLoCo's clock. Each rank has its own model in
the checkpoint; the model that is saved at the end is the average.
"""

import tempfile

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gossip_modules import DiLoCo
from gossip_modules.integrations.accelerate import GossipAccelerator

torch.manual_seed(0)
x, teacher = torch.randn(4096, 20), torch.randn(20, 4)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x @ teacher).argmax(dim=1)), batch_size=16)
options = {"algorithm": DiLoCo(sync_every=10)}
accelerator = GossipAccelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2, gossip=options)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for inputs, target in loader:  # each rank has its share of the batches
    with accelerator.accumulate(model):
        accelerator.backward(cross_entropy(model(inputs), target))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
with model.averaged(), torch.no_grad():
    accuracy = (model(x).argmax(dim=1) == (x @ teacher).argmax(dim=1)).float().mean().item()
with tempfile.TemporaryDirectory() as folder:
    accelerator.save_state(folder)  # load_state(folder) gives each rank its own model and optimizer back
    accelerator.save_model(model, folder)
accelerator.print(f"averaged model: accuracy {accuracy:.1%} after {model.comm_stats()['num_rounds']:.0f} rounds")
accelerator.end_training()
