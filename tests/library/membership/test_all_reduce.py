"""All-reduce of gradients among workers that die and come: all hold one model."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gossip_modules import AllReduceDataParallel
from gossip_modules.engine.gradients import GradientEngine
from tests.library.membership.test_membership import Job, close, member_of, model_of


def check_alike(workers: list[Any]) -> None:
    """All hold the same parameters, to the bit."""
    first, *others = ([*worker.wrapper.parameters()] for worker in workers)
    assert all(map(torch.equal, first * len(others), [x for other in others for x in other]))


def test_workers_die_and_come_and_hold_one_model() -> None:
    job = Job(dist.HashStore(), min_workers=3, wrap=AllReduceDataParallel)
    founders = job.start(3)
    job.until_live(founders)
    newcomer, *_ = job.start(1, seed=1)
    job.until_live([*founders, newcomer])
    assert newcomer.momentum is not None, "the state of the optimizer came from the donor"
    founders[0].is_killed.set()
    job.until_live([*founders[1:], newcomer])
    alive = job.end()
    check_alike(alive)
    stats = alive[0].wrapper.comm_stats()
    assert (stats["live"], stats["joins"], stats["deaths"]) == (3, 1, 1)
    assert stats["num_rounds"] > 0
    assert isinstance(alive[0].wrapper, AllReduceDataParallel)
    with ThreadPoolExecutor(len(alive)) as pool:  # without a warning of equal models
        list(pool.map(lambda worker: worker.wrapper.averaged_state_dict(), alive))
    close(alive)


def test_all_but_one_may_die() -> None:
    job = Job(dist.HashStore(), min_workers=3, wrap=AllReduceDataParallel)
    workers = job.start(3)
    job.until_live(workers)
    workers[1].is_killed.set()
    workers[0].is_killed.set()
    job.until_live(workers[2:])
    (last,) = job.end()
    assert last.membership is not None
    assert last.membership.world_size == 1
    close([last])


def test_a_worker_that_has_missed_an_average_takes_model_and_state_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its confirmation was lost with a worker that died in it."""
    average = GradientEngine.average
    missed: list[GradientEngine] = []

    def losing(engine: GradientEngine, parameters: Any) -> bool:
        done = average(engine, parameters)
        if done and engine.transport.rank == 1 and engine.t == 20 and not missed:
            missed.append(engine)
            engine.t -= 1
            for parameter in parameters:
                parameter.grad = None
        return done

    monkeypatch.setattr(GradientEngine, "average", losing)
    job = Job(dist.HashStore(), min_workers=3, wrap=AllReduceDataParallel)
    workers = job.start(3)
    job.until(lambda: bool(missed), "an average is missed")
    workers[2].is_killed.set()
    job.until_live(workers[:2])
    alive = job.end()
    check_alike(alive)
    assert alive[0].wrapper.comm_stats()["num_rounds"] > 20
    close(alive)


def test_one_worker_trains_as_without_a_wrapper() -> None:
    plain = model_of()
    wrapper = AllReduceDataParallel(copy.deepcopy(plain), membership=member_of(dist.HashStore(), min_workers=1))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, wrapper)]
    for step in range(3):
        for model, optimizer in zip((plain, wrapper), optimizers, strict=True):
            optimizer.zero_grad()
            for k in range(2):
                x = torch.full((4, 4), 0.1 * (step + k))
                if model is wrapper and k == 0:
                    with wrapper.no_sync():
                        model(x).pow(2).mean().backward()
                else:
                    model(x).pow(2).mean().backward()
            optimizer.step()
    for own, expected in zip(wrapper.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, expected)
    assert wrapper.comm_stats()["num_rounds"] == 3
    copied = copy.deepcopy(wrapper)
    wrapper.close()
    with pytest.warns(UserWarning, match="in a copy of a ElasticAllReduce"):
        copied(torch.ones(4, 4)).sum().backward()
    for own, expected in zip(copied.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, expected)


def test_eval_mode_averages_gradients_and_sparse_ones_are_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    module = nn.Sequential(table, nn.Linear(2, 1))
    wrapper = AllReduceDataParallel(module, membership=member_of(dist.HashStore(), min_workers=1))
    wrapper.eval()
    with pytest.raises(ValueError, match="got a sparse gradient with a membership"):
        wrapper(torch.tensor([1, 2])).sum().backward()
    table.sparse = False
    wrapper.zero_grad()
    wrapper(torch.tensor([1, 2])).sum().backward()
    assert wrapper.comm_stats()["num_rounds"] == 1
    wrapper.close()


def test_options_that_a_membership_decides_are_refused() -> None:
    member = member_of(dist.HashStore(), min_workers=1)
    with pytest.raises(ValueError, match="got timeout=3 s with a membership"):
        AllReduceDataParallel(nn.Linear(1, 1), membership=member, timeout=3)
    with pytest.raises(ValueError, match="got on_nonfinite='skip'"):
        AllReduceDataParallel(nn.Linear(1, 1), membership=member, on_nonfinite="skip")
    member.close()
