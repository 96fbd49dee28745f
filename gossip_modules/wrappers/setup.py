"""Setting up a wrapper: the ranks agree on model and options, start from one model, and connect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..flat.buffer import FlatBuffer
from ..transport.agreement import broadcast_tensors, check_agreement
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


def open_transport(
    buffer: FlatBuffer,
    description: Mapping[str, str],
    links: Links,
    *,
    init_sync: bool = True,
    ranks: Sequence[int] | None = None,
) -> ProcessGroupTransport:
    """Connect the ranks of a wrapper; collective.

    Ranks that disagree would make different groups and hang. So they compare what they are about to do over a group
    that exists, before any group is made.

    Args:
        buffer: the module's flat buffer.
        description: the options that must be equal on all ranks, by name.
        links: how the ranks reach each other.
        init_sync: whether all parameters and buffers of the module, also those outside `buffer`, start as on rank 0;
            but for those that its selection ignores.
        ranks: the global ranks of a new group, this one among them; None = all.

    Raises:
        ValueError: the ranks do not agree; on every rank, naming who differs and in what.
        RuntimeError, TimeoutError, ConnectionError: see `connect`.
    """
    device = buffer.vector.raw.device
    existing = connect(group_or_world(links.process_group), module_device=device, timeout=links.timeout)
    try:
        others = buffer.selection.others(buffer.module, buffer.tensors) if init_sync else {}
        shapes = [f"{name} {tuple(x.shape)} {x.dtype}" for name, x in others.items()]
        check_agreement(existing, {**description, "model": buffer.signature(), "beside what travels": shapes})
        if init_sync:
            broadcast_tensors(existing, [buffer.vector.raw, *others.values()])
    finally:
        existing.close()
    return links.connect(device, ranks=ranks)
