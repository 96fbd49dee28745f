"""GossipTrainerMixin: the Trainer of Hugging Face Transformers, with gossip in place of DDP."""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any, ClassVar

from ..wrappers.base import GossipWrapper
from .host import Gossip, load_rank, missing, read_rank, save_rank

try:
    from transformers import Trainer
except ModuleNotFoundError as error:
    raise missing("transformers", error) from error

from .accelerate import GossipAccelerator

_Base: Any = Trainer if TYPE_CHECKING else object


class GossipTrainerMixin(_Base):
    """To derive a Trainer from, before `Trainer` or a subclass of it, such as `Seq2SeqTrainer`.

    Rounds are optimizer steps, also with gradient accumulation. Mixed precision, clipping and compilation work as ever.
    `evaluate()`, `predict()` and `save_model()` are of the average over all ranks, as is the model in each checkpoint;
    they must be called on all ranks. A checkpoint has one file more for each rank, with which `resume_from_checkpoint`
    gives each rank its own model, optimizer, scheduler and scaler back. After `train()` the parameters of
    `trainer.model` are this rank's own.

    Attributes:
        gossip: the arguments of `GossipDataParallel` as a dict, or a function that wraps a module; see
            `gossip_modules.integrations.host.Gossip`.

    Raises:
        TypeError: (definition of a subclass) the mixin comes after `Trainer`.
        ValueError: (construction) see `GossipAccelerator`.

    Example:
        >>> class GossipTrainer(GossipTrainerMixin, Trainer):
        ...     gossip = dict(algorithm="diloco")
        >>> trainer = GossipTrainer(model, TrainingArguments("runs", bf16=True), train_dataset=data)
        >>> trainer.train()
        >>> trainer.save_model("averaged")
    """

    gossip: ClassVar[Gossip] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = list(cls.__mro__)
        if Trainer in order and order.index(Trainer) < order.index(GossipTrainerMixin):
            raise TypeError(
                f"got class {cls.__name__} with GossipTrainerMixin after Trainer, which would then train with DDP; "
                f"expected it before: class {cls.__name__}(GossipTrainerMixin, Trainer)"
            )

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's, with a `GossipAccelerator`."""
        super().create_accelerator_and_postprocess()
        gossip = inspect.getattr_static(self, "gossip")  # a function of a module, which is no method
        GossipAccelerator.adopt(self.accelerator, gossip)

    def _averaged(self) -> contextlib.AbstractContextManager[Any]:
        wrapper = self.model_wrapped
        return wrapper.averaged() if isinstance(wrapper, GossipWrapper) else contextlib.nullcontext()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's, with the averaged model; collective."""
        with self._averaged():
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As the Trainer's, with the averaged model; collective."""
        with self._averaged():
            super().save_model(*args, **kwargs)

    def _load_best_model(self) -> None:
        wrapper = self.model_wrapped
        if isinstance(wrapper, GossipWrapper):
            wrapper.settle()
        super()._load_best_model()
        if isinstance(wrapper, GossipWrapper):
            wrapper.set_extra_state(None)

    # The last of what a checkpoint has of a rank, and the first point at which all of it is there to be loaded.

    def _save_scaler(self, output_dir: str) -> None:
        super()._save_scaler(output_dir)
        if isinstance(self.model_wrapped, GossipWrapper):
            save_rank(output_dir, [self.model_wrapped], **self._own_parts())

    def _load_scaler(self, checkpoint: str | None) -> None:
        super()._load_scaler(checkpoint)
        if checkpoint is not None and isinstance(self.model_wrapped, GossipWrapper):
            load_rank(read_rank(checkpoint, [self.model_wrapped]), [self.model_wrapped], **self._own_parts())

    def _own_parts(self) -> dict[str, Any]:
        scalers = [] if self.accelerator.scaler is None else [self.accelerator.scaler]
        return {"optimizers": [self.optimizer], "schedulers": [self.lr_scheduler], "scalers": scalers}
