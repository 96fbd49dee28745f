"""The Trainer of Hugging Face Transformers, with gossip. pip install '.[transformers]'

    torchrun --standalone --nproc-per-node 2 examples/with_trainer.py

A language model of 30,000 parameters with random weights, so that nothing has to be downloaded, learns to count.
"""

import tempfile
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from gossip_modules.integrations.transformers import GossipTrainerMixin


class GossipTrainer(GossipTrainerMixin, Trainer):
    gossip: ClassVar[Any] = {"algorithm": "powergossip"}


torch.manual_seed(0)
rows = (torch.randint(32, (512, 1)) + torch.arange(16)) % 32
data: Any = [{"input_ids": row, "labels": row} for row in rows]
sizes: Any = {"vocab_size": 32, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
model: Any = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
given: Any = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "learning_rate": 5e-3, "bf16": True}
with tempfile.TemporaryDirectory() as folder:
    settings = TrainingArguments(folder, num_train_epochs=2, use_cpu=True, report_to="none", **given)
    trainer: Any = GossipTrainer(model, settings, train_dataset=data, eval_dataset=data[:64])
    trainer.train()
    trainer.evaluate()  # the average
    trainer.save_model(folder)  # the average
    if dist.get_rank() == 0:
        again: Any = GPT2LMHeadModel.from_pretrained(folder).eval()
        loss = again(input_ids=rows[:64], labels=rows[:64]).loss.item()
        num_rounds = trainer.model_wrapped.comm_stats()["num_rounds"]
        print(f"averaged model: loss {loss:.2f} after {trainer.state.global_step} steps and {num_rounds:.0f} rounds")
trainer.model_wrapped.close()
dist.destroy_process_group()
