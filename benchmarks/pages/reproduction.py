"""Headlines of papers on speed and on NoLoCo, and what was not reproduced."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from benchmarks.pages.headline import (
    IN_PART,
    NO,
    YES,
    Headline,
    by_effect,
    by_ratio,
    rows_of,
)

LINK_SPEEDS = {0.1: "0.1", 1.0: "1", 10.0: "10"}
EIGHT_HOSTS = "8 emulated hosts, 2.8 M parameters, 40 ms of computation"
FOUR_HOSTS = "4 emulated hosts, 1.1 M parameters, a twentieth of the steps 10 times as long"


def step_ms(csv: str, **setting: float) -> pd.Series:
    """Return milliseconds of a step of all ranks, by method and Gbit/s, from a file of `benchmarks.cluster`."""
    rows = rows_of(csv)
    for name, value in setting.items():
        rows = rows[rows[name] == value]
    rows = rows[rows["error"].isna()].astype({"fleet_step_ms": float})
    return rows.groupby(["method", "rate_gbit"])["fleet_step_ms"].median()


def per_speed(ratios: pd.Series) -> str:
    """Return ratios by Gbit/s in words."""
    texts = [f"{ratio:.2f} at {LINK_SPEEDS[speed]}" for speed, ratio in ratios.items()]
    return f"{', '.join(texts[:-1])} and {texts[-1]} Gbit/s"


def sgp_speed() -> tuple[str, str]:
    """Time of a step of DDP over that of SGP."""
    times = step_ms("loss_cells.csv", straggle_chance=0.0)
    ratios = times["ddp"] / times["sgp"]
    return per_speed(ratios), by_ratio(ratios.max(), 5.1 / 1.6)


def osgp_speed() -> tuple[str, str]:
    """The part of the time of SGP that overlap saves."""
    times = step_ms("loss_cells.csv", straggle_chance=0.0)
    saved = 1 - times["osgp"] / times["sgp"]
    text = f"{100 * saved[1.0]:.0f} % at 1 Gbit/s, {100 * saved[0.1]:.0f} % at 0.1 Gbit/s"
    return text, by_effect(saved[1.0], 0.4)


def adpsgd_speed() -> tuple[str, str]:
    """Time of a step of DDP over that of AD-PSGD, with stragglers."""
    times = step_ms("straggler_cells.csv")
    ratios = times["ddp"] / times["adpsgd"]
    return per_speed(ratios), YES if ratios.min() >= 4 else IN_PART if ratios.max() >= 4 else NO


def wagma_speed() -> tuple[str, str]:
    """Times of a step of DDP and SGP over that of WAGMA, with stragglers."""
    times = step_ms("straggler_cells.csv")
    ddp, sgp = (times[name] / times["wagma"] for name in ("ddp", "sgp"))
    text = f"over DDP {per_speed(ddp)}; over SGP {per_speed(sgp)}"
    return text, min(by_ratio(ddp.max(), 1.26), by_ratio(sgp.max(), 1.25), key=[NO, IN_PART, YES].index)


def wagma_large() -> tuple[str, str]:
    """Times of a step of SGP over that of WAGMA in the Lab, with 1,024 workers."""
    times = rows_of("simulator.csv").set_index("recipe")["step_seconds"]
    sgp, wagma = times["sgp"], times["wagma"]
    return f"{sgp / wagma:.2f} ({wagma:.2f} s for {sgp:.2f} s per step)", by_ratio(sgp / wagma, 2.1)


def noloco_loss() -> tuple[str, str]:
    """NoLoCo beside DiLoCo, which averages half as often: so where it is as good, NoLoCo does not converge faster."""
    rows = rows_of("outer_language.csv")
    ends = rows[~rows["is_tuning"] & (rows["step"] == rows["steps"]) & (rows["workers"] == 8)]
    noloco, diloco = (ends.loc[ends["method"] == name, "test"].mean() for name in ("NoLoCo, H = 50", "DiLoCo, H = 100"))
    return (
        f"{noloco:.3f} nats per byte with H = 50, DiLoCo with H = 100 {diloco:.3f}",
        by_effect(diloco / noloco - 1, 0.04),
    )


HEADLINES: Sequence[Headline] = (
    Headline(
        "SGP",
        "1.6 h for 5.1 h of all-reduce: 3.2 times as fast, 32 nodes, 10 Gbit/s",
        EIGHT_HOSTS,
        ("loss_cells.csv",),
        "utilisation",
        sgp_speed,
        {"workers": (8, 32)},
    ),
    Headline(
        "Overlap SGP",
        "overlap saves 40 % of the time, 32 nodes",
        EIGHT_HOSTS,
        ("loss_cells.csv",),
        "utilisation",
        osgp_speed,
        {"workers": (8, 32)},
    ),
    Headline(
        "AD-PSGD",
        "4 to 8 times as fast per epoch as synchronous methods on a shared network, 128 GPUs",
        FOUR_HOSTS,
        ("straggler_cells.csv",),
        "stragglers",
        adpsgd_speed,
        {"workers": (4, 128)},
    ),
    Headline(
        "WAGMA-SGD",
        "throughput 1.26 times that of all-reduce and 1.25 times that of SGP, 64 GPUs, two random ones 320 ms late",
        FOUR_HOSTS,
        ("straggler_cells.csv",),
        "stragglers",
        wagma_speed,
        {"workers": (4, 64)},
    ),
    Headline(
        "WAGMA-SGD",
        "throughput 2.1 times that of SGP, 1,024 GPUs, reinforcement learning with steps of 1.7 to 43.5 s",
        "1,024 workers in the Lab, 25 M parameters, 1 Gbit/s, even steps",
        ("simulator.csv",),
        "lab",
        wagma_large,
        {"workers": (1024, 1024), "slowest over fastest step": (1, 43.5 / 1.7)},
    ),
    Headline(
        "NoLoCo",
        "converges up to 4 % faster than DiLoCo",
        "decoder of 20,480 parameters, 8 workers, 3,000 steps, 3 seeds",
        ("outer_language.csv",),
        "outer_language",
        noloco_loss,
    ),
)
"""Those of `benchmarks.pages.studies` follow; see `benchmarks.pages.published`."""

NOT_REPRODUCED: Sequence[tuple[str, str, str]] = (
    (
        "SGP, WAGMA-SGD: ResNet-50 on ImageNet, 64 to 256 GPUs, 90 epochs",
        "The images, the GPUs and the weeks of GPU time are not available to this project.",
        "CIFAR-10 at small sizes",
    ),
    (
        "SGP: WMT'16 English-German with a large transformer, batches of 400,000 tokens",
        "The data set and eight nodes with eight GPUs each are not available. The published curves have no table.",
        "[a language model of bytes](language.md), with Adam and SGP; [Multi30k](translation.md)",
    ),
    (
        "SGP: scaling efficiency of 88.6 % from 4 to 32 nodes at 10 Gbit/s",
        "32 emulated hosts share two cores, which bound the steps at this speed.",
        "[8 hosts](default.md) at 0.1, 1 and 10 Gbit/s",
    ),
    (
        "SGP, AD-PSGD: InfiniBand and NCCL between nodes",
        "At most one GPU was at hand, and NCCL refuses two ranks on one GPU.",
        "Gloo on an emulated network; one GPU for overhead and overlap",
    ),
    (
        "MATCHA: up to 5 times less time to the same loss, CIFAR-100 and Penn Treebank",
        "The published tables by data set and budget were not found.",
        "[six graphs in the Lab](matcha_time.md), with drawn digits",
    ),
    (
        "WAGMA-SGD: 1,024 GPUs, reinforcement learning in Habitat; WMT'17 (26.1 BLEU, with fixed groups 24.8)",
        "The simulator Habitat, its scenes and the GPUs are not available.",
        "the Lab with 1,024 workers; 4 emulated hosts with stragglers",
    ),
    (
        "PowerGossip: 300 epochs of ResNet-20 on CIFAR-10, an LSTM on WikiText-2",
        "The published tables of accuracy were not found, and 300 epochs of 8 workers take days on two cores.",
        "the consensus figure; [a small model](accuracy_bytes.md)",
    ),
    (
        "DiLoCo, Streaming DiLoCo, NoLoCo: models of 60 M to 7 B parameters on C4",
        "The data and thousands of GPU hours are not available.",
        "decoders of 20,000 to 800,000 parameters on Python's sources",
    ),
    (
        "RelaySGD: VGG-11 at 32 pixels for 200 epochs, ImageNet, BERT",
        "200 epochs of 16 workers take days on two cores.",
        "[CIFAR-10 at 16 pixels](worker_numbers.md#uneven_data), 800 steps",
    ),
)
"""The claim, the reason, and the nearest measurement here."""
