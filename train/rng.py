"""The global random generators of this process, as plain numbers and tensors that `weights_only` loading accepts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def rng_state(device: torch.device) -> dict[str, Any]:
    """The states of the global generators of torch (CPU and, if `device` is one, the GPU), numpy and Python."""
    legacy: Any = np.random.get_state()  # noqa: NPY002 - the global one is the point
    name, keys, position, has_gauss, cached_gaussian = legacy
    version, internal, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [str(name), keys.tolist(), int(position), int(has_gauss), float(cached_gaussian)],
        "python": [version, list(internal), gauss_next],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Put the generators where `rng_state` found them.

    Raises:
        ValueError: the state comes from a CPU and the run goes on a GPU.
    """
    if device.type == "cuda" and "cuda" not in state:
        raise ValueError(f"got a checkpoint of a CPU run, expected one of a run on {device}; resume it on the CPU")
    torch.set_rng_state(state["torch"])
    name, keys, position, has_gauss, cached_gaussian = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached_gaussian))  # noqa: NPY002
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
