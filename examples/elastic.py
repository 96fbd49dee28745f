"""Workers that die and come back while the others train on.

    python -m gossip_modules.membership.serve --host 127.0.0.1 &           # the store, once
    python examples/elastic.py

The second line starts one worker: type it in four shells, or on four machines with STORE=host:29400. Kill one with
`kill -9`, and start it again: the others do not stop, and it goes on from the step that they have come to.
"""

import logging
import os
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gossip_modules import GossipDataParallel, Membership

logging.basicConfig(level=logging.INFO, format="%(message)s")  # one line for each change
num_steps = int(os.environ.get("STEPS", "2000"))
min_workers = int(os.environ.get("WORKERS", "4"))
teacher = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))  # what is to be learnt


def batch(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs and the class that the teacher gives them."""
    x = torch.randn(size, 20, generator=torch.Generator().manual_seed(seed))
    return x, (x @ teacher).argmax(dim=1)


membership = Membership(os.environ.get("STORE", "127.0.0.1:29400"), min_workers=min_workers)
model = GossipDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4)), membership=membership)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
membership.track(optimizer=optimizer)  # what a worker that joins gets beside the model

first = membership.join()  # 0, or the step that the job has come to
print(f"worker {membership.number} trains from step {first}", flush=True)
slowest = 0.0
for step in membership.steps(num_steps):
    start = time.perf_counter()
    x, y = batch(32, seed=1000 * step + membership.rank)  # by step and rank: each batch is drawn once
    loss = cross_entropy(model(x), y)  # gossips, then computes
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    slowest = max(slowest, time.perf_counter() - start)
    time.sleep(0.01)

model.eval()
with torch.no_grad():
    test_x, test_y = batch(2000, seed=99)
    accuracy = (model(test_x).argmax(dim=1) == test_y).float().mean().item()
stats = model.comm_stats()
print(f"worker {membership.number}: accuracy {accuracy:.1%}, slowest step {slowest * 1000:.0f} ms")
print(f"{stats['deaths']:.0f} workers died and {stats['joins']:.0f} joined; generation {stats['generation']:.0f}")
model.close()
