"""The page about the gap between gossip and all-reduce at equal samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from benchmarks.pages.base import Page
from benchmarks.record import DTYPES, RESULTS
from visualization.loss_against_time import LINES, NUM_STEPS

UNITS = {"language": "nats per byte", "images": "% errors"}
UNTUNED = {("language", 320): 0.008, ("images", 800): 0.1}
"""By task and steps: a change for which no such rate was tried is not tuned."""


def best(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of each change at the rate that is best on the validation split with the lowest seed, a row per change.

    Args:
        rows: of gap.csv, of one task with one number of workers and of steps.

    Returns:
        By change and batch: rate, seeds, and of the test split mean, lowest and highest; own (of the models of single
        workers); distance of these from their mean, relative; from the lowest mean to the highest.
    """
    found = []
    for (change, batch), own in rows.groupby(["change", "batch"], sort=False):
        tuned = own[own["run_seed"] == own["run_seed"].min()]
        rate = tuned.loc[tuned["validation"].idxmin(), "rate"]
        if rate == tuned["rate"].max() < UNTUNED.get((own["task"].iloc[0], own["steps"].iloc[0]), 0.0):
            continue  # no time was left for a rate that is too high
        own = own[own["rate"] == rate]
        test = own["test"]
        ends = (rate, len(own), test.mean(), test.min(), test.max(), own["test_own"].mean(), own["distance"].mean())
        found.append((change, batch, *ends))
    columns = ["change", "batch", "rate", "seeds", "mean", "lowest", "highest", "own", "distance"]
    return pd.DataFrame(found, columns=columns).sort_values("mean")


def parts(rows: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield title, unit and the table of `best` for each part of the study."""
    for (task, workers, steps), own in rows.groupby(["task", "workers", "steps"], sort=False):
        unit = UNITS[task.partition(",")[0]]
        yield f"{task[0].upper()}{task[1:]}, {workers} workers, {steps:,} steps", unit, best(own)


def tables(rows: pd.DataFrame) -> str:
    """A table for each part of the study, then how it was measured."""
    texts = []
    for title, unit, table in parts(rows):
        base = table[table["change"] == "all-reduce"].iloc[0]
        digits = 3 if unit.startswith("nats") else 1
        lines = [
            f"| change | batch | rate | seeds | {unit} | lowest to highest | beyond all-reduce |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for row in table.itertuples():
            mean, low, high, gap = (
                f"{value:.{digits}f}" for value in (row.mean, row.lowest, row.highest, row.mean - base["mean"])
            )
            lines.append(
                f"| {row.change} | {row.batch} | {row.rate:g} | {row.seeds} | {mean} | {low} to {high} | {gap} |"
            )
        texts += [f"## {title}", "\n".join(lines)]
    sources = []
    for (command, commit), part in rows.groupby(["command", "commit"], sort=False):
        first = part.iloc[0]
        made = f"{first['date']}, commit {commit}, torch {first['torch']}, {first['device']}, {len(part)} trainings."
        sources.append(f"    {command}\n\n{made}")
    return "\n\n".join([*texts, "## Measured by", *sources]) + "\n"


def default(cells: pd.DataFrame) -> str:
    """The losses of the gap study beside the times of the emulated cluster, then how the times were measured.

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
    picture = "![Test loss against seconds for each speed of the links.](../assets/default.svg)"
    return "\n\n".join([picture, "\n".join(lines), *_sources(cells)]) + "\n"


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
    return "\n\n".join(["\n".join(lines), *_sources(cells)]) + "\n"


def _sources(cells: pd.DataFrame) -> list[str]:
    sources = []
    for (command, commit), part in cells.groupby(["command", "commit"], sort=False):
        first = part.iloc[0]
        made = f"{first['date']}, commit {commit}, torch {first['torch']}, {first['machine']}, {first['cores']} cores."
        sources.append(f"    {command}\n\n{made}")
    return sources


GAP: Mapping[str, Page] = {
    "default": Page(
        "The default, DDP and Decent-DP: loss against time",
        "default_cells.csv",
        """\
The losses of [the gap study](gap.md) after 320 steps of eight workers, and the time of these steps on an emulated
cluster of eight hosts: a model with the parameters of a small ResNet-18, 2.8 million, whose step computes for 40 ms.
The loss does not depend on the links, since these methods wait for each other. DDP with its fp16 hook has the
loss of all-reduce in float32, and Decent-DP the loss of D-PSGD, whose law it has, on pairs at exponential distances.
Times are of all ranks together, of one run of each cell, with SGD as optimizer. A band spans the seeds.

**At 1 and 10 Gbit/s Overlap SGP by GossipAdamW needs 0.77 and 0.71 of the time of the faster DDP for 0.06 nats more,
and SGP 1.00 and 0.81 of it for 0.05 more.** Decent-DP takes 1.14 and 1.03 times as long as Overlap SGP, and ends 0.15
above all-reduce. At 0.1 Gbit/s no method that sends a model in float32 per step is fast: DDP with its fp16 hook is
before SGP there, and local SGD takes half of its time.""",
        render=default,
        also=("gap.csv",),
    ),
    "stragglers": Page(
        "Stragglers at three speeds of links",
        "straggler_cells.csv",
        """\
Milliseconds of a step of four emulated hosts with a model of 1.1 million parameters: all ranks over the sum of their
steps per second. A step computes for 40 ms, and each rank takes ten times as long in a twentieth of its steps. All
methods see the same delays. The loss after a step is another one for each method: see [the default](default.md) for
methods in lockstep.

**AD-PSGD, in which no rank waits for another one, is as fast as ranks that do not communicate, at all three speeds.**
Of the methods with a message in each step, Overlap SGP and Decent-DP follow: they wait for a straggler in the next step
only. SGP, WAGMA and DDP take about as long as each other. At 0.1 Gbit/s the time of a message, 352 ms, decides.""",
        render=stragglers,
    ),
    "gap": Page(
        "What separates gossip from all-reduce",
        "gap.csv",
        """\
Gossip and all-reduce with equal models, data, batches and steps, in the Lab: the loss that gossip costs, its causes,
one change at a time, and remedies. The decoder of language has 120,000 parameters and learns the bytes of Python's
standard library by AdamW with betas (0.9, 0.95), on eight sequences of 64 bytes for each worker and step. The network
of images has three convolutions and learns CIFAR-10 at 16 pixels by SGD with momentum 0.9. The learning rate rises in
the first tenth of the steps and falls linearly to zero. Its highest value is tuned for each change alike on a
validation split, with the first seed. All figures are of a test split, and of the mean of the models of all workers, in
the mean over seeds. `--pack`, with a folder of images per class, writes the file of CIFAR-10. At the end, where the
rate is zero, the models of single workers are as good: the largest difference is 0.0001 nats and 0.07 % of errors.

**Language: the second moments of Adam are the cause.** A worker that gossips sees the squares of its own noisy
gradients; all-reduce squares their mean, whose noise is n times smaller. AdamW divides its steps by the root of these
squares.

- At the rate 0.004 and with the first seed all-reduce ends at 2.316 nats and SGP at 2.508. With the first moments of
  the mean gradient, which no cluster has for free, SGP ends at 2.435, with its second moments at 2.335, and with both
  at 2.316. So second moments make nine tenths of the gap.
- No learning rate makes up for it. With the best rate of each SGP is 0.15 nats above all-reduce, and 0.12 if the
  parameters of all workers are averaged exactly in each step. So the distance between the models makes 0.04.
- **[`GossipAdamW`][gossip_modules.GossipAdamW] computes the second moments of the mean gradient from two averages
  that each worker has, and sends nothing.** With the exact average of parameters in each step the gap is gone. SGP is
  0.05 above all-reduce, with two peers 0.02, Overlap SGP 0.06, with two peers 0.04; seeds of all-reduce spread over
  0.08. Local SGD with a period of four is 0.09 above instead of 0.26. After 1,000 steps, with one seed and all-reduce
  at 0.004 only, SGP is 0.004 above all-reduce, Overlap SGP 0.018, and SGP by AdamW 0.06. With another text,
  the one of Python 3.11, and one seed SGP is 0.015 above all-reduce, with messages in bfloat16 0.019, by AdamW 0.161.
- AccumAdam with its usual betas is worse than AdamW in so few steps: its moments follow windows of s steps, so that
  they reach back s times as far. With betas to the power of s SGP is 0.09 above all-reduce.

**Images: the distance between the models is the cause.** SGD is linear in the gradient, so exact averages of the
parameters in each step would be all-reduce. With 25 workers SGP ends 3.2 points above it, with two peers 2.6, with
four peers 2.1, with momentum that is mixed as models are 2.2, with each fourth round exact 2.4. Less noise closes the
gap: with four times the batch SGP is 0.3 points above all-reduce with this batch (one seed). With 8 workers it is 1.5
points above, with two peers 0.8 (the first seed). No learning rate closes it. Take AllReduce, large batches or more
peers where this matters.

The two remedies for Adam that failed are in the table too: the square of the first moment in place of its average,
and second moments of the mean gradient of rare steps, which cost an all-reduce each. Rows of "GossipAdamW without the
bound L" and "with m'^2 in place of s'" were measured with the optimizer in `git show ec27f1a6:benchmarks/gap.py`.
`GossipAdamW` was tried at two rates only, the best ones of this form. The GPU was lent for minutes: changes with
fewer than three seeds ended for time, and changes whose tuning did are left out.""",
        render=tables,
        script="cb643b0e:benchmarks/gap.py",
    ),
}
