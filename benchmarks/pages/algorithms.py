"""Pages about graphs, compressors and methods, without training a network."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.pages.base import Page

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
ALGORITHMS: Mapping[str, Page] = {
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
        script="bb6c722:benchmarks/graph_scaling.py",
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
        script="bb6c722:benchmarks/default_graphs.py",
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
        script="bb6c722:benchmarks/matcha_planning.py",
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
        _CODES,
        script="cb643b0e:benchmarks/compression.py",
    ),
    "compression_gpu": Page(
        "What compression costs and saves on a GPU",
        "compression_gpu.csv",
        """\
As [on a CPU](compression.md), with the vector and the model on a GPU; times end when the GPU has done the work. The
commit was given by hand, since the machine had a copy of the files without git.""",
        _CODES,
        script="cb643b0e:benchmarks/compression.py",
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
        script="cb643b0e:benchmarks/consensus.py",
    ),
    "lab": Page(
        "Time of a worker and step in the Lab",
        "lab.csv",
        """\
64 workers of a transformer with 30,592 parameters, 8 sequences of 32 words in a step, AdamW, SGP, all in one process on
one core. "vmap" computes the losses of all workers at once, "loop" one after another; see [the Lab](../guides/lab.md).
Milliseconds are those of the processor, of one worker and step.""",
        columns={
            "by": ("losses by", "s"),
            "workers": ("workers", "d"),
            "parameters": ("parameters", ",d"),
            "milliseconds": ("ms per worker and step", ".2f"),
        },
        script="cb643b0e:benchmarks/lab.py",
    ),
    "gpu": Page(
        "One GPU: bandwidth, overhead, overlap, memory and the Lab",
        "gpu.csv",
        """\
Bandwidth is the bytes that an operation has to read and write over its time; its ratio is to a copy on the device, or
to a copy between the device and pinned memory. Steps are those of a ResNet-18 on images of 32 x 32, with a peer that
only takes part in rounds over Gloo, of all wrappers in turn; their ratio is the median over turns of the ratio to the
bare step, or to the longer one of the step and the round. The memory is the peak beside the bare model, in copies of
the parameters. In "precision" two ranks train a small model in several ways. In "lab" 64 workers of a decoder train
in one process. A row with the figure "error" is a section that failed.""",
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
    ),
    "simulator": Page(
        "What the simulator predicts for 1,024 workers",
        "simulator.csv",
        """\
1,024 workers, a model of 25 million parameters, 250 ms of compute per step, links of 1 Gbit/s: what
`python -m gossip_modules.lab --world-size 1024 --network "1 Gbit/s" --parameters 25e6 --compute 0.25`
prints, which advises as well, and D-PSGD under consensus control, `--schedule "ConsensusControl(2)"`, also
with `average_every=1`. [Which method?](../choosing.md#ask-the-simulator) says how to read it.
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
        script="cb643b0e:benchmarks/simulator.py",
    ),
}
