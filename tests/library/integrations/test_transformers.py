"""GossipTrainerMixin: the Trainer has our rounds, tests and saves the average, and resumes each rank's own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossip_modules import GossipDataParallel

from . import hosts
from .hosts import ACCUMULATION, BATCH, METHODS, STEPS, Model, assert_equal, batches, ending, loss_of, own_loop

pytestmark = [hosts.needs("transformers", "accelerate"), pytest.mark.e2e, pytest.mark.timeout(120)]


class Classifier(Model):
    """With the signature that the Trainer expects."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        output = super().forward(x)
        return {"loss": loss_of(output.float(), labels), "logits": output}


def trainer_of(folder: str, options: Any, **arguments: Any) -> Any:
    """A Trainer over this rank's data, as a user makes it."""
    from transformers import Trainer, TrainingArguments

    from gossip_modules.integrations.transformers import GossipTrainerMixin

    class GossipTrainer(GossipTrainerMixin, Trainer):
        gossip = options

        def get_train_dataloader(self) -> Any:  # of this rank's own data, in order
            return self.get_eval_dataloader()

        def get_eval_dataloader(self, dataset: Any = None) -> Any:
            rows = [{"x": x, "labels": y} for xs, ys in batches() for x, y in zip(xs, ys, strict=True)]
            return torch.utils.data.DataLoader(rows, batch_size=BATCH)  # type: ignore[arg-type]

    given: dict[str, Any] = {
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "num_train_epochs": 1,
        "bf16": True,
        "use_cpu": True,
        "max_grad_norm": hosts.NORM,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "average_tokens_across_devices": False,
        "dataloader_pin_memory": False,
    }
    model = Classifier()
    optimizer = hosts.sgd(model)
    settings = TrainingArguments(folder, **given | arguments)
    data: dict[str, Any] = {"train_dataset": [0] * STEPS * ACCUMULATION * BATCH, "eval_dataset": [0]}
    return GossipTrainer(model, settings, optimizers=(optimizer, None), **data)


def train(rank: int, folder: str) -> None:
    from safetensors.torch import load_file

    for name, options in METHODS.items():
        expected, average = own_loop(options)
        trainer = trainer_of(f"{folder}/{name}", options, save_strategy="steps", save_steps=STEPS // 2)
        trainer.train()
        wrapper = trainer.model_wrapped
        assert isinstance(wrapper, GossipDataParallel)
        assert trainer.model.dtypes == {torch.bfloat16}
        if name == "SGP":
            assert wrapper.comm_stats()["num_rounds"] == STEPS
        trainer.save_model(f"{folder}/{name}/model")
        trainer.evaluate()
        own, found = ending(wrapper)
        assert_equal(trainer.model.evaluated, found)
        if not options.get("overlap"):  # a checkpoint in between changes when one round is applied
            assert_equal(own, expected)
            assert_equal(found, average)
        dist.barrier()
        saved = load_file(f"{folder}/{name}/model/model.safetensors")
        assert_equal([saved[key] for key, _ in trainer.model.named_parameters()], found)
        resumed = trainer_of(f"{folder}/{name}/more", options)
        resumed.train(resume_from_checkpoint=f"{folder}/{name}/checkpoint-{STEPS // 2}")
        assert_equal(ending(resumed.model_wrapped)[0], own)


def best_and_mistakes(rank: int, folder: str) -> None:
    from transformers import Trainer, TrainingArguments

    from gossip_modules.integrations.transformers import GossipTrainerMixin

    # The best model is a checkpoint of the average, and what overlaps is not added to it.
    strategy = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    trainer = trainer_of(folder, {"overlap": True}, load_best_model_at_end=True, **strategy)
    trainer.train()
    own, average = ending(trainer.model_wrapped)
    torch.testing.assert_close(own, average, rtol=0, atol=1e-7)
    # The checkpoint of another number of ranks.
    again = trainer_of(f"{folder}/again", {})
    (Path(folder) / "checkpoint-4" / f"gossip_rank_{rank}_of_2.pt").unlink()
    with pytest.warns(UserWarning, match="got no file .*checkpoint-4.*training goes on from the one model"):
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
    again.model_wrapped.close()
    with pytest.raises(TypeError, match=r"class Late\(GossipTrainerMixin, Trainer\)"):

        class Late(Trainer, GossipTrainerMixin): ...

    given: dict[str, Any] = {"use_cpu": True, "report_to": "none", "max_steps": 1, "remove_unused_columns": False}
    settings = TrainingArguments(f"{folder}/plain", **given)
    data = [{"x": x, "labels": y} for xs, ys in batches() for x, y in zip(xs, ys, strict=True)]
    plain = Trainer(GossipDataParallel(Classifier()), settings, train_dataset=data)
    with pytest.raises(RuntimeError, match=r"Trainer of Transformers .* write class GossipTrainer\(GossipTrainerMixin"):
        plain.train()


def callbacks_resume(rank: int, folder: str) -> None:
    """The callbacks with a state; the models of ranks differ, and each comes back."""
    from transformers import EarlyStoppingCallback, TrainerCallback, trainer_callback

    kinds = {kind for kind in vars(trainer_callback).values() if isinstance(kind, type)}
    stateful = {kind for kind in kinds if issubclass(kind, TrainerCallback) and hasattr(kind, "state")}
    assert stateful == {EarlyStoppingCallback}

    class Seen(TrainerCallback):
        begin: Any = None
        saved: Any = None

        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.begin = hosts.values(given["model"]) if self.begin is None else self.begin

        def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.saved = hosts.values(given["model"]) if self.saved is None else self.saved

    def run(place: str, **more: Any) -> tuple[Any, Any]:
        strategy: dict[str, Any] = {
            "eval_strategy": "steps",
            "eval_steps": 1,
            "save_strategy": "steps",
            "save_steps": 2,
        }
        options = {"metric_for_best_model": "loss", "restore_callback_states_from_checkpoint": True, **strategy}
        trainer, seen, stopping = trainer_of(place, {"schedule": 3}, **options), Seen(), EarlyStoppingCallback(9)
        for callback in (seen, stopping):
            trainer.add_callback(callback)
        trainer.train(**more)
        trainer.model_wrapped.close()
        return seen, stopping.state()

    first, state = run(folder)
    for x in first.saved:
        both = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(both, x)
        assert not torch.equal(*both)
    dist.barrier()
    again, found = run(f"{folder}/again", resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}")
    assert_equal(again.begin, first.saved)
    assert found == state


def test_ranks_train_as_our_loop_resume_and_name_mistakes() -> None:
    """One start of processes does all, since the import of the host is what takes long."""
    hosts.run_bodies(train, best_and_mistakes, callbacks_resume, ranks=2)
