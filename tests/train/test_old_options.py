"""Options of the scripts of SGP, MATCHA, WAGMA-SGD, PowerGossip and dpwa, each typed as it stands in their READMEs."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest

from train.command_line import read_command_line
from train.job.errors import UsageError
from train.old_options.actions import Action, Gone
from train.old_options.settings import texts_of_old_options
from train.old_options.tables import DPWA, MATCHA, OPTIONS, OTHERS, POWERGOSSIP, SGP, WAGMA
from train.old_options.translate import translated, translated_config
from train.tasks.images.config import Config
from train.tasks.language_model.config import LanguageModelConfig
from train.tasks.translation.config import TranslationConfig

VALUES = {
    "all_reduce": "True",
    "push_sum": "True",
    "bilat": "True",
    "graph_type": "0",
    "mixing_strategy": "0",
    "synch_freq": "0",
    "num_dataloader_workers": "2",
    "num_epochs": "3",
    "peers_per_itr_schedule": "0 1",
    "warmup": "True",
    "print_freq": "7",
    "train_fast": "True",
    "checkpoint_all": "True",
    "overwrite_checkpoints": "True",
    "checkpoint_dir": "somewhere",
    "dataset_dir": "somewhere",
    "single_threaded": "True",
    "distributed": "True",
    "dist_avg": "gossip",
    "no_cuda_streams": "",
    "matcha": "",
    "graphid": "0 --matcha",
    "compress": "",
    "consensus_lr": "0.1",
    "bs": "64",
    "epoch": "10",
    "randomSeed": "3",
    "savePath": "somewhere",
    "datasetRoot": "somewhere",
    "description": "words",
    "p": "",
}
"""A value for each option that has one; others are typed with 1."""
OWN = [
    "lr",
    "batch_size",
    "momentum",
    "weight_decay",
    "nesterov",
    "overlap",
    "seed",
    "resume",
    "backend",
    "model",
    "dataset",
]
"""Options of the ancestors that are called the same here."""


def read(line: str, config_type: Any = Config) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = read_command_line(config_type, description=None, arguments=shlex.split(line))
    return config, [str(warning.message) for warning in caught]


@pytest.mark.parametrize(("name", "action"), OPTIONS.items())
def test_every_option(name: str, action: Action) -> None:
    dashes = "-" if name in {*WAGMA, "n", "p", "r"} else "--"
    line = f"{dashes}{name} {VALUES.get(name, '1')}".strip()
    if isinstance(action, Gone):
        with pytest.raises(UsageError) as caught:
            read(line)
        text = str(caught.value)
        assert text.startswith(f"got {line}, which has no place here: {action.remedy}")
        assert "\n" not in text
    else:
        _, warned = read(line)
        assert len(warned) == 1
        assert f"{dashes}{name}" in warned[0]


@pytest.mark.parametrize("name", OWN)
def test_an_option_with_one_name_is_no_old_option(name: str) -> None:
    assert name in {option.name for option in fields(Config)}
    assert name not in OPTIONS


def test_options_of_old_that_are_options_of_today_are_those_of_today() -> None:
    assert set(OPTIONS) & {option.name for option in fields(Config)} == set()
    config, warned = read("--epochs 2")
    assert config.epochs == 2
    assert warned == []


LINES: Mapping[str, dict[str, Any]] = {
    # The job scripts of SGP: submit_SGP, submit_DPSGD, submit_AR, submit_ADPSGD.
    "--batch_size 32 --lr 0.1 --num_dataloader_workers 16 --num_epochs 90 --nesterov True --warmup True "
    "--push_sum True --graph_type 0 --schedule 30 0.1 60 0.1 80 0.1 --train_fast False --print_freq 100 --verbose "
    "False --seed 1": {
        "recipe": "sgp",
        "graph": "exponential",
        "num_workers": 16,
        "epochs": 90,
        "nesterov": True,
        "warmup_epochs": 5,
        "milestones": (30, 60, 80),
        "milestone_factor": 0.1,
        "validate_every": 1,
        "log_every": 100,
    },
    # The README of dpwa's example, and of the code that it is made from.
    "--resume --lr 0.01": {"resume": "auto", "lr": 0.01},
    "--push_sum False --graph_type 1 --nesterov False --warmup False": {
        "recipe": "dpsgd",
        "graph": "bipartite-exponential",
        "nesterov": False,
        "warmup_epochs": 0,
    },
    "--all_reduce True --graph_type -1 --push_sum False": {"recipe": "ar", "graph": "auto"},
    "--bilat True --graph_type 1 --push_sum False --train_fast True": {"recipe": "adpsgd", "validate_every": 1000000},
    # Of its README.
    "--overlap True --synch_freq 2": {"recipe": "sgp", "overlap": True, "max_staleness": 2},
    "--overlap=True --graph-type=5": {"overlap": True, "graph": "npeer-exponential"},
    "--overlap False --resume False": {"overlap": False, "resume": ""},
    "--resume True": {"resume": "auto"},
    "--peers_per_itr_schedule 0 2 30 1": {"peers_per_itr": "0:2,30:1"},
    "--dataset_dir /data/imagenet": {"dataset": "imagefolder", "data_dir": "/data/imagenet"},
    # MATCHA's example.
    "--lr 0.8 --bs 64 --epoch 200 --matcha --budget 0.5 -p --description experiment --graphid 0 --dataset cifar10 "
    "--datasetRoot ./data/ --randomSeed 9001 --savePath ./results/": {
        "recipe": "matcha",
        "graph": "matcha0",
        "lr": 0.8,
        "batch_size": 64,
        "epochs": 200,
        "seed": 9001,
        "data_dir": "./data/",
        "out_dir": "./results/",
    },
    "--compress --consensus_lr 0.1 --graphid 5": {
        "recipe": "choco",
        "graph": "matcha5",
        "algorithm": "Choco(TopK(0.1), step_size=0.1)",
    },
}


@pytest.mark.parametrize(("line", "expected"), LINES.items())
def test_lines_that_work(line: str, expected: dict[str, Any]) -> None:
    config, warned = read(line)
    assert {name: getattr(config, name) for name in expected} == expected
    assert len(warned) == 1
    assert warned[0].startswith("got options of another system or version, which work: ")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--model res", r"^got --model res: pass --model resnet20 or cnn: the network that MATCHA calls res"),
        ("--ps_weight 1", r"^got --ps_weight 1, .*: leave it out: the push-sum weight starts at 1"),
        (
            "--alpha 0.1",
            r"^got --alpha 0.1, .*: say which one is meant: --dirichlet-alpha for uneven data; MATCHA ",
        ),
        ("--graph_type 9", r"^got --graph_type 9: pass one of -1, 0, 1, 2, 3, 4, 5, or --graph with a name of --help$"),
        ("--schedule 30 0.1 60 0.2", r"pass --milestones EPOCH ... and --milestone-factor, one factor for all$"),
        ("--schedule 30", r"pass --milestones EPOCH"),
        ("--peers_per_itr_schedule 0", r"pass --peers-per-itr 0:1,30:2"),
        ("--synch_freq often", r"^got --synch_freq often: pass a number of steps$"),
        ("--all_reduce maybe", r"^got --all_reduce maybe: pass True or False$"),
        ("--mixing_strategy 3", r"pass mixing= to GossipDataParallel"),
        ("--graphid 0", r"^got --graphid without --matcha: pass --matcha, or .* --algorithm \'MATCHA\(budget=1.0\)\'$"),
        ("--push_sum True --recipe dpsgd", r"means --recipe sgp, and recipe itself: give one of them$"),
        ("--all_reduce True --bilat True", r"got --bilat True beside an option that means --recipe ar: give one"),
        ("--tag a --master_port 1", r"^got --tag a, .*; got --master_port 1, .*torchrun --master-port$"),
        ("--num_workers 1 --num_dataloader_workers 2", r"means --num-workers 2, and num_workers itself"),
    ],
)
def test_lines_that_do_not(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        read(line)
    assert "\n" not in str(caught.value)


def test_a_script_without_the_option_says_so() -> None:
    config, _ = read("--dist_avg gossip", TranslationConfig)
    assert config.recipe == "sgp"
    with pytest.raises(UsageError, match=r"^got --warmup True: leave it out, as there is no --warmup-epochs 5 here$"):
        read("--warmup True", TranslationConfig)


def test_arguments_after_two_dashes_are_left_alone() -> None:
    defaults = {option.name: option.default for option in fields(Config)}
    with pytest.warns(UserWarning, match="--bs 8 is now --batch-size 8"):
        assert translated(["--bs", "8", "--", "--bs", "9"], defaults) == ["--batch-size", "8", "--", "--bs", "9"]
    assert translated(["--lr", "-1e-3", "words"], defaults) == ["--lr", "-1e-3", "words"]
    assert translated([], defaults) == []


DEFAULTS = {option.name: option.default for option in fields(Config)}
KEYS: Mapping[str, tuple[Any, dict[str, Any]]] = {
    "optimizer": ("power-gossip", {"recipe": "powergossip"}),
    "optimizer_rank": (2, {"algorithm": "PowerGossip(rank=2)"}),
    "optimizer_num_iterations": (4, {"algorithm": "PowerGossip(num_iterations=4)"}),
    "optimizer_warm_start": (False, {"algorithm": "PowerGossip(warm_start=False)"}),
    "optimizer_diffusion_rate": (1.0, {"algorithm": "PowerGossip(step_size=1.0)"}),
    "optimizer_compressor": ("top-k", {"algorithm": "Choco(TopK(0.01), step_size=0.0375)"}),
    "optimizer_keep_ratio": (0.02, {"algorithm": "Choco(TopK(0.02), step_size=0.1)"}),
    "optimizer_theta": (2.0, {"algorithm": "Moniqua(theta=2.0)"}),
    "topology": ("fully-connected", {"graph": "complete"}),
    "num_epochs": (3, {"epochs": 3}),
    "distributed_lr_warmup_epoch": (5, {"warmup_epochs": 5}),
    "lr_schedule_milestones": ([(150, 0.1), (225, 0.1)], {"milestones": (150, 225), "milestone_factor": 0.1}),
    "distributed_backend": ("gloo", {"backend": "gloo"}),
    "task": ("Cifar", {"dataset": "cifar10", "model": "resnet20"}),
    "task_architecture": ("ResNet20", {"model": "resnet20"}),
    "evaluate_average_model": (True, {}),
    "spectrum_logging_epochs": ([1], {}),
    "spectrum_logging_params": ([], {}),
}


BESIDE: Mapping[str, dict[str, Any]] = {
    "optimizer_compressor": {"optimizer": "choco"},
    "optimizer_keep_ratio": {
        "optimizer": "choco",
        "optimizer_compressor": "top-k",
        "optimizer_diffusion_rate": 0.1,
    },
    "optimizer_theta": {"optimizer": "moniqua"},
}
"""The keys beside those that set an argument of an algorithm; of others "power-gossip"."""


@pytest.mark.parametrize(("name", "action"), POWERGOSSIP.items())
def test_every_key_of_powergossip(name: str, action: Action) -> None:
    if isinstance(action, Gone):
        with pytest.raises(UsageError, match=rf"^got {name}=1, which has no place here: "):
            translated_config({name: 1}, DEFAULTS)
        return
    value, expected = KEYS[name]
    beside = BESIDE.get(name, {"optimizer": "power-gossip"}) if "algorithm" in expected else {}
    with pytest.warns(UserWarning, match=rf"which work: .*{name}="):
        new = translated_config({**beside, name: value, "seed": 7}, DEFAULTS)
    assert new == {"seed": 7, **expected}


@pytest.mark.parametrize(
    ("line", "algorithm"),
    [
        (
            "--recipe diloco --sync-period 50 --outer-bits 4",
            "DiLoCo(sync_every=50, compressor=QSGD(4, 32, unbiased=True))",
        ),
        ("--recipe wagma --group-size 2 --no-wait-avoiding", "WAGMA(group_size=2, wait_avoiding=False)"),
        ("--recipe choco --compressor topk", "Choco(TopK(0.01), step_size=0.0375)"),
        ("--recipe deepsqueeze --step-size 0.02", "DeepSqueeze(SignNorm(), step_size=0.02)"),
        ("--recipe moniqua --theta 2 --compression-bits 4 --step-size 0.2", "Moniqua(theta=2, bits=4, step_size=0.2)"),
        ("--recipe matcha --budget 0.3", "MATCHA(budget=0.3)"),
        ("--recipe dpwa --interpolation loss", "Dpwa(interpolation=LossInterpolation())"),
        ("--recipe slowmo --outer-gossip-every 2", "SlowMo(inner_lr='optimizer', sync_every=10, gossip_every=2)"),
        ("--recipe localsgd --sync_period=3", "LocalSGD(sync_every=3)"),
        ("--recipe sgp --sync-period 3", ""),
        ("--recipe sparta --compression-ratio 0.02", "Sparta(0.02)"),
        ("--recipe streamingdiloco --outer-delay 2 --anchor-device cpu", "StreamingDiLoCo(sync_every=10, "),
        ("--recipe sparseloco --compression-ratio 0.03", "ChunkTopK(123, values=TwoBit())"),
    ],
)
def test_options_of_version_0_1_are_the_text_of_an_algorithm(line: str, algorithm: str) -> None:
    config, (warned,) = read(line)
    assert algorithm in config.algorithm
    assert bool(config.algorithm) == bool(algorithm)
    assert f"is now --algorithm '{config.algorithm}'" in warned.replace("'\"'\"'", "'") or not algorithm
    assert config.recipe == line.split()[1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--recipe choco --compressor zip", "got --compressor zip: got compressor=zip, expected one of sign, topk,"),
        ("--recipe diloco --outer-bits 2", "got --outer-bits 2: got outer_bits=2, expected 4 or 8, or 0 for drifts"),
        ("--recipe choco --compressor qsgd --compression-bits 2", r"got QSGD\(2\) and no step_size, expected one"),
        ("--algorithm DiLoCo() --sync-period 5 --recipe diloco", "got --sync-period 5 beside algorithm: give the text"),
        ("--consensus-target 2.0 --consensus-remedy rounds", "--consensus-target 2.0, which has no place here: take"),
    ],
)
def test_options_of_version_0_1_that_cannot_be(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(line)


@pytest.mark.parametrize(
    ("manifest", "texts"),
    [
        ({"recipe": "sgp", "sync_period": 10, "warm_start": True}, {"algorithm": "", "schedule": ""}),
        ({"recipe": "matcha", "budget": 0.3}, {"algorithm": "MATCHA(budget=0.3)", "schedule": ""}),
        (
            {"recipe": "dpsgd", "consensus_target": 2.0},
            {"algorithm": "", "schedule": "ConsensusControl(target=2.0)"},
        ),
    ],
)
def test_a_checkpoint_of_version_0_1_describes_its_run(manifest: dict[str, Any], texts: dict[str, str]) -> None:
    assert texts_of_old_options(manifest) == texts


def test_an_optimizer_of_today_is_not_one_of_powergossip() -> None:
    assert translated_config({"optimizer": "adamw"}, {"optimizer": "sgd"}) == {"optimizer": "adamw"}
    with pytest.raises(UsageError, match=r"got optimizer='newton': pass one of dpsgd, all-reduce, power-gossip"):
        translated_config({"optimizer": "newton"}, DEFAULTS)


def test_the_tables_do_not_contradict_each_other() -> None:
    tables = [OTHERS, DPWA, WAGMA, MATCHA, SGP]
    assert sum(map(len, tables)) == len(OPTIONS)


def test_the_language_task_of_powergossip_has_its_model() -> None:
    defaults = {option.name: option.default for option in fields(LanguageModelConfig)}
    with pytest.warns(UserWarning, match=r"task='LSTM' is now task='language_model' model='lstm'"):
        new = translated_config({"task": "LSTM", "optimizer": "dpsgd"}, defaults)
    assert new == {"task": "language_model", "model": "lstm", "recipe": "dpsgd"}
