"""PublishedModel: the model that a rank contributes to group averages, y, and the round it is of."""

from __future__ import annotations

from typing import Any

import torch

from ..engine.shared_model import SharedModel
from ..flat.vector import FlatVector


class PublishedModel:
    """y, a copy of x in host memory that training writes and the worker reads, both under the lock of `shared`.

    Methods and attributes are for threads that hold that lock; it is reentrant.

    Args:
        x: the parameters; published as those of round -1.

    Attributes:
        shared: the copy and its lock.
        t: the round in which training published it.
    """

    def __init__(self, x: FlatVector) -> None:
        self.shared = SharedModel(x)
        self.t = -1
        self._layout, self._device = x.layout, x.raw.device

    def publish(self, x: FlatVector, *, t: int) -> None:
        """y <- x, the model of round t."""
        self.shared.publish(x)
        self.t = t

    def state_dict(self) -> dict[str, Any]:
        """y and its round."""
        copy = self.shared.host_vector()
        self.shared.snapshot(copy)
        return {"published": copy.raw, "published_at": self.t}

    def check(self, state: dict[str, Any]) -> None:
        """Raise ValueError where `load_state_dict` would load the state of another model."""
        raw, num_bytes = state["published"], self._layout.num_bytes
        if raw.dtype != torch.uint8 or raw.shape != (num_bytes,):
            raise ValueError(
                f"got a published model of {raw.numel()} elements of {raw.dtype}, expected {num_bytes} bytes "
                "(torch.uint8); load the state of a wrapper around the same model"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict()` returned, after `check`."""
        self.publish(FlatVector(self._layout, state["published"].to(self._device)), t=state["published_at"])
