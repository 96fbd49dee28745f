"""Gossip under Ray Train: Ray starts workers and torch.distributed; the wrapper takes the place of prepare_model.

python job_scripts/ray_train.py --workers 4    # on this machine, or through `ray job submit` on a cluster

Pass GossipDataParallel the plain model: `ray.train.torch.prepare_model` would wrap it in a DistributedDataParallel.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer, get_device
from torch import nn

from gossip_modules import GossipDataParallel


def draw(num_points: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of a square, and whether they are inside a circle."""
    x = 2 * torch.rand(num_points, 2, generator=generator) - 1
    return x, (x.square().sum(1) < 0.6).long()


def train(config: dict[str, Any]) -> None:
    """Runs on each worker; the arguments are `train_loop_config`."""
    context, device = ray.train.get_context(), get_device()
    model = GossipDataParallel(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1 + context.get_world_rank())  # each worker has data of its own
    for _ in range(config["steps"]):
        x, y = (tensor.to(device) for tensor in draw(32, generator))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    x, y = (tensor.to(device) for tensor in draw(1000, torch.Generator().manual_seed(0)))
    with model.averaged(), torch.no_grad():  # on every worker
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    state = model.averaged_state_dict()  # on every worker; rank 0 gets it
    model.close()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if context.get_world_rank() == 0:
            torch.save(state, Path(folder, "averaged_model.pt"))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"accuracy": accuracy}, checkpoint=checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--gpu", action="store_true", help="one GPU for each worker, over NCCL")
    options = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": 300},
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        torch_config=TorchConfig(backend="nccl" if options.gpu else "gloo"),
    )
    result = trainer.fit()
    print(f"accuracy {result.metrics['accuracy']:.1%}, {result.checkpoint}")
