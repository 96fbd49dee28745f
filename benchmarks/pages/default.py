"""The pages of the studies of `benchmarks.studies.default`: the loss with 2 to 64 workers, and the time until it."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from benchmarks.claims import equal_loss
from benchmarks.claims.default import ANOTHER, fastest
from benchmarks.claims.language import BASE, STEPS, at_equal_steps
from benchmarks.pages.base import Page
from benchmarks.pages.second_moments import SECOND_MOMENTS
from benchmarks.record import rows_of
from benchmarks.studies.ends import gaps
from benchmarks.tables import table
from visualization import seconds_to_loss

ENDS = {
    "method": ("method", "s"),
    "workers": ("workers", "d"),
    "rate": ("rate", "g"),
    "seeds": ("seeds", "d"),
    "validation": ("validation, nats", ".3f"),
    "test": ("test, nats", ".3f"),
    "beyond": ("above all-reduce", "+.3f"),
    "lowest": ("lowest", "+.3f"),
    "highest": ("highest", "+.3f"),
    "tuned": ("steps that chose the rate", ",d"),
    "megabytes": ("MB sent by a worker", ",.0f"),
}


def above(row: pd.Series) -> str:
    """Return the distance from all-reduce, with its seeds if there are several; all-reduce itself has its loss."""
    if row["method"] == BASE:
        return f"{row['test']:.3f} nats"
    spread = f" ({row['lowest']:+.3f} to {row['highest']:+.3f})" if row["seeds"] > 1 else ""
    return f"{row['beyond']:+.3f}{spread}"


def by_workers(rows: pd.DataFrame) -> str:
    """Write the distance of each method from all-reduce, a column for each number of workers."""
    found = at_equal_steps(rows)
    found["text"] = found.apply(above, axis=1)
    cells = found.pivot(index="method", columns="workers", values="text")
    order = found[found["workers"] == found["workers"].min()].set_index("method")["test"].reindex(cells.index)
    first = [BASE, *order.sort_values().index.drop(BASE)]
    columns = {"method": ("method", "s"), **{n: (f"{n} workers", "s") for n in cells}}
    return table(cells.loc[first].reset_index(), columns)


def two_ends(rows: pd.DataFrame) -> str:
    """Write the ends of the trainings of two workers."""
    return table(gaps(rows, BASE, STEPS), {name: column for name, column in ENDS.items() if name != "workers"})


def every_end(rows: pd.DataFrame) -> str:
    """Write the ends of the trainings, for each number of steps."""
    lengths = sorted(rows.loc[~rows["is_tuning"], "steps"].unique(), key=lambda steps: (steps != STEPS, steps))
    return "\n\n".join(f"**{steps:,} steps**\n\n{table(gaps(rows, BASE, steps), ENDS)}" for steps in lengths)


def searched(rows: pd.DataFrame) -> str:
    """Write the ends of the search."""
    return table(
        gaps(rows, BASE, int(rows["steps"].max())), {x: ENDS[x] for x in ("method", "test", "beyond", "megabytes")}
    )


def seconds_table(cells: pd.DataFrame) -> str:
    """Write the steps and the seconds of each method to the equal loss.

    Args:
        cells: of default_cells.csv.
    """
    found = equal_loss.equal_loss(rows_of("language.csv"), cells)
    lines = []
    for label in (label for label in equal_loss.LINES if label in set(found["label"])):
        own = found[found["label"] == label]
        row = {"label": label, "steps": own["steps"].iloc[0]}
        for each in own.itertuples():
            row |= {f"{name} {each.rate:g}": getattr(each, name) for name in ("ms", "seconds", "share")}
        lines.append(row)
    rates = sorted(found["rate"].unique(), reverse=True)
    columns = {"label": ("method", "s"), "steps": ("steps", ",.0f")}
    for rate in rates:
        columns[f"ms {rate:g}"] = (f"{rate:g} Gbit/s: ms per step", ",.0f")
        columns |= {f"seconds {rate:g}": ("s", ",.0f"), f"share {rate:g}": ("of DDP's", ".2f")}
    return table(pd.DataFrame(lines), columns)


BARS: Mapping[str, str] = {
    "DDP": "DDP",
    "DDP, fp16 hook": "DDP, fp16 hook",
    "SGP, bfloat16": "SGP, bf16",
    "Overlap SGP, bfloat16": "Overlap SGP, bf16",
    "SGP, momentum mixed too, bfloat16": "SGP, mixed, bf16",
    "Overlap SGP, momentum mixed too, bfloat16": "Overlap SGP, mixed, bf16",
    "Local SGD, H = 10": "Local SGD, H = 10",
    "Local SGD, H = 4, momentum mixed too": "Local, H = 4, mixed",
    "Local SGD, H = 4, 4 bits, momentum mixed too": "Local, H = 4, mixed, 4 bits",
}
"""The bars of the picture, by the labels of `equal_loss.LINES`; SGP and Overlap SGP send bfloat16."""


def picture() -> str:
    """Return the picture of the seconds to an equal loss, as SVG."""
    found = equal_loss.equal_loss(*map(rows_of, equal_loss.FILES))
    shown = found.assign(label=found["label"].map(BARS)).dropna(subset="label")
    title = "Seconds of eight workers to an equal loss"
    return seconds_to_loss.draw(shown, list(BARS.values()), title).svg()


TWO = Page(
    "Two workers",
    "language_two.csv",
    """\
**With two workers SGP ends {language.sgp_adamw_2} nats above all-reduce by AdamW, and {language.sgp_2} by
GossipAdamW.** Local SGD with H = 4, codes of 4 bits and mixed first moments ends {language.local4_coded_2} above, with
far fewer bytes. Local SGD with H = 10 ends {language.local_adamw_2} above by AdamW and {language.local_2} by
GossipAdamW.""",
    render=two_ends,
    measures=("gossip_modules/lab", "gossip_modules/optim", "gossip_modules/rounds"),
)
SEARCH = Page(
    "Search for the method of 64 workers",
    "language_search.csv",
    """\
After 600 steps of 64 workers at one rate, two peers and mixed first moments end {language.search_two_mixed} nats above
all-reduce, one peer and mixed moments {language.search_mixed}, and SGP {language.search_sgp}. An exact average of the
models in each step, without mixed moments, ends {language.search_exact} above: so much of the distance lies in the
optimizer.""",
    render=searched,
    measures=("gossip_modules/lab", "gossip_modules/optim", "gossip_modules/rounds"),
)
ANOTHER_MACHINE = Page(
    "The same cells on another machine",
    ANOTHER,
    f"""\
**Here {fastest(rows_of("language.csv"), rows_of(ANOTHER))}.** This machine has another processor,
and other work was done on it while the cells were timed. So the order of methods within a quarter of each other does
not carry over from one machine to another; the first place at 0.1 Gbit/s does.""",
    measures=("gossip_modules/rounds", "gossip_modules/transport", "gossip_modules/wrappers"),
    render=seconds_table,
    also=("language.csv",),
)
INT8 = "default_cells_int8.csv"
"""Cells of methods with messages of 8 bits, on a third machine."""


def mixed_share() -> float:
    """The share at 1 Gbit/s of Overlap SGP with mixed moments in int8, by its steps in bfloat16."""
    of_int8, of_bfloat16 = (
        equal_loss.equal_loss(*map(rows_of, files)).set_index(["label", "rate"])
        for files in ((equal_loss.FILES[0], INT8), equal_loss.FILES)
    )
    mixed = "Overlap SGP, momentum mixed too"
    steps = of_bfloat16.loc[(f"{mixed}, bfloat16", 1.0), "steps"] / of_int8.loc[(f"{mixed}, int8", 1.0), "steps"]
    return float(steps * of_int8.loc[(f"{mixed}, int8", 1.0), "share"])


EIGHT_BITS = Page(
    "Messages of 8 bits, on a third machine",
    INT8,
    f"""\
**Here {fastest(rows_of("language.csv"), rows_of(INT8))}.** Methods in int8 send [codes of 8
bits](../guides/compression.md#eight-bits). The processor is slower than those of the other tables, so codes, mixing and
the optimizer take a larger part of a step. With mixed moments Overlap SGP needs fewer steps in int8 than in bfloat16:
that is the chance of one seed with 2,000 steps, since both end near each other after 3,000. With the steps of bfloat16
its share at 1 Gbit/s would be {mixed_share():.2f}.""",
    measures=("gossip_modules/rounds", "gossip_modules/transport", "gossip_modules/wrappers"),
    render=seconds_table,
    also=("language.csv",),
)
DEFAULT: Mapping[str, Page] = {
    "language": Page(
        "Language: gossip beside all-reduce, 2 to 64 workers",
        "language.csv",
        """\
**Local SGD with mixed first moments and an average in every second step ends lowest of all gossip: in nats above
all-reduce, it ends at {language.local2_mixed_8} with 8 workers and {language.local2_mixed_16} with 16; with one seed,
at rates of gossip that were chosen in 600 steps, {language.local2_mixed_32} with 32 and {language.local2_mixed_64} with
64**, by [`GossipAdamW`][gossip_modules.GossipAdamW] and
[`MixedMomentum`][gossip_modules.MixedMomentum]. SGP with mixed moments ends {language.mixed_8} above with 8 workers and
{language.mixed_16} with 16. Without mixed moments it ends {language.sgp_8} above with 8 workers. With the first seed it
ends {language.adamw_8} above by AdamW and {language.gossip_adamw_8} by GossipAdamW: the second moments make
{language.moments} of the distance.""",
        render=every_end,
        summary=by_workers,
        measures=("gossip_modules/lab", "gossip_modules/optim", "gossip_modules/rounds"),
        parts=(TWO, SEARCH, SECOND_MOMENTS),
        setup="""\
This is [a study in the Lab](index.md#studies-in-the-lab): a decoder of 20,480 parameters learns text in 3,000 steps, on
four sequences of 32 characters per worker and step. GossipAdamW has the settings of AdamW. With up to 16 workers, rates
are the best ones of whole trainings with the first seed; with more, those of gossip are the best ones of trainings of
600 steps, which chose twice the rate for all-reduce. Cells have nats of the
test split above all-reduce with the same seed: the mean, the lowest and the highest.""",
        question="Is it as accurate?",
        result="Local SGD with mixed first moments and H = 2 ends {language.local2_mixed_16} nats above all-reduce "
        "with 16 workers, and {language.local2_mixed_64} with 64, with one seed.",
    ),
    "default": Page(
        "Seconds to an equal loss: gossip and DDP",
        "default_cells.csv",
        """\
**To an equal loss {default.fastest}.** Gossip trains by GossipAdamW, DDP by AdamW. Methods with fewer messages need
more steps until the loss. Mixed first moments save steps and double the bytes.

![Seconds to an equal loss for each speed of the links.](../assets/default.svg)""",
        measures=("gossip_modules/rounds", "gossip_modules/transport", "gossip_modules/wrappers"),
        render=seconds_table,
        setup="""\
Losses come from [the study of language](language.md) with 8 workers, times from eight [emulated
hosts](index.md#emulated-hosts), each method with its optimizer: the median of three runs. The hosts share two cores, so
the cluster is slowed by four, and all times are divided by four: a host then has a core, computes 2.8 million
parameters for 40 ms per step, and has links of 0.1, 1 and 10 Gbit/s. The methods wait for each other, so loss and time
can be measured apart. Methods whose shares are close change places between machines.

The target is the highest validation loss after 3,000 steps of DDP, SGP and Overlap SGP, with and without mixed moments:
{default.target} nats, of Overlap SGP in float32. The steps of a method are those of a training that is planned to end
there, with a learning rate that falls to zero. They are interpolated between trainings of 1,500, 2,000, 3,000 and 6,000
steps, in the logarithm of the steps. Rates are the best ones of 3,000 steps. Other lengths have the first seed, and
their losses are moved by its distance from the mean of three seeds at 3,000 steps. DDP with
a hook counts with the loss of all-reduce in float32. "Of DDP's" is the share of the seconds of the fastest DDP. With
mixed moments the processor of a host bounds the step: on GPUs it may be shorter.""",
        also=("language.csv",),
        parts=(ANOTHER_MACHINE, EIGHT_BITS),
        question="Is it as fast?",
        result="To an equal loss {default.fastest}.",
    ),
}
"""By the name of the page."""
