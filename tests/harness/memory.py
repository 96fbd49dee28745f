"""Tensors in memory."""

from __future__ import annotations

import gc

import torch


def num_vectors(num_bytes: int) -> int:
    """The number of tensors in this process whose memory has this length; views of one memory count once."""
    gc.collect()
    storages = [x.untyped_storage() for x in gc.get_objects() if type(x) is torch.Tensor]
    return sum(size == num_bytes for size in {x.data_ptr(): x.nbytes() for x in storages}.values())
