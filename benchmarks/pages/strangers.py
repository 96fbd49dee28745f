"""The section of the page about faults with strangers at the ports of a job."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from benchmarks.pages.base import Page
from benchmarks.pages.markdown import table

WIRE, COST, GLOO = "wire", "none", "gloo"
COUNTED = ("liveness", "dpwa")
"""The ports whose answers were counted. torch's store answers everyone with its own protocol."""


def guard_of(row: pd.Series) -> str:
    """The protection of a job."""
    return "TLS" if row["tls"] else "key" if row["key"] else "none"


def attacks(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of attacked ports, with the growth of descriptors and of memory."""
    found = rows[~rows["port"].isin([WIRE, COST])].copy()
    found["guard"] = found.apply(guard_of, axis=1)
    found["where"] = found["port"].where(found["port"] != "store", "store, bytes of another protocol")
    found["descriptors"] = found["descriptors_after"] - found["descriptors_before"]
    found["store_growth"] = found["store_megabytes_after"] - found["store_megabytes_before"]
    found["worker_growth"] = found["megabytes_after"] - found["megabytes_before"] - found["store_growth"]
    found["answered"] = [f"{row['accepted']:,.0f}" if row["port"] in COUNTED else "" for _, row in found.iterrows()]
    found["unequal"] = [f"{x:,.0f} of {n:,.0f}" for x, n in zip(found["changed"], found["compared"], strict=True)]
    return found


def said(rows: pd.DataFrame) -> str:
    """Return the result in words."""
    found = attacks(rows)
    counted, sent = found[found["port"].isin(COUNTED)], found[found["port"] != GLOO]
    with_key, open_ = counted[counted["guard"] != "none"], counted[counted["guard"] == "none"]
    stays = "no member leaves" if found["same_members"].astype(bool).all() else "members leave"
    least, most, at_gloo = sent["messages"].min(), sent["messages"].max(), found[found["port"] == GLOO]
    each = f"{most:,.0f}" if least == most else f"{least:,.0f} to {most:,.0f}"
    return (
        f"**{sent['messages'].sum():,.0f} messages of a stranger, {each} at each port, change "
        f"{found['changed'].sum():,.0f} of {found['compared'].sum():,.0f} compared states, and {stays}.** At liveness "
        f"and dpwa {with_key['accepted'].sum():,.0f} are answered as a worker's with a key or TLS, and "
        f"{open_['accepted'].sum():,.0f} without them, which ask dpwa for a model. Of "
        f"{at_gloo['messages'].sum():,.0f} connections to the ports of Gloo {at_gloo['accepted'].sum():,.0f} took a "
        "byte. Afterwards a job has at most "
        f"{found['descriptors'].max():+,.0f} descriptors; the memory of all workers together grew by "
        f"{found['worker_growth'].max():.0f} MB at most, with the benchmark's own times of steps, and that of the "
        f"store's process by {found['store_growth'].max():.0f} MB, as torch's store "
        "keeps what does not begin as a client of torch. The median step under attack takes "
        f"{found['ratio'].min():.2f} to {found['ratio'].max():.2f} times as long as before."
    )


def heard(rows: pd.DataFrame) -> str:
    """Return the number of packets that tell a program something, in words; empty without rows."""
    found = rows[rows["port"] == WIRE]
    texts = [
        f"{row['learnt']:,.0f} of {row['messages']:,.0f} packets {'with TLS' if row['tls'] else text}"
        for _, row in found.iterrows()
        for text in ["with the key" if row["key"] else "without both"]
    ]
    own = "A program that reads all packets of a job of dpwa finds numbers of the model, or the key, in "
    return f"{own}{', '.join(texts)}: the key does not encrypt." if texts else ""


def costs(rows: pd.DataFrame) -> str:
    """Return the cost of key and TLS in words; empty without rows."""
    found = rows[rows["port"] == COST]
    texts = [f"{row['ratio']:.3f} ({row['job']}, {guard_of(row)})" for _, row in found.iterrows()]
    said = f"Without an attack the median step takes {', '.join(texts)} times as long as in a job beside it without."
    return said if texts else ""


def shown(rows: pd.DataFrame) -> str:
    """Write the result and a table of ports."""
    columns = {
        "job": ("job", "s"),
        "where": ("port", "s"),
        "guard": ("protection", "s"),
        "messages": ("messages", ",.0f"),
        "answered": ("answered", "s"),
        "unequal": ("states with other bits", "s"),
        "descriptors": ("descriptors", "+.0f"),
        "worker_growth": ("memory of workers, MB", "+.1f"),
        "store_growth": ("of the store, MB", "+.1f"),
        "ratio": ("step under attack / before", ".2f"),
    }
    texts = [said(rows), heard(rows), costs(rows), table(attacks(rows), columns)]
    return "\n\n".join(text for text in texts if text)


def every(rows: pd.DataFrame) -> str:
    """Write all rows."""
    columns = {
        "job": ("job", "s"),
        "port": ("port", "s"),
        "guard": ("protection", "s"),
        "messages": ("messages", ",.0f"),
        "accepted": ("answered", ",.0f"),
        "learnt": ("packets that tell", ",.0f"),
        "changed": ("other bits", ",.0f"),
        "compared": ("compared", ",.0f"),
        "steps": ("steps", ",.0f"),
        "descriptors_before": ("descriptors before", ",.0f"),
        "descriptors_after": ("after", ",.0f"),
        "megabytes_before": ("MB before", ",.1f"),
        "megabytes_after": ("after", ",.1f"),
        "store_megabytes_before": ("MB of the store before", ",.1f"),
        "store_megabytes_after": ("after", ",.1f"),
        "seconds": ("seconds", ",.1f"),
        "ratio": ("ratio", ".3f"),
    }
    return table(rows.assign(guard=rows.apply(guard_of, axis=1)), columns)


STRANGERS: Mapping[str, Page] = {
    "strangers": Page(
        "Strangers at all ports",
        "strangers.csv",
        "[Security](../guides/security.md#ports) says what a stranger at each port can do.",
        render=every,
        summary=shown,
        setup="""\
Three workers of a membership train a layer of 10,100 parameters on a ring; two workers of dpwa keep a constant model of
that size. A stranger connects to one port of a new job, again and again: with recorded messages of a worker, as they
were or with bytes changed, cut or added; at the ports of Gloo, with 32 random bytes where the kernel connects it within
2 ms. "values of the store" are old and altered values under all keys of the job, written by a client of torch. Compared
states are the parameters of each worker after every 50th step, beside the same step of a job without strangers and
without a key; with dpwa, all entries at the end. Memory and descriptors are those of all processes of the job, before
and 11 s after the attack. The first measurement of the cost of a key shared the machine with another attack; it was
repeated, with more steps. All processes share the machine's cores with other programs, and a step has about a
millisecond, so that the ratio of steps under attack tells little more than that training goes on.""",
        measures=(
            "gossip_modules/dpwa",
            "gossip_modules/membership",
            "gossip_modules/transport/job_key.py",
            "gossip_modules/transport/stores.py",
        ),
    ),
}
