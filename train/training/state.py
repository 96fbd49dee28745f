"""TrainingState: everything that a run needs in order to go on as if it had never stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from gossip_modules.methods import Wrapper
from train.training.meters import Meters
from train.training.rng import rng_state, set_rng_state


@dataclass
class TrainingState:
    """The parts of a run that change from step to step; the images are a function of `step`."""

    wrapper: Wrapper
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    meters: Meters
    device: torch.device
    step: int = 0
    """Optimizer steps that this rank has taken."""

    KEYS: ClassVar[tuple[str, ...]] = ("step", "wrapper", "optimizer", "scaler", "meters", "rng")

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values, by KEYS."""
        return {
            "step": self.step,
            "wrapper": self.wrapper.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "meters": self.meters.state_dict(bytes_sent=self.wrapper.comm_stats()["bytes_sent"]),
            "rng": rng_state(self.device),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, with the options of this run: torch would take momentum and decay from the state."""
        self.step = state["step"]
        self.wrapper.load_state_dict(state["wrapper"])
        self.load_optimizer(state)
        self.meters.load_state_dict(state["meters"])
        set_rng_state(state["rng"], self.device)

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """The part of `load_state_dict` that is the optimizer's."""
        options = [
            {name: value for name, value in group.items() if name != "params"} for group in self.optimizer.param_groups
        ]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, option in zip(self.optimizer.param_groups, options, strict=True):
            group.update(option)
        self.scaler.load_state_dict(state["scaler"])
