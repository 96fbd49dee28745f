"""Infinities of a round in flight that come to light as a generation begins: who goes on takes the same step again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gossip_modules import GossipDataParallel, Membership
from gossip_modules.membership.roster import Roster
from gossip_modules.membership.view import Change
from tests.harness.problems import loss_of, mlp, sgd
from tests.harness.progress import engine_of, local_of, round_of, step_of, weight_of
from tests.harness.ranks import run_ranks
from tests.library.membership.test_membership import SECONDS, member_of
from tests.library.membership.test_nodes import PER_NODE, Nodes

NUM_STEPS = 8


def await_(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def wrapped(member: Membership, **options: Any) -> GossipDataParallel:
    return GossipDataParallel(mlp(), membership=member, overlap=True, **options)


def send_infinities(model: GossipDataParallel, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """A step whose round, which is in flight after it, sends them; the model has none afterwards."""
    bias = model.module.get_parameter("2.bias").detach()
    healthy = bias.clone()
    bias.fill_(float("inf"))
    loss_of(model, rank, step)
    bias.copy_(healthy)
    optimizer.zero_grad()
    optimizer.step()


def training_step(model: GossipDataParallel, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    loss = loss_of(model, rank, step)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train_into_a_generation(
    group: dist.ProcessGroup, member: Membership, first_steps: list[int], everyone: threading.Barrier, **options: Any
) -> dict[str, Any]:
    """All form their generation anew; in the step before it begins the first worker sends infinities.

    Args:
        group: of all processes; says which this one is.
        member: of this one.
        first_steps: gets the first step of the new generation, of each worker.
        everyone: where all processes meet.
        options: of the wrapper; uses_steps: whether steps are those of `Membership.steps`.
    """
    uses_steps, changes = options.pop("uses_steps"), list[Change]()
    member.on_change(changes.append)
    model = wrapped(member, **options)
    optimizer = sgd(model)
    member.join()
    steps: Iterable[int] = member.steps(NUM_STEPS) if uses_steps else iter(lambda: step_of(model), NUM_STEPS)
    seen: list[int] = []
    raised: list[int] = []
    for step in steps:
        if step == 2:
            if member.node is None or member.node.leads:
                member.worker.say(Roster.form_again, member.id, 1)
                await_(lambda: bool(member.worker.generations.due), "they form another generation")
                first_steps.append(member.worker.generations.due[0][0].start)
            everyone.wait(SECONDS)
        seen.append(step)
        try:
            if member.rank == 0 and first_steps and step == first_steps[0] - 1:
                send_infinities(model, optimizer, group.rank(), step)
            else:
                training_step(model, optimizer, group.rank(), step)
        except FloatingPointError:
            raised.append(step)
    model.flush()
    result = {
        "is_sender": member.rank == 0,
        "seen": seen,
        "raised": raised,
        "begun": [(change.generation, change.step) for change in changes],
        "counts": (round_of(model), step_of(model)),
        "clock": member.worker.generations.clock if member.node is None or member.node.leads else NUM_STEPS - 1,
        "is_turned": engine_of(model).mixer.transport is local_of(model).transport,
        "is_finite": all(bool(parameter.isfinite().all()) for parameter in model.parameters()),
    }
    model.close()
    return result


def check(results: list[dict[str, Any]], first_steps: list[int]) -> None:
    (start,) = set(first_steps)
    for result in results:
        again = [start] if result["is_sender"] else []
        assert result["raised"] == again, "the worker that has sent them gets the error, and no other one"
        assert result["seen"] == sorted([*range(NUM_STEPS), *again]), "that step comes again"
        assert [step for _, step in result["begun"]] == [0, start], "it begins once, at the step that all know"
        assert result["counts"] == results[0]["counts"]
        assert result["counts"][1] == NUM_STEPS
        assert result["clock"] == NUM_STEPS - 1
        assert result["is_turned"]
        assert result["is_finite"]


@pytest.mark.parametrize("uses_steps", [True, False])
def test_a_generation_begins_where_infinities_were_in_flight(uses_steps: bool) -> None:
    store, everyone, first_steps = dist.HashStore(), threading.Barrier(2), list[int]()

    def body(group: dist.ProcessGroup) -> dict[str, Any]:
        member = member_of(store, min_workers=2)
        return train_into_a_generation(group, member, first_steps, everyone, uses_steps=uses_steps)

    check(run_ranks(2, body), first_steps)


def test_a_generation_of_nodes_begins_where_infinities_were_in_flight() -> None:
    nodes, everyone, first_steps = Nodes(2, min_workers=2), threading.Barrier(2 * PER_NODE), list[int]()

    def body(group: dist.ProcessGroup) -> dict[str, Any]:
        inside = nodes.group_of(*divmod(group.rank(), PER_NODE))
        options = {"nprocs_per_node": PER_NODE, "process_group": inside, "uses_steps": True}
        return train_into_a_generation(group, member_of(nodes.store, min_workers=2), first_steps, everyone, **options)

    check(nodes.run(body), first_steps)


def test_a_worker_joins_where_its_donor_had_infinities_in_flight() -> None:
    """It gets the state at the next attempt, and the donor counts the step once."""
    store, may_come = dist.HashStore(), threading.Event()

    def body(group: dist.ProcessGroup) -> tuple[list[int], int, int]:
        is_founder, changes, raised = group.rank() == 0, list[Change](), list[int]()
        if not is_founder:
            may_come.wait(SECONDS)
        member = member_of(store, min_workers=1)
        member.on_change(changes.append)
        model = wrapped(member)
        optimizer = sgd(model)
        for step in member.steps(1 << 30):
            if len(changes) == 1 + is_founder and step == changes[-1].step + 3:
                break
            try:
                if is_founder and step == 2 and not raised:
                    send_infinities(model, optimizer, group.rank(), step)
                    may_come.set()
                    await_(lambda: bool(member.worker.donor.snapshots), "somebody is to get the state")
                else:
                    training_step(model, optimizer, group.rank(), step)
            except FloatingPointError:
                raised.append(step)
        clock, begun = member.worker.generations.clock, changes[-1].step
        model.close()
        return raised, clock, begun

    founder, newcomer = run_ranks(2, body)
    assert founder[0] == [3]
    assert newcomer[0] == []
    assert founder[1:] == newcomer[1:] == (founder[2] + 3, founder[2])


def freeze(model: GossipDataParallel) -> None:
    """Then the forward makes a new vector, after what is in flight."""
    model.module.get_submodule("0").requires_grad_(requires_grad=False)


def lose_weight(model: GossipDataParallel) -> None:
    """Who is alone has the weight one in the next forward."""
    local_of(model).buffer.vector.push_sum_weight.fill_(0.5)


@pytest.mark.parametrize("what", [freeze, lose_weight])
def test_a_step_is_counted_once_where_infinities_were_in_flight(what: Callable[[GossipDataParallel], None]) -> None:
    member = member_of(dist.HashStore(), min_workers=1)
    model = wrapped(member)
    optimizer = sgd(model)
    raised: list[int] = []
    weights: list[float] = []
    for step in member.steps(5):
        try:
            if step == 2:
                send_infinities(model, optimizer, 0, step)
                what(model)
            else:
                training_step(model, optimizer, 0, step)
        except FloatingPointError:
            raised.append(step)
        weights.append(weight_of(model))
    assert raised == [3]
    assert (member.worker.generations.clock, step_of(model)) == (4, 5)
    assert weights[-1] == 1.0
    model.close()
