"""Headlines of SGP, AD-PSGD, WAGMA-SGD, MATCHA, PowerGossip, the codes beside it, and dpwa, from studies of images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from benchmarks.pages.headline import (
    EXACT,
    IN_PART,
    LEVEL,
    NO,
    YES,
    Headline,
    by_effect,
    by_level,
    by_limit,
    by_order,
    by_ratio,
    order_found,
    rows_of,
    worst,
)
from benchmarks.pages.image_studies import beside, bytes_ends, fastest, late_ends, matcha_ends, of
from benchmarks.pages.paper_studies import SIZE, ablation_ends, times_to_target
from benchmarks.studies.ends import ends

NUMBERS, LATE, BYTES, MATCHA = "worker_numbers.csv", "straggler_accuracy.csv", "accuracy_bytes.csv", "matcha_time.csv"
SMALL = "CIFAR-10 at 16 pixels, batch normalisation"
RING = "CIFAR-10 at 16 pixels, ring of 8"
DIGITS = "drawn digits, 64 workers, two late"
WAGMA_TABLE: Mapping[str, float] = {
    "all-reduce": 75.9,
    "WAGMA-SGD": 75.3,
    "SGP, 2 peers": 74.8,
    "D-PSGD": 71.3,
    "AD-PSGD": 66.9,
}
"""Accuracies in per cent of a ResNet-50 on ImageNet with 64 GPUs, as the authors of WAGMA-SGD measured them."""
FEW, MANY = 32, 64
"""Gossip is to be ahead with up to FEW workers, and all-reduce with MANY workers or more."""


def gaps_by_workers(method: str, base: str) -> pd.Series:
    """Return the points of a method below another one, by the number of workers: see `worker_numbers.csv`."""
    found = ends(rows_of(NUMBERS), base)
    return found[found["method"] == method].set_index("workers")["gap"].sort_index()


def in_words(gaps: pd.Series) -> str:
    """Return gaps by the number of workers in words."""
    return f"points below: {', '.join(f'{gap:.1f} with {workers}' for workers, gap in gaps.items())} workers"


# SGP and Overlap SGP.


def sgp_few() -> tuple[str, str]:
    """SGP with up to 8 workers beside all-reduce."""
    gaps = gaps_by_workers("SGP", "all-reduce").loc[:8]
    return in_words(gaps), by_level(gaps.max())


def sgp_many() -> tuple[str, str]:
    """SGP with the most workers beside all-reduce."""
    gaps = gaps_by_workers("SGP", "all-reduce").loc[16:]
    return in_words(gaps), by_limit(gaps.iloc[-1], 1.2 + EXACT, 2.4)


def overlap_accuracy() -> tuple[str, str]:
    """Overlap SGP beside SGP, with 8 workers or more."""
    gaps = gaps_by_workers("Overlap SGP", "SGP").loc[8:]
    return in_words(gaps), by_level(gaps.max())


def sgp_above(csv: str) -> tuple[str, str]:
    """SGP with two peers above D-PSGD with the most workers of a study."""
    found = ends(rows_of(csv), "SGP, 2 peers")
    row = of(found[found["workers"] == found["workers"].max()], "D-PSGD")
    effect = WAGMA_TABLE["SGP, 2 peers"] - WAGMA_TABLE["D-PSGD"]
    return f"{row['gap']:.1f} points above with {int(row['workers'])} workers", by_effect(row["gap"], effect)


# AD-PSGD.


def adpsgd_accuracy() -> tuple[str, str]:
    """AD-PSGD beside all-reduce by the number of workers."""
    gaps = gaps_by_workers("AD-PSGD", "all-reduce")
    return in_words(gaps), by_level(gaps.max())


def adpsgd_late() -> tuple[str, str]:
    """AD-PSGD beside all-reduce with late workers, at equal times of a worker."""
    row = of(ends(rows_of(LATE), "all-reduce"), "AD-PSGD")
    return beside(row["gap"], "all-reduce"), by_level(row["gap"])


def adpsgd_throughput() -> tuple[str, str]:
    """The time of a step of all-reduce over that of AD-PSGD, with late workers."""
    found = late_ends(rows_of(LATE))
    ratio = of(found, "all-reduce")["step"] / of(found, "AD-PSGD")["step"]
    return f"{ratio:.2f} times as fast", by_ratio(ratio, 4)


# WAGMA-SGD.


def wagma_throughput() -> tuple[str, str]:
    """The time of a step of all-reduce and of SGP over that of WAGMA."""
    found = late_ends(rows_of(LATE))
    wagma, base, sgp = (of(found, name)["step"] for name in ("WAGMA-SGD", "all-reduce", "SGP, 2 peers"))
    text = f"{base / wagma:.2f} times all-reduce, {sgp / wagma:.2f} times SGP with two peers"
    return text, worst(by_ratio(base / wagma, 1.26), by_ratio(sgp / wagma, 1.25))


def wagma_order(csv: str) -> tuple[str, str]:
    """The order of WAGMA's table with the most workers of a study."""
    found = ends(rows_of(csv), "all-reduce")
    own = found[found["workers"] == found["workers"].max()].set_index("method")["accuracy"]
    in_order, half, total = by_order(own.to_dict(), WAGMA_TABLE)
    listed = ", ".join(f"{name.partition(', 2')[0]} {own[name]:.1f}" for name in WAGMA_TABLE)
    text = f"{listed}: {in_order} of {total} pairs in order, {half} with at least half of the gap"
    return text, order_found(in_order, total)


def wagma_sizes(csv: str) -> tuple[str, str]:
    """Groups of 8 beside smaller and larger ones."""
    found = ablation_ends(rows_of(csv))
    small, large = (of(found, f"groups of {size}")["gap"] for size in (4, 64))
    text = f"groups of {SIZE} end {beside(-small, 'groups of 4')}, and those of 64 {beside(large, f'groups of {SIZE}')}"
    return text, worst(by_effect(small, 75.3 - 72.8), by_level(-large))


def wagma_size_time() -> tuple[str, str]:
    """The time of a round with groups of 64 over that with groups of 8."""
    found = ablation_ends(rows_of("wagma_ablations.csv"))
    ratio = of(found, "groups of 64")["seconds"] / of(found, f"groups of {SIZE}")["seconds"]
    return f"{ratio:.2f} times as long", by_ratio(ratio, 1.24)


def wagma_without(csv: str, method: str, published: float) -> tuple[str, str]:
    """An ablation beside changing groups of 8.

    Args:
        csv: of the study.
        method: the ablation.
        published: its accuracy in the paper.
    """
    gap = of(ablation_ends(rows_of(csv)), method)["gap"]
    return beside(gap, f"changing groups of {SIZE}"), by_effect(gap, WAGMA_TABLE["WAGMA-SGD"] - published)


# MATCHA.


def matcha_bytes() -> tuple[str, str]:
    """MATCHA with half of the messages beside D-PSGD on a ring."""
    half = of(bytes_ends(rows_of(BYTES)), "MATCHA, budget 0.5")
    return f"{beside(half['gap'], 'D-PSGD')}, {half['ratio']:.1f} times fewer bytes", by_level(half["gap"])


def matcha_epochs() -> tuple[str, str]:
    """MATCHA with half of the messages beside all links, after equal numbers of steps on six graphs."""
    found = matcha_ends(rows_of(MATCHA)).pivot(index="graph", columns="budget", values="accuracy")
    gaps = found[1.0] - found[0.5]
    text = f"{gaps.min():+.2f} to {gaps.max():+.2f} points below all links on {len(gaps)} graphs"
    return text, by_level(gaps.max())


def matcha_time() -> tuple[str, str]:
    """The time of D-PSGD over that of MATCHA with the best budget."""
    best = fastest(matcha_ends(rows_of(MATCHA)))["factor"]
    return f"{best.min():.1f} to {best.max():.1f} times less on {len(best)} graphs", by_effect(best.max() - 1, 4.0)


# PowerGossip and other codes.

TUNED = ("CHOCO, signs", "CHOCO, top 1 %", "DeepSqueeze, signs")
"""Codes with a tuned step size, whose messages are of the size of PowerGossip's."""


def power_accuracy() -> tuple[str, str]:
    """PowerGossip beside D-PSGD."""
    power = of(bytes_ends(rows_of(BYTES)), "PowerGossip, rank 1")
    verdict = worst(by_level(power["gap"]), by_ratio(power["ratio"], 30))
    return f"{beside(power['gap'], 'D-PSGD')}, {power['ratio']:.0f} times fewer bytes", verdict


def power_tuned() -> tuple[str, str]:
    """PowerGossip beside the best tuned code."""
    found = bytes_ends(rows_of(BYTES)).set_index("method")
    power, codes = found.loc["PowerGossip, rank 1"], found.loc[list(TUNED)]
    best = codes["accuracy"].idxmax()
    listed = ", ".join(f"{name} {row['accuracy']:.1f} % ({row['megabytes']:.0f} MB)" for name, row in codes.iterrows())
    text = f"{power['accuracy']:.1f} % ({power['megabytes']:.0f} MB); {listed}"
    return text, by_level(codes.loc[best, "accuracy"] - power["accuracy"])


def choco_bytes() -> tuple[str, str]:
    """The bytes of D-PSGD until it is as accurate as CHOCO at the end, over those of CHOCO."""
    rows = rows_of(BYTES)
    curves = rows[~rows["is_tuning"]].groupby(["method", "step"])[["test", "megabytes"]].mean()
    choco, plain = curves.loc["CHOCO, top 1 %"].iloc[-1], curves.loc["D-PSGD"]
    ratio = plain[plain["test"] <= choco["test"]]["megabytes"].iloc[0] / choco["megabytes"]
    return f"with the top 1 % {ratio:.0f} times fewer bytes to {100 - choco['test']:.1f} %", by_ratio(ratio, 100)


def deep_squeeze() -> tuple[str, str]:
    """DeepSqueeze beside CHOCO with equal codes."""
    found = bytes_ends(rows_of(BYTES)).set_index("method")["accuracy"]
    gap = found["CHOCO, signs"] - found["DeepSqueeze, signs"]
    return f"with signs {beside(gap, 'CHOCO')}", by_limit(gap, 0.0, LEVEL)


def moniqua() -> tuple[str, str]:
    """Moniqua beside D-PSGD."""
    row = of(bytes_ends(rows_of(BYTES)), "Moniqua, 8 bits")
    text = f"8 bits: {beside(row['gap'], 'D-PSGD')}, {row['ratio']:.1f} times fewer bytes"
    return text, worst(by_level(row["gap"]), by_ratio(row["ratio"], 32))


# dpwa.


def who_is_ahead(times: pd.DataFrame) -> str:
    """Return whether gossip is ahead with few workers, and all-reduce with many.

    Args:
        times: seconds to the target by the number of workers: dpwa, all-reduce; NaN: it is never reached.
    """
    gossip_leads = times["dpwa"].lt(times["all-reduce"])
    few, many = gossip_leads[times.index <= FEW], ~gossip_leads[times.index >= MANY]
    halves = [bool(part.all()) for part in (few, many) if len(part)]
    return YES if halves == [True, True] else IN_PART if any(halves) else NO


def dpwa_times(times: pd.DataFrame) -> tuple[str, str]:
    """The seconds to the target accuracy of dpwa and all-reduce."""
    texts = [
        f"{row['dpwa']:.0f} s and {row['all-reduce']:.0f} s of all-reduce with {workers} workers"
        if row["dpwa"] > 0
        else f"never and {row['all-reduce']:.0f} s of all-reduce with {workers} workers"
        for workers, row in times.iterrows()
    ]
    return f"to two points below all-reduce at the end: {', '.join(texts)}", who_is_ahead(times)


def dpwa_late() -> tuple[str, str]:
    """The times of dpwa and all-reduce with 64 workers, two of them late."""
    reached = late_ends(rows_of(LATE)).set_index("method")["reached"]
    return dpwa_times(pd.DataFrame({name: {64: reached[name]} for name in ("dpwa", "all-reduce")}))


def dpwa_numbers() -> tuple[str, str]:
    """The times of dpwa and all-reduce by the number of workers."""
    return dpwa_times(times_to_target(rows_of("crossover.csv")))


def power_iterations() -> tuple[str, str]:
    """The bits to agree of rank 1 with 32 iterations, beside higher ranks with equal bytes in a round."""
    bits = rows_of("power_iterations.csv").groupby(["rank", "iterations"])["megabits"].mean()
    one, ranks = bits.loc[1, 32], bits[[rank > 1 for rank, _ in bits.index]]
    text = (
        f"{one:.2f} Mbit to 1 % with rank 1 and 32 iterations, {ranks.min():.2f} to {ranks.max():.2f} with ranks of 2 "
        f"to 8 and as many products; {bits.loc[1, 1]:.2f} with rank 1 and one iteration"
    )
    return text, by_limit(one / bits.min() - 1, EXACT, 0.05)


_FEW_NODES = "up to 8 nodes: the accuracy of all-reduce"
_NODES = "32 nodes: within 1.2 points of all-reduce (76.2 %), ResNet-50 on ImageNet"
_ABOVE = "more accurate than D-PSGD: 74.8 % and 71.3 %, 64 GPUs, measured by the authors of WAGMA-SGD"
_EPOCHS = (
    "learns as much in an epoch as all-reduce, 128 GPUs; the authors of WAGMA-SGD measured 66.9 % and 75.9 % with 64"
)
_FAST = "4 to 8 times as fast per epoch as synchronous methods on a shared network, 128 GPUs"
_THROUGHPUT = (
    "throughput 1.26 times that of all-reduce and 1.25 times that of SGP, 64 GPUs, two random ones 320 ms late"
)
_ORDER = "accuracy of all-reduce 75.9 %, WAGMA-SGD 75.3, SGP 74.8, D-PSGD 71.3, AD-PSGD 66.9, 64 GPUs"
_SIZES = "groups of 8, the square root of 64: 2.5 points above groups of 4, and groups of 64 gain nothing"
_FIXED = "groups that never change end 3.1 points below (72.2 %)"
_NONE = "without groups, with averages over all every 10 steps only, 6.8 points below (68.5 %)"
_HALF = "error per epoch equal to D-PSGD's with a budget of 0.5"
_CROSSOVER = (
    "asynchronous gossip is ahead with up to about 32 workers, and all-reduce with about 100 (Jin et al., 2016)"
)
_IMAGES = "CIFAR-10 at 16 pixels, 64 workers, two late"


_AT_32, _AT_64, _OF_128 = {"workers": (32, 64)}, {"workers": (64, 64)}, {"workers": (64, 128)}


def ablations(theirs: str, measure: Callable[..., tuple[str, str]], *arguments: Any) -> list[Headline]:
    """Return the headlines of an ablation, for images and for digits."""
    csvs = {_IMAGES: "wagma_ablations_images.csv", DIGITS: "wagma_ablations.csv"}
    return [
        Headline("WAGMA-SGD", theirs, scale, (csv,), "wagma_ablations", partial(measure, csv, *arguments), _AT_64)
        for scale, csv in csvs.items()
    ]


FOUNDING: Sequence[Headline] = (
    Headline("SGP", _FEW_NODES, SMALL, (NUMBERS,), "worker_numbers", sgp_few),
    Headline("SGP", _NODES, SMALL, (NUMBERS,), "worker_numbers", sgp_many, {"workers": (32, 32)}),
    Headline("SGP", _ABOVE, SMALL, (NUMBERS,), "worker_numbers", partial(sgp_above, NUMBERS), _AT_32),
    Headline("SGP", _ABOVE, DIGITS, (LATE,), "straggler_accuracy", partial(sgp_above, LATE), _AT_64),
    Headline("Overlap SGP", "as accurate as SGP", SMALL, (NUMBERS,), "worker_numbers", overlap_accuracy),
    Headline("AD-PSGD", _FAST, DIGITS, (LATE,), "straggler_accuracy", adpsgd_throughput, _OF_128),
    Headline("AD-PSGD", _EPOCHS, SMALL, (NUMBERS,), "worker_numbers", adpsgd_accuracy, {"workers": (32, 128)}),
    Headline("AD-PSGD", _EPOCHS, DIGITS, (LATE,), "straggler_accuracy", adpsgd_late, _OF_128),
    Headline("WAGMA-SGD", _THROUGHPUT, DIGITS, (LATE,), "straggler_accuracy", wagma_throughput, _AT_64),
    Headline("WAGMA-SGD", _ORDER, SMALL, (NUMBERS,), "worker_numbers", partial(wagma_order, NUMBERS), _AT_32),
    Headline("WAGMA-SGD", _ORDER, DIGITS, (LATE,), "straggler_accuracy", partial(wagma_order, LATE), _AT_64),
    *ablations(_SIZES, wagma_sizes),
    Headline(
        "WAGMA-SGD",
        "a round with groups of 64 takes 1.24 times as long as with groups of 8",
        DIGITS,
        ("wagma_ablations.csv",),
        "wagma_ablations",
        wagma_size_time,
        _AT_64,
    ),
    *ablations(_FIXED, wagma_without, f"fixed groups of {SIZE}", 72.2),
    *ablations(_NONE, wagma_without, "no groups", 68.5),
    Headline("MATCHA", _HALF, RING, (BYTES,), "accuracy_bytes", matcha_bytes),
    Headline(
        "MATCHA",
        _HALF,
        "drawn digits, the six published graphs",
        (MATCHA,),
        "matcha_time",
        matcha_epochs,
    ),
    Headline(
        "MATCHA",
        "up to 5 times less time than D-PSGD to the same training loss",
        "drawn digits, the six published graphs",
        (MATCHA,),
        "matcha_time",
        matcha_time,
    ),
    Headline(
        "PowerGossip",
        "the accuracy of D-PSGD on a ring of 8 with 30 to 50 times fewer bytes (ResNet-20, CIFAR-10)",
        RING,
        (BYTES,),
        "accuracy_bytes",
        power_accuracy,
    ),
    Headline(
        "PowerGossip",
        "on par with tuned codes, with nothing to tune",
        RING,
        (BYTES,),
        "accuracy_bytes",
        power_tuned,
    ),
    Headline(
        "PowerGossip",
        "power iterations send the most information in a bit",
        "consensus on a ring of 8, matrices of 100 x 100",
        ("power_iterations.csv",),
        "power_iterations",
        power_iterations,
    ),
    Headline(
        "CHOCO-SGD",
        "two orders of magnitude fewer bytes than without compression",
        RING,
        (BYTES,),
        "accuracy_bytes",
        choco_bytes,
    ),
    Headline("DeepSqueeze", "ahead of earlier compressed methods", RING, (BYTES,), "accuracy_bytes", deep_squeeze),
    Headline(
        "Moniqua",
        "one bit for each parameter costs no accuracy (ResNet-20, CIFAR-10)",
        RING,
        (BYTES,),
        "accuracy_bytes",
        moniqua,
        {"times fewer bytes": (4, 32)},
    ),
    Headline(
        "dpwa",
        _CROSSOVER,
        "drawn digits, 10 Gbit/s",
        ("crossover.csv",),
        "crossover",
        dpwa_numbers,
    ),
    Headline("dpwa", _CROSSOVER, DIGITS, (LATE,), "straggler_accuracy", dpwa_late),
)
"""In the order of the page."""
