"""Pages about compressors, and about one GPU."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from benchmarks.pages.base import Page
from benchmarks.pages.headline import rows_of
from benchmarks.pages.markdown import table
from benchmarks.pages.study_tables import together

_CODES = {
    "name": ("codec", "s"),
    "num_bytes": ("bytes per message", ",d"),
    "encode_ms": ("encode, ms", ".1f"),
    "decode_ms": ("decode, ms", ".1f"),
    "saved_ms": ("saved at 1 Gbit/s, ms", ".1f"),
    "ratio_at_0.1_gbit": ("ratio at 100 Mbit/s", ".2f"),
    "ratio_at_1_gbit": ("ratio at 1 Gbit/s", ".2f"),
    "ratio_at_10_gbit": ("ratio at 10 Gbit/s", ".2f"),
}
_BFLOAT16 = "Cast(torch.bfloat16)"
_SHOWN_CODES = (
    _BFLOAT16,
    "CHOCO, sign",
    "CHOCO, top 1 %",
    "DeepSqueeze, sign",
    "Moniqua, 8 bits",
    "PowerGossip, rank 1, 1 iteration",
)


def codes(rows: pd.DataFrame) -> str:
    """A few codecs, with bytes and the ratio of saved time to spent time."""
    names = ("name", "num_bytes", "ratio_at_0.1_gbit", "ratio_at_1_gbit", "ratio_at_10_gbit")
    return table(rows[rows["name"].isin(_SHOWN_CODES)], {name: _CODES[name] for name in names})


def codes_said(rows: pd.DataFrame) -> str:
    """Return how many codecs pay, and the ratios of a few of them, in words."""
    own = rows[rows["num_bytes"] < rows["plain_bytes"]].set_index("name")
    pays = {gbit: own[own[f"ratio_at_{gbit}_gbit"] > 1].index for gbit in (1, 10)}
    power, plain, sign = (own.loc[name] for name in ("PowerGossip, rank 1, 1 iteration", _BFLOAT16, "CHOCO, sign"))
    at_10 = f", at 10 Gbit/s {len(pays[10])}"
    which = f" At 10 Gbit/s they are {together([f'`{name}`' for name in pays[10]])}." if len(pays[10]) else ""
    return (
        f"**At 1 Gbit/s {len(pays[1])} of {len(own)} codecs save more time on the link than they cost on a CPU"
        f"{at_10}.**{which} At 1 Gbit/s the ratio is {power['ratio_at_1_gbit']:.1f} for PowerGossip of rank 1, "
        f"{plain['ratio_at_1_gbit']:.1f} for bfloat16 and {sign['ratio_at_1_gbit']:.1f} for CHOCO with signs."
    )


def one_gpu(rows: pd.DataFrame) -> str:
    """The steps of the wrappers beside the bare model."""
    steps = rows[(rows["figure"] == "step") & (rows["reference"] == "bare")]
    columns = {
        "section": ("section", "s"),
        "case": ("case", "s"),
        "value": ("step, ms", ".1f"),
        "ratio": ("ratio to the bare model", ".2f"),
    }
    return table(steps.sort_values(["section", "case"], ascending=[False, True]), columns)


def deltas_said(rows: pd.DataFrame) -> str:
    """Return in words how many times fewer bytes each rate has, and the ratios of processor time."""
    fewer = together([f"{row.times_fewer:.1f} at {row.rate:g}" for row in rows.itertuples()])
    low, high = rows["cpu_ratio"].min(), rows["cpu_ratio"].max()
    return (
        f"**`deltas=True` sends {rows['times_fewer'].min():.1f} to {rows['times_fewer'].max():.1f} times fewer bytes "
        f"than the bfloat16 wire, with equal bits.** By the rate of AdamW: {fewer}. A step with 9.5 million parameters "
        f"takes {low:.2f} to {high:.2f} times the processor time, so use it where links are slow."
    )


ALGORITHMS: Mapping[str, Page] = {
    "compression": Page(
        "Cost and savings of compression",
        "compression.csv",
        codes_said(rows_of("compression.csv")),
        _CODES,
        measures=("gossip_modules/compression",),
        summary=codes,
        setup="""\
The vector is as long as the parameters of ResNet-18. The rows with a method compress a ResNet-18 with its buffers. A
ratio is the time that the saved bytes take on the link, over encoding plus decoding: compression pays above 1. Times
are medians of the processor time of one thread.""",
        question="How many rounds and bytes?",
        result=codes_said(rows_of("compression.csv")).partition("**")[2].partition("**")[0],
    ),
    "deltas": Page(
        "Changes only, deltas=True",
        "deltas.csv",
        deltas_said(rows_of("deltas.csv")),
        {
            "rate": ("rate of AdamW", "g"),
            "plain_bytes": ("bytes per message, bfloat16", ",d"),
            "bytes": ("with deltas", ",d"),
            "times_fewer": ("times fewer", ".1f"),
            "plain_cpu_ms": ("processor ms of a step, bfloat16", ".0f"),
            "deltas_cpu_ms": ("with deltas", ".0f"),
            "cpu_ratio": ("ratio", ".2f"),
            "ratio": ("ratio of wall time", ".2f"),
        },
        measures=("gossip_modules/rounds",),
        setup="""\
Bytes: four ranks on a ring train a decoder of 135,168 parameters by D-PSGD, after 400 steps of one worker; means over
16 steps. Both wires end with equal parameters. Times: two ranks train a perceptron of 9.5 million parameters, 64 rows
in a batch; both wires take turns, and figures are medians of the slower rank. The machine was busy with other work.""",
    ),
    "gpu": Page(
        "One GPU: bandwidth, overhead, overlap and memory",
        "gpu.csv",
        """\
**With overlap, a round over Gloo costs 1 % of a step of 57 ms; without overlap 68 %.** A step of 11 ms cannot hide it
and takes 39 ms. In float32 mixing reaches the bandwidth of a copy (1.02 to 1.08 times), with two messages in bfloat16
0.2 to 0.4. A kernel of `torch.cuda.jiterator`, a beta, would reach 1.1 to 1.3. AllReduceDataParallel takes 37.0 ms
where DDP takes 36.1.""",
        {
            "section": ("section", "s"),
            "case": ("case", "s"),
            "figure": ("figure", "s"),
            "value": ("value", ".4g"),
            "unit": ("unit", "s"),
            "ratio": ("ratio", ".3g"),
            "reference": ("to", "s"),
            "gpu": ("GPU", "s"),
        },
        summary=one_gpu,
        setup="""\
Steps train a ResNet-18 on images of 32 x 32. A peer takes part in the rounds over Gloo. A ratio is a median over
turns. Memory is the peak beside the bare model, in copies of the parameters. Bandwidth is the bytes that an operation
has to read and write over its time; its ratio is to a copy. "precision" has two ranks and a small model, "lab" 64
workers of a decoder.""",
        question="Is it as fast?",
        result="A round adds 1 % to a step of 57 ms on an H100 with overlap, and 68 % without.",
    ),
}
