"""Each callback of Lightning with a state resumes on unequal ranks; common files have averages of its models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import hosts
from .hosts import batches, loss_of, sgd
from .test_lightning import trainer_of

pytestmark = [hosts.needs("lightning"), pytest.mark.e2e, pytest.mark.timeout(120)]
HOOKS = ("state_dict", "load_state_dict", "on_save_checkpoint", "on_load_checkpoint")
EPOCHS, SAVED = 3, 1
# Lightning goes on otherwise, also in one process: it tunes again, forgets masks, and does not unfreeze.
OTHER_TRAINING = ("BackboneFinetuning", "BaseFinetuning", "LearningRateFinder", "ModelPruning")
OTHER_STATE = ("ModelCheckpoint", "Timer")  # the score of now, and the time


def makes() -> dict[str, Callable[[str], Any]]:
    """A function that makes each callback with a state or a file, of a folder."""
    from lightning.pytorch import callbacks

    class Finetuning(callbacks.BaseFinetuning):
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.backbone)

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.backbone, optimizer)

    def save(trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep a copy of the model, and put another model in its place."""
        checkpoint["kept"] = {name: x.clone() for name, x in checkpoint["state_dict"].items()}
        checkpoint["state_dict"] = {name: 2 * x for name, x in checkpoint["state_dict"].items()}

    def load(trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        module.load_state_dict(checkpoint["kept"])

    return {
        "BackboneFinetuning": lambda folder: callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1),
        "BaseFinetuning": lambda folder: Finetuning(),
        "EarlyStopping": lambda folder: callbacks.EarlyStopping("loss", patience=9),
        "EMAWeightAveraging": lambda folder: callbacks.EMAWeightAveraging(decay=0.5),
        "LambdaCallback": lambda folder: callbacks.LambdaCallback(on_save_checkpoint=save, on_load_checkpoint=load),
        "LearningRateFinder": lambda folder: callbacks.LearningRateFinder(num_training_steps=4),
        "ModelCheckpoint": lambda folder: callbacks.ModelCheckpoint(folder, monitor="loss", filename="best"),
        "ModelPruning": lambda folder: callbacks.ModelPruning("l1_unstructured", apply_pruning=is_first, amount=0.5),
        "OnExceptionCheckpoint": lambda folder: callbacks.OnExceptionCheckpoint(folder),
        "StochasticWeightAveraging": lambda folder: callbacks.StochasticWeightAveraging(0.05, 1, device=None),
        "Timer": lambda folder: callbacks.Timer(),
        "WeightAveraging": lambda folder: callbacks.WeightAveraging(),
    }


def is_first(epoch: int) -> bool:
    return epoch == 0


def module_of(raises_at: int = -1) -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.lr = 0.1  # of the tuner
            self.backbone, self.head = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 3)

        def training_step(self, batch: Any, k: int) -> Any:
            if self.current_epoch == raises_at:
                raise ArithmeticError("on all ranks")
            return self.loss(batch)

        def validation_step(self, batch: Any, k: int) -> None:
            self.log("loss", self.loss(batch), sync_dist=True)

        def loss(self, batch: Any) -> Tensor:
            return loss_of(self.head(self.backbone(batch[0])), batch[1])

        def configure_optimizers(self) -> Any:
            return sgd(nn.ModuleList([part for part in self.children() if next(part.parameters()).requires_grad]))

        def train_dataloader(self) -> Any:
            data: Any = batches()[2 * self.current_epoch % 8 :][:2]
            return torch.utils.data.DataLoader(data, batch_size=None)

        val_dataloader = train_dataloader

    return Module()


def weights_of(module: Any) -> dict[str, Tensor]:
    """Copies of the parameters, with their masks."""
    masks = dict(module.named_buffers())
    return {
        name.replace("_orig", ""): x.detach() * masks.get(name.replace("_orig", "_mask"), 1)
        for name, x in module.named_parameters()
    }


def fit(name: str, folder: str, *, ckpt_path: str | None = None, raises_at: int = -1) -> tuple[Any, Any]:
    """The models of this rank, and the state of the callback, at the begin and at the end of each epoch."""
    from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

    from gossip_modules.integrations.lightning import GossipStrategy

    class Seen(Checkpoint):  # whose hooks come after all others, before the files
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.begin = self.now(module)
            self.ends: list[Any] = []

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            self.ends.append(self.now(module))

        def now(self, module: Any) -> Any:
            models = [part.state_dict() for part in vars(callback).values() if isinstance(part, nn.Module)]
            return weights_of(module), copy.deepcopy({"state": callback.state_dict(), "models": models})

    callback, seen, module = makes()[name](folder), Seen(), module_of(raises_at)
    after = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    newest: dict[str, Any] = {"monitor": "step", "mode": "max", "save_on_train_epoch_end": False}
    inside = ModelCheckpoint(folder, filename="inside-{epoch}", save_top_k=-1, **newest)
    options: dict[str, Any] = {"max_epochs": EPOCHS, "accumulate_grad_batches": 1, "precision": None}
    strategy = GossipStrategy({"schedule": 3})
    callbacks = [callback, seen, after, inside]
    trainer = trainer_of(folder, strategy, *callbacks, enable_checkpointing=True, num_sanity_val_steps=0, **options)
    try:
        trainer.fit(module, ckpt_path=ckpt_path)
    except ArithmeticError:
        assert raises_at >= 0
    return seen, module


def callbacks_resume(rank: int, folder: str) -> None:
    for name in makes():
        place = f"{folder}/{name}"
        first, module = fit(name, place)
        weights, state = first.ends[SAVED]
        assert_apart(weights)
        for file in (f"epoch={SAVED}", f"inside-epoch={SAVED}"):
            check_files(place, file)
        again, resumed = fit(name, place, ckpt_path=f"{place}/epoch={SAVED}.ckpt")
        assert_same(again.begin[0], weights, name)
        if name in OTHER_TRAINING:
            continue
        assert_same(again.begin[1]["models"], state["models"], name)
        if name not in OTHER_STATE:
            assert_same(again.ends[-1][1], first.ends[-1][1], name)
        assert_same(again.ends[-1][0], first.ends[-1][0], name)
        assert_same(dict(resumed.named_parameters()), dict(module.named_parameters()), name)


def an_exception_on_all_ranks(rank: int, folder: str) -> None:
    first, _ = fit("OnExceptionCheckpoint", folder, raises_at=2)
    assert_apart(first.ends[1][0])
    again, _ = fit("OnExceptionCheckpoint", folder, ckpt_path=f"{folder}/on_exception.ckpt")
    assert_same(again.begin[0], first.ends[1][0], "after an exception")


def assert_apart(weights: dict[str, Tensor]) -> None:
    """The models of ranks differ."""
    for x in weights.values():
        both = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(both, x.contiguous())
        assert not torch.equal(*both)


def assert_same(got: Any, want: Any, what: str) -> None:
    """Trees with equal numbers, bit for bit, and texts."""
    assert numbers_of(got) == numbers_of(want), what


def numbers_of(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: numbers_of(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [*map(numbers_of, tree)]
    return tree.tolist() if isinstance(tree, Tensor) else tree


def check_files(folder: str, name: str) -> None:
    """Where the files of ranks have a model, the common file has the mean of the models."""
    dist.barrier()
    common = torch.load(f"{folder}/{name}.ckpt", weights_only=True)
    files = (f"{folder}/gossip_rank_{rank}_of_2-{name}.ckpt" for rank in range(2))
    ranks = [torch.load(file, weights_only=True)["entries"] for file in files]
    for key in ("state_dict", "current_model_state", "kept", "callbacks"):
        for where, x in tensors_in(common.get(key)).items():
            own = [tensors_in(entries[key])[where] for entries in ranks]
            if len(x.shape) and x.is_floating_point():
                torch.testing.assert_close(x, (own[0] + own[1]) / 2, msg=f"{name} {where}")
                assert not torch.equal(*own)


def tensors_in(tree: Any, where: str = "") -> dict[str, Tensor]:
    if isinstance(tree, Tensor):
        return {where: tree}
    if not isinstance(tree, Mapping):
        return {}
    return {name: x for key in tree for name, x in tensors_in(tree[key], f"{where}.{key}").items()}


def all_are_here(rank: int, folder: str) -> None:
    from lightning.pytorch import callbacks

    kinds = {name: getattr(callbacks, name) for name in callbacks.__all__ if name != "Callback"}
    base = callbacks.Callback
    touching = {name for name, kind in kinds.items() if any(getattr(kind, h) is not getattr(base, h) for h in HOOKS)}
    assert touching - {*makes()} == {"SpikeDetection"}, "its load_state_dict fails before the first batch"


def test_callbacks_resume_on_unequal_ranks() -> None:
    """One start of processes does all, since the import of the host is what takes long."""
    hosts.run_bodies(all_are_here, callbacks_resume, an_exception_on_all_ranks, ranks=2)
