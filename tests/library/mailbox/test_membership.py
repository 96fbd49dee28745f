"""Arguments of `Membership` for a mailbox, and loops over its steps that end early or repeat a step."""

from __future__ import annotations

import gc
import math
import uuid
from typing import Any

import pytest
import torch
from torch import nn

from gossip_modules import DiLoCo, GossipDataParallel, Membership
from gossip_modules.mailbox.errors import MailboxError, RoundGone
from gossip_modules.mailbox.membership import MailMembership
from tests.harness.mailbox import MailRun, MailWorker

NO_COUNTS: tuple[Any, ...] = (0, -1, 1.5, "3", True)
NO_SECONDS: tuple[Any, ...] = (0, -1.0, "30", None, True, math.nan, math.inf)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *((name, value, "a whole number of at least 1") for name in ("quorum", "save_every") for value in NO_COUNTS),
        *(("min_workers", value, "a whole number of at least 1") for value in (*NO_COUNTS, None)),
        *((name, value, "seconds above 0") for name in ("grace", "poll", "interval") for value in NO_SECONDS),
        *(("audit", value, "a share of rounds between 0 and 1") for value in (-0.1, 1.1, "1", None, True)),
    ],
)
def test_arguments_out_of_range_are_refused(name: str, value: object, expected: str) -> None:
    options: dict[str, Any] = {"min_workers": 1, name: value}
    with pytest.raises(ValueError, match=rf"got {name}={value!r}, expected {expected}"):
        Membership("memory://arguments", **options)


@pytest.mark.parametrize(
    ("key", "shown"), [("", "of 0 bytes"), (b"fifteen bytes !", "of 15 bytes"), (5, "of type int")]
)
def test_a_key_that_is_no_secret_is_refused_and_not_shown(key: Any, shown: str) -> None:
    with pytest.raises(ValueError, match=rf"got key {shown}, expected a secret text of at least 16 bytes"):
        Membership("memory://arguments", min_workers=1, key=key)


def test_a_variable_without_a_value_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job script that exports a secret which is not there must not start a run that anyone can change."""
    monkeypatch.setenv("GOSSIP_JOB_KEY", "")
    with pytest.raises(
        ValueError, match=r"got GOSSIP_JOB_KEY of 0 bytes, expected a secret .*; .* unset GOSSIP_JOB_KEY"
    ):
        Membership("memory://arguments", min_workers=1)


@pytest.mark.parametrize("store", ["s3:/bucket/run", "./run", "/shared/run", "node0"])
def test_what_looks_like_neither_address_names_both(store: str) -> None:
    with pytest.raises(ValueError, match=r"expected 'host:port'.* for a mailbox, 's3://bucket/run' or 'file:///folder"):
        Membership(store, min_workers=1)


def wrapped(membership: Membership) -> GossipDataParallel:
    return GossipDataParallel(nn.Linear(1, 1), algorithm=DiLoCo(4), membership=membership)


def num_beats(worker: MailWorker, seconds: float = 100.0) -> int:
    """The number of signs of life of this worker in so many seconds."""
    before = worker.membership.mail._count
    worker.clock.sleep(seconds)
    return worker.membership.mail._count - before


def test_signs_of_life_end_with_an_error_until_the_next_loop() -> None:
    """A script that takes long after an error, as a notebook does, would let each round of the others wait."""

    def body(worker: MailWorker) -> None:
        model = worker.wrap(nn.Linear(1, 1), algorithm=DiLoCo(4))

        def fail() -> None:
            for step in worker.membership.steps(20):
                model(torch.ones(1, 1)).sum().backward()
                if step == 2:
                    raise KeyError("a batch")

        with pytest.raises(KeyError, match="a batch"):
            fail()
        worker.clock.sleep(1.0)  # in which a thread that sleeps wakes
        assert num_beats(worker) == 0
        for step in worker.membership.steps(20):
            model(torch.ones(1, 1)).sum().backward()
            if step == 4:
                assert num_beats(worker) > 10
                break
        assert num_beats(worker) > 10  # after `break` it is a worker still

    MailRun(quorum=1).train(1, body)


def test_signs_of_life_end_with_a_wrapper_that_is_lost() -> None:
    membership = MailMembership(f"memory://{uuid.uuid4().hex}", min_workers=1, poll=0.01)
    model, mail = wrapped(membership), membership.mail
    next(membership.steps(1))
    del model, membership
    gc.collect()
    assert mail._has_stopped


def test_a_worker_that_takes_the_newest_model_may_repeat_the_step() -> None:
    def body(worker: MailWorker) -> list[int]:
        model, seen = worker.wrap(nn.Linear(1, 1), algorithm=DiLoCo(4)), []
        for step in worker.membership.steps(12):
            seen.append(step)
            model(torch.ones(1, 1)).sum().backward()
            worker.clock.sleep(1.0)
            newest = worker.membership.models.load()
            if newest is not None and newest.step == step == 5 and seen.count(5) == 1:
                worker.membership.rejoin(RoundGone("its round is gone"))
        return seen

    assert MailRun(quorum=1).train(1, body) == [[*range(6), *range(5, 12)]]


def test_a_worker_that_waits_in_vain_for_others_leaves() -> None:
    """It would else count as one of them when a script tries again."""
    address = f"memory://{uuid.uuid4().hex}"
    membership = MailMembership(address, min_workers=2, poll=0.01, timeout=0.05)
    with pytest.raises(MailboxError, match=r"1 of 2 workers came within 0.05 s: \[0\]; start the others"):
        wrapped(membership)
    assert membership.mail._has_stopped
    assert "worker/000000/left" in membership.medium.list("worker")
