"""Algorithms over algorithms: checkpoints, and layers that are frozen, with what the inner algorithm keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from gossip_modules import D2, Choco, GASLoC, GossipDataParallel, PowerGossip, RingGraph, SignNorm, SlowMo
from gossip_modules.extend import (
    Algorithm,
    Average,
    FlatVector,
    Memory,
    ProcessGroupTransport,
    PushPull,
    Round,
    Vectors,
)
from gossip_modules.mixing_manager import MetropolisHastingsMixing
from gossip_modules.rounds.rounds import Rounds
from gossip_modules.rounds.vector import Vector
from tests.harness.problems import mlp
from tests.harness.ranks import CPU, TIMEOUT, run_ranks
from tests.library.rounds.memories import drivers_of

COMPOSITIONS = [
    SlowMo(4, gossip_every=1).over(D2()),
    GASLoC(3, momentum=0, fragments=2).over(Choco(SignNorm(), step_size=0.4)),
    SlowMo(4, gossip_every=1).over(PowerGossip()),
]


def test_a_new_cut_keeps_the_memory_of_the_inner_algorithm() -> None:
    def body(group: dist.ProcessGroup) -> None:
        model = mlp()
        wrapper = GossipDataParallel(model, process_group=group, push_sum=False, algorithm=COMPOSITIONS[1])
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.05 * (1 + group.rank()))

        def step() -> None:
            optimizer.zero_grad()
            wrapper(torch.full((2, 3), 0.1 + group.rank(), device="cpu")).pow(2).sum().backward()
            optimizer.step()

        for _ in range(8):
            step()
        before = [driver.memory.inner.num_rounds for driver in drivers_of(wrapper)]
        public = torch.cat([x for driver in drivers_of(wrapper) for x in driver.memory.inner.parts_of("public")])
        assert min(before) > 0
        assert public.abs().max() > 0
        next(model.parameters()).requires_grad_(False)
        wrapper.settle()
        for _ in range(4):
            step()
        with_new_cut = torch.cat([x for driver in drivers_of(wrapper) for x in driver.memory.inner.parts_of("public")])
        for driver in drivers_of(wrapper):
            assert driver.messages.memory is driver.memory
            assert driver.memory.inner.num_rounds >= min(before)
        frozen = next(model.parameters()).numel()
        assert with_new_cut.numel() == public.numel() - frozen
        wrapper.close()

    with pytest.warns(UserWarning, match="other tensors are trained than before"):
        run_ranks(2, body)


@dataclass(frozen=True)
class InnerAverage(Algorithm):
    """An inner algorithm that averages exactly, as one of a user's own may."""

    is_plain: ClassVar[bool] = False
    is_whole: ClassVar[bool] = True
    takes_push_sum: ClassVar[bool] = True

    def round(self, v: Vectors, m: Memory, k: int) -> Round:
        sent = m.scratch().set_(v.x)
        yield Average(sent)
        v.x.set_(sent)


def test_an_average_that_an_inner_round_loses_loses_the_whole_round() -> None:
    def body(group: dist.ProcessGroup) -> None:
        rounds = Rounds(D2().over(InnerAverage()), PushPull())
        rounds.bind(MetropolisHastingsMixing(RingGraph(2)), ProcessGroupTransport(group, device=CPU, timeout=TIMEOUT))
        x = FlatVector.over(torch.full((4,), float(group.rank()), device="cpu"))
        rounds.begin(x)
        (driver,) = rounds.drivers

        def lose(s: FlatVector) -> None:  # as on an elastic transport after the death of a worker
            driver.averager.has_failed = True

        driver.averager.finish = lose  # type: ignore[method-assign]
        driver.run(Vector.of(x), 0, 1)
        assert driver.has_failed
        assert torch.equal(x.segments[0], torch.full((4,), float(group.rank()), device="cpu"))
        del driver.averager.finish
        driver.run(Vector.of(x), 1, 2)
        assert not driver.has_failed
        assert torch.equal(x.segments[0], torch.full((4,), 0.5, device="cpu"))

    run_ranks(2, body)
