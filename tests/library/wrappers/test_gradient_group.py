"""GradientGroup: what work that is posted in a backward must not hold."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules.transport.process_group import ProcessGroupTransport
from gossip_modules.wrappers.gradient_group import GradientGroup
from tests.harness.ranks import solo_group


@pytest.mark.skipif(not hasattr(torch._C, "_remove_obj_from_tls"), reason="older torch keeps the context elsewhere")
def test_work_of_a_backward_holds_no_python_context() -> None:
    """See [Note: context of a backward]: a thread of Gloo that frees it would need the GIL, which the reducer keeps."""
    group = solo_group()
    transport = ProcessGroupTransport(group, device=torch.device("cpu"), timeout=timedelta(seconds=10))
    gradients = GradientGroup(transport)
    has_context = []

    class Recorder:
        def allreduce(self, tensors: list[Tensor], options: Any) -> dist.Work:
            has_context.append(("posting", torch._C._is_key_in_tls("context")))
            return group.allreduce(tensors, options)

    gradients._group = Recorder()  # type: ignore[assignment]

    def average(gradient: Tensor) -> None:
        gradients.allreduce([gradient.clone()])
        has_context.append(("afterwards", torch._C._is_key_in_tls("context")))

    x = torch.ones(3, requires_grad=True)
    x.register_hook(average)
    x.sum().backward()
    assert has_context == [("posting", False), ("afterwards", True)]
    transport.close()
