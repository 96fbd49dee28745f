"""The global random generators of torch, which dropout draws from; all else draws from generators of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def rng_state(device: torch.device) -> dict[str, Any]:
    """The states of the generators of the CPU and, if `device` is one, of the GPU: tensors."""
    state = {"cpu": torch.get_rng_state()}
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
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
