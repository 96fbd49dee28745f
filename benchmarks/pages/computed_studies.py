"""Pages of the studies that train nothing, and their rows of the page Reproduction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import pandas as pd

from benchmarks.pages.base import QUESTIONS, Page
from benchmarks.pages.headline import IN_PART, NO, YES, Headline, by_limit, rows_of
from benchmarks.pages.mail_goodput import MAIL_GOODPUT
from benchmarks.pages.markdown import grid, table
from benchmarks.pages.study_tables import has, study_page, together
from benchmarks.studies.utilisation import PERIODS, methods
from gossip_modules.lab import LabPlan

SYSTEMS = (
    "SGP with a membership",
    "torchft, all-reduce",
    "DDP, a checkpoint every 600 s",
    "DDP, a checkpoint every 30 s",
)
"""Those whose goodput is compared."""
MEASURES = ("gossip_modules/algorithms", "gossip_modules/lab", "gossip_modules/rounds")
FIFTH = 0.2
"""The share by which a utilisation may differ from the published one."""
SCALE = 16
"""The published model and rates are larger than those of the cluster by this factor."""
CELL = ("method", "period", "mbit")


# Compute utilisation.


def measured_on_the_cluster() -> pd.DataFrame:
    """Return the measured utilisation in percent, by method, period and rate: see `utilisation_cells.csv`.

    The reference is a local step, the median over all cells. The rates are scaled back.
    """
    rows = rows_of("utilisation_cells.csv")
    rows = rows[rows["error"].isna()]
    steps = rows.groupby(["method", "rate_gbit", "planned_steps", "repeat"])["mean_step_ms"].mean()
    local = steps["local"].median()
    names = {(period, LabPlan.of(method).text): name for period in PERIODS for name, method in methods(period).items()}
    own = steps.drop("local").groupby(level=["method", "rate_gbit"]).median()
    found = []
    for (text, gbit), step_ms in own.items():
        chosen = LabPlan.of({"ddp": "ar"}.get(text, text)).chosen
        key = names[chosen.period, chosen.text], chosen.period, round(1000 * SCALE * gbit)
        found.append((*key, step_ms, 100 * local / step_ms))
    return pd.DataFrame(found, columns=[*CELL, "step_ms", "measured_percent"])


def utilisations(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the cells that were measured or published: computed, measured and published.

    Args:
        rows: of the clock.
    """
    return rows.merge(measured_on_the_cluster(), "left", on=list(CELL))


def within_a_fifth(rows: pd.DataFrame, name: str) -> tuple[int, int]:
    """Return how many cells of a column differ from the published ones by at most a fifth, and how many there are."""
    own = rows[rows["published_percent"].notna() & rows[name].notna()]
    return int(((own[name] / own["published_percent"] - 1).abs() <= FIFTH).sum()), len(own)


def utilisation_said(rows: pd.DataFrame) -> str:
    """Return the result of the study in words."""
    cells = utilisations(rows)
    near, total = within_a_fifth(cells, "measured_percent")
    near_by_clock, _ = within_a_fifth(cells, "utilisation_percent")
    own = cells[cells["published_percent"].notna()]
    ratio = own["measured_percent"] / own["published_percent"]
    far = [
        f"H = {row.period} at {row.mbit} Mbit/s ({ratio[row.Index]:.2f})"
        for row in own.itertuples()
        if abs(ratio[row.Index] - 1) > FIFTH
    ]
    off = (cells["utilisation_percent"] / cells["measured_percent"])[cells["published_percent"].notna()]
    texts = [
        f"**On an emulated cluster {near} of {total} published compute utilisations of DiLoCo come out within a "
        f"fifth.** The ratio of ours to theirs is {ratio.min():.2f} to {ratio.max():.2f}.",
        *([f"Outside {'is' if len(far) == 1 else 'are'} {together(far)}."] if far else []),
        f"The clock of the Lab gives {near_by_clock} of {total}, and {off.min():.2f} to {off.max():.2f} times the "
        "measured utilisation.",
    ]
    at = cells[(cells["period"] == 32) & (cells["mbit"] == 200)].set_index("method")["measured_percent"].dropna()
    if {"DiLoCo", "Streaming DiLoCo, carry, 4 bits", "SparseLoCo"} <= set(at.index):
        late = at["Streaming DiLoCo, carry, 4 bits"]
        texts.append(
            f"At 200 Mbit/s and H = 32 DiLoCo computes for {at['DiLoCo']:.0f} % of the time, Streaming DiLoCo in 4 "
            f"bits for {late:.0f} %, and SparseLoCo for {at['SparseLoCo']:.0f} %."
        )
    return " ".join(texts)


def utilisation_summary(rows: pd.DataFrame) -> str:
    """Write measured, computed and published cells of DiLoCo, then the other methods."""

    def texts(cells: pd.DataFrame, *names: str) -> pd.Series[str]:
        forms = [cells[name].map(lambda x: "-" if pd.isna(x) else f"{x:.3g}") for name in names]
        return forms[0].str.cat(forms[1:], sep=" / ")

    cells = utilisations(rows)
    own = cells[cells["published_percent"].notna()]
    shown = texts(own, "measured_percent", "utilisation_percent", "published_percent")
    own = own.assign(period=own["period"].astype(str), text=shown)
    parts = [
        "DiLoCo, in percent: measured / by the clock / published.",
        grid(own, ("period", "H"), "mbit", "text", "s", "{} Mbit/s", how="first"),
        "Other methods, in percent: measured / by the clock. A hyphen: not measured.",
    ]
    others = cells[cells["published_percent"].isna()]
    others = others[others.groupby(["method", "period"])["measured_percent"].transform("count") > 0]
    others = others.assign(text=texts(others, "measured_percent", "utilisation_percent"))
    for period, part in others.groupby("period"):
        title = f"H = {period}" if period > 1 else "a round in each step"
        parts.append(grid(part, ("method", title), "mbit", "text", "s", "{} Mbit/s", how="first"))
    return "\n\n".join(parts)


def steps_table(rows: pd.DataFrame) -> str:
    """Write the time of a step of each trial, the mean over ranks."""
    key = ["method", "rate_gbit", "planned_steps", "repeat"]
    heads = {"method": ("method", "s"), "rate_gbit": ("Gbit/s", "g"), "planned_steps": ("steps", "d")}
    columns = {**heads, "repeat": ("repeat", "d"), "mean_step_ms": ("ms per step", ".1f")}
    return table(rows.groupby(key, sort=False)["mean_step_ms"].mean().reset_index(), columns)


def hosts_table(rows: pd.DataFrame) -> str:
    """Write medians over repeats of the time of a step of all hosts, and their share of the processors."""
    key = ["hosts", "rate_gbit", "planned_ms", "straggle_chance", "title"]
    shares = rows["hosts"] * rows["cpu_ms"] / (rows["cores"] * rows["mean_step_ms"])
    repeats = rows.assign(share=shares).groupby([*key, "repeat"], sort=False)[["fleet_step_ms", "share"]].mean()
    columns = {
        "hosts": ("hosts", "d"),
        "rate_gbit": ("Gbit/s", "g"),
        "planned_ms": ("ms of sleep", ".0f"),
        "straggle_chance": ("share of steps 10 times as long", ".2f"),
        "title": ("method", "s"),
        "fleet_step_ms": ("ms per step", ".1f"),
        "share": ("processor share", ".2f"),
    }
    return table(repeats.groupby(key, sort=False).median().reset_index().sort_values(key[:4], kind="stable"), columns)


def utilisation_headline() -> tuple[str, str]:
    """The published cells of DiLoCo."""
    near, total = within_a_fifth(utilisations(rows_of("utilisation.csv")), "measured_percent")
    text = f"{near} of {total} cells within a fifth"
    return text, YES if near == total else IN_PART if near > total / 2 else NO


# Agreement.


def code_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the means over seeds of each code at the step size that all seeds have, or the best one of the first."""
    found = []
    for method, own in rows.groupby("method", sort=False):
        order = own.sort_values(["rounds", "last_error"], na_position="last")
        counts = own["step_size"].map(own["step_size"].value_counts())
        step_size = own.loc[counts.idxmax(), "step_size"] if counts.max() > 1 else order["step_size"].iloc[0]
        best = own[own["step_size"] == step_size]
        tried = own[own["run_seed"] == own["run_seed"].min()]
        reached = best["rounds"].notna().all()
        found.append(
            {
                "method": method,
                "step_size": step_size,
                "seeds": len(best),
                "rounds": best["rounds"].mean() if reached else float("nan"),
                "megabits": best["megabits"].mean() if reached else float("nan"),
                "last_error": best["last_error"].mean(),
                "diverged": f"{int(tried['diverged'].sum())} of {len(tried)}",
            }
        )
    return pd.DataFrame(found).sort_values(["megabits", "last_error"])


def codes_said(rows: pd.DataFrame) -> str:
    """Return the result of the study in words."""
    found = code_table(rows).set_index("method")
    power, plain = found.loc["power-r1-i1"], found.loc["plain"]
    reached = found["rounds"].notna()
    best = found[reached].index[0]
    return (
        f"**PowerGossip needs {power['rounds']:.0f} rounds and {power['megabits']:.2f} Mbit to an error of 1 %, and "
        f"plain gossip {plain['rounds']:.0f} rounds and {plain['megabits']:.2f} Mbit.** {int(reached.sum())} of "
        f"{len(found)} codes reach 1 % in 800 rounds. {best} sends the fewest bits: "
        f"{found.loc[best, 'megabits']:.2f} Mbit."
    )


CODE_COLUMNS = {
    "method": ("method", "s"),
    "step_size": ("step size", ".3g"),
    "seeds": ("seeds", "d"),
    "rounds": ("rounds to 1 %", ".0f"),
    "megabits": ("Mbit", ".2f"),
    "last_error": ("error at the end", ".2g"),
    "diverged": ("step sizes that diverged", "s"),
}


def codes_summary(rows: pd.DataFrame) -> str:
    """Write the table of codes."""
    return table(code_table(rows), CODE_COLUMNS)


def power_codes_headline() -> tuple[str, str]:
    """PowerGossip's rounds and bits over three seeds."""
    row = code_table(rows_of("consensus_codes.csv")).set_index("method").loc["power-r1-i1"]
    off = max(abs(row["rounds"] / 550 - 1), abs(row["megabits"] / 3.5 - 1))
    text = f"{row['rounds']:.0f} rounds and {row['megabits']:.2f} Mbit; codes that need a step size beside it"
    return text, by_limit(off, 0.1, 0.5)


def pair_means(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the disagreement of both methods, by the law and as simulated, by workers and exchanges."""
    own = rows.groupby(["workers", "exchanges", "method"])[["law", "disagreement"]].mean().unstack()
    own.columns = [f"{method}, {'law' if name == 'law' else 'simulated'}" for name, method in own.columns]
    return own.assign(ratio=own["AD-PSGD, law"] / own["A2CiD2, law"])


def times_to_agree(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the exchanges of a worker until the disagreement is 0.001, by workers and method."""
    return rows.groupby(["workers", "method"])["exchanges_to_0.001"].first().unstack()


def pairs_said(rows: pd.DataFrame) -> str:
    """Return the result of the study in words."""
    times, means = times_to_agree(rows), pair_means(rows)
    own = means.loc[32]
    half = len(own) // 2  # the last ratio is that of two tiny numbers
    plain, fast = (times.loc[32, name] / times.loc[16, name] for name in ("AD-PSGD", "A2CiD2"))
    return (
        f"**To agree to 0.001 on a cycle of 32, a worker needs {times.loc[32, 'AD-PSGD']:.0f} exchanges with AD-PSGD "
        f"and {times.loc[32, 'A2CiD2']:.0f} with A2CiD2.** From 16 to 32 workers the number grows {plain:.1f} times, "
        f"and {fast:.1f} times with A2CiD2. After {own.index[half]} exchanges "
        f"A2CiD2 has {own['ratio'].iloc[half]:,.0f} times less disagreement on the cycle of 32."
    )


def pairs_summary(rows: pd.DataFrame) -> str:
    """Write the tables of cycles."""
    methods = ("AD-PSGD", "A2CiD2")
    columns = {"workers": ("workers", "d"), "exchanges": ("exchanges of a worker", "d")}
    columns |= {f"{name}, {how}": (f"{name}, {how}", ".3g") for name in methods for how in ("law", "simulated")}
    columns["ratio"] = ("ratio by the law", ",.0f")
    heads = {"workers": ("workers", "d"), **{name: (f"exchanges to 0.001, {name}", ".1f") for name in methods}}
    return "\n\n".join(
        [table(times_to_agree(rows).reset_index(), heads), table(pair_means(rows).reset_index(), columns)]
    )


def pairs_headline() -> tuple[str, str]:
    """The growth of the time to agree from a cycle of 16 to one of 32."""
    times = times_to_agree(rows_of("pairwise.csv"))
    plain, fast = (times.loc[32, name] / times.loc[16, name] for name in ("AD-PSGD", "A2CiD2"))
    text = f"from 16 to 32 workers {fast:.1f} times as long, without momentum {plain:.1f} times"
    return text, by_limit(fast, 1.2 * plain**0.5, plain - 1e-9)


# MATCHA.


def rho_said(rows: pd.DataFrame) -> str:
    """Return the result of the study in words."""
    whole = rows[rows["budget"] == 1].set_index("graph")["rho"]
    half = rows[rows["budget"] == 0.5].set_index("graph")["rho"]
    near = [str(graph) for graph in half.index if half[graph] <= whole[graph]]
    return (
        f"**With half of the messages MATCHA agrees at least as fast as with all links on {len(near)} of {len(half)} "
        f"published graphs ({', '.join(near)}).** On graph 0, the example of the paper, rho is {half[0]:.3f} with half "
        f"of the messages and {whole[0]:.3f} with all."
    )


def rho_summary(rows: pd.DataFrame) -> str:
    """Write rho by graph and budget."""
    return grid(rows.assign(graph=rows["graph"].astype(str)), ("graph", "graph"), "budget", "rho", ".3f", "budget {}")


def rho_headline() -> tuple[str, str]:
    """Rho of the paper's example with half of the messages and with all."""
    rho = rows_of("matcha_rho.csv").set_index(["graph", "budget"])["rho"]
    half, whole = rho[0, 0.5], rho[0, 1.0]
    return f"{half:.3f} and {whole:.3f}", YES if half <= whole else NO


# Goodput.


def goodput_said(rows: pd.DataFrame) -> str:
    """Return the result of the study in words."""
    own = rows.set_index(["workers", "failures", "system"])["goodput"]

    def shares(workers: int, failures: str) -> str:
        percent = [100 * own[workers, failures, name] for name in rows["system"].unique()]
        text = "{} %, torchft {} %, and DDP {} % with a checkpoint every ten minutes, {} % with one every 30 s"
        return text.format(*(f"{x:.2f}" for x in percent))

    return (
        f"**With 32 workers that fail once an hour each, SGP with a membership keeps {shares(32, 'one an hour')}.** "
        f"With 1,024 workers and the failures of Llama 3's training SGP keeps {shares(1024, 'Llama 3')}, "
        "if pauses go on to grow as from 16 to 32 workers. These figures are computed from pauses that were measured "
        "with 4 to 32 processes on two cores."
    )


def goodput_summary(rows: pd.DataFrame) -> str:
    """Write goodput in percent by number of workers, a table for each time between failures."""
    parts = []
    for failures, part in rows.groupby("failures", sort=False):
        hours = part["worker_hours"].iloc[0]
        shown = part.assign(percent=100 * part["goodput"])
        parts += [
            f"Failures: {failures}, {hours:,.0f} h between those of one worker. Goodput in percent:",
            grid(shown, ("system", "system"), "workers", "percent", ".2f", "{} workers"),
        ]
    return "\n\n".join([*parts, *_chaos()])


def _chaos() -> list[str]:
    """What was measured under a random fault every two seconds."""
    rows = rows_of("chaos.csv")
    found = rows.assign(
        between=rows["seconds"] / rows["kills"],
        percent=100 * rows["steps"] * rows["median_ms"] / 1e3 / rows["seconds"],
        present=100 * rows["mean_members"] / rows["num_workers"],
    )
    columns = {
        "method": ("method", "s"),
        "num_workers": ("workers", "d"),
        "between": ("s between kills", ".1f"),
        "percent": ("steps at the median pace, %", ".0f"),
        "present": ("workers present, %", ".0f"),
    }
    return [
        "Measured with [a random fault every two seconds](chaos.md), stops and losses of the store among them: the "
        "time of the steps at the median pace, as a share of the whole time.",
        table(found, columns),
    ]


COMPUTED_STUDIES: Mapping[str, Page] = {
    **study_page(
        "utilisation",
        "Compute utilisation on links of 50 to 5,000 Mbit/s",
        utilisation_said,
        has(("method", "period", "mbit"), ("DiLoCo", 32, 200)),
        summary=utilisation_summary,
        measures=MEASURES,
        question=QUESTIONS[4],
        columns={
            "method": ("method", "s"),
            "period": ("H", "d"),
            "mbit": ("Mbit/s", "d"),
            "utilisation_percent": ("utilisation, %", ".2f"),
            "published_percent": ("published, %", ".2f"),
        },
        setup="""\
Compute utilisation is the share of computation in the time of a step. The published figures were measured in 2026 with
DiLoCo on four GPUs whose links were shaped: 30.8 M parameters in float32, 26.5 ms of computation in a step, an outer
step every H steps.

Four [emulated hosts](index.md#emulated-hosts) measure the same cells at 1/16 of the size and of the rates: 1.94 M
parameters, 3.125 to 312.5 Mbit/s. So a message takes as long as the published one. A step is a sleep of 22 ms, the
optimizer and the loop; the median of its time without communication is the computation. One outer step or more, or
three steps at H = 1, come before the timed ones. Most cells have one trial. The cores also ran other work at a lower
priority, so ten groups of trials were dropped and measured again: their local step took over 29.15 ms.

On fast links the clock is above the measurement of codes and outer steps. The cause was not measured. In a model of
1/16 of the size PowerGossip's vectors are 1/4 as long, and from 200 Mbit/s on its figure does not depend on the link:
compare PowerGossip by the clock only.

The [Lab](../guides/lab.md)'s clock has the published size and rates, memory of 500 GB/s, and four outer steps after two
others. Streaming DiLoCo has four fragments, arrival="carry", and a delay of H - 1 steps. "4 bits" is
`QSGD(4, bucket_size=32, unbiased=True)`, whose messages are gathered.""",
        parts=(
            Page(
                "Measured on the emulated cluster",
                "utilisation_cells.csv",
                measures=("gossip_modules/algorithms", "gossip_modules/rounds", "gossip_modules/transport"),
                render=steps_table,
            ),
            Page(
                "Steps of 8 and 16 emulated hosts",
                "clock_cells.csv",
                "These cells calibrate [the clock](../guides/lab.md#how-far-you-can-trust-the-clock). The processor "
                "share is the processor time of all hosts over the time that the two cores have in a step.",
                measures=("gossip_modules/algorithms", "gossip_modules/rounds", "gossip_modules/transport"),
                render=hosts_table,
            ),
            Page(
                "Steps of 8 emulated hosts by the methods of four libraries",
                "loss_cells.csv",
                "These cells calibrate the clock too: torch, torchft, Decent-DP and this library, each method once.",
                measures=("gossip_modules/algorithms", "gossip_modules/rounds", "gossip_modules/transport"),
                render=hosts_table,
            ),
        ),
    ),
    **study_page(
        "goodput",
        "Goodput with failures, up to 1,024 workers",
        goodput_said,
        has(
            ("workers", "failures", "system"),
            *product((32,), ("one an hour",), SYSTEMS),
            *product((1024,), ("Llama 3",), SYSTEMS),
        ),
        summary=goodput_summary,
        question=QUESTIONS[2],
        columns={
            "failures": ("failures", "s"),
            "system": ("system", "s"),
            "workers": ("workers", "d"),
            "worker_hours": ("hours between failures of a worker", ",.1f"),
            "pause_seconds": ("pause, s", ".2f"),
            "missing_seconds": ("missing, s", ".1f"),
            "goodput": ("goodput", ".4f"),
        },
        setup="""\
Goodput is the useful part of the time of all workers. With n workers, a time M between failures of one worker, a pause
of all workers and the time for which the failed worker is missing:

    goodput = (1 - missing / M) / (1 + n pause / M)

- SGP with a membership: the slowest steps after [a kill and a join](elastic.md) beyond the median one, of 8, 16 and 32
  workers (joins: 8).
- torchft: the slowest step after a kill beyond the median one. A join takes no time here. Most of a pause is its time
  limit for heartbeats, 5 s.
- Beyond 32 workers both pauses go on along the line from 16 to 32, although two cores shared by all processes make most
  of this growth. So figures for more than 32 workers are no measurements.
- DDP with restarts: the start of the job, and the work since the last checkpoint. Failures come at random, so with a
  failure every m seconds, a start of R and a checkpoint every C seconds, the time from one checkpoint to the next is
  (m + R) (exp(C / m) - 1). The intervals are assumptions, and writing a checkpoint takes no time here.

A failed worker is back after 15 s, and a job that starts again trains after as long: an assumption. Workers have 8
GPUs. The training of Llama 3 had 419 unexpected interruptions in 54 days with 16,384 GPUs.""",
        also=("elastic_scale.csv", "elastic.csv", "chaos.csv"),
        measures=("gossip_modules/membership",),
        parts=(MAIL_GOODPUT,),
    ),
    **study_page(
        "consensus_codes",
        "Agreement by all compressors on a ring of 8",
        codes_said,
        has(("method",), ("power-r1-i1",), ("plain",)),
        summary=codes_summary,
        measures=MEASURES,
        question=QUESTIONS[3],
        columns={
            "method": ("method", "s"),
            "step_size": ("step size", ".4g"),
            "run_seed": ("seed", "d"),
            "rounds": ("rounds to 1 %", ".0f"),
            "megabits": ("Mbit", ".3f"),
            "last_error": ("error at the end", ".2g"),
        },
        setup="""\
This is the experiment of PowerGossip's paper, `train.consensus`, with more codes and seeds. Eight workers in a ring
gossip until they agree. Each begins with a 100x100 matrix of normal numbers. The error is the squared distance to the
mean, relative to the start. A worker has sent the Mbit when the error is 1 %. Plain gossip, bfloat16, PowerGossip and
Moniqua with 8 bits have the best step size of plain gossip. Other codes have the best of four step sizes from 0.01 to
it, found with the first seed. A run ends after 800 rounds, or when its error has grown tenfold: it diverges. Top-k and
random-k send 1 % of the entries, and qsgd has 4 bits.""",
    ),
    **study_page(
        "pairwise",
        "A2CiD2 and AD-PSGD on cycles",
        pairs_said,
        has(("workers", "method"), *product((16, 32), ("AD-PSGD", "A2CiD2"))),
        summary=pairs_summary,
        measures=MEASURES,
        question=QUESTIONS[3],
        columns={
            "method": ("method", "s"),
            "workers": ("workers", "d"),
            "exchanges": ("exchanges of a worker", "d"),
            "run_seed": ("seed", "d"),
            "disagreement": ("disagreement", ".3g"),
            "runs": ("runs", "d"),
            "law": ("by the law", ".3g"),
            "exchanges_to_0.001": ("exchanges to 0.001", ".1f"),
        },
        setup="""\
Workers on a cycle average in pairs at random times, one in a unit of time on average. Nothing is learnt. The
disagreement is the mean square distance from the mean, relative to the start. "Simulated" is the mean over runs of
random exchanges, equal for both methods, and "law" the expected value, by the equation of second moments. A2CiD2 has
the rates of `BilatGossipDataParallel(continuous_momentum=True)`.""",
    ),
    **study_page(
        "matcha_rho",
        "Convergence rate of MATCHA on its six graphs",
        rho_said,
        has(("graph", "budget"), *product(range(6), (0.5, 1.0))),
        summary=rho_summary,
        measures=MEASURES,
        question=QUESTIONS[3],
        columns={
            "graph": ("graph", "d"),
            "workers": ("workers", "d"),
            "budget": ("budget", ".1f"),
            "rho": ("rho", ".5f"),
        },
        setup="""\
Rho bounds the factor by which a round of gossip shrinks the squared distance from the mean: smaller is better. Graphs
are those of `gossip_modules.matcha.select_graph`, the six of the paper. The budget is the share of messages of a round
over all links. The figures are computed.""",
    ),
}
"""The pages of the studies with enough rows."""

COMPUTED_HEADLINES: Sequence[Headline] = (
    Headline(
        "MATCHA",
        "on the graph of the example rho is at least as good with half of the messages: 0.644 and 0.654",
        "the setting of the paper",
        ("matcha_rho.csv",),
        "matcha_rho",
        rho_headline,
    ),
    Headline(
        "PowerGossip",
        "consensus to 1 % on a ring of 8: about 550 rounds and 3.5 Mbit, by the authors' rule",
        "the setting of the paper",
        ("consensus_codes.csv",),
        "consensus_codes",
        power_codes_headline,
    ),
    Headline(
        "A2CiD2",
        "the time to agree grows as the square root of the time without momentum, as graphs become larger",
        "cycles of 16 and 32 workers, second moments of the law",
        ("pairwise.csv",),
        "pairwise",
        pairs_headline,
    ),
    Headline(
        "DiLoCo",
        "compute utilisation on 4 GPUs with 30.8 M parameters: 0.07 to 87 % for H = 1 to 128 at 50 to 5,000 Mbit/s",
        "4 emulated hosts, 1/16 of size and rates",
        ("utilisation_cells.csv", "utilisation.csv"),
        "utilisation",
        utilisation_headline,
    ),
)
"""The headlines of papers that these studies measure."""
