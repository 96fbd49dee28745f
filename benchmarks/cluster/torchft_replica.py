"""A replica of torchft's, as each benchmark needs it; torchft is imported when one is made."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class Replica:
    """A process as a replica of torchft's, with the servers that it needs beside the lighthouse.

    Args:
        load_state_dict: takes what another replica's `state_dict` gave, where this one comes later.
        state_dict: what is trained.
        lighthouse: where the replicas meet, "host:port".
        host: of this process, as the others reach it.
        name: of the replica; torchft sorts by it.
        min_replicas: that are needed for a step.
        timeout: of each wait.
        options: of `torchft.Manager` beside these.
    """

    def __init__(
        self,
        load_state_dict: Callable[[Any], Any],
        state_dict: Callable[[], Any],
        *,
        lighthouse: str,
        host: str,
        name: str,
        min_replicas: int,
        timeout: timedelta,
        **options: Any,
    ) -> None:
        from torchft import Manager, ProcessGroupGloo

        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timeout),
            load_state_dict=load_state_dict,
            state_dict=state_dict,
            min_replica_size=min_replicas,
            init_sync=False,  # models are equal at the first step
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=self._store.port,
            lighthouse_addr=f"http://{lighthouse}",
            replica_id=name,
            hostname=host,
            timeout=timeout,
            quorum_timeout=timeout,
            connect_timeout=timeout,
            **options,
        )

    def close(self) -> None:
        """End the servers."""
        self.manager.shutdown(wait=False)
