"""GossipAccelerator: Hugging Face Accelerate, whose `prepare()` wraps models for gossip in place of DDP."""

from __future__ import annotations

import os
import weakref
from typing import Any

from torch import nn

from ..wrappers.base import GossipWrapper
from .host import Gossip, check_gossip, load_rank, missing, read_rank, save_rank, wrap

try:
    from accelerate import Accelerator
except ModuleNotFoundError as error:
    raise missing("accelerate", error) from error


class GossipAccelerator(Accelerator):
    """An `Accelerator` for gossip: only this class and `gossip=` change in a script.

    `prepare()` adds autocast and compilation to the forward of a model, moves it, and wraps it; rounds are optimizer
    steps, also with `accumulate()`. Optimizers, schedulers and data are prepared as ever. In one process nothing is
    wrapped, and neither is a model without trained parameters.

    `save_state()` writes the average under the names of the plain model, and one file for each rank; `load_state()`
    gives each rank its own model, optimizers, schedulers and scaler back. `save_model()` and `get_state_dict()` give
    the average. These, like `averaged()` of a model, must be called on all ranks.

    Args:
        args: of `Accelerator`.
        gossip: the arguments of `GossipDataParallel` as a dict, or a function that wraps a module; see
            `gossip_modules.integrations.host.Gossip`.
        kwargs: of `Accelerator`.

    Raises:
        ValueError: Accelerate is to shard the model (FSDP, DeepSpeed, Megatron-LM, tensor parallelism), or XLA; or
            there is a membership.

    Example:
        >>> accelerator = GossipAccelerator(mixed_precision="bf16", gossip=dict(algorithm="diloco"))
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> with model.averaged():
        ...     evaluate(model)
        >>> accelerator.save_model(model, "averaged")
    """

    gossip: Gossip
    _models: list[nn.Module]
    _made: weakref.WeakSet[GossipWrapper]  # also those that are no longer in `_models`, after free_memory()

    def __init__(self, *args: Any, gossip: Gossip = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._take(gossip)

    @classmethod
    def adopt(cls, accelerator: Accelerator, gossip: Gossip) -> None:
        """Make an `Accelerator` that another tool has made, and that has prepared nothing, one of this class."""
        accelerator.__class__ = cls
        accelerator._take(gossip)

    def _take(self, gossip: Gossip) -> None:
        self.gossip, self._made = check_gossip(gossip, host=type(self).__name__), weakref.WeakSet()
        kind = self.distributed_type.value
        if not kind.startswith(("NO", "MULTI_")) or getattr(self, "parallelism_config", None):
            raise ValueError(
                f"got a {type(self).__name__} with distributed_type={kind} or a parallelism_config, expected whole "
                "models, one in each process (MULTI_GPU, MULTI_CPU); launch without FSDP, DeepSpeed and parallel "
                "axes, or shard with fully_shard in a loop of your own, with gossip_modules.integrations.semi_sync"
            )

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """As `Accelerator.prepare_model`, with a gossip wrapper in place of DistributedDataParallel."""
        if model in self._models and isinstance(model, GossipWrapper):
            return model
        host = type(self).__name__
        if getattr(model, "is_distributed_loading_by_transformers", False):
            raise ValueError(
                f"got a model that from_pretrained(distributed_config=...) has sharded, to prepare with {host}, "
                "expected a whole one in each process; load it without distributed_config"
            )
        if isinstance(model, GossipWrapper):
            return wrap(model, self.gossip, host=host)  # which refuses it
        prepared = super().prepare_model(model, device_placement, evaluation_mode=True)
        is_trained = any(parameter.requires_grad for parameter in model.parameters())
        if evaluation_mode or not self.use_distributed or not is_trained:
            return prepared
        wrapper = wrap(prepared, self.gossip, host=host)
        vars(wrapper)["_is_accelerate_prepared"] = True
        self._made.add(wrapper)
        self._models = [*(other for other in self._models if other is not model), wrapper]
        return wrapper

    @property
    def _wrappers(self) -> list[GossipWrapper]:
        return [model for model in self._models if isinstance(model, GossipWrapper)]

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """As `Accelerator.unwrap_model`. Its parameters are this rank's own, but inside `averaged()` of the wrapper."""
        return super().unwrap_model(model.module if isinstance(model, GossipWrapper) else model, *args, **kwargs)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The averaged model under the names of the plain one, of a model that `prepare()` has wrapped; collective."""
        plain = self.unwrap_model(model, keep_torch_compile=False)
        for wrapper in self._wrappers:
            if self.unwrap_model(wrapper, keep_torch_compile=False) is plain:
                state = wrapper.averaged_state_dict(rank0_only=False)
                first: dict[int, str] = {}  # tensors that are one in the model stay so, as safetensors expects
                for name, tensor in wrapper.module.state_dict(keep_vars=True).items():
                    state[name] = state[first.setdefault(id(tensor), name)]
                return {name.replace("_orig_mod.", ""): tensor for name, tensor in state.items()}
        return super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: str | os.PathLike[str] | None = None, *args: Any, **kwargs: Any) -> Any:
        """As `Accelerator.save_state`, with one file more for each rank; collective."""
        folder = super().save_state(output_dir, *args, **kwargs)
        if self._wrappers:  # in one process nothing is wrapped
            save_rank(folder, self._wrappers, **self._own_parts())
        return folder

    def load_state(self, input_dir: str | os.PathLike[str] | None = None, *args: Any, **kwargs: Any) -> None:
        """As `Accelerator.load_state`, with each rank's own state; collective.

        A checkpoint of another number of ranks, or of a plain `Accelerator`, gives its one model to all ranks, with a
        warning.
        """
        if not self._wrappers:
            super().load_state(input_dir, *args, **kwargs)
            return
        contents = []

        def load_into_modules(models: list[nn.Module], folder: str) -> None:
            contents.append(read_rank(folder, self._wrappers))
            for wrapper in self._wrappers:
                wrapper.settle()  # else what is in flight would be added to what is loaded
            models[:] = [self.unwrap_model(model, keep_torch_compile=False) for model in models]

        handle = self.register_load_state_pre_hook(load_into_modules)
        try:
            super().load_state(input_dir, *args, **kwargs)
        finally:
            handle.remove()
        load_rank(contents[0], self._wrappers, **self._own_parts())

    def _own_parts(self) -> dict[str, Any]:
        scalers = [] if self.scaler is None else [self.scaler]
        return {"optimizers": self._optimizers, "schedulers": self._schedulers, "scalers": scalers}

    def end_training(self) -> None:
        """As `Accelerator.end_training`; closes all wrappers that it has made."""
        for wrapper in tuple(self._made):
            wrapper.close()
        super().end_training()
