"""The page of the study of HALoS's regions, and its row of the page Reproduction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from benchmarks.pages.base import QUESTIONS, Page
from benchmarks.pages.headline import IN_PART, NO, YES, Headline, by_ratio, rows_of
from benchmarks.pages.markdown import grid, table
from benchmarks.pages.study_tables import all_rows, has_trainings, study_page, trainings

CSV, WORKERS, PLANNED = "regions.csv", 16, 21
OTHERS = ("async local SGD", "DiLoCo, DyLU", "DiLoCo")
"""The methods after HALoS in the published order, from the shortest time to the longest."""
HALOS, SHORT = "HALoS", "HALoS, K = 4"
"""At the published settings, and with the number of pushes that has the lowest validation loss."""
PUBLISHED = {"DiLoCo": 7.5, "async local SGD": 2.1}
"""The time to a loss over that of HALoS, up to."""
LOSSES = (2.8, 2.7, 2.6, 2.5, 2.4, 2.3, 2.2, 2.1)


def curves(rows: pd.DataFrame, base: str) -> pd.DataFrame:
    """Return seconds and test loss by method and step of a HALoS and the others, mean over their common seeds."""
    own = _compared(rows[~rows["is_tuning"]], base)
    return own.groupby(["method", "step"])[["seconds", "test", "megabytes", "waiting"]].mean()


def _compared(rows: pd.DataFrame, base: str) -> pd.DataFrame:
    """Return the rows of a HALoS and the others with their common seeds."""
    last, methods = trainings(rows), [base, *OTHERS]
    num = last[last["method"].isin(methods)].groupby("seed")["method"].nunique()
    return rows[rows["method"].isin(methods) & rows["seed"].isin(num.index[num == len(methods)])]


def reached(curve: pd.DataFrame, loss: float) -> float:
    """Return the time at which a curve is at a loss for the first time, between its points; NaN: it never is."""
    at = (curve["test"] <= loss).to_numpy()
    if not at.any():
        return math.nan
    k, seconds, test = int(at.argmax()), curve["seconds"].to_numpy(), curve["test"].to_numpy()
    if k == 0:
        return float(seconds[0])
    share = (test[k - 1] - loss) / (test[k - 1] - test[k])
    return float(seconds[k - 1] + share * (seconds[k] - seconds[k - 1]))


def region_ends(rows: pd.DataFrame, base: str = HALOS) -> pd.DataFrame:
    """Return the ends of a HALoS and the others in the published order, and the time to the highest loss at an end.

    Returns:
        By method: rate, seeds, loss, lowest, highest, step (seconds), waiting (percent), gigabytes between regions,
        seconds (to the loss), ratio (of seconds to those of HALoS).
    """
    order, found, last = [base, *OTHERS], curves(rows, base), _compared(trainings(rows), base)
    ends, own = found.groupby("method").last().loc[order], last.groupby("method")
    target, steps = ends["test"].max(), last["steps"].iloc[0]
    seconds = pd.Series({name: reached(found.loc[name], target) for name in order})
    spread = own["test"].agg(["count", "min", "max"]).set_axis(["seeds", "lowest", "highest"], axis=1)
    return ends.join(spread).assign(
        rate=own["rate"].first(),
        loss=ends["test"],
        step=ends["seconds"] / steps,
        waiting=100 * ends["waiting"],
        gigabytes=WORKERS * ends["megabytes"] / 1e3,
        seconds=seconds,
        ratio=seconds / seconds[base],
    )


def variants(rows: pd.DataFrame) -> list[str]:
    """Return the HALoS that have run with the first seed."""
    return [base for base in (HALOS, SHORT) if base in set(trainings(rows)["method"])]


def region_said(rows: pd.DataFrame) -> str:
    """Return the result of the study in words."""
    texts = []
    for base in variants(rows):
        found = region_ends(rows, base)
        diloco, alone = found["ratio"]["DiLoCo"], found["ratio"]["async local SGD"]
        said = (
            f"to {found['loss'].max():.2f} nats per byte DiLoCo takes {diloco:.1f} times as long as HALoS, and "
            f"asynchronous local SGD {alone:.1f} times: {'' if _is_published(found) else 'not '}the published order."
        )
        texts.append(
            f"**T{said[1:]}**" if base == HALOS else f"After {SHORT.partition(' = ')[2]} pushes for 32, {said}"
        )
    return f"{' '.join(texts)} The paper says up to 7.5 and 2.1 times. The authors trained six times as many steps."


def _is_published(found: pd.DataFrame) -> bool:
    return list(found["ratio"].sort_values(kind="stable").index) == list(found.index)


def region_summary(rows: pd.DataFrame) -> str:
    """Write a table of methods and the times to several losses, for each HALoS that has run."""
    columns = {
        "method": ("method", "s"),
        "rate": ("rate", "g"),
        "seeds": ("seeds", "d"),
        "loss": ("nats per byte", ".3f"),
        "lowest": ("lowest", ".3f"),
        "highest": ("highest", ".3f"),
        "step": ("s per step", ".2f"),
        "waiting": ("waiting, %", ".0f"),
        "gigabytes": ("GB between regions", ",.0f"),
    }
    parts, times = [], []
    for base in variants(rows):
        found = region_ends(rows, base)
        last = {"seconds": (f"s to {found['loss'].max():.2f}", ",.0f"), "ratio": (f"times {base}", ".2f")}
        parts.append(table(found.reset_index(names="method"), {**columns, **last}))
    for base in [name for name in trainings(rows)["method"].unique() if name.startswith(HALOS)]:
        own, names = curves(rows, base), (HALOS, *OTHERS) if base == HALOS else (base,)
        times += [
            {"method": name, "loss": loss, "seconds": reached(own.loc[name], loss)} for name in names for loss in LOSSES
        ]
    said = "Seconds until the loss is so many nats per byte; empty if it never is:"
    return "\n\n".join(
        [*parts, said, grid(pd.DataFrame(times), ("method", "method"), "loss", "seconds", ",.0f", "{:.1f}")]
    )


def region_rows(rows: pd.DataFrame) -> str:
    """Write the end of each training, and the grid of rates."""
    columns = {
        "validation": ("validation", ".3f"),
        "test": ("test", ".3f"),
        "seconds": ("seconds", ",.0f"),
        "cpu_seconds": ("CPU s", ".0f"),
    }
    return all_rows(rows, columns, "Validation losses", ".3f")


def halos_headline() -> tuple[str, str]:
    """The order of the times to a loss, and their ratios to the time of HALoS, at the published settings."""
    rows = rows_of(CSV)
    texts = []
    for base in variants(rows):
        own = region_ends(rows, base)["ratio"]
        listed = ", ".join(f"{name.replace(',', ' with')} {own[name]:.1f}" for name in OTHERS)
        texts.append(f"{base}: {listed} times as long")
    found = region_ends(rows)
    own = found["ratio"]
    sizes = min((by_ratio(own[name], ratio) for name, ratio in PUBLISHED.items()), key=[NO, IN_PART, YES].index)
    return "; ".join(texts), sizes if _is_published(found) else IN_PART if own.idxmin() == HALOS else NO


SETUP = """\
16 workers of unequal speed are in four regions of [a study in the Lab](index.md#studies-in-the-lab). Links have 0.117
to 0.935 Gbit/s between regions, and 100 inside. Speeds, links and settings are those of
[the authors' simulator](https://github.com/utnslab/halos). So are the bytes of Pythia-70M, and its step of 238 ms on
the fastest worker. A decoder of one layer with 12,288 parameters reads four sequences of 32 characters in a step of a
worker. After {steps:,} steps of a worker in the mean, the training ends: all methods read equal data. The learning rate
rises in the first twentieth of the steps, and falls by a cosine to a tenth. The loss is that of the model of the
(global) server. Times are those of the mean curve over seeds, between its 32 points.

| method | communication | settings |
|---|---|---|
| DiLoCo | all workers wait for the slowest one and for an all-reduce along a ring | \
H = 32, outer rate 0.7, momentum 0.9 |
| DiLoCo, DyLU | a worker takes steps in proportion to its speed, at most H | those of DiLoCo |
| async local SGD | with DyLU, workers push drifts to a server in the first region: Delayed Nesterov steps | \
H = 32, rate 0.05 for each push, momentum 0.9, N = 32 |
| HALoS | with DyLU, workers push to the server of their region | H = 8, rate 0.2, momentum 0.9, N = 16 |
| HALoS, between regions | after K pushes a region's drift goes to a global server, whose model comes back | \
K = 32; of 4, 8, 16 and 32, 4 has the lowest validation loss after three \
seeds; rate 0.15, momentum 0.5, N = 2; the model is merged with a share of 0.25 |"""

REGION_STUDY: Mapping[str, Page] = study_page(
    "regions",
    "Time to a loss in HALoS's four regions",
    region_said,
    has_trainings(*((name, WORKERS) for name in (HALOS, *OTHERS))),
    planned=PLANNED,
    render=region_rows,
    summary=region_summary,
    setup=SETUP.format(steps=1024),
    measures=("gossip_modules/lab", "gossip_modules/optim"),
    question=QUESTIONS[1],
)

REGION_HEADLINES: Sequence[Headline] = (
    Headline(
        "HALoS",
        "time to a loss in the order HALoS, async local SGD, DiLoCo with DyLU, DiLoCo; DiLoCo takes up to 7.5 times as "
        "long as HALoS, async local SGD 2.1 times",
        "decoder of 12,288 parameters, the authors' regions by the Lab's clock",
        (CSV,),
        "regions",
        halos_headline,
    ),
)
