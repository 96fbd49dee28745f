"""The page about the mailbox on the wire."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.pages.base import Page

_MEASURES = ("gossip_modules/mailbox",)

MAILBOX: Mapping[str, Page] = {
    "mailbox": Page(
        "Training over a mailbox with faults",
        "mailbox_faults.csv",
        """\
**No survivor fails, and training waits for at most 12.1 s, with a grace of 10 s and polls of 1 s.** With push-sum it
waits for no round. Workers train on while the store is away. All anchors are equal after each round, and the weights
of push-sum are exact.""",
        {
            "method": ("method", "s"),
            "num_workers": ("workers", "d"),
            "outage_s": ("outage, s", ".0f"),
            "survivors": ("survivors", "d"),
            "survivors_that_failed": ("of them failed", "d"),
            "listening_sockets": ("workers with a port", "d"),
            "reachable_workers": ("workers that reach others", "d"),
            "limit_s": ("grace and two polls, s", ".1f"),
            "longest_wait_s": ("longest wait, s", ".3f"),
            "longest_forward_s": ("longest forward, s", ".3f"),
            "least_steps_in_outage": ("steps in the outage", "d"),
            "anchors_compared": ("anchors compared", "d"),
            "anchors_that_differ": ("that differ", "d"),
            "last_anchor_equal": ("last one equal", "s"),
            "weight_error": ("error of weights", ".1g"),
        },
        measures=_MEASURES,
        setup="""\
Four workers train a small network, with a message every 20 steps of 100 ms. Each is in a network namespace with a
cable to an S3 server (moto), and no other route. Two are killed (SIGKILL), one is started again, and then all packets
of the server are dropped for 60 s, the time of 600 steps. `ss -ltu` counts ports, and `comm_stats()` has the longest
wait. The weights of push-sum are compared with the requests that the server has carried out.""",
        parts=(
            Page(
                "Requests and bytes of a worker in a round",
                "mailbox_requests.csv",
                """\
**A worker writes 1.4 to 2.8 objects in a round, and uploads and downloads one message.** The worker that closes a
round writes four: its message, a claim to read the messages, the close and the mean; and it downloads all messages.
Without the claim, at commit 22dc53e3af, several workers downloaded all messages where they wrote at the same time. With
DiLoCo and 8 workers these were 3.5 messages for each worker, and 1.7 with the claim.""",
                {
                    "method": ("method", "s"),
                    "num_workers": ("workers", "d"),
                    "rounds": ("rounds", ".1f"),
                    "round_s": ("seconds", ".1f"),
                    "writes": ("writes", ".2f"),
                    "writes_beat": ("beats", ".2f"),
                    "writes_model": ("saved models", ".2f"),
                    "writes_most": ("most of one worker", ".0f"),
                    "uploads_median": ("uploads, median", ".0f"),
                    "downloads_median": ("downloads, median", ".0f"),
                    "downloads_most": ("most of one worker", ".0f"),
                    "messages_down": ("mean", ".2f"),
                    "reads": ("reads", ".2f"),
                    "reads_absent": ("of them in vain", ".2f"),
                    "lists": ("lists", ".2f"),
                    "deletes": ("deletes", ".2f"),
                    "dollars_1000_rounds": ("$ for 1,000 rounds", ".3f"),
                    "commit": ("commit", "s"),
                },
                measures=_MEASURES,
                setup="""\
The same workers without faults, with a message every 50 steps. Figures are per worker and round, by the log of the
server. The counters of `comm_stats()` agree with it, up to the request that makes the bucket and to six reads that were
under way at the end. Uploads and downloads are those of the size of a message. The money is for all workers, at $5 for
a million writes or lists and $0.40 for a million reads.""",
            ),
            Page(
                "Ten minutes with a random fault every three seconds",
                "mailbox_soak.csv",
                """\
**With 200 faults in ten minutes, no worker of four methods fails or hangs.** No anchor differs, and the weights of
push-sum are exact to rounding, 7e-15. From the second minute to the last, the memory of a worker that lives through all
faults grows by 0.1 to 0.4 MB of 427 to 429 MB, and it has at most one descriptor and no thread more.""",
                {
                    "method": ("method", "s"),
                    "num_workers": ("workers", "d"),
                    "seconds": ("seconds", ".0f"),
                    "faults": ("faults", "d"),
                    "kills": ("kills", "d"),
                    "stops": ("stops", "d"),
                    "joins": ("joins", "d"),
                    "aways": ("outages", "d"),
                    "refuses": ("bursts of 503", "d"),
                    "failed": ("failed", "d"),
                    "hung": ("hung", "d"),
                    "anchors_compared": ("anchors compared", "d"),
                    "anchors_that_differ": ("that differ", "d"),
                    "weight_error": ("error of weights", ".1g"),
                    "requests": ("requests", ",d"),
                    "megabytes_early": ("MB early", ".1f"),
                    "megabytes_late": ("late", ".1f"),
                    "descriptors_early": ("descriptors early", ".0f"),
                    "descriptors_late": ("late", ".0f"),
                    "threads_early": ("threads early", ".0f"),
                    "threads_late": ("late", ".0f"),
                },
                measures=_MEASURES,
                setup="""\
Six workers on this machine, without namespaces. A seed draws a fault every three seconds: a worker is killed (SIGKILL),
stopped (SIGSTOP) or started, or the server stands still or answers with 503, for 0.5 to 8 s. The grace is 3 s.
Resources are those of a worker that is never killed, from 1:30 to 2:30 and in the last minute. Two runs shared two
cores with other work, at a load of 25.""",
            ),
            Page(
                "Workers that are killed while they write a file",
                "mailbox_folder.csv",
                """\
**Nobody reads an unfinished file.** 30 workers are killed while they have one open. They leave 67 MB, of which nothing
is listed or read, and which the next worker deletes when it is an hour old.""",
                {
                    "method": ("method", "s"),
                    "num_workers": ("workers", "d"),
                    "kills": ("kills", "d"),
                    "survivors_that_failed": ("survivors that failed", "d"),
                    "objects_read": ("objects read", ",d"),
                    "objects_refused": ("refused", "d"),
                    "unfinished_files": ("unfinished files", "d"),
                    "unfinished_bytes": ("their bytes", ",d"),
                    "unfinished_after_two_hours": ("after two hours", "d"),
                    "anchors_that_differ": ("anchors that differ", "d"),
                },
                measures=_MEASURES,
                setup="""\
Messages have nine megabytes. A worker is killed while it has an unfinished file open, and another one is started.
Meanwhile a reader lists and reads the newest objects. At the end the unfinished files get a date of two hours ago, and
the folder is opened once more.""",
            ),
        ),
        question="What does a failure cost?",
        result="When two of four workers die and the store is away for 60 s, survivors wait for at most 12.1 s.",
    ),
}
