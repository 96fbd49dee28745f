"""Pages about jobs whose workers die, come back and join."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from benchmarks.pages.base import Page
from benchmarks.pages.chaos import chaos, chaos_faults, outcomes
from benchmarks.pages.markdown import grid, table


def kills(rows: pd.DataFrame) -> str:
    """The worst step after a kill by method, with the store alive and killed."""
    found = [
        {
            "method": method,
            "median": own["median_ms"].median(),
            **{store: own.loc[own["store"] == store, "slowest_after_kill_ms"].max() for store in ("lives", "killed")},
            "bound": f"{(own['met'] == 'yes').sum()} of {len(own)}",
            "failed": own["survivors_that_failed"].sum(),
        }
        for method, own in rows.groupby("method", sort=False)
    ]
    columns = {
        "method": ("method", "s"),
        "median": ("median step, ms", ".0f"),
        "lives": ("slowest after a kill, ms", ".0f"),
        "killed": ("store killed too, ms", ".0f"),
        "bound": ("runs within the bound", "s"),
        "failed": ("survivors that failed", "d"),
    }
    return table(pd.DataFrame(found), columns)


def cost(rows: pd.DataFrame) -> str:
    """The ratio of CPU times with and without a membership, by method and size of the model."""
    return grid(
        rows, ("method", "CPU time with a membership / without"), "num_parameters", "ratio", ".3f", "{:,} parameters"
    )


MEMBERSHIP: Mapping[str, Page] = {
    "elastic": Page(
        "Training time when workers are killed",
        "elastic.csv",
        """\
**{elastic.survivors} survivor fails. The pause is at most a step and 50 ms in {elastic.within} runs; in the others
{elastic.beyond}.** One to three of eight workers are killed at once. The bound, for gossip, DiLoCo and the asynchronous
methods, is twice the median and 50 ms for the survivors' slowest step. All-reduce needs a new generation first:
{elastic.reduced}, and {elastic.reduced_store} while the store is gone. After the restart the slowest step takes
{elastic.joined}. torchft takes 5.2 to 5.7 s for a step, mostly its default heartbeat limit: see the part about 8, 16
and 32 workers.""",
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
        measures=("gossip_modules/membership", "gossip_modules/wrappers"),
        summary=kills,
        setup="""\
[Eight workers](index.md#jobs-with-a-membership) take steps that compute little and sleep 50 ms. The first one, two or
three by rank are killed, rank 0 among them. After 100 more steps one worker is started again. Where the store is
killed, it dies with them and is started again, empty, with that worker. Survivors are timed, in ms.
"Rounds until joined" counts the rounds of the others from the moment when the new worker was ready to its first round.

torchft's replicas train by its `DistributedDataParallel` and meet in a lighthouse. They take a replica for dead after
5 s without a heartbeat. Without the lighthouse all fail after 60 s, their time limit. This row is older: on 26
November, with torchft 0.2.0, some replicas ended before the first kill.""",
        parts=(
            Page(
                "Workers that are stopped, cut off, slow or lossy",
                "elastic_network.csv",
                """\
**The others wait once, for 1.01 to 1.09 s at a deadline of 1 s, then train on.** A worker that wakes or is
reached again joins by itself. A worker that is slow but sends heartbeats is waited for, step by step: with 200 ms of
delay in each direction, or with 5 % of the packets lost, steps take up to 1.26 s for the 5 s of the fault.""",
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
                measures=("gossip_modules/membership", "gossip_modules/transport"),
                setup="""\
Each of eight workers is on a host of its own: a network namespace behind a router that delays, loses or drops packets.
At step 100 one worker is disturbed. A worker without a heartbeat for the deadline is excluded. Times are those of the
other workers, in ms. A slow step takes longer than twice the median and 50 ms. The median at the end is that of the
last hundred of 400 steps.""",
            ),
            Page(
                "Time to begin, to go on and to join with 8, 16 and 32 workers",
                "elastic_scale.csv",
                """\
**32 workers form the next generation 1.7 s after a kill, 8 workers after 0.7 s.** Training goes on meanwhile: the
slowest step takes 0.6 s with 32 workers, 0.3 s with 8.""",
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
                measures=("gossip_modules/membership",),
                setup="""\
Each worker is on an emulated host with a link of 1 Gbit/s. All share two cores. The first worker is killed, and one is
started again 40 steps later. Seconds run from the moment when all are ready to the last worker's first step; from the
kill until the last worker begins the next generation; and from the moment when the new worker is ready to its first
step. Workers begin a generation two steps after they are ready for it: half a second of the time with 8 and 16
workers. torchft does not report generations; its rows are older.""",
            ),
        ),
        question="What does a failure cost?",
        result="In {elastic.within} runs survivors wait for at most a step and 50 ms.",
    ),
    "chaos": Page(
        "Training under a random fault every two seconds",
        "chaos.csv",
        """\
**With {chaos.num_faults} faults per method, {chaos.failed} worker fails or hangs. Beside the run without faults,
{chaos.far}.** Each ran once, at a load of up to 40 processes. A kill
costs 0.09 to 0.29 s, in the median over faults. A stop for longer than the deadline of 2 s costs the others 2 s once.

![The number of workers in the run with SGP, and the slowest step after each fault.](../assets/chaos.svg)""",
        measures=("gossip_modules/membership", "gossip_modules/rounds", "gossip_modules/wrappers"),
        render=chaos,
        summary=outcomes,
        setup="""\
Every two seconds a seed draws a fault of [eight workers](index.md#jobs-with-a-membership): one or two are killed, one
is stopped (SIGSTOP) for 0.5 to 8 seconds, one is started, or the store is killed and an empty one started. The deadline
is 2 s. At the end the missing workers are started, and the learning rate falls to zero in 1500 steps. A step sleeps 50
ms with SGP and 100 with the others. Times leave out steps in which the worker itself stood still or joined. Accuracy is
the mean over the workers at the end.

These checks must pass: no worker that was not killed fails or hangs; generations and steps only rise; all workers of a
generation name the same members; the sum of the push-sum weights stays while nobody comes or goes ("weight drift": its
largest relative change in one step). Threads, descriptors and memory are those of a worker that is never killed, in its
first generation and in the last 250 steps.

AD-PSGD and PowerGossip ran beside tests, at a load of 20 to 45, and SGP almost alone.
[Decisions](../decisions/membership.md) says what earlier runs changed.""",
        parts=(
            Page(
                "Cost of each kind of fault",
                "chaos_faults.csv",
                """\
The slowest step of any worker between a fault and the next one, in ms: the median over the faults, nine of ten of them,
and the slowest. A worker that is stopped for longer than 2 s costs the others these 2 s, mostly after the next fault
has come. So most steps of more than 1.3 s after a fault of another kind belong to an earlier stop.""",
                measures=("gossip_modules/membership", "gossip_modules/rounds", "gossip_modules/wrappers"),
                render=chaos_faults,
            ),
            Page(
                "Runs that failed a check and were repeated",
                "chaos_before.csv",
                """\
At a load of 20 to 45, Overlap SGP ended 0.57 points below its run without faults, and D-PSGD 1.56: workers took half as
many steps between two faults. One worker of D-PSGD failed. With WAGMA, descriptors grew from 41 to 82, since former
generations were not released.""",
                measures=("gossip_modules/membership", "gossip_modules/rounds", "gossip_modules/wrappers"),
                render=chaos,
            ),
        ),
        question="What does a failure cost?",
        result="With {chaos.num_faults} faults {chaos.failed} worker fails. Beside the run without faults, "
        "{chaos.far}.",
    ),
    "elastic_cost": Page(
        "Cost of a membership without failures",
        "elastic_cost.csv",
        """\
**With 9.6 million parameters, a membership adds 0 to 4 % of CPU time to SGP, Overlap SGP and DiLoCo, and 32 % to
all-reduce.** All-reduce without a membership is DistributedDataParallel, which overlaps the backward pass and copies no
gradients. A tiny model pays 0.07 to 0.21 ms per step, and 2.9 ms with all-reduce. The threads of a membership use 1.0
to 1.5 % of a core while nothing is trained.""",
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
        measures=("gossip_modules/membership", "gossip_modules/rounds", "gossip_modules/wrappers"),
        summary=cost,
        setup="""\
Four [workers](index.md#jobs-with-a-membership) and four without a membership train the same network, in turns of a few
steps. Nothing sleeps. The figure is the processor time of a step, of all threads of a process, in the mean over the
four. The ratio is the median over turns, with its quartiles. Wall times are of the slowest worker.""",
        question="What does a failure cost?",
        result="It adds 0 to 4 % of CPU time to gossip and DiLoCo with 9.6 million parameters.",
    ),
    "scale": Page(
        "Cost of one rank among 16, 64 and 256",
        "scale.csv",
        """\
**From 16 to 256 ranks, a named barrier and wrapping a model take 2.1 and 2.4 times as much CPU time of a rank, a step
with its round 1.3 times, an exact average 7 times.** The target was [a factor of two](../decisions/transport.md). 256
ranks should start in 3 s: as 256 processes on 16 cores they take 0.33 s, in 16 processes on two cores 2.3 s (3.4 s
before), as threads of one process 7.0 s before.""",
        {
            "library": ("library", ""),
            "cores": ("cores", "d"),
            "ranks": ("ranks", "d"),
            "processes": ("processes", "d"),
            "descriptors": ("descriptors", ".1f"),
            "barrier_ms": ("barrier, ms", ".2f"),
            "group_s": ("groups of all, s", ".2f"),
            "start_s": ("start of all, s", ".2f"),
            "start_user_ms": ("start, user, ms", ".1f"),
            "start_system_ms": ("start, system, ms", ".1f"),
            "wrap_ms": ("wrapping, ms", ".1f"),
            "round_ms": ("step and round, ms", ".2f"),
            "average_ms": ("exact average, ms", ".2f"),
        },
        measures=("gossip_modules/transport", "gossip_modules/wrappers"),
        setup="""\
Ranks are threads of one process, or of several, over Gloo, with few connections. Times are CPU time of a rank, the
median. "Groups" and "start" are wall time of all ranks: the time to connect, and the time to wrap the
first model. User and system time of the start are those of all threads by the number of ranks. Rows of the start on
two cores are of a busy machine.

On 256 machines with a group, wrapping waits for two barriers, a sum and a broadcast of eight messages each, and for two
answers of the store.""",
        question="Is it as fast?",
        result="From 16 to 256 ranks a step with its round takes 1.3 times the CPU time, an exact average 7 times.",
    ),
}
