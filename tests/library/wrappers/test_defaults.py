"""What wrappers use where nobody names a graph."""

from __future__ import annotations

import re
import warnings
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from gossip_modules import DiLoCo, GossipDataParallel, QGDSGDm
from tests.harness.ranks import run_ranks


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"push_sum": False}, True),
        ({"rule": QGDSGDm()}, True),
        ({"push_sum": False, "graph": "ring"}, False),
        ({"push_sum": True}, False),
        ({"outer": DiLoCo(5)}, False),
    ],
)
def test_a_checkpoint_from_when_nine_ranks_had_a_ring_says_how_to_go_on_with_it(
    options: dict[str, Any], warns: bool
) -> None:
    def body(group: dist.ProcessGroup, is_older: bool) -> None:
        wrapper = GossipDataParallel(nn.Linear(2, 1), process_group=group, **options)
        state = wrapper.get_extra_state()
        wrapper.set_extra_state({name: value for name, value in state.items() if not (is_older and name == "graph")})
        wrapper.close()

    run_ranks(9, partial(body, is_older=False))  # a warning would be an error
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(9, partial(body, is_older=True))
    said = [str(warning.message) for warning in caught if "older version" in str(warning.message)]
    assert len(said) == 9 * warns
    for message in said:
        assert re.search(
            r'ranks mixed on a ring .* now it is DynamicBipartiteCompleteGraph.* to go on with the ring: graph="ring"$',
            message,
        )
