"""TokenConfig: the optimizer's options, shared by the tasks that predict tokens."""

from __future__ import annotations

from abc import ABC
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from typing_extensions import Self

from train.job.world import World
from train.run_config import RunConfig
from train.tasks.momentum_sgd import check_sgd

_CLASSES = {"adam": "Adam", "adamw": "AdamW", "gossip-adamw": "GossipAdamW", "muon": "MuonAdamW", "sgd": "SGD"}


@dataclass(frozen=True)
class TokenConfig(RunConfig, ABC):
    """A run of a task that predicts tokens, by the task's own Adam (the default), or by SGD with momentum."""

    optimizer: str = ""
    """Name of the optimizer, a key of `RATES`."""
    lr: float = 0.0
    """Learning rate at the end of the warm-up; 0: the rate in `RATES`."""
    momentum: float = 0.9
    """Momentum of sgd, less than 1."""

    RATES: ClassVar[Mapping[str, float]] = {}
    """The optimizers of the task, each with its learning rate for lr=0."""
    CHOICES: ClassVar[Mapping[str, Collection[object]]] = RunConfig.CHOICES
    NOT_NEGATIVE: ClassVar[tuple[str, ...]] = (*RunConfig.NOT_NEGATIVE, "lr")
    ZERO: ClassVar[Mapping[str, str]] = {**RunConfig.ZERO, "lr": "is the usual one of the optimizer"}
    BELOW_ONE: ClassVar[tuple[str, ...]] = (*RunConfig.BELOW_ONE, "dropout", "momentum")
    IDENTITY: ClassVar[tuple[str, ...]] = (*RunConfig.IDENTITY, "optimizer")
    SETTINGS: ClassVar[tuple[str, ...]] = (*RunConfig.SETTINGS, "lr", "momentum", "warmup_steps", "dropout")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer == "sgd":
            check_sgd(self.recipe, momentum=self.momentum, first_moment_period=self.first_moment_period)
        elif self.momentum != type(self).momentum:
            raise ValueError(
                f"got momentum={self.momentum} with optimizer={self.optimizer!r}, expected {type(self).momentum}, "
                "which has no effect there; pass --optimizer sgd, or leave --momentum out"
            )

    def check_preset(self, preset: Mapping[str, Any]) -> None:
        """See `RunConfig`; the rates of a preset are for its own optimizer."""
        rates = [name for name in ("lr", "weight_decay") if name in preset and getattr(self, name) == preset[name]]
        own = preset.get("optimizer", type(self).optimizer)
        if rates and self.optimizer != own:
            given = " and ".join(f"{name}={preset[name]}" for name in rates)
            raise ValueError(
                f"got --optimizer {self.optimizer} with a preset for {own}, expected rates that go with it in place of "
                f"{given}; pass {' and '.join('--' + name.replace('_', '-') for name in rates)}, where --lr 0 and "
                "--weight-decay -1 are the usual ones of the optimizer"
            )

    @property
    def used_choices(self) -> dict[str, Any]:
        """See `RunConfig`; the momentum with sgd only."""
        chosen = super().used_choices
        return chosen if self.optimizer == "sgd" else {n: value for n, value in chosen.items() if n != "momentum"}

    @property
    def optimizer_class(self) -> str:
        """See `RunConfig`."""
        return _CLASSES[self.optimizer]

    def resolved(self, world: World) -> Self:
        """See `RunConfig`; lr=0 becomes the rate of the optimizer."""
        return replace(self, lr=self.lr or self.RATES[self.optimizer])
