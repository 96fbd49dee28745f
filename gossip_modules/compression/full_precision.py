"""Products of matrices without TF32 and without autocast."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

_tf32 = threading.Lock()
_exact_products: list[object] = []  # for each block that computes now, the setting that the process had before


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute matrix products in the dtype of their arguments: without autocast and without TF32.

    TF32 is a setting of the whole process, so products of training at the same time are also computed without it, and
    the last of several threads in here puts it back.
    """
    matmul = torch.backends.cuda.matmul
    # Since torch 2.9 the setting has a new name. A process that has used the new name must not use the old one.
    name, exact = ("fp32_precision", "ieee") if hasattr(matmul, "fp32_precision") else ("allow_tf32", False)
    with torch.autocast(device.type, enabled=False):
        if device.type != "cuda":
            yield
            return
        with _tf32:
            _exact_products.append(_exact_products[-1] if _exact_products else getattr(matmul, name))
            setattr(matmul, name, exact)
        try:
            yield
        finally:
            with _tf32:
                before = _exact_products.pop()
                if not _exact_products:
                    setattr(matmul, name, before)
