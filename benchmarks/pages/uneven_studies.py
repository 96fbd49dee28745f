"""Pages of the studies of `benchmarks.studies.uneven`, and their rows of the page Reproduction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from benchmarks.claims.uneven import unsigned
from benchmarks.pages.base import QUESTIONS, Page
from benchmarks.pages.headline import EXACT, Headline, by_effect, by_level, by_limit, by_order, order_found
from benchmarks.pages.image_studies import SETUP, beside, ends_of_all, of
from benchmarks.pages.study_tables import Rule, has_trainings, study_page, together
from benchmarks.record import rows_of
from benchmarks.studies.ends import split_ends
from benchmarks.studies.uneven import GRAPHS, NUMBERS, RING, SKEWED, most_workers, on_base_graphs
from benchmarks.tables import table

WORDS = {
    "alike": "data alike",
    "alpha 1": "classes drawn from Dirichlet(1)",
    "alpha 0.1": "classes drawn from Dirichlet(0.1)",
    "1-2 classes": "one or two classes on each worker",
}
"""The splits in words."""
TASK = "CIFAR-10 and 22,154 parameters, without normalisation"
SPREAD = (
    "A worker draws its images from a shard of its own, and each seed has other shards. ± is the standard deviation."
)
TABLE_2: Mapping[str, tuple[float, float]] = {
    "all-reduce": (90.2, 90.2),
    "RelaySGD": (90.2, 89.5),
    "SGP": (89.5, 89.2),
    "QG-DSGDm": (89.5, 84.8),
    "D2": (88.2, 88.5),
}
"""Accuracies in per cent of RelaySum's Table 2 with momentum, for alpha = 1 and 0.1."""
ON_BASE_GRAPH = tuple(name for name in on_base_graphs(NUMBERS[-1]) if name.startswith("BaseGraph"))


def accuracy_text(row: pd.Series) -> str:
    """Return an accuracy with its spread; a single seed has none."""
    return f"{row['accuracy']:.1f}" if pd.isna(row["spread"]) else f"{row['accuracy']:.1f} ± {row['spread']:.1f}"


def below(row: pd.Series) -> str:
    """Return a method with its gap in words, with one decimal."""
    return f"{row['method'].partition(',')[0]} {unsigned(row['gap'])}"


# Uneven data.

WHERE: Mapping[str, str] = {"exponential": "on the exponential graph", "two trees": "on two trees", RING: "on a ring"}
"""The graphs of methods in a sentence; a method without one averages over all workers."""


def on_its_graph(row: pd.Series) -> str:
    """Return a method with its graph and its gap in words."""
    name, _, points = below(row).rpartition(" ")
    return " ".join(filter(None, (name, WHERE.get(GRAPHS[row["method"]], ""), points)))


def of_gossip(rows: pd.DataFrame, split: str) -> pd.DataFrame:
    """Return the ends of a split but for all-reduce, the smallest gap first."""
    found = split_ends(rows, split)
    return found[found["method"] != "all-reduce"].sort_values("gap")


def all_below(found: pd.DataFrame) -> str:
    """Return methods with their gaps in words."""
    return together([below(row) for _, row in found.iterrows()])


def counts(seeds: pd.Series) -> str:
    """Return how many seeds the methods of a split have."""
    low, high = seeds.min(), seeds.max()
    return f"{low}" if low == high else f"{low} or {high}"


def data_said(rows: pd.DataFrame) -> str:
    """Return the result of the study in words."""
    others = of_gossip(rows, SKEWED[-1])
    shown = others[(others["method"] == "SGP") | others.index.isin([others.index[0], others.index[-1]])]
    first, *rest = [on_its_graph(row) for _, row in shown.iterrows()]
    method, _, points = first.rpartition(" ")
    ring = all_below(others[others["method"].map(GRAPHS) == RING])
    ends = {split: split_ends(rows, split) for split in SKEWED}
    levels = [of(found, "all-reduce") for found in ends.values()]
    accuracies, rates = (together([f"{level[name]:{form}}" for level in levels]) for name, form in LEVELS.items())
    numbers = {split: counts(found["seeds"]) for split, found in ends.items()}
    seeds = together([f"{number} with {split}" for split, number in numbers.items()])
    if len({*numbers.values()}) == 1:
        seeds = numbers[SKEWED[0]]
    return " ".join(
        (
            f"**With one or two classes on each of 16 workers, {method} ends "
            f"{together([f'{points} points below all-reduce', *rest])}.**",
            f"This is an order of methods and graphs together. Compare the methods on the ring with D-PSGD: {ring}.",
            f"All-reduce reaches {accuracies} % with {together(SKEWED)} in {rows['steps'].max():,} steps, with the "
            f"rates {rates}, which short trainings chose. Seeds: {seeds}.",
        )
    )


LEVELS: Mapping[str, str] = {"accuracy": ".1f", "rate": "g"}
"""The columns that say how all-reduce trained, with their formats."""


def data_summary(rows: pd.DataFrame) -> str:
    """Write graphs, bytes, accuracies and gaps, two columns for each split, in the order of the last one."""
    shown, columns = pd.DataFrame(), {"method": ("method", "s"), "graph": ("graph", "s")}
    for split in SKEWED:
        found = split_ends(rows, split).set_index("method")
        shown[f"{split} accuracy"] = found.apply(accuracy_text, axis="columns")
        shown[f"{split} gap"] = found["gap"].round(1) + 0.0
        shown["megabytes"] = found["megabytes"]
        columns[f"{split} accuracy"] = (f"{split}, %", "s")
        columns[f"{split} gap"] = ("below", "+.1f")
    columns["megabytes"] = ("MB sent by a worker", ".0f")
    shown = shown.sort_values(f"{SKEWED[-1]} gap").rename_axis("method").reset_index()
    return table(shown.assign(graph=shown["method"].map(GRAPHS)), columns)


def relay_order() -> tuple[str, str]:
    """The order of Table 2 of RelaySum."""
    counts = []
    for column, split in enumerate(SKEWED[:-1]):
        means = split_ends(rows_of("uneven_data.csv"), split).set_index("method")["accuracy"].to_dict()
        counts.append(by_order(means, {name: row[column] for name, row in TABLE_2.items()}))
    in_order, half, total = (sum(count) for count in zip(*counts, strict=True))
    text = f"{in_order} of {total} pairs in order, {half} with at least half of the gap"
    return text, order_found(in_order, total)


def relay_gap() -> tuple[str, str]:
    """RelaySGD and SGP below all-reduce on uneven data."""
    found = split_ends(rows_of("uneven_data.csv"), "alpha 0.1")
    relay, sgp = (of(found, name)["gap"] for name in ("RelaySGD", "SGP"))
    return f"{relay:.1f} points below; SGP {sgp:.1f}", by_limit(relay, 0.7 + EXACT, sgp)


# Numbers of workers that are no power of two.


def numbers_said(rows: pd.DataFrame) -> str:
    """Return the result of the study in words."""
    found = split_ends(rows, "alike")
    most = most_workers(found)
    last = found[found["workers"] == most].set_index("method")["gap"]
    base = [f"{last[name]:.1f} with {name.partition(', ')[2]}" for name in ON_BASE_GRAPH if name in last]
    text = (
        f"**With {most} workers and data alike, SGP on the exponential graph ends {last['SGP']:.1f} points below "
        f"all-reduce, and D-PSGD on `BaseGraph` {together(base)}.**"
    )
    uneven = split_ends(rows, "alpha 0.1")
    gaps = uneven.set_index("method")["gap"]
    if {"SGP", ON_BASE_GRAPH[0]} <= {*gaps.index}:
        one = f"ends {gaps[ON_BASE_GRAPH[0]]:.1f} points below, and SGP {gaps['SGP']:.1f}"
        text += f" With {WORDS['alpha 0.1']} and {uneven['workers'].max()} workers, `BaseGraph` with one peer {one}."
    return text


def numbers_summary(rows: pd.DataFrame) -> str:
    """Write the accuracy of all-reduce, and the points below it of each method, a row for each number of workers."""
    texts = []
    for split in ("alike", "alpha 0.1"):
        found = split_ends(rows, split)
        if found.empty:
            continue
        base = found[found["method"] == "all-reduce"].set_index("workers")
        gaps = found[found["method"] != "all-reduce"].pivot(index="workers", columns="method", values="gap")
        gaps = gaps.round(1) + 0.0  # no minus before zero
        shown = gaps.assign(base=base.apply(accuracy_text, axis="columns"), seeds=base["seeds"]).reset_index()
        columns = {
            "workers": ("workers", "d"),
            "seeds": ("seeds", "d"),
            "base": ("all-reduce, %", "s"),
            **{name: (f"{name}, points below", "+.1f") for name in ("SGP", *ON_BASE_GRAPH) if name in gaps},
        }
        texts += [f"With {WORDS[split]}:", table(shown, columns)]
    return "\n\n".join(texts)


def sgp_small() -> tuple[str, str]:
    """SGP with up to 8 workers."""
    found = split_ends(rows_of("uneven_workers.csv"), "alike")
    own = found[(found["method"] == "SGP") & (found["workers"] <= 8)]
    text = "; ".join(f"{beside(row.gap, 'it')} with {row.workers}" for row in own.itertuples())
    return text, by_level(own["gap"].max())


def base_graph() -> tuple[str, str]:
    """D-PSGD on `BaseGraph` with one peer beside SGP on the exponential graph, with 25 workers."""
    found = split_ends(rows_of("uneven_workers.csv"), "alpha 0.1").set_index("method")
    base, sgp = found.loc[ON_BASE_GRAPH[0]], found.loc["SGP"]
    gap = base["accuracy"] - sgp["accuracy"]
    spread = max(base["spread"], sgp["spread"])
    text = f"{abs(gap):.1f} points {'above' if gap > 0 else 'below'}; the standard deviation is up to {spread:.1f}"
    return text, by_effect(gap, 1.5)


LAST = tuple((f"{SKEWED[-1]}: {name}", 16) for name in ("all-reduce", "SGP", "RelaySGD", "D-PSGD"))
PLANNED = {"uneven_data": 90, "uneven_workers": 111}
"""The numbers of trainings of the studies."""
UNEVEN_STUDIES: Mapping[str, Page] = {
    **study_page(
        "uneven_data",
        "Accuracy on uneven data",
        data_said,
        has_trainings(*LAST),
        planned=PLANNED["uneven_data"],
        render=ends_of_all,
        summary=data_summary,
        setup=SETUP.format(
            task=TASK,
            batch=8,
            more=f"""\
{SPREAD} "alpha 1" and "alpha 0.1": the shares of the classes in a shard are drawn from a Dirichlet distribution. "1-2
classes": the images in the order of their classes are cut into 16 shards. Rates are chosen by images of all classes.
RelaySGD is on two binary trees; local SGD averages over all workers in every eighth step.""",
        ),
        measures=("gossip_modules/algorithms", "gossip_modules/lab", "gossip_modules/rounds"),
        question=QUESTIONS[0],
    ),
    **study_page(
        "uneven_workers",
        "Accuracy with 3 to 25 workers",
        numbers_said,
        has_trainings(*((f"alike: {name}", NUMBERS[-1]) for name in on_base_graphs(NUMBERS[-1]))),
        planned=PLANNED["uneven_workers"],
        render=ends_of_all,
        summary=numbers_summary,
        setup=SETUP.format(
            task=TASK,
            batch=8,
            more=f"""\
{SPREAD} All workers take equal numbers of steps, so that more workers read more images.""",
        ),
        measures=("gossip_modules/graph_manager", "gossip_modules/lab", "gossip_modules/mixing_manager"),
        question=QUESTIONS[0],
    ),
}

_HEADLINES: Mapping[Rule, Headline] = {
    has_trainings(*((f"{split}: {name}", 16) for split in SKEWED[:-1] for name in TABLE_2)): Headline(
        "RelaySGD",
        "Table 2 with momentum: the order of five methods for Dirichlet 1 and 0.1",
        "16 workers, CIFAR-10 at 16 pixels, 22,154 parameters, 800 steps",
        ("uneven_data.csv",),
        "uneven_data",
        relay_order,
    ),
    has_trainings(*((f"alpha 0.1: {name}", 16) for name in ("all-reduce", "RelaySGD", "SGP"))): Headline(
        "RelaySGD",
        "0.7 points below all-reduce for Dirichlet 0.1; SGP 1.0",
        "16 workers, CIFAR-10 at 16 pixels, 22,154 parameters, 800 steps",
        ("uneven_data.csv",),
        "uneven_data",
        relay_gap,
    ),
    has_trainings(*(("alike: SGP", n) for n in NUMBERS if n <= 8)): Headline(
        "SGP",
        "up to 8 nodes: the accuracy of all-reduce",
        "CIFAR-10 at 16 pixels, 22,154 parameters, 400 steps, data alike",
        ("uneven_workers.csv",),
        "uneven_workers",
        sgp_small,
    ),
    has_trainings(*((f"alpha 0.1: {name}", NUMBERS[-1]) for name in ("all-reduce", "SGP", ON_BASE_GRAPH[0]))): Headline(
        "Base-(k+1) graph",
        "87.1 % on Base-2, 85.6 % on the exponential graph, 25 workers, Dirichlet 0.1",
        "CIFAR-10 at 16 pixels, 22,154 parameters, 400 steps",
        ("uneven_workers.csv",),
        "uneven_workers",
        base_graph,
    ),
}
UNEVEN_HEADLINES: Sequence[Headline] = [
    each for is_ready, each in _HEADLINES.items() if each.page in UNEVEN_STUDIES and is_ready(rows_of(each.csvs[0]))
]
"""The headlines of papers that these studies measure, of those whose trainings have ended."""
