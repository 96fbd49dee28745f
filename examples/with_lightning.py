"""Lightning: `GossipStrategy` in place of "ddp". pip install '.[lightning]'

torchrun --standalone --nproc-per-node 2 examples/with_lightning.py
"""

from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gossip_modules.integrations.lightning import GossipStrategy


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch: list[Tensor], k: int) -> Tensor:
        return cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], k: int) -> None:
        self.log("error", (self.layers(batch[0]).argmax(dim=1) != batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


torch.manual_seed(0)
x, teacher = torch.randn(2048, 20), torch.randn(20, 4)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x @ teacher).argmax(dim=1)), batch_size=16)
options: Any = {"max_epochs": 6, "accumulate_grad_batches": 2, "callbacks": [EarlyStopping("error")], "logger": False}
options |= {"accelerator": "cpu", "devices": 2, "precision": "bf16-mixed", "enable_checkpointing": False}
trainer = Trainer(strategy=GossipStrategy({"overlap": True}), **options)
trainer.fit(Classifier(), loader, loader)
if trainer.is_global_zero:
    print(f"averaged model: accuracy {1 - trainer.callback_metrics['error']:.1%} after {trainer.global_step} steps")
