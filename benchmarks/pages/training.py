"""Pages about training with a fixed number of ranks: the time of a step, the loss, and the effects of faults."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pandas as pd

from benchmarks.faults.fault import FAULTS
from benchmarks.faults.table import WRAPPERS, newest
from benchmarks.faults.table import markdown as faults_markdown
from benchmarks.pages.base import Page
from benchmarks.pages.headline import rows_of
from benchmarks.pages.markdown import grid, table
from benchmarks.pages.study_tables import together


def faults(rows: pd.DataFrame) -> str:
    """The table of faults and what deviates; errors are shown letter by letter."""
    lines = faults_markdown(rows).splitlines()
    escaped = (re.sub(r"([\\`*_\[\]<>])", r"\\\1", line) if line.startswith("- ") else line for line in lines)
    return "\n".join(escaped) + "\n"


def fault_table(rows: pd.DataFrame) -> str:
    """The table of faults alone."""
    return faults(rows).partition("Deviations")[0]


def errors(rows: pd.DataFrame) -> str:
    """Errors, names and times by wrapper."""
    rows = newest(rows)
    must = (rows["role"] == "survivor") & ~rows["fault"].map(lambda name: FAULTS[name].is_survived)
    found = []
    for wrapper, title in WRAPPERS.items():
        own = rows[must & (rows["wrapper"] == wrapper)]
        killed = own[own["fault"].isin(("kill-0", "kill-odd", "kill-even"))]
        found.append(
            {
                "title": title,
                "errors": f"{own['error_type'].notna().sum()} of {len(own)}",
                "names": f"{(own['names_the_dead'] == True).sum()} of {len(own)}",  # noqa: E712
                "kill": killed["seconds"].max(),
                "wait": rows.loc[rows["wrapper"] == wrapper, "wait_seconds"].max(),
            }
        )
    columns = {
        "title": ("method", "s"),
        "errors": ("survivors with an error", "s"),
        "names": ("errors that name the dead rank", "s"),
        "kill": ("slowest error after a kill, s", ".1f"),
        "wait": ("longest wait, s", ".1f"),
    }
    return table(pd.DataFrame(found), columns)


_STEP_COLUMNS = {
    "model": ("model", "s"),
    "ranks": ("ranks", "d"),
    "library": ("library", "s"),
    "method": ("method", "s"),
    "standard": ("beside", "s"),
    "wall_ms": ("wall, ms", ".2f"),
    "ratio": ("ratio", ".3f"),
    "cpu_ms": ("CPU, ms", ".2f"),
    "cpu_ratio": ("ratio", ".3f"),
    "cpu_ratio_low": ("from", ".3f"),
    "cpu_ratio_high": ("to", ".3f"),
    "cpu_over_ms": ("over, ms", ".2f"),
}
_CODES = {
    "choco-sign": "CHOCO-SGD with signs",
    "sgp-bf16": "SGP in bfloat16",
    "powergossip": "PowerGossip",
    "wagma": "WAGMA-SGD",
    "ar": "AllReduceDataParallel",
}


def codes_said(rows: pd.DataFrame) -> str:
    """Return in words the time of a step by methods with codes, as a share of DDP's and beside loops by hand."""
    times = rows.set_index("method")["cpu_ms"]
    own = times / times["ddp"]
    found = [
        f"{title} {own[name]:.2f}" + (f" (by hand {own[f'hand-{name}']:.2f})" if f"hand-{name}" in own else "")
        for name, title in _CODES.items()
    ]
    return (
        f"**Beside DistributedDataParallel on one machine, with 9.4 M parameters, a step takes this share of its CPU "
        f"time: {together(found)}.** A link of such a machine costs nothing, so this is the price of codes where "
        "they save nothing."
    )


def robust_said(rows: pd.DataFrame) -> str:
    """Return in words the time of a step by rules that bound wrong models, as a share of the step of D-PSGD."""
    shares = rows.set_index(["model", "method"])["cpu_ratio"]
    found = [
        f"{shares['resnet18-16', name]:.2f} ({shares['resnet18', name]:.2f}) by {title}"
        for name, title in {
            "clipped": "ClippedGossip with one neighbour in a round",
            "clipped-all": "ClippedGossip with all three",
            "trimmed-all": "the trimmed mean of all three",
            "bounded-all": "D-PSGD with `max_relative_distance`",
        }.items()
    ]
    return (
        "**With four ranks on two cores and a ResNet-18, a step of 16 images (of two) takes this share of the CPU time "
        f"of D-PSGD with as many neighbours: {together(found)}.** These rules need the norm of a whole difference, or "
        "the entries of all models."
    )


def key_said(rows: pd.DataFrame) -> str:
    """Return in words the time of a step of a membership with a key, as a share of one without."""
    keyed = rows[rows["method"] == "member-key"].set_index("model")["cpu_ratio"]
    found = [f"{ratio:.2f} for {_MODELS[model]}" for model, ratio in keyed.items()]
    return f"**With a key a step takes this share of the CPU time without: {together(found)}.**"


_MODELS = {
    "mlp": "a tiny perceptron",
    "tensors": "1,000 small tensors",
    "resnet18": "ResNet-18",
    "resnet18-16": "ResNet-18, 16 images",
    "wide": "9.4 M in 8 tensors",
}


def steps(rows: pd.DataFrame) -> str:
    """The ratio of CPU times to the loop written by hand, by method and model."""
    own = rows[(rows["library"] == "this") & rows["method"].isin(("sgp", "osgp", "diloco", "ar", "decent-dp"))]
    shown = own.assign(method=own["method"] + " / " + own["standard"], model=own["model"].map(_MODELS))
    return grid(shown, ("method", "method / loop beside it"), "model", "cpu_ratio", ".2f")


def before_and_after(rows: pd.DataFrame) -> str:
    """The CPU time of a step beyond its standard, before and after a change."""
    own = rows[~rows["method"].isin(("local", "hand-sgp", "hand-diloco"))]
    shown = own.assign(library=own["library"].where(own["library"] == "this", "before").replace("this", "after"))
    shown = shown.assign(method=shown["model"].map(_MODELS) + ": " + shown["method"])
    return grid(shown, ("method", "CPU ms beyond the loop beside it"), "library", "cpu_over_ms", ".2f")


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


TRAINING: Mapping[str, Page] = {
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
    "step_time": Page(
        "Time of a step against hand-written loops",
        "step_time.csv",
        """\
**On a ResNet-18, SGP and all-reduce take the CPU time of a loop written by hand, Overlap SGP 1.06 times and DiLoCo 1.07
times.** On a tiny perceptron with steps of 1 ms, the work around a round shows: SGP takes 1.17 times the hand-written
loop, Overlap SGP 1.40, DiLoCo 1.56. Decent-DP takes 1.07 and 1.20.""",
        _STEP_COLUMNS,
        measures=(
            "gossip_modules/flat",
            "gossip_modules/rounds",
            "gossip_modules/transport",
            "gossip_modules/wrappers",
        ),
        summary=steps,
        setup="""\
Methods take turns of a few steps in one run. A ratio is the median over turns of the method's time over the time of the
loop beside it. SGP, Overlap SGP and DiLoCo stand beside a loop of 30 lines in plain torch.distributed
(`benchmarks/by_hand.py`), all-reduce beside DistributedDataParallel with `gradient_as_bucket_view=True`, the others
beside a step without communication. Read the CPU time, of one rank: the wall time, of the slowest rank, varies on two
busy cores. "Over, ms" is the median difference of the CPU times. "Library" is a commit, or "this": the commit of the
row. "mlp" has six layers of 64, "tensors" 1,000 tensors of up to 16 numbers, "wide" 9.4 M parameters in eight
tensors.""",
        parts=(
            Page(
                "Codes and narrow messages beside DistributedDataParallel",
                "step_codes.csv",
                codes_said(rows_of("step_codes.csv")),
                _STEP_COLUMNS,
                measures=("gossip_modules/compression", "gossip_modules/rounds", "gossip_modules/flat"),
            ),
            Page(
                "Robust rules beside D-PSGD",
                "step_robust.csv",
                robust_said(rows_of("step_robust.csv")),
                _STEP_COLUMNS,
                measures=("gossip_modules/algorithms", "gossip_modules/rounds"),
            ),
            Page(
                "A membership with a key",
                "step_key.csv",
                key_said(rows_of("step_key.csv")),
                _STEP_COLUMNS,
                measures=("gossip_modules/membership", "gossip_modules/transport"),
            ),
            Page(
                "An outer step of DiLoCo before and after it computes in place",
                "outer_step.csv",
                "**An outer step every second step takes 1.05 times the CPU time "
                "of the hand-written loop, 1.22 before.** "
                "The model has 9.4 M parameters in eight tensors. The machine did other work.",
                _STEP_COLUMNS,
                measures=("gossip_modules/algorithms", "gossip_modules/rounds"),
                summary=before_and_after,
            ),
            Page(
                "A step of WAGMA before and after it averages in place",
                "wagma_step.csv",
                "**With 9.4 M parameters WAGMA takes 34.8 ms of CPU time beyond a local step, 41.3 before.** SGP takes "
                "1.7 ms beyond the hand-written loop, which takes 23.2 beyond a local step.",
                _STEP_COLUMNS,
                measures=("gossip_modules/wagma",),
                summary=before_and_after,
            ),
            Page(
                "A step of a tiny perceptron before and after the lockstep engines became one",
                "step_time_lockstep.csv",
                "SGP takes 2.46 ms of CPU time, 2.45 before, and Overlap SGP 2.66, 2.71 before.",
                _STEP_COLUMNS,
            ),
        ),
        question="Is it as fast?",
        result="On a ResNet-18 SGP takes 1.01 times the CPU time of a hand-written loop, DiLoCo 1.07.",
    ),
    "faults": Page(
        "Errors when ranks are killed, stopped or leave",
        "faults.csv",
        """\
**All 312 survivors get an error, and 311 errors name the dead rank.** These are jobs without a membership, with a
timeout of 10 s. After a kill the error comes within 5.6 s, with AD-PSGD and WAGMA within 0.1 s. The longest wait is
11.4 s, and no process has to be killed. [Failures](../guides/failures.md) says what is guaranteed.""",
        render=faults,
        summary=errors,
        setup="""\
Four Gloo ranks train as processes on one machine with two cores, once for each fault and wrapper. Times run from the
fault to the error. Since these rows were measured, the backward of AllReduce raises torch's own error, which names no
rank.""",
        parts=(
            Page(
                "Ranks with loader processes, with slow exits, and suspended ones",
                "faults_lost.csv",
                "All 60 survivors get an error with the name of the rank. With a timeout of 5 s the error comes within "
                "3.7 s of a kill although the loader processes of the rank live on, and within 1.6 s of an exception "
                "or Ctrl-C although its exit handlers take 7.5 s. The machine was busy with other work.",
                render=fault_table,
            ),
            Page(
                "Seven faults after the lockstep engines became one",
                "faults_lockstep.csv",
                "All 126 survivors get an error, and 125 errors name the victim, with a timeout of 5 s. No process has "
                "to be killed, and the longest wait is 6.2 s.",
                render=fault_table,
            ),
            Page(
                "A random fault every few seconds after the lockstep engines became one",
                "chaos_lockstep.csv",
                "SGP on eight workers of a membership, with 28 faults. No worker fails or hangs, and the sum of the "
                "push-sum weights stays.",
                {
                    "method": ("method", "s"),
                    "num_workers": ("workers", "d"),
                    "seconds": ("s", ".0f"),
                    "faults": ("faults", "d"),
                    "failed": ("failed", "d"),
                    "hung": ("hung", "d"),
                    "weight_drift": ("drift of the weights", ".0e"),
                    "accuracy": ("accuracy, %", ".2f"),
                    "undisturbed_accuracy": ("without faults, %", ".2f"),
                },
            ),
            Page(
                "All faults at an earlier commit, on a quieter machine",
                "faults_quieter.csv",
                "After a kill the error comes within 2.5 s, but for dpwa. 307 of 312 errors name the dead rank.",
                render=fault_table,
            ),
            Page(
                "All faults before errors named the dead rank",
                "faults_before.csv",
                "Of 312 survivors 247 get an error, and 183 errors name the dead rank. 69 of 448 processes have to be "
                "killed.",
                render=fault_table,
            ),
        ),
        question="What does a failure cost?",
        result="Without a membership, all survivors get an error, and 311 of 312 errors name the dead rank.",
    ),
}
