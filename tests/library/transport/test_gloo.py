"""gloo_backend: over which interface it talks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gossip_modules.transport.gloo import gloo_backend
from tests.harness.ranks import TIMEOUT


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_the_interfaces_of_the_variable_are_taken_where_no_host_is_given(
    host: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    gloo_backend(dist.HashStore(), 0, 1, TIMEOUT).allreduce([torch.ones(1)]).wait()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nonesuch0")
    if host is None:
        with pytest.raises(RuntimeError, match="nonesuch0"):
            gloo_backend(dist.HashStore(), 0, 1, TIMEOUT)
    else:
        gloo_backend(dist.HashStore(), 0, 1, TIMEOUT, host=host).allreduce([torch.ones(1)]).wait()
