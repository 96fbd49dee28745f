"""The parts of a translation run: model, loss, learning rate, scores, options."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from num2words import num2words
from torch import Tensor

import gossip_modules as gm
from tests.harness.ranks import CPU
from tests.train.training.test_checkpoint import Ranks
from train.command_line import read_command_line
from train.tasks.base import MicroBatch
from train.tasks.byte_tokenizer import END, PAD, START
from train.tasks.token_scores import count_tokens, nll, token_accuracy_percent
from train.tasks.translation.config import TranslationConfig
from train.tasks.translation.optim import InverseSquareRoot, adam
from train.tasks.translation.scores import text_scores
from train.tasks.translation.task import TranslationTask
from train.tasks.translation.token_batches import micro_batch
from train.tasks.translation.tokenization import BytePairs
from train.tasks.translation.transformer import SIZES, Beam, Size, Translator
from train.training.meters import Meters
from train.training.step import train_step

# Of 60 numbers, the same for learning, validation and test: what is learnt is not the question here.
NUMBERS = range(0, 6000, 100)
TINY = Size(num_layers=1, width=16, feed_forward_width=16, num_heads=2)


def world(ranks: Ranks, rank: int) -> Any:
    """A rank among threads."""
    member = ranks[rank]
    return SimpleNamespace(
        rank=rank, size=ranks.size, device=CPU, gather=member.gather, on_every_rank=member.on_every_rank
    )


def write_corpus(folder: Path, english: str, german: str) -> TranslationConfig:
    for prefix in ("train", "val", "test"):
        (folder / f"{prefix}.en").write_text(english)
        (folder / f"{prefix}.de").write_text(german)
    options: dict[str, Any] = {"num_validation": 12, "num_test": 7, "max_length": 20, "beam_size": 1}
    return TranslationConfig(data_dir=str(folder), vocabulary_size=300, max_tokens=40, **options)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TranslationConfig:
    english, german = ("".join(f"{num2words(number, lang=code)}\n" for number in NUMBERS) for code in ("en", "de"))
    return write_corpus(tmp_path_factory.mktemp("numbers"), english, german)


@pytest.fixture(scope="module")
def task(config: TranslationConfig) -> TranslationTask:
    return TranslationTask(config, world(Ranks(1), 0))


@pytest.fixture(scope="module")
def translator(task: TranslationTask) -> Translator:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = task.make_model()
    assert isinstance(model, Translator)
    return model


def test_the_embeddings_are_one_matrix_and_positions_are_fixed(translator: Translator) -> None:
    network = translator.network
    shared = network.model.shared.weight
    assert network.model.encoder.embed_tokens.weight is shared
    assert network.model.decoder.embed_tokens.weight is shared
    assert network.lm_head.weight is shared
    positions = network.model.encoder.embed_positions.weight
    assert not positions.requires_grad
    assert torch.allclose(positions[3, 0], torch.tensor(math.sin(3.0)))
    optimizer = adam(translator)
    assert type(optimizer).__name__ == TranslationConfig().optimizer_class
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert id(shared) in trained
    assert id(positions) not in trained
    assert sum(p.numel() for p in translator.parameters() if p.requires_grad) == pytest.approx(0.7e6, rel=0.02)


def test_gossip_takes_the_embeddings_once_and_no_position(task: TranslationTask) -> None:
    model = task.make_model()
    buffer = gm.extend.FlatBuffer(model)
    assert len(buffer.tensors) == sum(p.requires_grad for p in model.parameters())
    assert buffer.vector.buffers == []


def test_padding_changes_nothing(translator: Translator) -> None:
    translator.eval()
    source, decoder = torch.tensor([[5, 6, 7, END]]), torch.tensor([[START, 8, 9]])
    padded, longer = torch.tensor([[5, 6, 7, END, PAD, PAD]]), torch.tensor([[START, 8, 9, PAD]])
    with torch.no_grad():
        alone = translator(source, source != PAD, decoder)
        beside = translator(padded, padded != PAD, longer)
    assert torch.allclose(alone, beside[:, :3], atol=1e-5)


def test_the_decoder_sees_only_earlier_tokens(translator: Translator) -> None:
    translator.eval()
    source = torch.tensor([[5, 6, 7, END]])
    with torch.no_grad():
        first, second = (translator(source, source != PAD, torch.tensor([[START, 8, last]])) for last in (9, 10))
    assert torch.equal(first[:, :2], second[:, :2])
    assert not torch.equal(first[:, 2], second[:, 2])


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 2.0])
def test_a_beam_that_follows_everything_finds_the_best_of_all_translations(length_penalty: float) -> None:
    num_tokens, longest = 7, 3
    with torch.random.fork_rng():
        torch.manual_seed(3)
        translator = Translator(TINY, num_tokens=num_tokens, max_length=8, dropout=0.0).eval()
    source = torch.randint(END + 1, num_tokens, (6, 5), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(source, dtype=torch.bool)
    words = range(END + 1, num_tokens)
    ended = [(*text, END) for length in range(longest) for text in itertools.product(words, repeat=length)]
    every = [*ended, *itertools.product(words, repeat=longest)]

    targets = torch.tensor([[*tokens, *[PAD] * (longest - len(tokens))] for tokens in every])
    decoder = targets.roll(1, dims=1)
    decoder[:, 0] = START
    lengths = (targets != PAD).sum(1)
    with torch.no_grad():
        found = translator.translate(source, mask, Beam(len(every), length_penalty, longest))
        for row, best in enumerate(found):
            one = source[row : row + 1].expand(len(every), -1)
            logits = translator(one, torch.ones_like(one, dtype=torch.bool), decoder)
            logits[:, :, [PAD, START]] = -torch.inf  # no translation has them
            log_p = logits.log_softmax(2).gather(2, targets[:, :, None])[:, :, 0].masked_fill(targets == PAD, 0)
            scores = log_p.sum(1) / lengths**length_penalty
            assert best == [token for token in every[scores.argmax()] if token != END]


def test_a_narrow_beam_does_not_end_at_the_first_hypotheses() -> None:
    """END is always second to one word, so that each step ends a hypothesis, and none of them is good."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        translator = Translator(TINY, num_tokens=7, max_length=12, dropout=0.0).eval()
    word = END + 1
    translator.network.final_logits_bias[0] = -20
    translator.network.final_logits_bias[0, [word, END]] = torch.tensor([6.0, 0.0])
    source = torch.tensor([[4, 5, 6, END]])
    with torch.no_grad():
        found = [translator.translate(source, source != PAD, Beam(size, 0.6, 10)) for size in (1, 2, 3)]
    assert found == [[[word] * 10]] * 3


def test_learning_rate_rises_for_4000_steps_and_falls_with_their_root() -> None:
    rate = InverseSquareRoot(lr=5e-4, warmup_steps=4000)
    assert rate(0) == pytest.approx(1e-7 + (5e-4 - 1e-7) / 4000)
    assert rate(3999) == 5e-4
    assert rate(15999) == pytest.approx(2.5e-4)
    assert max(map(rate, range(20000))) == 5e-4


def gradients_of_a_step(task: TranslationTask, parts: list[MicroBatch]) -> tuple[dict[str, Tensor], float]:
    """What `train_step` hands to the optimizer, and the mean loss that it counts."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = task.make_model()
    taken: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        taken.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(keep)
    model.no_sync = nullcontext  # type: ignore[assignment]
    meters = Meters(CPU)
    run = SimpleNamespace(
        config=task.config,
        task=task,
        state=SimpleNamespace(
            wrapper=model,
            optimizer=optimizer,
            scaler=torch.amp.GradScaler(enabled=False),
            meters=meters,
            device=CPU,
            step=0,
        ),
    )
    train_step(run.task, run.config, run.state, parts, learning_rate=0.1)
    return taken, meters.loss


def test_parts_of_a_batch_give_the_gradient_of_the_whole(task: TranslationTask) -> None:
    indices = np.arange(9)
    parts = [micro_batch(task.train, part) for part in (indices[:5], indices[5:7], indices[7:])]
    assert len({part.num_items for part in parts}) == 3, "a mean of means would be another"
    (whole, loss), (summed, mean_loss) = (
        gradients_of_a_step(task, [micro_batch(task.train, indices)]),
        gradients_of_a_step(task, parts),
    )
    assert mean_loss == pytest.approx(loss, rel=1e-5)
    assert whole.keys() == summed.keys()
    for name, gradient in whole.items():
        assert torch.allclose(gradient, summed[name], atol=1e-6), name


def test_loss_and_correct_tokens_leave_padding_out(task: TranslationTask) -> None:
    logits = torch.randn(2, 3, 300, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[7, END, PAD], [8, 9, END]])
    logits[0, 0, 7], logits[1, 1, 9], logits[0, 2, PAD] = 20, 20, 20
    log_p = logits.log_softmax(2)
    places = [(0, 0, 7), (0, 1, END), (1, 0, 8), (1, 1, 9), (1, 2, END)]
    right = torch.stack([log_p[place] for place in places])
    spread = torch.stack([log_p[row, column].mean() for row, column, _ in places])
    assert torch.allclose(task.loss(logits, targets), -(0.9 * right + 0.1 * spread).mean())
    counts = count_tokens(logits, targets)
    assert nll(counts) == pytest.approx(-float(right.mean()), rel=1e-5)
    assert int(task.num_correct(logits, targets)) == 2
    assert token_accuracy_percent(counts) == 40


def test_scores_are_those_of_sacrebleu() -> None:
    references = ["ein kleiner Hund läuft schnell .", "zwei Vögel"]
    perfect = text_scores(references, references, bleu_tokenizer="13a")
    assert perfect == {"bleu": pytest.approx(100), "chrf": pytest.approx(100), "exact_match_percent": 100}
    scores = text_scores(["ein kleiner Hund läuft .", "zwei Vögel"], references, bleu_tokenizer="13a")
    # Matches of 1 to 4 words: 7 of 7, 4 of 5, 2 of 3, 1 of 2; one word of eight is missing.
    bleu = 100 * math.exp(1 - 8 / 7) * (4 / 5 * 2 / 3 * 1 / 2) ** 0.25
    assert scores["bleu"] == pytest.approx(bleu)
    assert scores["exact_match_percent"] == 50
    assert 0 < scores["chrf"] < 100


def test_a_tokenizer_that_bleu_lacks_is_refused_before_training(config: TranslationConfig) -> None:
    with pytest.raises(ValueError, match=r"rank 0: got bleu_tokenizer='13b', expected one of .*13a.*char"):
        TranslationTask(replace(config, bleu_tokenizer="13b"), world(Ranks(1), 0))


def test_ranks_share_the_translation_of_the_test_set(
    config: TranslationConfig, task: TranslationTask, translator: Translator, tmp_path: Path
) -> None:
    translator.eval()
    with torch.no_grad():
        alone = task.evaluate_averaged(translator)
    assert {"validation_nll", "nll", "bleu", "chrf", "exact_match_percent"} == alone.keys()
    assert task.score in alone
    assert task.selection(alone) == -alone["validation_nll"] != -alone["nll"]
    config = replace(config, out_dir=str(tmp_path))
    ranks = Ranks(3)

    def body(member: Any) -> tuple[dict[str, float], TranslationTask]:
        shared = TranslationTask(config, world(ranks, member.rank))
        with torch.no_grad():
            return shared.evaluate_averaged(translator), shared

    results = ranks.run(body)
    for scores, shared in results:
        assert shared.identity == task.identity
        assert shared.translations == task.translations
        assert scores == pytest.approx(alone)
        shared.finish(translator)
    assert (tmp_path / "translations.de").read_text().splitlines() == task.translations
    assert BytePairs.load(tmp_path / "tokenizer.json").digest == task.tokenizer.digest


def test_an_own_model_is_measured_token_by_token(task: TranslationTask, translator: Translator) -> None:
    translator.eval()
    with torch.no_grad():
        scores = task.evaluate(translator)
        inputs, targets = task.on_device(micro_batch(task.test, np.arange(len(task.test))))
        counts = count_tokens(translator(*inputs), targets)
    assert len(task.test) == task.config.num_test
    assert scores == {"nll": pytest.approx(nll(counts)), "token_accuracy_percent": token_accuracy_percent(counts)}


def test_files_are_read_by_all_ranks_or_by_none(tmp_path: Path) -> None:
    for name in ("same", "other"):
        (tmp_path / name).mkdir()
        config = write_corpus(tmp_path / name, "a house\n\n" * 30, "ein Haus\n\n" * 29 + f"mein {name}\n\n")
    ranks = Ranks(2)

    def tasks_of(folders: list[str]) -> list[Any]:
        def body(member: Any) -> TranslationTask:
            own = replace(config, data_dir=str(tmp_path / folders[member.rank]), num_test=0)
            return TranslationTask(own, world(ranks, member.rank))

        return ranks.run(body)

    task, _ = tasks_of(["same", "same"])
    assert (len(task.train), len(task.validation), len(task.test), task.corpus.train.num_blank) == (30, 12, 30, 30)
    assert task.score == "bleu"
    for error in tasks_of(["same", "other"]):
        with pytest.raises(ValueError, match=r"got other text on rank 1 than on rank 0, expected the same files in"):
            raise error
    for error in tasks_of(["same", "nowhere"]):
        with pytest.raises(ValueError, match=r"rank 1: got no such folder in .*nowhere"):
            raise error


def test_options_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got max_length=64 and max_tokens=63, expected room"):
        TranslationConfig(max_tokens=63)
    with pytest.raises(ValueError, match=r"got vocabulary_size=100, expected at least 259"):
        TranslationConfig(vocabulary_size=100)
    with pytest.raises(ValueError, match=r"got source and target 'de', expected two languages"):
        TranslationConfig(source="de")
    with pytest.raises(ValueError, match=r"got model='huge', expected one of tiny, small, base, big"):
        TranslationConfig(model="huge")
    with pytest.raises(ValueError, match=r"got tokenizer='runs/a/../a/tokenizer.json' in the folder of this run"):
        TranslationConfig(out_dir="runs/a", tokenizer="runs/a/../a/tokenizer.json")
    with pytest.raises(ValueError, match=r"got beam_size=0, expected more than 0"):
        TranslationConfig(beam_size=0)
    with pytest.raises(ValueError, match=r"got recipe='decentlam' where Adam steps the model, expected one that takes"):
        TranslationConfig(recipe="decentlam")


def test_presets_are_the_recipe_of_the_paper() -> None:
    config = read_command_line(TranslationConfig, description=None, arguments=["--preset", "wmt16-big"])
    assert (config.model, config.dropout, config.label_smoothing) == ("big", 0.3, 0.1)
    assert (config.lr, config.warmup_steps) == (5e-4, 4000)
    assert config.max_tokens * config.accumulation_steps * 8 == 448_000, "the 400k-token batch of eight nodes"
    assert str(config.run_dir) == "runs/wmt16_en_de_en_de_sgp"
    assert str(TranslationConfig().run_dir) == "runs/numbers_en_de_sgp"
    for preset in TranslationConfig.PRESETS:
        read_command_line(TranslationConfig, description=None, arguments=["--preset", preset])


def test_the_sizes_are_those_of_the_paper() -> None:
    def num_parameters(name: str) -> int:
        size = SIZES[name]
        attention, width = 4 * size.width * (size.width + 1), size.width
        feed_forward = 2 * size.feed_forward_width * width + size.feed_forward_width + width
        encoder, decoder = attention + feed_forward + 4 * width, 2 * attention + feed_forward + 6 * width
        return size.num_layers * (encoder + decoder) + 37_000 * width

    # Vaswani et al., table 3, with the shared vocabulary of about 37,000 tokens.
    assert num_parameters("base") == pytest.approx(65e6, rel=0.05)
    assert num_parameters("big") == pytest.approx(213e6, rel=0.05)
