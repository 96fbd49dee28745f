"""Pages about jobs whose workers die, come back and join."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.pages.base import Page
from benchmarks.pages.chaos import chaos, chaos_faults

MEMBERSHIP: Mapping[str, Page] = {
    "elastic": Page(
        "Killed while the others train on",
        "elastic.csv",
        """\
Eight workers with a [membership](../guides/elasticity.md), each a process of its own on one machine with two cores; a
step computes little and sleeps 50 ms. The first one, two or three by rank are killed (SIGKILL) at once, rank 0 among
them. After 100 more steps one worker is started again. Where the store is killed, it dies with them and is started
again, empty, with that worker. Times are those of the workers that live, in ms: the median of all steps before, the
slowest step before the kill, from the kill to the restart, and after it. What must hold is that none of them fails
and that the slowest step after the kill takes no longer than twice the median and 50 ms. The last column but one
counts the rounds that the others began between the moment when the new worker was ready to join and its first.

**No worker that lives fails, and the bound holds for all methods but all-reduce in all runs but two: MATCHA passed it
by 20 ms, and DiLoCo while other work made steps of 1.4 s before the kill too.** An all-reduce of eight processes takes
20 ms of two cores in Gloo, so a lost step of all-reduce and the next generation take 11 to 78 ms beyond the bound.
Without the store no generation forms, and steps of all-reduce, which need one, wait for a second each until it is back.

torchft is another library, for comparison: its `DistributedDataParallel`, an all-reduce in each step. Its replicas meet
in a lighthouse, in the place of the store; it takes a replica for dead after 5 s without a heartbeat, which is the
default and the length of the pause. A replica joins within its first step. Without the lighthouse all of them fail
after 60 s, which is the time limit that they were given. Its rows are older: on 26 November, with torchft 0.2.0, some
replicas ended before the first kill.""",
        {
            "method": ("method", "s"),
            "killed": ("killed", "d"),
            "store": ("store", "s"),
            "median_ms": ("median", ".1f"),
            "slowest_before_ms": ("slowest before", ".1f"),
            "target_ms": ("at most", ".1f"),
            "slowest_after_kill_ms": ("after the kill", ".1f"),
            "met": ("holds", "s"),
            "slowest_after_join_ms": ("after the restart", ".1f"),
            "rounds_until_joined": ("rounds until joined", "d"),
            "survivors_that_failed": ("survivors that failed", "d"),
        },
    ),
    "elastic_cost": Page(
        "What a membership costs without faults",
        "elastic_cost.csv",
        """\
Four workers with a [membership](../guides/elasticity.md) and four without one train the same network, each in a process
of its own, on one machine. The two sides take turns of a few steps, and the side that has no turn waits. The figure is
the processor time of a step, of all threads of a process, mean over the four; nothing is slept. The ratio is the median
over turns of with / without, and its quartiles. Times of the wall are of the slowest worker. The last column is the
part of one core that the threads of the membership use while nothing is trained. No other job ran. All-reduce without
a membership is DistributedDataParallel, which averages under the backward and copies no gradients.""",
        {
            "method": ("method", "s"),
            "num_workers": ("workers", "d"),
            "num_parameters": ("parameters", ",d"),
            "turns": ("turns", "d"),
            "plain_cpu_ms": ("without, ms", ".2f"),
            "elastic_cpu_ms": ("with, ms", ".2f"),
            "over_ms": ("more, ms", ".2f"),
            "ratio": ("ratio", ".3f"),
            "ratio_quarter": ("from", ".3f"),
            "ratio_three_quarters": ("to", ".3f"),
            "plain_wall_ms": ("wall without, ms", ".2f"),
            "elastic_wall_ms": ("wall with, ms", ".2f"),
            "background_percent": ("of a core, %", ".1f"),
        },
    ),
    "elastic_joins": Page(
        "What a join costs the donor",
        "elastic_joins.csv",
        """\
Workers that come one after the other to a job with a [membership](../guides/elasticity.md), on one machine with two
cores, which they all share; a step computes and sleeps 50 ms. The state is the parameters and their
momentum; beside it go the names and shapes. The slowest step of the donor while it gives its state stands beside
its slowest step at other times, which shows what sharing the cores does. The target is 1.25 times the median, at most
ten rounds and the bytes of one state. All join within five rounds. **20 of 28 joins are within 1.25**; the median is
1.18. In no row is the slowest step while giving as slow as the slowest at other times: workers and those that start
share the cores.""",
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
        script="bb6c722:benchmarks/elastic/joins.py",
    ),
    "elastic_scale": Page(
        "How long 8, 16 and 32 workers take",
        "elastic_scale.csv",
        """\
Workers with a [membership](../guides/elasticity.md), each a process of its own on a host of the emulated cluster: a
network namespace behind a switch, with links of 1 Gbit/s. All share one machine with two cores; a step sleeps, the
longer since so many share them. The first one is killed, and one is started again 40 steps later. Seconds: from the
moment when all are ready to the last worker's first step; from the kill until the last one begins the next
generation, which torchft's replicas do not name; and from the moment when the new worker is ready to its first step.
torchft's replicas meet in a lighthouse, which takes one for dead after 5 s without a heartbeat; its rows are older.
Workers begin a generation two steps after they are ready for it, so that none waits: half a second of the time with 8
and 16 workers.""",
        {
            "method": ("method", "s"),
            "num_workers": ("workers", "d"),
            "slept_ms": ("computation, ms", ".0f"),
            "median_ms": ("median step, ms", ".1f"),
            "seconds_to_begin": ("to begin, s", ".2f"),
            "seconds_to_form": ("next generation, s", ".2f"),
            "slowest_after_kill_ms": ("slowest after the kill, ms", ".0f"),
            "seconds_to_join": ("to join, s", ".2f"),
            "survivors_that_failed": ("survivors that failed", "d"),
        },
    ),
    "scale": Page(
        "The cost of one rank among many",
        "scale.csv",
        """\
Ranks as threads of one process over Gloo, in groups whose ranks have few connections. Times are CPU time of the thread
of a rank, the median of all ranks: a named barrier, wrapping a tiny model, a step of SGP with its round, and an exact
average. Descriptors are those of one rank, with the ends of all its connections. The times of 256 ranks were to be at
most twice those of 16; see [Transport and failures](../decisions/transport.md).""",
        {
            "ranks": ("ranks", "d"),
            "descriptors": ("descriptors", ".1f"),
            "barrier_ms": ("barrier, ms", ".2f"),
            "wrap_ms": ("wrapping, ms", ".1f"),
            "round_ms": ("step and round, ms", ".2f"),
            "average_ms": ("exact average, ms", ".2f"),
        },
    ),
    "elastic_network": Page(
        "Stopped, cut off, slow and lossy",
        "elastic_network.csv",
        """\
Eight workers with a [membership](../guides/elasticity.md), each on a host of its own: a network namespace, behind a
router that delays, loses or drops packets; all on one machine with two cores. A step computes little and sleeps 50 ms.
At step 100 something happens to one worker. The deadline is the silence after which it is left out. Times are
those of the other workers: the median step before, the slowest step before and after, how many steps after took longer
than twice the median and 50 ms, and the median of the last hundred steps of 400, when the faults that end have ended.

Where a worker was stopped or cut off, the others wait once: the slowest step is an ordinary one and the deadline, and
at most 38 ms more; in each of the first steps a few of them wait, so that three count as slow. Who wakes, or is reached
again, joins by itself. A worker that is slow but not silent is waited for, step by step: a delay of 200 ms in each
direction, of which a message of 37 kB takes several, or a lost packet, which TCP sends again after 200 ms or more. That
is more than the deadline and 50 ms for a step of 5 s of delay, since nobody is left out for it.""",
        {
            "method": ("method", "s"),
            "fault": ("what happens", "s"),
            "deadline_ms": ("deadline, ms", ".0f"),
            "median_ms": ("median before", ".1f"),
            "slowest_before_ms": ("slowest before", ".1f"),
            "slowest_after_ms": ("slowest after", ".1f"),
            "slow_steps": ("slow steps", "d"),
            "median_afterwards_ms": ("median at the end", ".1f"),
            "members_afterwards": ("workers at the end", "d"),
            "others_that_failed": ("others that failed", "d"),
        },
    ),
    "chaos": Page(
        "A random fault every two seconds",
        "chaos.csv",
        """\
Eight workers with a [membership](../guides/elasticity.md), each a process of its own on one machine with two
cores that does other work too. Every two seconds, drawn with a seed, one or two workers are killed (SIGKILL),
one is stopped (SIGSTOP) for half a second to eight, one is started, or the process of the store is killed and
another one, empty, is started. Who is silent for 2 s is left out. Then as many workers as are missing are started, and
the learning rate falls to zero in 1500 steps. The run beside it has the same number of steps, and no faults.
[What each kind of fault costs](chaos_faults.md) is on a page of its own. All that must hold does, with all eight
methods but DiLoCo, which ended 0.7 points below its run without faults in twelve minutes at a load of 25 to 40. SGP had
the machine almost for itself; Overlap SGP and D-PSGD ran side by side, MATCHA and CHOCO-SGD three at once, all with
other work at the lowest priority beside them, and so did WAGMA, alone; AD-PSGD and PowerGossip ran at once with two
more, beside tests, at a load of 20 to 45. At that load Overlap SGP ended 0.57 points below its run without faults, and
D-PSGD 1.56, where the limit is 0.5: workers took half as many steps between two faults. In an earlier run with WAGMA
descriptors grew from 41 to 82, which was mended. These three runs have [a page of their own](chaos_before.md).

What earlier runs showed, and what was changed: models ran away in graphs with holes, since weights are small there
(steps are limited while a peer is lost); no generation formed any more where the store died together with most workers;
and threads and descriptors grew, as errors kept what failed generations had made, with AD-PSGD and WAGMA what all
former generations had. [Decisions](../decisions/membership.md) has the reasons.

![How many workers there were in the run with SGP, and the slowest step after each fault.](../assets/chaos.svg)

What must hold: no worker that was not killed fails or hangs; the generations and steps of a worker only rise; a
generation is the same set of workers for all of them; the sum of the push-sum weights of a generation stays
while nobody comes or goes (the largest relative change in one step; where messages are in flight it is not the
whole mass, and the cell is empty). Threads, descriptors and memory are those of a worker that is never killed, in its
first generation and in the last 250 steps. Accuracy is the mean over the workers at the end, in percent. A step sleeps
50 ms with SGP and 100 with the others; those in which a worker itself stood still or joined are left out of the
times.""",
        render=chaos,
    ),
    "chaos_before": Page(
        "A random fault every two seconds, before",
        "chaos_before.csv",
        """\
Runs that did not hold all that [must](chaos.md), and were repeated: Overlap SGP and D-PSGD at a load of 20 to 45, and
WAGMA before its former generations were let go of.""",
        render=chaos,
    ),
    "chaos_faults": Page(
        "What each kind of fault costs",
        "chaos_faults.csv",
        """\
The faults of the runs with [a random fault every two seconds](chaos.md), by what was done: the slowest step of any
worker between the fault and the next one, in ms, as the median over the faults, nine of ten of them, and the
slowest of all. A worker that is stopped for longer than 2 s costs the others these 2 s, once. They end when the next
fault has come, and mostly count with that: so it is with most steps of more than 1.3 s after a fault of another
kind.""",
        render=chaos_faults,
    ),
}
