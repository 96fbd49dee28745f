"""The page about the gap between gossip and all-reduce at equal samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from benchmarks.claims.tuned import best
from benchmarks.pages.base import Page
from benchmarks.pages.many_steps import MANY_STEPS
from benchmarks.pages.markdown import table as as_table
from benchmarks.pages.second_moments import SECOND_MOMENTS
from benchmarks.record import DTYPES, RESULTS
from visualization.loss_against_time import LINES, NUM_STEPS

UNITS = {"language": "nats per byte", "images": "% errors"}


def parts(rows: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield title, unit and the table of `best` for each part of the study."""
    for (task, workers, steps), own in rows.groupby(["task", "workers", "steps"], sort=False):
        unit = UNITS[task.partition(",")[0]]
        yield f"{task[0].upper()}{task[1:]}, {workers} workers, {steps:,} steps", unit, best(own)


def tables(rows: pd.DataFrame) -> str:
    """A table for each part of the study."""
    texts = []
    for title, unit, found in parts(rows):
        base = found[found["change"] == "all-reduce"].iloc[0]
        digits = 3 if unit.startswith("nats") else 1
        lines = [
            f"| change | batch | rate | seeds | {unit} | lowest to highest | beyond all-reduce |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for row in found.itertuples():
            mean, low, high, gap = (
                f"{value:.{digits}f}" for value in (row.mean, row.lowest, row.highest, row.mean - base["mean"])
            )
            lines.append(
                f"| {row.change} | {row.batch} | {row.rate:g} | {row.seeds} | {mean} | {low} to {high} | {gap} |"
            )
        texts += [f"**{title}**", "\n".join(lines)]
    return "\n\n".join(texts) + "\n"


SHOWN = {
    "SGP": "SGP, AdamW",
    "SGP, GossipAdamW": "SGP, GossipAdamW",
    "SGP, 2 peers, GossipAdamW": "SGP with two peers, GossipAdamW",
    "Overlap SGP": "Overlap SGP, AdamW",
    "Overlap SGP, GossipAdamW": "Overlap SGP, GossipAdamW",
    "local SGD, 4": "local SGD, period 4, AdamW",
    "local SGD, 4, GossipAdamW": "local SGD, period 4, GossipAdamW",
    "D-PSGD": "D-PSGD, AdamW",
}
"""Changes of the short table of language, and how it names them."""


CAUSES = """\
## Causes

**Language: the second moments of Adam.** A worker that gossips squares its own noisy gradients. All-reduce squares
their mean, with n times less noise.

- At the rate 0.004, with the first seed, all-reduce ends at 2.316 nats and SGP at 2.508. With the second moments of the
  mean gradient, SGP ends at 2.335, with the first at 2.435, with both at 2.316.
- With exact averages of the parameters in each step and AdamW, the gap is 0.12. So the distance between models makes
  0.04 of the 0.15.
- `GossipAdamW` computes the second moments of the mean gradient from two averages that each worker has, and sends
  nothing. With exact averages of the parameters the gap is gone.
- AccumAdam (arXiv 2410.11998), which the library had before, ends 0.10 to 0.57 nats above all-reduce.

**Images: the distance between the models.** SGD is linear in the gradient, so exact averages in each step would be
all-reduce. With 25 workers, two peers end 2.6 points above it, mixed momentum 2.2, both 1.5, an exact average in each
fourth round 2.4."""
"""What the rows of all changes show."""


def language(rows: pd.DataFrame) -> str:
    """A few changes of the language model, in the mean over seeds, and the causes of the gap."""
    found = best(rows[(rows["task"] == "language") & (rows["steps"] == NUM_STEPS)]).set_index("change")
    base = found.loc["all-reduce"]
    shown = pd.DataFrame([{"name": "all-reduce, AdamW", **base}, *({"name": SHOWN[x], **found.loc[x]} for x in SHOWN)])
    shown["gap"] = shown["mean"] - base["mean"]
    columns = {
        "name": ("method", "s"),
        "seeds": ("seeds", "d"),
        "mean": ("nats per byte", ".3f"),
        "gap": ("beyond all-reduce", ".3f"),
    }
    return f"{as_table(shown.sort_values('mean'), columns)}\n\n{CAUSES}"


def default(cells: pd.DataFrame) -> str:
    """The losses of the gap study beside the times of the emulated cluster.

    Args:
        cells: of default_cells.csv.
    """
    gap = pd.read_csv(RESULTS / "gap.csv", dtype=DTYPES)
    losses = best(gap[(gap["task"] == "language") & (gap["steps"] == NUM_STEPS)]).set_index("change")
    done = cells[cells["error"].isna()].astype({"fleet_step_ms": float})
    times = done.groupby(["method", "rate_gbit"])["fleet_step_ms"].median().unstack()
    heads = [f"ms per step, {rate:g} Gbit/s | s for {NUM_STEPS} steps" for rate in times]
    lines = [
        f"| method | optimizer | nats per byte | lowest to highest | {' | '.join(heads)} |",
        "|---|---|---:|---:|" + "---:|---:|" * len(heads),
    ]
    for label, (change, method) in LINES.items():
        own = losses.loc[change]
        cell = [f"{ms:.0f} | {ms * NUM_STEPS / 1e3:.1f}" for ms in times.loc[method]]
        start = f"| {label.partition(', ')[0]} | {label.rpartition(', ')[2]} | {own['mean']:.3f} "
        lines.append(f"{start}| {own['lowest']:.3f} to {own['highest']:.3f} | {' | '.join(cell)} |")
    return "\n".join(lines) + "\n"


def stragglers(cells: pd.DataFrame) -> str:
    """Milliseconds of a step of the emulated cluster, by method and speed of the links.

    Args:
        cells: of straggler_cells.csv.
    """
    done = cells[cells["error"].isna()].astype({"fleet_step_ms": float})
    times = done.groupby(["title", "rate_gbit"])["fleet_step_ms"].median().unstack()
    times = times.sort_values(times.columns[len(times.columns) // 2])
    lines = [
        f"| method | {' | '.join(f'{rate:g} Gbit/s' for rate in times)} |",
        "|---|" + "---:|" * len(times.columns),
        *(f"| {title} | {' | '.join(f'{ms:.0f}' for ms in row)} |" for title, row in times.iterrows()),
    ]
    return "\n".join(lines) + "\n"


GAP: Mapping[str, Page] = {
    "default": Page(
        "Loss against time: gossip, DDP and Decent-DP",
        "default_cells.csv",
        """\
**At 1 and 10 Gbit/s, Overlap SGP with GossipAdamW takes 0.77 and 0.71 of the time of the faster DDP, and ends 0.06 nats
above it.** SGP takes 1.00 and 0.81 of the time, and ends 0.05 above. Decent-DP takes 1.14 and 1.03 times as long as
Overlap SGP, and ends 0.15 above. At 0.1 Gbit/s, DDP with its fp16 hook is faster than SGP, and local SGD takes half of
its time.

![Test loss against seconds for each speed of the links.](../assets/default.svg)""",
        measures=("gossip_modules/rounds", "gossip_modules/transport", "gossip_modules/wrappers"),
        render=default,
        setup="""\
Losses come from [the accuracy study](gap.md), 320 steps of eight workers; times come from eight
[emulated hosts](index.md#emulated-hosts), where 2.8 million parameters are computed for 40 ms per step. Loss and time
can be measured apart, since these methods wait for each other. DDP with its fp16 hook counts with the loss of
all-reduce in float32, and Decent-DP with the loss of D-PSGD, which has the same update. Each cell ran once, by
SGD. [The Lab](../guides/default.md) also weighs steps.""",
        also=("gap.csv",),
        question="Is it as fast?",
        result="At 1 Gbit/s Overlap SGP with GossipAdamW takes 0.77 of the time of the faster DDP, for 0.06 nats more.",
    ),
    "stragglers": Page(
        "Step time with stragglers",
        "straggler_cells.csv",
        """\
**AD-PSGD is as fast as ranks without communication, at all three link speeds: 49 to 50 ms for 48.** Overlap SGP and
Decent-DP follow (62 to 68 ms at 1 and 10 Gbit/s): they wait for a straggler one step later. SGP, WAGMA and DDP take 99
to 106 ms at 1 Gbit/s. At 0.1 Gbit/s, the 352 ms of a message decide.""",
        measures=(
            "gossip_modules/ad_psgd",
            "gossip_modules/rounds",
            "gossip_modules/transport",
            "gossip_modules/wagma",
            "gossip_modules/wrappers",
        ),
        render=stragglers,
        setup="""\
Four [emulated hosts](index.md#emulated-hosts) train 1.1 million parameters. A step computes for 40 ms, and each rank
takes ten times as long in a twentieth of its steps, at the same steps for all methods. The table has the number of
ranks over the sum of their steps per second, in ms. The loss after a step differs between methods: see
[loss against time](default.md).""",
        question="Is it as fast?",
        result="At 1 Gbit/s AD-PSGD takes 50 ms per step, Overlap SGP 63 and DDP 102.",
    ),
    "gap": Page(
        "Accuracy of gossip against all-reduce",
        "gap.csv",
        """\
**Language: with AdamW, SGP ends 0.15 nats above all-reduce. With [`GossipAdamW`][gossip_modules.GossipAdamW] it ends
0.05 above, with two peers 0.02.** Overlap SGP ends 0.06 above, local SGD with a period of four 0.09 instead of 0.26.
Seeds of all-reduce spread over 0.08.

**Images: with SGD, SGP ends 3.2 points above all-reduce with 25 workers, and 1.4 with 8.** Two peers and mixed
momentum, which the library does not have, halve the gap of 25. No learning rate closes it: take AllReduce or large
batches, and see [all studies](worker_numbers.md#images).""",
        measures=("gossip_modules/lab", "gossip_modules/optim", "gossip_modules/rounds"),
        render=tables,
        script="06779bc3:benchmarks/gap.py",
        summary=language,
        parts=(MANY_STEPS, SECOND_MOMENTS),
        setup="""\
This is [a study in the Lab](index.md#studies-in-the-lab), but rates are those of whole trainings. A decoder of 120,000
parameters learns the bytes of Python's standard library by AdamW with betas (0.9, 0.95) and weight decay 0.01, on eight
sequences of 64 bytes per worker and step. Three convolutions learn 30,000 images of CIFAR-10 at 16 pixels by SGD with
momentum 0.9 and weight decay 5e-4; 4,000 are for validation, 8,000 for the test.

`GossipAdamW` was tried at two rates. Rows of "GossipAdamW without the bound L" and "with
m'^2 in place of s'" had the optimizer of `git show ec27f1a6:benchmarks/gap.py`.""",
        question="Is it as accurate?",
        result="Language: SGP with GossipAdamW ends 0.05 nats above all-reduce, with AdamW 0.15. Images: 3.2 points "
        "with 25 workers.",
    ),
}
