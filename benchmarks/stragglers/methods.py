"""The methods of the straggler benchmark, what they train, and when a rank's training is over."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossip_modules import (
    AllReduceDataParallel,
    BilatGossipDataParallel,
    GossipDataParallel,
    GroupAverageDataParallel,
    PairwiseDataParallel,
    Progress,
)

NUM_CLASSES = 10
SYNC_PERIOD = 10
"""Rounds from one global average of WAGMA to the next: its default."""


@dataclass(frozen=True)
class RankContext:
    """A rank among the others.

    Args:
        rank: this one.
        group: all of them, for what the benchmark itself says.
        progress: how many steps all have taken together.
        addresses: of all ranks in order, "tcp://host:port", where pairwise workers listen.
        wrapper_group: for what the method says; None: of the wrapper's own making.
    """

    rank: int
    group: dist.ProcessGroup
    progress: Progress
    addresses: tuple[str, ...] = ()
    wrapper_group: dist.ProcessGroup | None = None


class BenchmarkPace(ABC):
    """When a rank's training ends, and which share of the whole is done.

    All methods get the same number of optimizer steps, summed over ranks: `num_rounds` for each rank.
    """

    def __init__(self, place: RankContext, num_rounds: int) -> None:
        self.place = place
        self.num_rounds = num_rounds
        self.num_own_steps = 0
        self.share = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the rank's last step is done."""
        return self.share >= 1.0

    def gossiped(self, wrapped: nn.Module) -> None:
        """After the forward, in which ranks may have met, and before the time that the step takes."""

    @abstractmethod
    def stepped(self) -> None:
        """Count an optimizer step of this rank."""


class LockstepPace(BenchmarkPace):
    """All ranks take `num_rounds` steps, so nobody waits for a rank that has gone."""

    def stepped(self) -> None:
        """See `BenchmarkPace`."""
        self.num_own_steps += 1
        self.share = self.num_own_steps / self.num_rounds


class SharedPace(BenchmarkPace):
    """The sum over ranks counts, so fast ranks do more of the work and all end together."""

    def stepped(self) -> None:
        """See `BenchmarkPace`."""
        self.num_own_steps += 1
        self.share = self.place.progress.add(1) / (self.num_rounds * self.place.group.size())


class GlobalAveragePace(SharedPace):
    """The sum over ranks counts, and ranks part at a global average, where they are all at the same round."""

    _is_last_step = False

    @property
    def is_over(self) -> bool:
        """See `BenchmarkPace`."""
        return self._is_last_step  # which is done whenever this is asked

    def gossiped(self, wrapped: nn.Module) -> None:
        """See `BenchmarkPace`. Asked after the step instead, all would wait for the step of the slowest."""
        assert isinstance(wrapped, GroupAverageDataParallel), "only WAGMA has rounds that all ranks share"
        if wrapped.round % SYNC_PERIOD == 0:
            total = torch.tensor([self.num_own_steps])
            self.place.group.allreduce([total]).wait()
            self._is_last_step = total.item() >= self.num_rounds * self.place.group.size()


@dataclass(frozen=True)
class StragglerMethod:
    """A row of the tables: its name there, its wrapper, and its pace."""

    title: str
    wrap: Callable[[nn.Module, RankContext], nn.Module]
    pace: Callable[[RankContext, int], BenchmarkPace]


def _pairwise(model: nn.Module, place: RankContext) -> nn.Module:
    peers = {f"worker{rank}": address for rank, address in enumerate(place.addresses)}
    patience = timedelta(minutes=5)  # stragglers come late to an average
    return PairwiseDataParallel(model, name=f"worker{place.rank}", peers=peers, average_timeout=patience)


def _wrap(wrapper: Callable[..., nn.Module], **options: Any) -> Callable[[nn.Module, RankContext], nn.Module]:
    """A wrapper that needs to know its process group only."""
    return lambda model, place: wrapper(model, process_group=place.wrapper_group, **options)


STRAGGLER_METHODS: Mapping[str, StragglerMethod] = {
    "none": StragglerMethod("no communication", lambda model, place: model, SharedPace),
    "ar": StragglerMethod("AllReduce", _wrap(AllReduceDataParallel), LockstepPace),
    "sgp": StragglerMethod("SGP", _wrap(GossipDataParallel), LockstepPace),
    "osgp": StragglerMethod("OSGP", _wrap(GossipDataParallel, overlap=True), LockstepPace),
    "adpsgd": StragglerMethod("AD-PSGD", _wrap(BilatGossipDataParallel), SharedPace),
    "wagma": StragglerMethod("WAGMA", _wrap(GroupAverageDataParallel, sync_period=SYNC_PERIOD), GlobalAveragePace),
    "owagma": StragglerMethod(
        "WAGMA, overlapped",
        _wrap(GroupAverageDataParallel, sync_period=SYNC_PERIOD, overlap=True),
        GlobalAveragePace,
    ),
    "dpwa": StragglerMethod("dpwa", _pairwise, SharedPace),
}
BOUND, BASELINE = "none", "ar"


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """The same optimizer for everyone."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=1e-4)


def learning_rate(share: float, peak: float) -> float:
    """A twentieth of the training up to `peak`, then half a cosine to zero."""
    return peak * min(1.0, share / 0.05 + 0.05) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scikit-learn's handwritten digits: 898 training images, 899 test images, always the same.

    Half of them are for the test, so that a point of accuracy is nine images.

    Returns:
        Training images float32 [898, 1, 8, 8], their labels int64 [898]; test images and labels alike.
    """
    from sklearn.datasets import load_digits

    pixels, values = load_digits(return_X_y=True)
    images = (torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8) / 16 - 0.3053) / 0.3761
    labels = torch.from_numpy(values).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[: len(order) // 2], order[len(order) // 2 :]
    return images[train], labels[train], images[test], labels[test]


def trained_tensors(model: nn.Module) -> list[Tensor]:
    """Parameters and floating-point buffers: what an average of models averages."""
    return [x.detach() for x in (*model.parameters(), *model.buffers()) if x.is_floating_point()]


def read(model: nn.Module) -> Tensor:
    """A copy of the trained tensors, float32 [d]."""
    return torch.cat([x.reshape(-1) for x in trained_tensors(model)])


def write(model: nn.Module, values: Tensor) -> None:
    """The trained tensors of `model` <- values, float32 [d], that `read` gave."""
    tensors = trained_tensors(model)
    for x, part in zip(tensors, values.split([x.numel() for x in tensors]), strict=True):
        x.copy_(part.view_as(x))


@torch.no_grad()
def accuracy_percent(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of the images [B, 1, 8, 8] whose label [B] the model gives; leaves it in eval mode."""
    model.eval()
    return 100 * float((model(images).argmax(1) == labels).float().mean())
