"""GossipStrategy for the Trainer of Lightning and GossipFabricStrategy for Fabric, in place of their DDPStrategy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..wrappers.base import GossipWrapper
from .host import Gossip, OwnFile, check_gossip, load_models, missing, own_models, plain_part, rank_name, wrap
from .model_copies import ModelCopies

try:
    from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
    from lightning.pytorch import LightningDataModule, LightningModule
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ModuleNotFoundError as error:
    raise missing("lightning", error) from error


class _RankFiles:
    """The file of each rank, gossip_rank_<i>_of_<n>-<name of the checkpoint>.

    See [Note: A file for each rank] of `host.py`.
    """

    checkpoint_io: Any
    _ddp_kwargs: dict[str, Any]

    def _take(self, gossip: Gossip) -> None:
        self.gossip = check_gossip(gossip, host=type(self).__name__)
        if self._ddp_kwargs:
            raise ValueError(
                f"got {', '.join(self._ddp_kwargs)} for {type(self).__name__}, expected arguments of the strategy "
                "alone; the arguments of the wrapper are gossip=dict(...)"
            )

    def _wrap(self, model: nn.Module) -> GossipWrapper:
        return wrap(model, self.gossip, host=type(self).__name__)

    def _path(self, path: Any) -> str:
        """The file beside a checkpoint, or beside the checkpoint that a link names: save_last="link"."""
        return self._beside(os.path.realpath(path) if os.path.islink(path) else path)

    def _beside(self, path: Any) -> str:
        folder, name = os.path.split(str(path))
        return os.path.join(folder, f"{rank_name()}-{name}")

    def _write(self, path: Any, content: dict[str, Any]) -> None:
        self.checkpoint_io.save_checkpoint(content, self._path(path))

    def _read(self, path: Any) -> OwnFile:
        """The file that `_write` wrote."""
        own = self._path(path)
        return OwnFile(lambda: self.checkpoint_io.load_checkpoint(own, weights_only=True), where=own)


# [Note: Resuming before the wrapper] Lightning restores the module and the callbacks, in any order that these like,
# before the strategy wraps the module. All of them get the checkpoint of their rank: the entries in the file of the
# rank take the places of the entries in the common file. So what the module has when it is wrapped is this rank's own
# model. A wrapper starts all ranks from the model of rank 0; `_setup_model` gives the module its own values back.


class GossipStrategy(_RankFiles, DDPStrategy):
    """The strategy of a Lightning Trainer for gossip.

    Rounds are optimizer steps, also with accumulation. Validation during `fit()` is of the average over all ranks, and
    so is the model in each checkpoint, under the names of the module; when `fit()` ends well, the module has it, too.
    Beside each checkpoint is one file for each rank, with which `fit(ckpt_path=...)` gives each rank its own model,
    optimizers, schedulers and states of callbacks back. A model that a callback puts into a checkpoint, such as an EMA,
    is the average over all ranks there, and of each rank in its own file.

    Args:
        gossip: the arguments of `GossipDataParallel` as a dict, or a function that wraps a module; see
            `gossip_modules.integrations.host.Gossip`.
        kwargs: the arguments of Lightning's DDPStrategy, without the ones for DistributedDataParallel.

    Raises:
        ValueError: arguments of DistributedDataParallel, or a membership.

    Example:
        >>> strategy = GossipStrategy(gossip=dict(algorithm="diloco"))
        >>> trainer = Trainer(strategy=strategy, devices=4, precision="bf16-mixed")
        >>> trainer.fit(model, loader)
    """

    def __init__(self, gossip: Gossip = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._take(gossip)
        self._average = contextlib.ExitStack()  # has averaged() of the model during validation
        self._is_validating = False
        self._own: dict[str, Any] = {}  # the state dict that a checkpoint in the making has
        self._found: OwnFile | None = None  # the file of this rank, until the model has its wrapper

    def _setup_model(self, model: nn.Module) -> GossipWrapper:  # type: ignore[override]
        """See [Note: Resuming before the wrapper]."""
        own = dict(model.state_dict())
        if self._found is not None:
            own = {name: x.clone() if isinstance(x, Tensor) else x for name, x in own.items()}
        wrapper = self._wrap(model)
        if found := self._found:
            self._found = None
            if content := found.compared([wrapper]):
                load_models([wrapper], [{"model": own, "gossip": content["models"][0]["gossip"]}])
        return wrapper

    def _register_ddp_hooks(self) -> None:
        """There is no reducer."""

    # The average during validation.

    def on_validation_start(self) -> None:
        """The module is the average from now on; collective."""
        super().on_validation_start()
        self._is_validating = True
        self._enter_average()

    def _enter_average(self) -> None:
        if isinstance(self.model, GossipWrapper):
            self._average.enter_context(self.model.averaged())

    def on_validation_end(self) -> None:
        """The module is this rank's own again."""
        self._is_validating = False
        self._average.close()
        super().on_validation_end()

    def on_train_end(self) -> None:
        """The module becomes the average for good; collective."""
        super().on_train_end()
        if isinstance(self.model, GossipWrapper):
            self.model.average_()

    def teardown(self) -> None:
        """Closes the wrapper, whose module stays."""
        if isinstance(wrapper := self.model, GossipWrapper):
            self._average.close()
            wrapper.close()
            self.model = self.lightning_module
        super().teardown()

    # Checkpoints.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's own model, with which Lightning begins a checkpoint; collective.

        Callbacks and the hooks of the module see own models alone. Inside a validation the module is this rank's own
        from here until `save_checkpoint`, which writes the averages.
        """
        if isinstance(self.model, GossipWrapper):
            self._average.close()
            self.model.settle()
        self._own = super().lightning_module_state_dict()
        return self._own

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """As Lightning's, with averages of models, and one file more for each rank, unless only weights are saved.

        Collective. See [Note: Copies of the model] of `model_copies.py`.
        """
        wrapper, own, self._own = self.model, self._own, {}
        if isinstance(wrapper, GossipWrapper):
            if "optimizer_states" in checkpoint:
                self._write(filepath, {"models": own_models([wrapper]), "entries": _entries(checkpoint)})
            checkpoint = ModelCopies(wrapper).averaged(checkpoint, own, model="state_dict")
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if self._is_validating:
            self._enter_average()

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As Lightning's; the checkpoint of this rank if training goes on."""
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        module = self.lightning_module
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            self._found = self._read(checkpoint_path)
            if content := self._found.content:
                # An older file has the model of the rank beside the entries.
                checkpoint.update({"state_dict": content["models"][0]["model"], **content["entries"]})
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """As Lightning's. A tuner may call it after the wrapper was made, and then it is collective."""
        if isinstance(wrapper := self.model, GossipWrapper):
            found, self._found = self._found, None
            content = {} if found is None else found.compared([wrapper])
            wrapper.settle()
            super().load_model_state_dict(checkpoint, strict=strict)
            own = dict(wrapper.module.state_dict())
            load_models([wrapper], [{"model": own, "gossip": content["models"][0]["gossip"]}] if content else None)
        else:
            super().load_model_state_dict(checkpoint, strict=strict)

    def remove_checkpoint(self, filepath: Any) -> None:
        """As Lightning's, with the file of each rank; the checkpoint that a link names keeps its files."""
        super().remove_checkpoint(filepath)
        self.checkpoint_io.remove_checkpoint(self._beside(filepath))


_HPARAMS = frozenset(  # in a checkpoint; equal on all ranks, and of any type
    getattr(kind, f"CHECKPOINT_HYPER_PARAMS_{name}")
    for kind in (LightningModule, LightningDataModule)
    for name in ("KEY", "NAME", "TYPE")
)


def _entries(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of the checkpoint of Lightning for the file of this rank."""
    entries = {name: value for name, value in checkpoint.items() if name not in _HPARAMS}
    if isinstance(callbacks := entries.get("callbacks"), dict):
        entries["callbacks"] = plain_part(callbacks, where="callbacks of a checkpoint")
    return plain_part(entries, where="a checkpoint")


class GossipFabricStrategy(_RankFiles, FabricDDPStrategy):
    """The strategy of a Lightning Fabric for gossip.

    `fabric.setup()` wraps; `no_backward_sync()`, clipping and precision work as ever, and rounds are optimizer steps.
    `fabric.save()` writes the average under the names of the module, and beside it one file for each rank, with which
    `fabric.load(path, state)` gives each rank its own model, and whatever else in `state` has a state dict.

    Args:
        gossip: the arguments of `GossipDataParallel` as a dict, or a function that wraps a module; see
            `gossip_modules.integrations.host.Gossip`.
        kwargs: the arguments of Fabric's DDPStrategy, without the ones for DistributedDataParallel.

    Raises:
        ValueError: arguments of DistributedDataParallel, or a membership.

    Example:
        >>> strategy = GossipFabricStrategy(gossip=dict(algorithm="diloco"))
        >>> fabric = Fabric(strategy=strategy, devices=4)
        >>> model, optimizer = fabric.setup(model, optimizer)
        >>> with strategy.wrapper_of(model).averaged():
        ...     evaluate(model)
    """

    def __init__(self, gossip: Gossip = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._take(gossip)
        self._backward_sync_control: Any = _NoSync()

    def setup_module(self, module: nn.Module) -> GossipWrapper:  # type: ignore[override]
        """The wrapper around a module."""
        return self._wrap(module)

    def wrapper_of(self, module: nn.Module) -> GossipWrapper:
        """Return the wrapper in a result of `fabric.setup()`; it has `averaged()`, `comm_stats()` and `close()`.

        Args:
            module: the result of `fabric.setup()`.

        Raises:
            ValueError: the module has no wrapper.
        """
        for part in module.modules():
            if isinstance(part, GossipWrapper):
                return part
        raise ValueError(
            f"got a {type(module).__name__} without a gossip wrapper, expected a model of fabric.setup(); pass that"
        )

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The average under the names of the module; collective."""
        if isinstance(module, GossipWrapper):
            return module.averaged_state_dict(rank0_only=False)
        return super().get_module_state_dict(module)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Loads one model into all ranks, which forget those from before; collective."""
        if isinstance(module, GossipWrapper):
            module.settle()
            module.module.load_state_dict(state_dict, strict=strict)
            module.set_extra_state(None)
        else:
            super().load_module_state_dict(module, state_dict, strict=strict)

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As Fabric's, with averages of copies of a model, and one file more for each rank; collective."""
        if wrappers := _wrappers(state):
            parts = {name: part.state_dict() for name, part in _parts(state).items()}
            self._write(path, {"models": own_models(wrappers), "parts": parts})
            copies = {name: parts[name] for name, part in _parts(state).items() if isinstance(part, nn.Module)}
            for wrapper in wrappers:
                copies = ModelCopies(wrapper).averaged(copies, {})
            state = {**state, **copies}
        super().save_checkpoint(path, state, *args, **kwargs)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As Fabric's, with this rank's own models and optimizers where `state` is a dict; collective."""
        wrappers = _wrappers(state) if isinstance(state, dict) else []
        content = self._read(path).compared(wrappers) if wrappers else {}
        rest = super().load_checkpoint(path, state, *args, **kwargs)
        if content:
            load_models(wrappers, content["models"])
            for name, part in _parts(state).items():
                if name in content["parts"]:  # strict=False loads what there is
                    part.load_state_dict(content["parts"][name])
        return rest


class _NoSync:
    """Accumulation in Fabric."""

    def no_backward_sync(self, module: GossipWrapper, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """See `fabric.no_backward_sync`."""
        return module.no_sync() if enabled else contextlib.nullcontext()


def _wrappers(state: Mapping[str, Any]) -> list[GossipWrapper]:
    return [value for value in state.values() if isinstance(value, GossipWrapper)]


def _parts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Optimizers, schedulers, other modules such as an EMA, and their like."""
    return {
        name: value
        for name, value in state.items()
        if hasattr(value, "load_state_dict") and not isinstance(value, GossipWrapper)
    }
