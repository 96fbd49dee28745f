"""How a worker ends: it is lost, it leaves, or it is closed."""

from __future__ import annotations

import gc
import weakref

import torch
import torch.distributed as dist

from gossip_modules import GossipDataParallel
from tests.harness.ranks import assert_no_gossip_threads
from tests.library.membership.test_membership import _no_thread_stays, member_of, model_of

__all__ = ["_no_thread_stays"]


def test_a_wrapper_that_is_lost_without_close_leaves_no_thread() -> None:
    """A cell of a notebook that is run again: the job would seem to live, and its next worker wait for a donor."""
    store = dist.HashStore()
    for _ in range(2):  # the second one comes to the door of a job whose worker has ended, and begins it anew
        member = member_of(store, min_workers=1)
        wrapper = GossipDataParallel(model_of(), membership=member)
        for _step in member.steps(2):
            wrapper(torch.ones(4, 4)).sum().backward()
        reference = weakref.ref(member)
        del member, wrapper
        gc.collect()
        assert reference() is None
        assert_no_gossip_threads()
