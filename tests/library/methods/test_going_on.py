"""A run that goes on from a checkpoint or from a copy has the bits of the run itself, for all methods."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gossip_modules as gm
from gossip_modules import GossipDataParallel
from gossip_modules.compression import ChunkTopK, TwoBit
from tests.harness.problems import loss_of, net, train_step
from tests.harness.ranks import run_ranks
from tests.harness.reference import flatten
from tests.library.methods.combinations import ROWS
from tests.library.wrappers.wrapping import irregular

Arguments = Mapping[str, Any]
FRAGMENTS = [["first"], [name for name, _ in net().named_children() if name != "first"]]


def coded() -> gm.QSGD:
    """A code of 4 bits without a bias."""
    return gm.QSGD(4, bucket_size=8, unbiased=True)


def over(outer: Any, inner: Any) -> Arguments:
    """An algorithm over another one."""
    return {"push_sum": False, "algorithm": outer.over(inner)}


OTHERS: Mapping[str, Callable[[], Arguments]] = {
    "sgp, directed": lambda: {"graph": irregular()},
    "sgp, schedule": lambda: {"graph": irregular(), "schedule": gm.Schedule(gossip_every=2, average_every=3)},
    "osgp, directed": lambda: {"graph": irregular(), "overlap": True},
    "choco, TopK": lambda: {"push_sum": False, "algorithm": gm.Choco(gm.TopK(0.3), step_size=0.3)},
    "deepsqueeze, SignNorm": lambda: {"push_sum": False, "algorithm": gm.DeepSqueeze(gm.SignNorm(8), step_size=0.1)},
    "choco, overlap": lambda: {"push_sum": False, "algorithm": gm.Choco(gm.TopK(0.3), step_size=0.3), "overlap": True},
    "deepsqueeze, overlap": lambda: {
        "push_sum": False,
        "algorithm": gm.DeepSqueeze(gm.SignNorm(8), step_size=0.1),
        "overlap": True,
    },
    "powergossip, overlap": lambda: {"push_sum": False, "algorithm": gm.PowerGossip(), "overlap": True},
    "powergossip, rank 2": lambda: {
        "push_sum": False,
        "algorithm": gm.PowerGossip(rank=2, num_iterations=2, compress_vectors=True, check_every=1),
    },
    "diloco, Adam": lambda: {"algorithm": gm.DiLoCo(3, optimizer=lambda x: torch.optim.Adam(x, lr=0.05))},
    "diloco, compressed": lambda: {"algorithm": gm.DiLoCo(3, compressor=coded())},
    "streamingdiloco, delay 2": lambda: {"algorithm": gm.StreamingDiLoCo(4, fragments=2, delay=2)},
    "streamingdiloco, compressed": lambda: {
        "algorithm": gm.StreamingDiLoCo(4, fragments=2, delay=2, compressor=coded(), error_decay=0.9)
    },
    "eagerdiloco, fragments": lambda: {"algorithm": gm.EagerDiLoCo(3, fragments=FRAGMENTS)},
    "eagerdiloco, compressed": lambda: {"algorithm": gm.EagerDiLoCo(3, fragments=FRAGMENTS, compressor=coded())},
    "sparseloco, codes": lambda: {"algorithm": gm.SparseLoCo(3, compressor=ChunkTopK(3, 16, values=TwoBit(8)))},
    "sparseloco, delay 1": lambda: {
        "algorithm": gm.SparseLoCo(3, compressor=gm.RandomK(0.1), fragments=2, delay=1),
    },
    "gasloc, delay 1": lambda: {"algorithm": gm.GASLoC(3, fragments=2, delay=1)},
    "slowmo, gossip": lambda: {"algorithm": gm.SlowMo(4, gossip_every=2)},
    "slowmo, the rate of the optimizer": lambda: {"algorithm": gm.SlowMo(3, inner_lr="optimizer")},
    "slowmo over d2": lambda: over(gm.SlowMo(4, gossip_every=1), gm.D2()),
    "gasloc over choco": lambda: over(gm.GASLoC(3, momentum=0, fragments=2), gm.Choco(gm.SignNorm(), step_size=0.4)),
    "slowmo over powergossip": lambda: over(gm.SlowMo(4, gossip_every=1), gm.PowerGossip()),
}
"""Methods with other settings than those of the table of combinations."""

CASES: Mapping[str, Callable[[], Arguments]] = {**{k: v for k, v in ROWS.items() if k != "control"}, **OTHERS}
ONE_RATE = ("qgdsgdm", "decentlam")
"""The methods that need one learning rate for all parameters."""
PLACES, LAST = (0, 3, 6), 10
"""The steps before which a checkpoint is made, and the number of steps."""


class Training:
    """A rank that trains `net` by a method, with two groups of parameters whose learning rates fall in each step."""

    def __init__(self, group: dist.ProcessGroup, case: str, seed: int) -> None:
        self.rank, self.step, self.case = group.rank(), 0, case
        self.wrapper = GossipDataParallel(net(seed), process_group=group, **CASES[case]())
        self.start(self.wrapper.module)

    def start(self, module: Any) -> None:
        """Begin with the optimizer of a module."""
        second = 0.01 if self.case in ONE_RATE else 0.02
        groups: list[dict[str, Any]] = [{"params": [*module.first.parameters(), *module.norm.parameters()]}]
        groups.append({"params": [*module.second.parameters()], "lr": second})
        self.optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.9)

    @property
    def parts(self) -> Mapping[str, Any]:
        return {"model": self.wrapper, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def train(self, last: int) -> Tensor:
        """Train up to a step; returns the parameters and buffers."""
        for self.step in range(self.step, last):  # noqa: B020 (the attribute is the count)
            train_step(self.wrapper, self.optimizer, self.rank, self.step)
            self.scheduler.step()
        self.step = last
        return torch.cat([x.double().flatten() for x in (flatten(self.wrapper.module), *self.wrapper.module.buffers())])

    def checkpoint(self) -> bytes:
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in self.parts.items()}, file)
        return file.getvalue()

    def load(self, file: bytes, step: int) -> None:
        saved = torch.load(io.BytesIO(file), weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
        if step:  # else `Over` has no inner memory yet
            assert gossip_state(self.wrapper.state_dict()) == gossip_state(saved["model"]), "nothing is lost by then"
        self.step = step

    def copied(self) -> Training:
        twin = copy.copy(self)
        twin.wrapper = copy.deepcopy(self.wrapper)
        twin.start(twin.wrapper.module)
        for name in ("optimizer", "scheduler"):
            twin.parts[name].load_state_dict(copy.deepcopy(self.parts[name].state_dict()))
        return twin


def gossip_state(state: Any) -> str:
    """The state of gossip in a state dict."""
    return str(state._metadata[""])


@pytest.mark.parametrize("case", CASES)
def test_checkpoints_and_copies_go_on_to_the_bit(case: str) -> None:
    """A checkpoint changes no bit, also before the first round. Its wrapper has trained another model before it."""

    def body(group: dist.ProcessGroup) -> None:
        run, files = Training(group, case, seed=0), {}
        for place in PLACES:
            run.train(place)
            files[place] = run.checkpoint()
        expected = run.train(LAST)
        run.wrapper.flush()  # all share one group, which has one collective at a time
        before = gossip_state(run.wrapper.state_dict())
        run.wrapper.close()
        assert gossip_state(run.wrapper.state_dict()) == before
        for place, file in files.items():
            resumed = Training(group, case, seed=5)
            loss_of(resumed.wrapper, run.rank, 0)
            resumed.load(file, place)
            again = Training(group, case, seed=6)
            again.load(resumed.checkpoint(), place)  # before it has trained
            resumed.wrapper.close()
            assert torch.equal(again.train(LAST), expected), place
            again.wrapper.close()

    run_ranks(3, body)


@pytest.mark.parametrize("case", CASES)
def test_a_copy_and_its_original_go_on_alone(case: str) -> None:
    """So do a wrapper and another one that has loaded its state without a file."""

    def body(group: dist.ProcessGroup) -> None:
        run, loaded = (Training(group, case, seed) for seed in (0, 5))
        run.train(PLACES[-1])
        run.wrapper.flush()  # as a copy does
        twin = run.copied()
        for name, part in loaded.parts.items():
            state = run.parts[name].state_dict()
            part.load_state_dict(state if name == "model" else copy.deepcopy(state))
        loaded.step = run.step
        expected = run.train(LAST)
        run.wrapper.flush()
        for each in (twin, loaded):
            assert torch.equal(each.train(LAST), expected)
            each.wrapper.flush()
        for each in (run, twin, loaded):
            each.wrapper.close()

    run_ranks(3, body)
