"""Attributes of other libraries: they are missing, and the error says what takes their place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

import gossip_modules as gm
from gossip_modules.compat.tables import DDP_ATTRIBUTES
from tests.harness.ranks import solo_group

WRAPPERS: list[Any] = [gm.GossipDataParallel, gm.BilatGossipDataParallel, gm.GroupAverageDataParallel]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_attributes_of_ddp_are_missing_with_a_remedy(wrapper: Any) -> None:
    model = wrapper(nn.Linear(2, 1), process_group=solo_group())
    for name in DDP_ATTRIBUTES.keys() - ({"join_hook"} if isinstance(model, Joinable) else set()):
        assert not hasattr(model, name)
        with pytest.raises(AttributeError, match=rf"^'{wrapper.__name__}' object has no attribute '{name}': .+"):
            getattr(model, name)
    with pytest.raises(AttributeError, match=r"for smaller messages pass wire_dtype=torch.bfloat16 or algorithm=Power"):
        model.register_comm_hook(None, None)
    model.close()


def test_join_is_told_for_each_wrapper() -> None:
    remedies = [r"with torch.distributed.algorithms.Join\(\[model\]\)", r"then call close\(\)", r"while model.round"]
    for wrapper, remedy in zip(WRAPPERS, remedies, strict=True):
        model = wrapper(nn.Linear(2, 1), process_group=solo_group())
        with pytest.raises(AttributeError, match=remedy):
            model.join()
        if wrapper is not gm.GossipDataParallel:
            with pytest.raises(AttributeError, match=remedy):
                Join([model])
        model.close()


def test_the_table_has_attributes_of_ddp() -> None:
    """Each is one of the installed torch's, so that the table names nothing that nobody writes."""
    ddp = DistributedDataParallel(nn.Linear(2, 1), process_group=solo_group(), static_graph=True)
    assert [name for name in DDP_ATTRIBUTES if not hasattr(ddp, name)] == []


def test_attributes_of_the_module_are_named() -> None:
    model = gm.GossipDataParallel(nn.Linear(2, 1), process_group=solo_group())
    with pytest.raises(AttributeError, match=r"no attribute 'in_features': .*; write model.module.in_features$"):
        _ = model.in_features
    with pytest.raises(AttributeError, match=r"no attribute 'out_featurs'$"):
        _ = model.out_featurs
    copied = copy.deepcopy(model)  # it asks for attributes of an object that has none yet
    assert copied.module.in_features == 2
    model.close()
    with pytest.raises(AttributeError, match=r"no attribute 'module'"):
        _ = gm.GossipDataParallel.__new__(gm.GossipDataParallel).module
