"""Workers that share a folder or a bucket, and nothing else: no open port, no leader, no server.

    python examples/mailbox.py file:///tmp/run1

Type this line in two terminals. Or in a terminal of each of two machines, with a folder that both have mounted, or with
a bucket and its keys in the environment: `python examples/mailbox.py s3://my-bucket/run1`. Stop one worker with Ctrl-C
and start it again: the other one does not stop, and the new one goes on from the newest model of the run.
"""

import os
import sys
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gossip_modules import DiLoCo, GossipDataParallel, Membership

if len(sys.argv) != 2:
    sys.exit(__doc__)
num_steps = int(os.environ.get("STEPS", "3000"))
teacher = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))  # what is to be learnt


def batch(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs and the class that the teacher gives them."""
    x = torch.randn(size, 20, generator=generator)
    return x, (x @ teacher).argmax(dim=1)


torch.manual_seed(0)
torch.set_num_threads(1)  # the model is small
membership = Membership(sys.argv[1], min_workers=2, quorum=1, grace=5.0, interval=2.0)  # one worker may go on alone
net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
model = GossipDataParallel(net, algorithm=DiLoCo(sync_every=100), membership=membership)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
membership.track(optimizer=optimizer)  # what a worker that joins gets beside the model

first = membership.join()  # 0, or the step of the newest model of the run
print(f"worker {membership.number} trains from step {first}", flush=True)
data = torch.Generator().manual_seed(1000 + membership.number)  # workers take steps at their own pace
for step in membership.steps(num_steps):
    x, y = batch(32, data)
    loss = cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(f"step {step}: loss {loss.item():.3f}, workers {membership.members}", flush=True)
    time.sleep(0.005)

model.eval()
with torch.no_grad(), model.averaged():  # the anchor of DiLoCo, the newest average
    test_x, test_y = batch(2000, torch.Generator().manual_seed(99))
    accuracy = (model(test_x).argmax(dim=1) == test_y).float().mean().item()
print(f"worker {membership.number}: accuracy {accuracy:.1%} after {model.comm_stats()['num_rounds']:.0f} rounds")
model.close()
