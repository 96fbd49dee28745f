"""The backend of a process group: which library moves its bytes, whatever name torch has for it."""

from __future__ import annotations

import torch
import torch.distributed as dist


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """What moves the group's tensors on this device: "gloo", "nccl", "mpi4py", ...

    [Note: names of NCCL] torch 2.15 has several backends over NCCL. "nccl" makes one that says it is "nccl2"; beside it
    are "nccl-lazy", "nccl4py" and, by the name "nccl-legacy" or with TORCH_DIST_USE_NCCL2=0, the one that says it is
    "nccl", which is all that older torch has. They differ in how they make connections; all carry CUDA tensors, order
    their work by streams and want a round as one batch. So they are one here: "nccl".

    Raises:
        RuntimeError: the group was made without a backend for that device.
    """
    name = group._get_backend(device).name().lower()
    return "nccl" if name.startswith("nccl") else name


def nccl_name(world: dist.ProcessGroup, device: torch.device) -> str:
    """By which name the default group, `world`, got its NCCL: `dist.new_group` makes another like it by that name only.

    What "nccl-legacy" makes says that it is "nccl", which makes something else.
    """
    by_device = dict(pair.split(":") for pair in dist.get_backend_config(world).split(","))
    return by_device[device.type]
