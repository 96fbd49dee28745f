"""The pages, each with the columns of its table."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pandas as pd

from benchmarks.faults.table import markdown as faults_markdown
from benchmarks.pages.chaos import chaos, chaos_faults


def faults(rows: pd.DataFrame) -> str:
    """The table of faults and what deviates; errors are shown letter by letter."""
    lines = faults_markdown(rows).splitlines()
    escaped = (re.sub(r"([\\`*_\[\]<>])", r"\\\1", line) if line.startswith("- ") else line for line in lines)
    return "\n".join(escaped) + "\n"


@dataclass(frozen=True)
class Page:
    """A page and the CSV file it is made of.

    Attributes:
        title: of the page.
        csv: name of the file in benchmarks/results/.
        text: what is measured, and how to read it.
        columns: columns of the table: the name in the CSV file, the header here, and the format of a number.
        render: makes the figures of a page that is no plain table.
    """

    title: str
    csv: str
    text: str
    columns: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    render: Callable[[pd.DataFrame], str] | None = None


PAGES: Mapping[str, Page] = {
    "graph_scaling": Page(
        "Graphs of up to a million ranks",
        "graph_scaling.csv",
        """\
What one rank does on each graph, with one peer per round: construction, a query (its peers in one
round), the mixing weights of one round, which includes building the graph, and the peak of Python's
memory over all of it. Times are the least of the repeats, on a machine that did other work too.
`NetworkXGraph` keeps the user's edges, so it grows with the number of ranks.""",
        {
            "graph": ("graph", "s"),
            "ranks": ("ranks", ",d"),
            "construction_ms": ("construction, ms", ".3f"),
            "query_ms": ("query, ms", ".3f"),
            "uniform_mixing_ms": ("uniform mixing, ms", ".3f"),
            "metropolis_mixing_ms": ("Metropolis mixing, ms", ".3f"),
            "peak_bytes": ("peak, bytes", ",d"),
        },
    ),
    "default_graphs": Page(
        "Graphs for numbers of ranks that are no powers of two",
        "default_graphs.csv",
        """\
How fast ranks agree on the default graphs and on others, by linear algebra on the mixing matrices of
training. Contraction is the factor by which the distance from the average shrinks in the long run, per
round and per message that a rank sends, on average over the ranks; 0 means that the average is exact
after some rounds. Rounds and messages lead to an error of 1e-6. Figures of random graphs are
expectations. Noise and drift are how far apart models stay when every step moves them, by what is
random (the variance of a rank around the mean, for steps of variance 1) and by what is the same in
every step (the distance of all models from the mean, for the worst steps of length 1): less is better.
[Which graph?](../choosing.md#which-graph) says what follows. The figures are computed, not timed.""",
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
    ),
    "matcha_planning": Page(
        "Planning MATCHA",
        "matcha_planning.csv",
        """\
How long a MATCHA plan takes on random geometric graphs: the edge colouring into matchings, the
probabilities p of the matchings, and the weight alpha of a link. rho is the expected factor by which
a round shrinks the squared distance to the mean; less is better. The last two columns optimise p and
alpha together, on small graphs only. Times are the least of the repeats, on a machine that did other
work too.""",
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
    ),
    "compression": Page(
        "What compression costs and saves",
        "compression.csv",
        """\
Compressors on a vector as long as ResNet-18's parameters, then whole gossipers on a ResNet-18 with
its buffers, with one thread. The last columns are the time that the saved bytes take on a link,
divided by encoding plus decoding: compressing pays where that is above 1. Times are medians of the
processor time of one thread; other work on the machine shares its caches and memory, and can make
them longer and the ratios smaller.""",
        {
            "name": ("codec", "s"),
            "num_bytes": ("bytes per message", ",d"),
            "encode_ms": ("encode, ms", ".1f"),
            "decode_ms": ("decode, ms", ".1f"),
            "saved_ms": ("saved at 1 Gbit/s, ms", ".1f"),
            "ratio_at_0.1_gbit": ("ratio at 100 Mbit/s", ".2f"),
            "ratio_at_1_gbit": ("ratio at 1 Gbit/s", ".2f"),
            "ratio_at_10_gbit": ("ratio at 10 Gbit/s", ".2f"),
        },
    ),
    "consensus": Page(
        "Agreement in steps and in bits",
        "consensus.csv",
        """\
Eight ranks in a ring, each with a 100x100 matrix of normal numbers, gossip until they agree. The error is
the squared distance to the mean, relative to the start; Mbit are sent per rank. The step size of each
method is that of plain gossip on this ring. These figures do not depend on how busy the machine is.""",
        {
            "method": ("method", "s"),
            "step_size": ("step size", "g"),
            "steps_to_0.01": ("steps to 0.01", "d"),
            "megabits_to_0.01": ("Mbit", ".2f"),
            "steps_to_0.0001": ("steps to 0.0001", "d"),
            "megabits_to_0.0001": ("Mbit", ".2f"),
        },
    ),
    "simulator": Page(
        "What the simulator predicts for 1,024 workers",
        "simulator.csv",
        """\
1,024 workers, a model of 25 million parameters, 250 ms of compute per step, links of 1 Gbit/s: what
`python -m gossip_modules.simulate --world-size 1024 --rate-gbit 1 --parameters 25e6 --compute-ms 250`
prints, which advises as well. [Which method?](../choosing.md#ask-the-simulator) says how to read it.
The figures are computed, not timed: a busy machine does not change them.
MATCHA is missing: it is simulated for up to 512 workers. An empty cell means that the target was not
reached in 320 steps. Disagreement is how far models differ, relative to their size; where they do not
agree they are not one model, and the method is not advised.""",
        {
            "method": ("method", "s"),
            "steps": ("steps", "d"),
            "step_seconds": ("s per step", ".3f"),
            "seconds": ("s to target", ".1f"),
            "rank_megabytes": ("MB per worker", ",d"),
            "waiting_percent": ("waiting, %", "d"),
            "disagreement": ("disagreement", ".3f"),
            "agreed": ("agree", "s"),
        },
    ),
    "elastic": Page(
        "Killed while the others train on",
        "elastic.csv",
        """\
Eight workers with a [membership](../guides/elasticity.md), each a process of its own on one machine with two
cores; a step computes little and sleeps 50 ms. Some are killed (SIGKILL) at once, the first among them, and
one is started again 100 steps later. Times are those of the workers that live: the median of all steps before,
the slowest step before the kill, from the kill to the restart, and after it. The last column counts the rounds
that the others began between the moment when the new worker was ready to join and its first.""",
        {
            "method": ("method", "s"),
            "num_workers": ("workers", "d"),
            "killed": ("killed", "d"),
            "median_ms": ("median, ms", ".1f"),
            "slowest_before_ms": ("slowest before", ".1f"),
            "slowest_after_kill_ms": ("after the kill", ".1f"),
            "slowest_after_join_ms": ("after the restart", ".1f"),
            "rounds_until_joined": ("rounds until joined", "d"),
            "survivors_that_failed": ("survivors that failed", "d"),
        },
    ),
    "elastic_joins": Page(
        "What a join costs the donor",
        "elastic_joins.csv",
        """\
Workers that come one after the other to a job with a [membership](../guides/elasticity.md), on one machine with two
cores that did other work at the same time; a step computes and sleeps 50 ms. The state is the parameters and their
momentum; beside it go the names and shapes. The slowest step of the donor while it gives its state stands beside
its slowest step at other times, which shows what the other work did.""",
        {
            "method": ("method", "s"),
            "num_workers": ("workers", "d"),
            "state_bytes": ("state, bytes", ",d"),
            "sent_bytes": ("sent, bytes", ",d"),
            "seconds": ("seconds", ".3f"),
            "rounds_until_joined": ("rounds until joined", "d"),
            "median_ms": ("median step, ms", ".1f"),
            "slowest_alone_ms": ("slowest alone", ".1f"),
            "slowest_serving_ms": ("slowest while giving", ".1f"),
            "ratio": ("by the median", ".2f"),
        },
    ),
    "chaos": Page(
        "A random fault every two seconds",
        "chaos.csv",
        """\
Eight workers with a [membership](../guides/elasticity.md), each a process of its own on one machine with two
cores that does other work too. Every two seconds, drawn with a seed, one or two workers are killed (SIGKILL),
one is stopped (SIGSTOP) for half a second to eight, one is started, or the process of the store is killed and
another one, empty, is started. Who is silent for 2 s is left out. Then as many steps are trained without faults.
[What each kind of fault costs](chaos_faults.md) is on a page of its own.
**Not all of it holds.** The run went on for 400 s through 200 faults; then all but one worker lost the job within
20 s, and that one diverged, with a push-sum weight of 0.001. Of 22 that failed, 20 waited to join when a store died.

![How many workers there were in the run with SGP, and the slowest step after each fault.](../assets/chaos.svg)

What must hold: no worker that was not killed fails or hangs; the generations and steps of a worker only rise; a
generation is the same set of workers for all of them; the sum of the push-sum weights of a generation stays
while nobody comes or goes (the largest relative change in one step; where messages are in flight it is not the
whole mass, and the cell is empty). Threads, descriptors and memory are those of a worker that is never killed, in the
first third of its life and in the last. Accuracy is the mean over the workers at the end, in percent. A step sleeps
50 ms; those in which a worker itself stood still or joined are left out of the times.""",
        render=chaos,
    ),
    "chaos_faults": Page(
        "What each kind of fault costs",
        "chaos_faults.csv",
        """\
The faults of the runs with [a random fault every two seconds](chaos.md), by what was done: the slowest step of any
worker between the fault and the next one, in ms, as the median over the faults, nine of ten of them, and the
slowest of all. A worker that is stopped for longer than 2 s costs the others these 2 s, once.""",
        render=chaos_faults,
    ),
    "before_after": Page(
        "The time of a step, before and after",
        "before_after.csv",
        """\
Milliseconds per training step of the slowest of four ranks, with the library of an earlier commit and
with that of this one, in one run: both train at once and take turns. The ratio is the median over turns
of after / before, with its interval of 95 %. "mlp" is six layers of 64: it shows what surrounds a round.
"resnet18" is mostly compute. Absolute times are those of four ranks on two cores.""",
        {
            "model": ("model", "s"),
            "method": ("method", "s"),
            "before_ms": ("before, ms", ".2f"),
            "after_ms": ("after, ms", ".2f"),
            "ratio": ("ratio", ".3f"),
            "ratio_low": ("from", ".3f"),
            "ratio_high": ("to", ".3f"),
        },
    ),
    "language_model": Page(
        "A language model on Python's sources",
        "language_model.csv",
        """\
The default run of `train/language_model.py`, by several methods with the same options: how long it
takes from the command to its end, and what the averaged model reaches on the validation files, beside
what the frequencies of the tokens alone give. Learning rates were not tuned for each method. The
machine did other work too, so seconds are no comparison of methods; the processor's seconds are those
of all processes of a run, which two idle cores share.
[Language models](../guides/language_models.md) says what is learnt.""",
        {
            "recipe": ("recipe", "s"),
            "model": ("model", "s"),
            "ranks": ("ranks", "d"),
            "python": ("Python", "s"),
            "steps": ("steps", "d"),
            "seconds": ("s, all", ".0f"),
            "cpu_seconds": ("s, processor", ".0f"),
            "training_seconds": ("s, training", ".0f"),
            "nll": ("nats per token", ".3f"),
            "perplexity": ("perplexity", ".1f"),
            "bits_per_byte": ("bits per byte", ".3f"),
            "frequencies_bits_per_byte": ("by frequencies", ".3f"),
            "sent_megabytes": ("MB sent per rank", ".1f"),
        },
    ),
    "restart": Page(
        "Killed and resumed",
        "restart.csv",
        """\
A job on one machine is killed by SIGKILL and started again with `--resume auto`: seconds from the
kill to the line that says from which step the run goes on, and to the first epoch that is new.""",
        {
            "date": ("date", "s"),
            "recipe": ("recipe", "s"),
            "num_workers": ("ranks", "d"),
            "repeat": ("repeat", "d"),
            "seconds_to_resume": ("to resume, s", ".1f"),
            "seconds_to_new_epoch": ("to a new epoch, s", ".1f"),
        },
    ),
    "faults": Page(
        "Killed, stopped and failing ranks",
        "faults.csv",
        """\
What every wrapper does when ranks are killed, stopped, fail or leave.
[What is guaranteed](../guides/failures.md) is on a page of its own.""",
        render=faults,
    ),
    "faults_quieter": Page(
        "Killed, stopped and failing ranks, on a quieter machine",
        "faults_quieter.csv",
        """\
The measurement of [killed, stopped and failing ranks](faults.md), made again on a quieter machine.""",
        render=faults,
    ),
    "faults_before": Page(
        "Killed, stopped and failing ranks, at an earlier commit",
        "faults_before.csv",
        """\
The same faults with the library of an earlier commit, for comparison with
[killed, stopped and failing ranks](faults.md).""",
        render=faults,
    ),
}
