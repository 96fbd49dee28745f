"""The page of graphs: how fast ranks agree, the cost of a graph with many ranks, and plans of MATCHA."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from benchmarks.pages.base import QUESTIONS, Page
from benchmarks.pages.headline import rows_of
from benchmarks.pages.markdown import grid
from benchmarks.pages.study_tables import has, study_page

SHOWN_RANKS = (6, 12, 25, 49)
_SCALING = {
    "graph": ("graph", "s"),
    "ranks": ("ranks", ",d"),
    "construction_ms": ("construction, ms", ".3f"),
    "query_ms": ("query, ms", ".4f"),
    "mixing_ms": ("weights, ms", ".3f"),
    "peak_bytes": ("peak, bytes", ",d"),
}


def agreement_said(rows: pd.DataFrame) -> str:
    """Return how many messages the graphs of 25 ranks need, in words."""
    own = rows[rows["ranks"] == 25].set_index("role")
    base, default, ring = (own.loc[name] for name in ("base, 1 peer", "default, push-sum", "ring, both neighbours"))
    two = own.loc["exponential, 2 peers"]
    return (
        f"**With 25 ranks `BaseGraph` is exact in {base['rounds']:.0f} rounds; the default graph needs "
        f"{default['rounds']:.0f} to an error of 1e-6.** A rank sends {base['messages']:.0f} messages on `BaseGraph`, "
        f"{default['messages']:.0f} on the default graph of push-sum and {ring['messages']:,.0f} on a ring. Two peers "
        f"per round of the exponential graph take {two['messages']:.0f} messages, and leave a noise of "
        f"{two['noise']:.2f} where the default graph leaves {default['noise']:.2f}."
    )


def messages(rows: pd.DataFrame) -> str:
    """Write the messages to an error of 1e-6, by graph and number of ranks."""
    shown = rows[rows["ranks"].isin(SHOWN_RANKS)]
    return grid(shown, ("role", "messages to an error of 1e-6"), "ranks", "messages", ".0f", "{} ranks")


def scaling_said(rows: pd.DataFrame) -> str:
    """Return the cost of a graph with the most ranks, in words."""
    most = rows[rows["about"] == rows["about"].max()]
    edges = rows[rows["graph"].str.startswith("NetworkX")].iloc[-1]
    return (
        f"**One rank asks for its peers in at most {1e3 * most['query_ms'].max():.0f} microseconds, with a million "
        f"ranks too.** The built-in graphs use at most {most['peak_bytes'].max() / 1e3:.1f} kB. `NetworkXGraph` stores "
        f"your edges, so it grows: with {edges['ranks']:,} ranks it takes {edges['construction_ms'] / 1e3:.2f} s to "
        "build."
    )


def planning_said(rows: pd.DataFrame) -> str:
    """Return the time and rho of plans, in words."""
    seconds = rows.groupby("ranks")["plan_seconds"].max()
    half = rows[rows["budget"] == 0.5].set_index("ranks")["rho"]
    joint = rows.dropna(subset="joint_rho")
    times = joint["joint_seconds"] / joint["plan_seconds"]
    return (
        f"**A plan takes at most {seconds[64]:.1f} s for 64 ranks and {seconds[256]:.1f} s for 256.** With half of the "
        f"messages rho is {half[16]:.3f} for 16 ranks and {half[64]:.3f} for 64. Optimising p and alpha together "
        f"lowers rho by at most {(joint['rho'] - joint['joint_rho']).max():.3f}, in {times.min():.0f} to "
        f"{times.max():.0f} times the time."
    )


def _parts() -> tuple[Page, ...]:
    scaling, planning = rows_of("graph_scaling.csv"), rows_of("matcha_planning.csv")
    return (
        Page(
            "Graphs with up to a million ranks",
            "graph_scaling.csv",
            scaling_said(scaling),
            _SCALING,
            measures=("gossip_modules/graph_manager", "gossip_modules/mixing_manager"),
            setup="""\
One rank, with one peer per round. A query asks for its peers in one round. The time of weights includes the time to
build the graph; the peak is the memory of Python meanwhile. Times are the least processor time of one thread over 20
repeats, of a `NetworkXGraph` of one. The machine was busy with other work.""",
        ),
        Page(
            "Planning time of MATCHA",
            "matcha_planning.csv",
            planning_said(planning),
            {
                "ranks": ("ranks", ",d"),
                "links": ("links", ",d"),
                "matchings": ("matchings", "d"),
                "budget": ("budget", "g"),
                "coloring_seconds": ("colouring, s", ".3f"),
                "probabilities_seconds": ("p, s", ".3f"),
                "alpha_seconds": ("alpha, s", ".3f"),
                "plan_seconds": ("plan, s", ".3f"),
                "rho": ("rho", ".5f"),
                "joint_seconds": ("joint, s", ".2f"),
                "joint_rho": ("joint rho", ".5f"),
            },
            measures=("gossip_modules/matcha",),
            setup="""\
The graphs are random and geometric. A plan colours the edges into matchings, then finds the probability p of each
matching and the weight alpha of a link. rho is the expected factor by which a round shrinks the squared distance to the
mean: less is better. Times are the processor time of one thread, measured once, while the machine was busy with other
work.""",
        ),
    )


GRAPH_STUDIES: Mapping[str, Page] = study_page(
    "default_graphs",
    "How fast ranks agree on each graph",
    agreement_said,
    has(("ranks", "role"), (25, "base, 1 peer"), (25, "default, push-sum")),
    columns={
        "ranks": ("ranks", "d"),
        "role": ("graph", "s"),
        "graph": ("class", "s"),
        "messages_per_round": ("messages per round", ".2f"),
        "contraction_per_round": ("contraction per round", ".3f"),
        "contraction_per_message": ("per message", ".3f"),
        "rounds": ("rounds", "d"),
        "messages": ("messages", ".1f"),
        "noise": ("noise", ".2f"),
        "drift": ("drift", ".2f"),
    },
    measures=("gossip_modules/graph_manager", "gossip_modules/mixing_manager"),
    summary=messages,
    setup="""\
The figures are computed from the mixing matrices of training. Random graphs have expectations. In the table of all
rows:

- **contraction** is the long-run factor of the distance from the average; at 0 the average is exact after some rounds.
- **noise** is the variance of a rank around the mean, if each step adds noise of variance 1.
- **drift** is the distance of all models from the mean, for the worst constant steps of length 1.

[Which graph?](../choosing.md#which-graph) draws the conclusions.""",
    parts=_parts(),
    question=QUESTIONS[3],
)
"""The page by its name."""
