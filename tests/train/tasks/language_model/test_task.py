"""The parts of a language model run: text of every rank, models, learning rate, scores, what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gossip_modules as gm
from tests.harness.ranks import CPU
from tests.train.training.test_checkpoint import Ranks
from train.command_line import read_command_line
from train.job.errors import UsageError
from train.tasks.byte_tokenizer import PAD, SMALLEST_VOCABULARY
from train.tasks.language_model.config import LanguageModelConfig
from train.tasks.language_model.models import SIZES, GptSize, LstmSize, make_language_model
from train.tasks.language_model.optim import WarmupCosine, adamw
from train.tasks.language_model.task import LanguageModelTask
from train.tasks.parameter_groups import clip_gradients

LINES = [f"the number {i} follows {i - 1} and {'ä' * (i % 3)}\n" for i in range(120)]


def make_tasks(config: LanguageModelConfig, num_ranks: int = 1, **last: Any) -> list[Any]:
    """The task on every rank, ranks being threads, the last one with other options; or why there is none."""
    ranks = Ranks(num_ranks)

    def body(member: Any) -> LanguageModelTask:
        functions = {"gather": member.gather, "on_every_rank": member.on_every_rank}
        world: Any = SimpleNamespace(rank=member.rank, size=num_ranks, device=CPU, **functions)
        is_other = last and member.rank == num_ranks - 1
        return LanguageModelTask(replace(config, **last) if is_other else config, world)

    return ranks.run(body)


@pytest.fixture
def config(tmp_path: Path) -> LanguageModelConfig:
    (tmp_path / "train.txt").write_text("".join(LINES[:100]))
    (tmp_path / "valid.txt").write_text("".join(LINES[100:]))
    options: dict[str, Any] = {"vocabulary_size": 270, "sequence_length": 16, "batch_size": 4, "model": "lstm-tiny"}
    return LanguageModelConfig(data_dir=str(tmp_path), steps_per_epoch=0, num_validation_bytes=0, **options)


def test_ranks_share_the_training_text_and_the_validation(config: LanguageModelConfig) -> None:
    torch.manual_seed(0)
    (alone,) = make_tasks(config)
    model = alone.make_model().eval()
    tasks = make_tasks(config, 3)
    ranks = Ranks(3)

    def body(member: Any) -> dict[str, float]:
        task = tasks[member.rank]
        task.world = SimpleNamespace(rank=member.rank, size=3, gather=member.gather)
        with torch.no_grad():
            return task.evaluate_averaged(model)

    with torch.no_grad():
        own, averaged = alone.evaluate(model), alone.evaluate_averaged(model)
    shared = ranks.run(body)
    assert own == pytest.approx(averaged)
    assert shared[0] == shared[1] == shared[2]
    assert shared[0] == pytest.approx(own)
    assert own["perplexity"] == pytest.approx(math.exp(own["nll"]))
    assert alone.selection(own) == -own["bits_per_byte"]
    assert sum(task.train.num_bytes for task in tasks) == alone.train.num_bytes
    assert len({task.steps_per_epoch for task in tasks}) == 1
    assert all(task.identity == tasks[0].identity for task in tasks)
    assert tasks[0].identity["tokenizer"] == alone.identity["tokenizer"]


def test_uneven_shares_give_all_ranks_as_many_steps_and_are_the_same_again(
    config: LanguageModelConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "folders"
    for name in ("a", "b", "c"):
        (folder / name).mkdir(parents=True)
        for number in range(12):
            (folder / name / f"{number}.txt").write_text("".join(f"{name} {line}" for line in LINES[number:60]))
    even = replace(config, data_dir=str(folder), validation_share=0.2)
    uneven = replace(even, dirichlet_alpha=0.1)
    tasks, again, others = (make_tasks(config, 3) for config in (uneven, uneven, replace(uneven, seed=2)))
    assert len({task.steps_per_epoch for task in tasks}) == 1
    assert len(set(tasks[0].identity["text"][:3])) == 3
    assert tasks[0].identity == again[0].identity
    assert tasks[0].identity["text"][:3] != others[0].identity["text"][:3]
    (alike, *_) = make_tasks(even, 3)
    assert tasks[0].identity["text"][:3] != alike.identity["text"][:3]
    assert tasks[0].identity["text"][3] == alike.identity["text"][3], "of the validation text"
    assert (even.identity["dirichlet_alpha"], uneven.identity["dirichlet_alpha"]) == (0.0, 0.1)


def test_bits_per_byte_are_those_of_the_whole_text_whatever_its_tokens(config: LanguageModelConfig) -> None:
    """Of a model that says nothing every byte, as one token, costs log2(259) bits, and so does the end of the file."""
    (task,) = make_tasks(replace(config, vocabulary_size=SMALLEST_VOCABULARY))
    model = task.make_model().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        metrics = task.evaluate(model)
    num_bytes = len("".join(LINES[100:]).encode())
    assert metrics["bits_per_byte"] == pytest.approx(math.log2(SMALLEST_VOCABULARY) * (num_bytes + 1) / num_bytes)
    assert metrics["perplexity"] == pytest.approx(SMALLEST_VOCABULARY, rel=1e-4)


def test_a_model_learns_and_loss_and_correct_tokens_leave_padding_out(config: LanguageModelConfig) -> None:
    torch.manual_seed(0)
    (task,) = make_tasks(config)
    model = task.make_model()
    optimizer = adamw(model, weight_decay=0.1)
    assert type(optimizer).__name__ == config.optimizer_class
    losses = []
    stream = task.train_stream(0)
    for _ in range(8):
        (part,) = next(stream)
        (tokens,), targets = task.on_device(part)
        loss = task.loss(model(tokens), targets)
        losses.append(loss.item())
        loss.backward()
        clip_gradients(optimizer, 1.0)
        assert torch.cat([p.grad.flatten() for p in model.parameters()]).norm() <= 1.001
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]
    logits, targets = torch.randn(1, 3, 270), torch.tensor([[7, 8, PAD]])
    assert torch.allclose(task.loss(logits, targets), F.cross_entropy(logits[0, :2], targets[0, :2]))
    logits[0, 0, 7] = logits[0, 2, PAD] = 20
    assert int(task.num_correct(logits, targets)) == int(logits[0, 1].argmax() == 8) + 1


@pytest.mark.parametrize("size", [LstmSize(num_layers=2, width=16), GptSize(num_layers=1, width=16, num_heads=2)])
def test_models_see_only_earlier_tokens_and_gossip_takes_the_embeddings_once(
    size: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "own", size)
    torch.manual_seed(0)
    model = make_language_model("own", num_tokens=30, max_length=8, dropout=0.1).eval()
    first, second = (model(torch.tensor([[5, 6, last]])) for last in (7, 8))
    assert first.shape == (1, 3, 30)
    assert torch.allclose(first[:, :2], second[:, :2])
    assert not torch.allclose(first[:, 2], second[:, 2])
    tied = [p for p in model.parameters() if p.shape[0] == 30 and p.ndim == 2]
    assert len(tied) == 1
    buffer = gm.extend.FlatBuffer(model)
    assert len(buffer.tensors) == len(list(model.parameters()))
    assert buffer.vector.buffers == []
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other = make_language_model("own", num_tokens=30, max_length=8, dropout=0.0).eval()
    other.load_state_dict(state)
    assert torch.equal(other(torch.tensor([[5, 6, 8]])), second)


def test_the_learning_rate_rises_and_falls_to_a_tenth() -> None:
    rate = WarmupCosine(lr=2.0, warmup_steps=10, num_steps=110)
    assert [rate(step) for step in (0, 4, 9)] == pytest.approx([0.2, 1.0, 2.0])
    assert rate(59) == pytest.approx(0.5 * (2.0 + 0.2))
    assert rate(109) == rate(500) == pytest.approx(0.2)
    assert WarmupCosine(lr=2.0, warmup_steps=0, num_steps=1)(0) == pytest.approx(0.2)


def test_gradients_are_scaled_down_together() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for norm, expected in ((10.0, 5.0), (1.0, 1.0)):
        model.weight.grad, model.bias.grad = torch.tensor([[3.0, 0.0]]), torch.tensor([4.0])
        clip_gradients(optimizer, norm)
        assert torch.cat([model.weight.grad[0], model.bias.grad]).norm() == pytest.approx(expected, rel=1e-4)
    scaled = [float(p.grad.sum()) for p in model.parameters() if p.grad is not None]
    assert scaled == pytest.approx([0.6, 0.8], rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_dir": "nowhere"}, r"rank 0: got 'nowhere' \(no such folder\), expected text files"),
        ({"sequence_length": 4096}, r"rank 0: got \d+ tokens .* expected at least 20480: .* lower --sequence-length"),
        ({"tokenizer": "nowhere.json"}, r"rank 0: got nowhere\.json: "),
    ],
)
def test_impossible_options_are_refused_before_training(
    config: LanguageModelConfig, changes: dict[str, Any], message: str
) -> None:
    (error,) = make_tasks(replace(config, **changes))
    assert isinstance(error, UsageError)
    with pytest.raises(UsageError, match=message):
        raise error


def test_files_that_are_no_text_are_refused_on_every_rank(config: LanguageModelConfig, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes("".join(LINES).encode() + b"\xff\xfe\n")
    for error in make_tasks(config, 2):
        assert isinstance(error, UsageError)
        assert "got byte 0xff at" in str(error)


def test_ranks_with_other_text_are_named(config: LanguageModelConfig, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for valid, message in ((LINES[99:], "names or sizes of files"), (LINES[:-21:-1], "validation text")):
        (other / "train.txt").write_text("".join(LINES[:100]))
        (other / "valid.txt").write_text("".join(valid))
        for error in make_tasks(config, 3, data_dir=str(other), files=("*.txt",)):
            assert isinstance(error, ValueError)
            assert f"got other {message} on rank 2 than on rank 0, expected the same in" in str(error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--vocabulary-size", "100"], r"got vocabulary_size=100, expected at least 259"),
        (["--validation-share", "1"], r"got validation_share=1.*, expected less"),
        (["--model", "gpt3"], r"got model='gpt3', expected one of gpt-tiny"),
        (["--dirichlet-alpha", "-1"], r"got dirichlet_alpha=-1.*, expected 0 or more; 0 switches it off"),
        (["--clip-norm", "-1"], r"got clip_norm=-1.*, expected 0 or more"),
        (
            ["--recipe", "qgdsgdm"],
            r"got recipe='qgdsgdm' where AdamW steps the model, expected one .*; pass --optimizer sgd, or",
        ),
        (["--out-dir", "r", "--tokenizer", "r/tokenizer.json"], r"got tokenizer='r/tokenizer\.json' in the folder of"),
    ],
)
def test_options_out_of_bounds_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_command_line(LanguageModelConfig, description=None, arguments=options)


def test_presets_are_those_of_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LanguageModelConfig.PRESETS:
        config = read_command_line(LanguageModelConfig, description=None, arguments=["--preset", name])
        json.dumps(config.identity)
        if name.startswith("gpt2"):
            per_step = config.batch_size * config.accumulation_steps * config.sequence_length
            assert (config.model, 8 * per_step) == (name, 2**19)
    assert (config.model, config.clip_norm, config.dropout, config.sequence_length) == ("lstm", 0.4, 0.4, 30)
