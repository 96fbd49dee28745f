"""The strategies for Lightning's Trainer and Fabric: our rounds, bf16, checkpoints of the average and of each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gossip_modules import GossipDataParallel

from . import hosts
from .hosts import (
    ACCUMULATION,
    METHODS,
    NORM,
    STEPS,
    Model,
    assert_equal,
    batches,
    ending,
    loss_of,
    own_loop,
    sgd,
    values,
)

pytestmark = [hosts.needs("lightning"), pytest.mark.e2e, pytest.mark.timeout(120)]


def fabric_loop(strategy: Any, folder: str, *, resumes: bool = False, saves: bool = False) -> tuple[Any, Any]:
    """The wrapper and the plain model after the loop that a user writes."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision="bf16-mixed")
    fabric.launch()
    plain = Model()
    model, optimizer = fabric.setup(plain, sgd(plain))
    state = {"model": model, "optimizer": optimizer, "k": 0}
    half = STEPS * ACCUMULATION // 2
    if resumes:
        fabric.load(f"{folder}/half.ckpt", state)
        assert state["k"] == half
    for k, (x, y) in list(enumerate(batches()))[state["k"] :]:
        if saves and k == half:
            fabric.save(f"{folder}/half.ckpt", {**state, "k": k})
        is_last = (k + 1) % ACCUMULATION == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            fabric.backward(loss_of(model(x).float(), y) / ACCUMULATION)
        if is_last:
            fabric.clip_gradients(model, optimizer, max_norm=NORM, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
    return strategy.wrapper_of(model), plain


def fabric_trains(rank: int, folder: str) -> None:
    from gossip_modules.integrations.lightning import GossipFabricStrategy

    for name, options in METHODS.items():
        place = f"{folder}/{name}"
        expected, average = own_loop(options)
        wrapper, plain = fabric_loop(GossipFabricStrategy(options), place)
        assert plain.dtypes == {torch.bfloat16}
        own, found = ending(wrapper)
        assert_equal(own, expected)
        assert_equal(found, average)
        expected, _ = ending(fabric_loop(GossipFabricStrategy(options), place, saves=True)[0])
        dist.barrier()
        own, _ = ending(fabric_loop(GossipFabricStrategy(options), place, resumes=True)[0])
        assert_equal(own, expected)
        saved = torch.load(f"{place}/half.ckpt", weights_only=True)["model"]
        assert sorted(saved) == sorted(name for name, _ in plain.named_parameters())


def trainer_of(folder: str, strategy: Any, *callbacks: Any, **options: Any) -> Any:
    """A Trainer as a user makes it."""
    from lightning.pytorch import Trainer

    given: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 2,
        "precision": "bf16-mixed",
        "max_epochs": 2,
        "reload_dataloaders_every_n_epochs": 1,
        "accumulate_grad_batches": ACCUMULATION,
        "gradient_clip_val": NORM,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "use_distributed_sampler": False,
    }
    return Trainer(strategy=strategy, default_root_dir=folder, callbacks=list(callbacks), **given | options)


def module_of(make: Any = Model) -> Any:
    """A LightningModule as a user writes it."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make()

        def training_step(self, batch: Any, k: int) -> Any:
            return loss_of(self.model(batch[0]).float(), batch[1])

        def validation_step(self, batch: Any, k: int) -> None:
            self.log("loss", loss_of(self.model(batch[0]).float(), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return sgd(self)

        def train_dataloader(self) -> Any:
            half = STEPS * ACCUMULATION // 2
            data: Any = batches()[half * self.current_epoch :][:half]
            return torch.utils.data.DataLoader(data, batch_size=None)

        val_dataloader = train_dataloader

    return Module()


def trainer_trains(rank: int, folder: str) -> None:
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    from gossip_modules.integrations.lightning import GossipStrategy

    class Ending(Callback):
        own: Any = None

        def on_train_end(self, trainer: Any, module: Any) -> None:
            trainer.strategy.model.settle()
            self.own = values(module)

    for name, options in METHODS.items():
        place = f"{folder}/{name}"
        expected, average = own_loop(options)
        ending_, module = Ending(), module_of()
        after = ModelCheckpoint(place, filename="{step}", save_top_k=-1, save_on_train_epoch_end=True)
        newest: dict[str, Any] = {"monitor": "step", "mode": "max", "save_on_train_epoch_end": False}
        inside = ModelCheckpoint(place, filename="validated-{step}", **newest)  # removes the one before
        callbacks = [ending_, EarlyStopping("loss", patience=3), after, inside]
        trainer = trainer_of(place, GossipStrategy(options), *callbacks, enable_checkpointing=True)
        trainer.fit(module)
        assert trainer.global_step == STEPS
        assert module.model.dtypes == {torch.bfloat16}
        if not options.get("overlap"):  # a checkpoint in between changes when one round is applied
            assert_equal(ending_.own, expected)
            assert_equal(values(module), average)
        assert_equal(module.model.evaluated, values(module))
        for saved in (f"step={STEPS}", f"validated-step={STEPS}"):
            state = torch.load(f"{place}/{saved}.ckpt", weights_only=True)["state_dict"]
            for name, parameter in module.named_parameters():
                torch.testing.assert_close(state[name], parameter, rtol=0, atol=1e-7)
            kept = torch.load(f"{place}/gossip_rank_{rank}_of_2-{saved}.ckpt", weights_only=True)["models"][0]
            assert_equal([kept["model"][name] for name, _ in module.named_parameters()], ending_.own)
        assert (
            len(list(Path(place).glob(f"gossip_rank_{rank}_of_2-*"))) == len(list(Path(place).glob("[sv]*.ckpt"))) == 3
        )
        own, resumed = Ending(), module_of()
        trainer_of(place, GossipStrategy(options), own).fit(resumed, ckpt_path=f"{place}/step={STEPS // 2}.ckpt")
        assert_equal(own.own, ending_.own)


def mistakes(rank: int, folder: str) -> None:
    from lightning.fabric import Fabric

    from gossip_modules.integrations.lightning import GossipFabricStrategy, GossipStrategy

    for make in (GossipStrategy, GossipFabricStrategy):
        with pytest.raises(
            ValueError, match=rf"got find_unused_parameters for {make.__name__}, expected .* gossip=dict"
        ):
            make(find_unused_parameters=True)
        with pytest.raises(ValueError, match=rf"got membership= in gossip= of {make.__name__}"):
            make({"membership": object()})
    trainer = trainer_of(folder, "ddp")
    with pytest.raises(RuntimeError, match=r"pass Trainer\(strategy=GossipStrategy\(gossip=dict"):
        trainer.fit(module_of(lambda: GossipDataParallel(Model())))
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    with pytest.raises(RuntimeError, match=r"pass Fabric\(strategy=GossipFabricStrategy\(gossip=dict"):
        fabric.setup(GossipDataParallel(Model()))(batches()[0][0])
    with pytest.raises(ValueError, match=r"pass Fabric\(strategy=GossipFabricStrategy\(gossip=dict"):
        GossipDataParallel(fabric.setup(Model()))


def other_worlds(rank: int, folder: str) -> None:
    from gossip_modules.integrations.lightning import GossipFabricStrategy, GossipStrategy

    trainer = trainer_of(folder, GossipStrategy({"graph": "ring"}), max_epochs=1)
    trainer.fit(module := module_of())
    average = values(module)
    trainer.validate(module, verbose=False)
    trainer.save_checkpoint(f"{folder}/end.ckpt")  # after the end there is the average only
    with pytest.warns(UserWarning, match=r"got no file .*end.ckpt.*training goes on from the one model"):
        trainer_of(folder, GossipStrategy(), max_epochs=1).fit(again := module_of(), ckpt_path=f"{folder}/end.ckpt")
    assert_equal(values(again), average)
    # A link of save_last="link" that goes takes no file of a rank with it.
    own, link = Path(f"{folder}/gossip_rank_{rank}_of_2-end.ckpt"), Path(f"{folder}/last-{rank}.ckpt")
    own.touch()
    link.symlink_to("end.ckpt")
    trainer.strategy.remove_checkpoint(str(link))
    assert own.exists()
    strategy = GossipFabricStrategy({"overlap": True})
    wrapper, plain = fabric_loop(strategy, folder, saves=True)
    dist.barrier()
    strategy.load_checkpoint(f"{folder}/half.ckpt", {"model": wrapper, "of a later version": sgd(plain)}, strict=False)
    # An EMA beside the model.
    ema = torch.optim.swa_utils.AveragedModel(plain)
    weight = ema.get_parameter("module.layers.0.weight")
    torch.nn.init.constant_(weight, rank)
    expected = values(ema)
    strategy.save_checkpoint(f"{folder}/ema.ckpt", {"model": wrapper, "ema": ema})
    dist.barrier()
    saved = torch.load(f"{folder}/ema.ckpt", weights_only=True)["ema"]["module.layers.0.weight"]
    torch.testing.assert_close(saved, torch.full_like(saved, 0.5))
    torch.nn.init.zeros_(weight)
    strategy.load_checkpoint(f"{folder}/ema.ckpt", {"model": wrapper, "ema": ema})
    assert_equal(values(ema), expected)
    wrapper.close()
    Path(f"{folder}/gossip_rank_{rank}_of_2-half.ckpt").unlink()
    with pytest.warns(UserWarning, match=r"got no file .*half.ckpt.*training goes on from the one model"):
        fabric_loop(GossipFabricStrategy({"overlap": True}), folder, resumes=True)[0].close()


def test_ranks_train_as_our_loop_resume_and_name_mistakes() -> None:
    """One start of processes does all, since the import of the host is what takes long."""
    hosts.run_bodies(trainer_trains, fabric_trains, other_worlds, mistakes, ranks=2)
