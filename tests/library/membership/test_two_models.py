"""Two models that train together, such as those of a GAN, are one module in one wrapper, with one membership."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gossip_modules import GossipDataParallel
from gossip_modules.membership.view import Change
from gossip_modules.testing import Chaos, Join, Kill, Worker

AFTER = 5  # steps of the last generation


class Gan(nn.Module):
    """Its forward is that of both, once in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.critic, self.generator = nn.Linear(4, 1), nn.Linear(3, 4)

    def forward(self, noise: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        fake = self.generator(noise)
        return fake, self.critic(fake.detach()).mean() - self.critic(real).mean()


def train(worker: Worker) -> tuple[list[bool], list[Tensor]]:
    membership = worker.membership(min_workers=3, timeout=60.0, min_deadline=20.0)
    torch.manual_seed(worker.rank)
    gan = Gan()
    model = GossipDataParallel(gan, membership=membership)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01, momentum=0.9) for part in (gan.critic, gan.generator)]
    membership.track(critic=optimizers[0], generator=optimizers[1])
    ends: list[int] = []

    def note(change: Change) -> None:
        if 3 in change.members and len(change.members) == 3:  # the fourth worker has come, one of the others has gone
            ends.append(change.step + AFTER)

    membership.on_change(note)
    membership.join()
    had_momentum = [bool(optimizer.state) for optimizer in optimizers]
    for step in membership.steps(1 << 30):
        if ends and step >= ends[0]:
            break
        fake, loss = model(torch.randn(8, 3), torch.randn(8, 4) + 3.0)
        optimizers[0].zero_grad()
        loss.backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        (-gan.critic(fake).mean()).backward()
        optimizers[1].step()
    with model.averaged():
        mean = [x.detach().clone() for x in gan.parameters()]
    model.close()
    return had_momentum, mean


def test_a_gan_goes_on_when_workers_come_and_die() -> None:
    results = Chaos([Join(step=5), Kill(step=20, rank=0)]).run(train, 3)
    assert [had_momentum for had_momentum, _ in results.values()] == [[False, False], [False, False], [True, True]]
    means = [mean for _, mean in results.values()]
    for x, *others in zip(*means, strict=True):
        assert all(torch.equal(x, other) for other in others), "all are in one generation, which has one mean"
