"""How a worker ends: it is lost, it leaves, or it is closed."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist

from gossip_modules import GossipDataParallel
from gossip_modules.membership import donor, limits
from gossip_modules.membership.donor import Donor
from gossip_modules.membership.joining import Joining
from tests.harness.ranks import assert_no_gossip_threads
from tests.library.membership.stores import serve
from tests.library.membership.test_membership import SECONDS, Job, close, member_of, model_of


def test_a_wrapper_that_is_lost_without_close_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell of a notebook that is run again: the job would seem to live, and its next worker wait for a donor."""
    monkeypatch.setattr(limits, "ENDED", 0.1)
    store = dist.HashStore()
    for _ in range(2):  # the second one comes to the door of a job whose worker has ended, and begins it anew
        member = member_of(store, min_workers=1)
        wrapper = GossipDataParallel(model_of(), membership=member)
        for _step in member.steps(2):
            wrapper(torch.ones(4, 4)).sum().backward()
        reference = weakref.ref(member)
        del member, wrapper
        deadline = time.monotonic() + SECONDS
        while reference() is not None and time.monotonic() < deadline:  # its watcher holds it during a turn
            gc.collect()
        assert reference() is None
        assert_no_gossip_threads()


def test_a_worker_that_leaves_while_founders_are_awaited_takes_no_step() -> None:
    """The wait is in the constructor of the wrapper."""
    member = member_of(dist.HashStore(), min_workers=2)
    threading.Timer(0.1, member.leave).start()
    wrapper = GossipDataParallel(model_of(), membership=member)
    assert list(member.steps(3)) == []
    with pytest.raises(ConnectionError, match=r"leave\(\) was called while this worker was joining"):
        wrapper(torch.ones(4, 4))
    wrapper.close()


@pytest.mark.parametrize("place", ["donor", "state", "generation"])
def test_a_worker_that_leaves_while_it_joins_takes_no_step(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a donor that does not come, for the rest of the state, or for its first generation."""
    job = Job(dist.HashStore(), min_workers=1)
    (worker,) = job.start(1)
    job.until_live([worker])
    member = member_of(job.store, min_workers=1)
    wrapper = GossipDataParallel(model_of(), membership=member)
    end = threading.Event()
    if place == "donor":
        monkeypatch.setattr(Donor, "take_snapshots", lambda _: None)
    elif place == "state":
        monkeypatch.setattr(donor, "send", lambda group, state, **_: end.wait(SECONDS))
    else:
        monkeypatch.setattr(Joining, "say_loaded", lambda *_: None)
    steps: list[list[int]] = []
    thread = threading.Thread(target=lambda: steps.append(list(member.steps(1 << 30))))
    thread.start()
    job.until(lambda: member.id in member.worker.roster.joiners, "it is at the door")
    if place == "state":
        job.until(lambda: member.worker.receiving is not None, "it waits for the state")
    member.leave()
    thread.join(SECONDS / 2)
    end.set()
    assert steps == [[]]
    wrapper.close()
    job.until(lambda: member.id not in worker.membership.worker.roster.joiners, "it has said so")  # type: ignore[union-attr]
    close(job.end())


@pytest.mark.parametrize("is_before", [True, False])
def test_a_wrapper_that_is_closed_in_the_loop_says_so(is_before: bool) -> None:
    """And not that there was no forward: there is one, which gossips no more."""
    member = member_of(dist.HashStore(), min_workers=1)
    wrapper = GossipDataParallel(model_of(), membership=member)

    def train() -> None:
        for step in member.steps(4):
            if step == 1 and is_before:
                wrapper.close()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of training after close()
                wrapper(torch.ones(4, 4)).sum().backward()
            if step == 1:
                wrapper.close()

    with pytest.raises(RuntimeError, match=r"got close\(\) of the wrapper or the membership in step 1, expected"):
        train()


def test_a_wrapper_may_be_closed_in_the_last_step() -> None:
    member = member_of(dist.HashStore(), min_workers=1)
    wrapper = GossipDataParallel(model_of(), membership=member)
    for step in member.steps(3):
        wrapper(torch.ones(4, 4)).sum().backward()
        if step == 2:
            wrapper.close()


def test_a_membership_that_was_closed_before_it_was_wrapped_leaves_no_thread() -> None:
    member = member_of(dist.HashStore(), min_workers=1)
    member.close()
    with pytest.raises(RuntimeError, match="the membership was closed before the job began; make another one"):
        GossipDataParallel(model_of(), membership=member)
    assert_no_gossip_threads()


_CLOSES_WHILE_IT_CONNECTS = """
import json, socket, sys, threading, time
from operator import methodcaller
import torch.distributed as dist
from torch import nn
from gossip_modules import GossipDataParallel, Membership
from gossip_modules.membership import limits
from gossip_modules.membership.view import Member

limits.CONNECT = 600.0
wrappers, listeners = [], []
for port in sys.argv[1:]:
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False)
    member = Membership(f"127.0.0.1:{port}", min_workers=1, timeout=600.0)
    wrappers.append(GossipDataParallel(nn.Linear(2, 1), membership=member))
    never = Member(1, -1, "elsewhere", 1, ("127.0.0.1", 1))
    come = methodcaller("come", never, description=member.job.description, min_workers=1)
    member.job.store.update([come, methodcaller("mark_loaded", 1, 0)])
    name = "gossip/job/2/addresses/0"
    while not store.check([f"{name}/{member.id}"]):
        time.sleep(0.01)
    text = store.get(f"{name}/{member.id}").decode()
    i = text.index("7f000001")  # after the port of this worker, which gets another host for the worker that never comes
    listeners.append(socket.create_server(("127.0.0.2", int(text[i - 4:i], 16))))
    pairs = json.loads(text.replace("7f000001", "7f000002")).items()
    store.set(f"{name}/1", json.dumps({key[:-1] + str(1 - int(key[-1])): address for key, address in pairs}))
time.sleep(0.3)
while sum(thread.name.startswith("connecting") for thread in threading.enumerate()) < len(wrappers):
    time.sleep(0.01)
wrappers[0].close()
"""


def test_a_process_ends_while_it_connects_with_a_worker_that_never_comes() -> None:
    """And is not aborted, as a thread that comes back from C++ code after the end of the interpreter would.

    Of two workers in the process one is closed, and one is lost.
    """
    servers = [serve(), serve()]
    command = [sys.executable, "-c", _CLOSES_WHILE_IT_CONNECTS, *(str(server.port) for server in servers)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert "was not formed" not in done.stderr
