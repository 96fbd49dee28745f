"""Pages about training with a fixed number of ranks: the time of a step, the loss, and the effects of faults."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pandas as pd

from benchmarks.faults.table import markdown as faults_markdown
from benchmarks.pages.base import Page


def faults(rows: pd.DataFrame) -> str:
    """The table of faults and what deviates; errors are shown letter by letter."""
    lines = faults_markdown(rows).splitlines()
    escaped = (re.sub(r"([\\`*_\[\]<>])", r"\\\1", line) if line.startswith("- ") else line for line in lines)
    return "\n".join(escaped) + "\n"


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

TRAINING: Mapping[str, Page] = {
    "step_time": Page(
        "The time of a step, beside loops written by hand",
        "step_time.csv",
        """\
The wall time of a training step on the slowest rank, and the CPU time of a step of one rank, all in one run:
all methods take turns of a few steps. Ratios are medians over turns of the method's time over its standard's: for SGP,
Overlap SGP and DiLoCo a loop of 30 lines in plain torch.distributed (`benchmarks/by_hand.py`), for all-reduce
DistributedDataParallel with `gradient_as_bucket_view=True`, for the rest a step without communication. The CPU time
says how much work a method does; the wall time of a short step on two cores, beside other load, is a
matter of luck. "over, ms" is the median difference of the CPU times. "mlp" is six layers of 64: it shows the work
around a round. "tensors" has 1,000 tensors of up to 16 numbers, "wide" 9.4 M parameters in eight tensors, and
"resnet18" is mostly compute. "library" is a commit, or "this": the one of the row.""",
        _STEP_COLUMNS,
    ),
    "outer_step": Page(
        "An outer step of DiLoCo, before and after",
        "outer_step.csv",
        """\
The script of [the time of a step](step_time.md) with the library of the commit before and after outer steps compute in
the memory of the drift. DiLoCo has an outer step in every second step here, of 9.4 M parameters in eight tensors. Its
standard is the hand-written loop, which takes no new memory in a step either. The CPU time is the figure to read; the
machine did other work.""",
        _STEP_COLUMNS,
    ),
    "wagma_step": Page(
        "A step of WAGMA, before and after",
        "wagma_step.csv",
        """\
The script of [the time of a step](step_time.md) with the library of the commit before and after a rank that is on time
gets its average in place. The CPU time is the figure to read: beyond a local step WAGMA takes less than before with
9.4 M parameters, and still more than SGP.""",
        _STEP_COLUMNS,
    ),
    "before_after_bits": Page(
        "The bits and the memory of training, before and after",
        "before_after_bits.csv",
        """\
Nine steps of training on four ranks with the library of an earlier commit and with this one: the largest difference of
a parameter and of a running statistic at the end, where 0 means the same bits, and the bytes of all tensors that are
alive after the last step, in models. Parameters, gradients and momentum are three of these. The module of the first
command is `benchmarks.before_after_bits` today. Bits of the asynchronous methods AD-PSGD and WAGMA depend on time, so
only their copies are compared; ranks meet before each step, and the receive buffers of WAGMA, three chunks of 4 MB for
large models, are one vector for this small one. The model has a layer of BatchNorm, and the learning rate changes. A
combination that one of the two libraries refuses is left out. Overlapped rows count the temporary tensors of a round in
flight, so their copies vary from run to run. Parameters keep their bits but for SparseLoCo in float32, which differs by
rounding. Statistics differ by rounding in overlapped rounds of compressed messages and in three other rows. In Eager
DiLoCo, which takes half of the averaged statistics, and in RelaySGD, which mixes them with the weights of the graph,
they differ by definition.""",
        {
            "method": ("method", "s"),
            "dtype": ("dtype", "s"),
            "rounds": ("rounds", "s"),
            "parameters": ("parameters", ".2g"),
            "buffers": ("statistics", ".2g"),
            "copies_before": ("copies before", ".2f"),
            "copies_after": ("copies after", ".2f"),
        },
    ),
    "language_model": Page(
        "A language model on Python's sources",
        "language_model.csv",
        """\
The default run of `train/language_model.py`, by several methods with the same options: how long it
takes from the command to its end, and what the averaged model reaches on the validation files, beside
what the frequencies of the tokens alone give. Learning rates were not tuned for each method. The
machine did other work in the first four runs, and in those by NoLoCo, GASLoC and, without options, Eager
DiLoCo: their seconds are no comparison of methods. The processor's seconds are those of all processes of
a run, which two idle cores share. All runs have the same seed.

**With a period of ten steps, the default here, the published outer momentum of 0.9 is too much for so short a
run.** DiLoCo and Eager DiLoCo learn more with 0.5, and local SGD, which has none, more than both.
[Language models](../guides/language_models.md) says what is learnt.""",
        {
            "recipe": ("recipe", "s"),
            "options": ("options", "s"),
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
        script="bb6c722:benchmarks/language_model.py",
    ),
    "outer_steps": Page(
        "What outer steps add to a step",
        "outer_steps.csv",
        """\
Four ranks on one machine with two cores, joined by Gloo over loopback, train a ResNet-18 each (11.2 M parameters),
with an outer step every H steps. Methods take turns in the same processes. The ratio is that of the mean step to the
step of a rank that trains alone, in the same cycle: the median over cycles, with its quartiles. "all_reduce" trains
alone, and calls `torch.distributed.all_reduce` for a vector of as many floats every H steps: it is what an exact
average costs before anything is computed with it, on cores that training needs as well. "diloco-fused" is DiLoCo
with `optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True, fused=True)`.

**At H = 4 no method takes at most 1.08 times the local step here, which is the target, and neither does the bare
all-reduce.** What DiLoCo takes beside it is reading and writing memory: anchor, drift, momentum and model, each 45 MB
on each rank, several times. A fused optimizer, whose last bit may differ, goes over them once. At H = 16 local SGD is
below the target, and DiLoCo with a fused optimizer.""",
        {
            "method": ("method", "s"),
            "ranks": ("ranks", "d"),
            "sync_every": ("H", "d"),
            "cycles": ("cycles", "d"),
            "step_seconds": ("step, s", ".3f"),
            "ratio": ("ratio", ".3f"),
            "ratio_low": ("from", ".3f"),
            "ratio_high": ("to", ".3f"),
        },
        script="bb6c722:benchmarks/outer_steps.py",
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
        script="bb6c722:benchmarks/restart.py",
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
