"""Links: the arguments of a wrapper that say how its ranks reach each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..transport.connect import connect, group_or_world
from ..transport.process_group import DEFAULT_TIMEOUT, ProcessGroupTransport
from .arguments import check_process_group


@dataclass(frozen=True)
class Links:
    """How the ranks of a wrapper reach each other, as its arguments say.

    Args:
        process_group: the group that carries the messages; None = a new group over `ranks`.
        comm_device: the device of the messages, see `connect`.
        backend: the backend that the group must have; None = any.
        timeout: the limit of every wait.

    Raises:
        ValueError: an argument of another kind.
    """

    process_group: dist.ProcessGroup | None = None
    comm_device: torch.device | str | None = None
    backend: str | None = None
    timeout: timedelta = DEFAULT_TIMEOUT

    def __post_init__(self) -> None:
        check_process_group(self.process_group)

    @property
    def place(self) -> tuple[int, int]:
        """This rank, and the number of ranks.

        Raises:
            RuntimeError: torch.distributed is not initialised.
        """
        group = group_or_world(self.process_group)
        return group.rank(), group.size()

    def connect(self, module_device: torch.device, *, ranks: Sequence[int] | None = None) -> ProcessGroupTransport:
        """A transport over the group that the arguments ask for; see `connect` for what is raised."""
        return connect(
            self.process_group,
            ranks=ranks,
            module_device=module_device,
            comm_device=self.comm_device,
            backend=self.backend,
            timeout=self.timeout,
        )
