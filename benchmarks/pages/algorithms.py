"""Pages about graphs, compressors and methods, without training a network."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from benchmarks.pages.base import Page
from benchmarks.pages.markdown import grid, table

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
_SHOWN_CODES = (
    "Cast(torch.bfloat16)",
    "CHOCO, sign",
    "CHOCO, top 1 %",
    "DeepSqueeze, sign",
    "Moniqua, 8 bits",
    "PowerGossip, rank 1, 1 iteration",
)
_SIMULATED = {
    "method": ("method", "s"),
    "steps": ("steps", "d"),
    "step_seconds": ("s per step", ".3f"),
    "seconds": ("s to target", ".1f"),
    "rank_megabytes": ("MB per worker", ",d"),
    "waiting_percent": ("waiting, %", "d"),
    "disagreement": ("disagreement", ".3f"),
    "agreed": ("agree", "s"),
}
_SHOWN_METHODS = (
    "diloco",
    "localsgd",
    "noloco",
    "sgp on npeer-exponential",
    "osgp on npeer-exponential",
    "ar",
    "wagma",
)


def largest(rows: pd.DataFrame) -> str:
    """Each graph with its largest number of ranks."""
    shown = rows.groupby("graph", sort=False).last().reset_index()
    return table(shown, {name: _GRAPHS[name] for name in ("graph", "ranks", "query_ms", "uniform_mixing_ms")})


def messages(rows: pd.DataFrame) -> str:
    """The messages to an error of 1e-6, by graph and number of ranks."""
    shown = rows[rows["ranks"].isin((6, 12, 25, 49))]
    return grid(shown, ("role", "messages to an error of 1e-6"), "ranks", "messages", ".0f", "{} ranks")


def codes(rows: pd.DataFrame) -> str:
    """A few codecs, with bytes and the ratio of saved time to spent time."""
    names = ("name", "num_bytes", "ratio_at_0.1_gbit", "ratio_at_1_gbit", "ratio_at_10_gbit")
    return table(rows[rows["name"].isin(_SHOWN_CODES)], {name: _CODES[name] for name in names})


def simulated(rows: pd.DataFrame) -> str:
    """A few methods of the simulator."""
    names = ("method", "steps", "step_seconds", "seconds", "rank_megabytes")
    return table(rows[rows["method"].isin(_SHOWN_METHODS)], {name: _SIMULATED[name] for name in names})


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


_GRAPHS = {
    "graph": ("graph", "s"),
    "ranks": ("ranks", ",d"),
    "construction_ms": ("construction, ms", ".3f"),
    "query_ms": ("query, ms", ".3f"),
    "uniform_mixing_ms": ("uniform mixing, ms", ".3f"),
    "metropolis_mixing_ms": ("Metropolis mixing, ms", ".3f"),
    "peak_bytes": ("peak, bytes", ",d"),
}

ALGORITHMS: Mapping[str, Page] = {
    "compression": Page(
        "Cost and savings of compression",
        "compression.csv",
        """\
**On a CPU, compression pays up to 1 Gbit/s and rarely at 10 Gbit/s.** At 1 Gbit/s, all but one of the codecs save more
time on the link than encoding and decoding take. The ratio is 15 for PowerGossip of rank 1, 4 for bfloat16 and 2 for
CHOCO with signs. At 10 Gbit/s, only PowerGossip of rank 1 with one iteration (1.5) and random 1 % (1.6) stay above 1.
On a GPU, all codecs pay at 10 Gbit/s too: bfloat16 by 60, PowerGossip of rank 1 by 7.6.""",
        _CODES,
        measures=("gossip_modules/compression",),
        script="cb643b0e:benchmarks/compression.py",
        summary=codes,
        setup="""\
The vector is as long as the parameters of ResNet-18. The rows with a method compress a ResNet-18 with its buffers. A
ratio is the time that the saved bytes take on the link, over encoding plus decoding: compression pays above 1. Times
are medians of the processor time of one thread.""",
        parts=(
            Page(
                "All rows on a GPU",
                "compression_gpu.csv",
                "The same vector and model are on a GPU. Times end when the GPU has "
                "done the work. The commit was given "
                "by hand, since the machine had a copy of the files without git.",
                _CODES,
                measures=("gossip_modules/compression",),
                script="cb643b0e:benchmarks/compression.py",
            ),
        ),
        question="How many rounds and bytes?",
        result="At 1 Gbit/s bfloat16 saves 4 times the time that it costs, PowerGossip 15 times.",
    ),
    "consensus": Page(
        "Rounds and bits to agreement",
        "consensus.csv",
        """\
**Plain gossip agrees in the fewest rounds, PowerGossip with the fewest bits.** To an error of 0.01, plain gossip takes
7 rounds and 4.48 Mbit per rank, bfloat16 7 rounds and 2.24 Mbit. PowerGossip takes 548 rounds and 3.58 Mbit with one
iteration, or 274 rounds and as many bits with two.""",
        {
            "method": ("method", "s"),
            "step_size": ("step size", "g"),
            "steps_to_0.01": ("steps to 0.01", "d"),
            "megabits_to_0.01": ("Mbit", ".2f"),
            "steps_to_0.0001": ("steps to 0.0001", "d"),
            "megabits_to_0.0001": ("Mbit", ".2f"),
        },
        measures=("gossip_modules/algorithms", "gossip_modules/compression", "gossip_modules/rounds"),
        script="cb643b0e:benchmarks/consensus.py",
        setup="""\
Eight ranks in a ring gossip until they agree. Each begins with a 100x100 matrix of normal numbers. The error is the
squared distance to the mean, relative to the start. All methods use the best step size of plain gossip.""",
        question="How many rounds and bytes?",
        result="PowerGossip needs 0.8 of the bits of plain gossip in float32, and 78 times as many rounds.",
    ),
    "default_graphs": Page(
        "How fast ranks agree on each graph",
        "default_graphs.csv",
        """\
**`BaseGraph` is exact after a few rounds, with the fewest messages.** With 25 ranks it takes 8 messages per rank to an
error of 1e-6. The default push-sum graph takes 44, a ring 1,306. With two peers per round, the exponential graph takes
36 messages and halves the noise of the default graph (0.37 for 0.80).""",
        {
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
        script="bb6c722:benchmarks/default_graphs.py",
        summary=messages,
        setup="""\
The figures are computed from the mixing matrices of training. Random graphs have expectations. In the table of all
rows:

- **contraction** is the long-run factor of the distance from the average; at 0 the average is exact after some rounds.
- **noise** is the variance of a rank around the mean, if each step adds noise of variance 1.
- **drift** is the distance of all models from the mean, for the worst constant steps of length 1.

[Which graph?](../choosing.md#which-graph) draws the conclusions.""",
        question="How many rounds and bytes?",
        result="With 25 ranks `BaseGraph` is exact in 9 rounds; the default graph needs 44 to an error of 1e-6.",
    ),
    "matcha_planning": Page(
        "Planning time of MATCHA",
        "matcha_planning.csv",
        """\
**A MATCHA plan for 64 ranks takes less than a second, for 256 ranks up to 8 seconds.** At half of the budget, rho is
0.424 for 16 ranks and 0.903 for 64. Optimising p and alpha together lowers rho by 0.011 at most, and takes 10 to 21
times as long.""",
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
        script="bb6c722:benchmarks/matcha_planning.py",
        setup="""\
The graphs are random and geometric. A plan colours the edges into matchings, then finds the probability p of each
matching and the weight alpha of a link. rho is the expected factor by which a round shrinks the squared distance to the
mean: less is better. Times are the least of the repeats.""",
        question="How many rounds and bytes?",
        result="A plan for 64 ranks takes 0.8 s, for 256 ranks up to 8 s.",
    ),
    "graph_scaling": Page(
        "Graphs with up to a million ranks",
        "graph_scaling.csv",
        """\
**The peers of a rank take microseconds to compute, for any number of ranks.** With a million ranks, all built-in graphs
answer in less than 0.01 ms and use less than 5 kB. `NetworkXGraph` stores your edges, so it grows with the number of
ranks: with 100,000 it takes a second to build.""",
        _GRAPHS,
        measures=("gossip_modules/graph_manager", "gossip_modules/mixing_manager"),
        script="bb6c722:benchmarks/graph_scaling.py",
        summary=largest,
        setup="""\
One rank, with one peer per round. A query asks for its peers in one round. The time of mixing includes building the
graph. The peak is Python's memory over all of it. Times are the least of the repeats.""",
        question="How many rounds and bytes?",
        result="A query for the peers of one rank takes microseconds.",
    ),
    "lab": Page(
        "Time per worker and step in the Lab",
        "lab.csv",
        """\
**Computing all workers at once by `vmap` takes 3.0 ms per worker and step, a loop over the workers 4.7 ms.**""",
        {
            "by": ("losses by", "s"),
            "workers": ("workers", "d"),
            "parameters": ("parameters", ",d"),
            "milliseconds": ("ms per worker and step", ".2f"),
        },
        measures=("gossip_modules/lab", "gossip_modules/rounds"),
        script="cb643b0e:benchmarks/lab.py",
        setup="""\
64 workers train a transformer of 30,592 parameters by SGP with AdamW, in one process on one core. A step has 8
sequences of 32 words. Milliseconds are processor time. See [the Lab](../guides/lab.md).""",
        question="Is the Lab right?",
        result="64 small transformers take 3.0 ms per worker and step on one core.",
    ),
    "simulator": Page(
        "Simulation of 1,024 workers",
        "simulator.csv",
        """\
**At 1 Gbit/s the simulator puts DiLoCo, Eager DiLoCo and SlowMo first (17.5 s to the target), then local SGD
(28.1 s).** SGP and Overlap SGP take 117 s, all-reduce 189 s. WAGMA and SparseLoCo are slower than all-reduce in this
setting. The simulator does not know your loss: in [a language model](outer_language.md) local SGD
and DiLoCo end above all-reduce.""",
        _SIMULATED,
        measures=("gossip_modules/algorithms", "gossip_modules/lab", "gossip_modules/rounds"),
        script="cb643b0e:benchmarks/simulator.py",
        summary=simulated,
        setup="""\
1,024 workers train 25 million parameters with 250 ms of compute per step, on links of 1 Gbit/s. This command computes
the figures, with advice: `python -m gossip_modules.lab --world-size 1024 --network "1 Gbit/s" --parameters 25e6
--compute 0.25`. An empty cell means that the target was not reached in 320 steps. Disagreement is the relative
difference between models; methods whose workers do not agree are not advised. MATCHA is simulated for up to 512 workers
only. [Which method?](../choosing.md#ask-the-simulator) says how to read the table.""",
        question="Is the Lab right?",
        result="At 1 Gbit/s outer optimizers come first; all-reduce takes 189 s to the target.",
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
