"""The section "Measured" of each method: all its rows of the studies, each beside the all-reduce of the same study."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd

from benchmarks.claims.base import Claim
from benchmarks.record import RESULTS
from benchmarks.records.submission import entry
from benchmarks.records.tracks import TRACKS
from benchmarks.sections import address
from benchmarks.studies.ends import trainings
from benchmarks.tables import table


@dataclass(frozen=True)
class ShownStudy:
    """A study, as the tables of methods show it.

    Attributes:
        task: what was trained, in a few words.
        optimizer: of methods whose names have none.
        unit: of a score and of a gap.
        form: the format of a score.
        is_error: whether the rows have 100 less the score.
        base: the method that others are compared with.
        page: the page of docs/benchmarks/; "": the one of the name of the file.
        steps: of the trainings that are shown; 0: all are.
    """

    task: str
    optimizer: str
    unit: tuple[str, str]
    form: str
    is_error: bool = False
    base: str = "all-reduce"
    page: str = ""
    steps: int = 0


POINTS, BLEU, NATS = ("%", "points"), ("BLEU", "BLEU"), ("nats", "nats")
ALL_LINKS = "MATCHA, budget 1"
SOURCES: Mapping[str, ShownStudy] = {
    "worker_numbers": ShownStudy("CIFAR-10, batch normalisation", "SGD", POINTS, ".1f", is_error=True),
    "resnet": ShownStudy("CIFAR-10, ResNet-20", "SGD", POINTS, ".1f", is_error=True),
    "accuracy_bytes": ShownStudy("CIFAR-10, ring of 8", "SGD", POINTS, ".1f", is_error=True),
    "uneven_data": ShownStudy("CIFAR-10, uneven data", "SGD", POINTS, ".1f", is_error=True),
    "uneven_workers": ShownStudy("CIFAR-10", "SGD", POINTS, ".1f", is_error=True),
    "straggler_accuracy": ShownStudy("drawn digits, late workers", "SGD", POINTS, ".1f", is_error=True),
    "wagma_ablations": ShownStudy("drawn digits", "SGD", POINTS, ".1f", is_error=True),
    "wagma_ablations_images": ShownStudy(
        "CIFAR-10, late workers", "SGD", POINTS, ".1f", is_error=True, page="wagma_ablations"
    ),
    "matcha_time": ShownStudy("drawn digits", "SGD", POINTS, ".1f", is_error=True, base=ALL_LINKS),
    "translation": ShownStudy("Multi30k", "Adam", BLEU, ".1f", is_error=True),
    "language": ShownStudy("language model, 3,000 steps", "AdamW", NATS, ".3f", steps=3000),
    "outer_language": ShownStudy("language model", "AdamW", NATS, ".3f"),
    "outer_long": ShownStudy("language model, long", "AdamW", NATS, ".3f"),
    "many_workers": ShownStudy("language model, short", "AdamW", NATS, ".3f", page="lab"),
    "regions": ShownStudy("language model, regions", "AdamW", NATS, ".3f"),
}
"""By the name of the file and of the page, in the order of the tables; a study that has not run yet has no file."""
RECORDS = "records.csv"
HAVE_FILES = tuple(name for name in SOURCES if (RESULTS / f"{name}.csv").is_file())

METHODS: Mapping[str, str] = {
    "ar": "all-reduce|all_reduce",
    "osgp": "Overlap SGP|overlap_sgp",
    "sgp": "SGP|sgp",
    "adpsgd": "AD-PSGD",
    "dpsgd": r"D-PSGD|BaseGraph|dpsgd|base\d?",
    "wagma": r"WAGMA|groups of \d+|fixed groups|no groups",
    "localsgd": "local SGD|local_sgd|plain averages",
    "slowmo": "SlowMo",
    "d2": "D2|d2",
    "qgdsgdm": "QG-DSGDm|qgdsgdm",
    "relaysgd": "RelaySGD|relaysgd",
    "decentlam": "DecentLaM|decentlam",
    "exactdiffusion": "exact diffusion",
    "gradienttracking": "gradient tracking|gradienttracking",
    "powergossip": "PowerGossip|powergossip",
    "matcha": r"MATCHA|graph \d",
    "choco": "CHOCO",
    "deepsqueeze": "DeepSqueeze",
    "moniqua": "Moniqua",
    "streamingdiloco": "Streaming DiLoCo",
    "eagerdiloco": "Eager DiLoCo",
    "noloco": "NoLoCo",
    "sparseloco": "SparseLoCo|sparseloco",
    "gasloc": "GASLoC",
    "isoloco": "IsoLoCo",
    "muloco": "MuLoCo",
    "diloco": "DiLoCo|diloco",
    "dpwa": "dpwa",
}
"""The beginnings of the names of a method in CSV files, by its page in docs/methods/."""
WITHOUT_PAGE = re.compile("HALoS|async local SGD|one worker alone")
"""Names of methods that the library does not have, and of a worker without others."""
MOST_ROWS = 4
"""Of a method in one study with one setting; of more, the best row and the worst one are shown."""
HEADS = {
    "method": "method",
    "task": "task",
    "workers": "workers",
    "optimizer": "optimizer",
    "score": "ends at",
    "gap": "worse than all-reduce by (seeds)",
    "sent": "MB sent by a worker",
    "reduced": "by all-reduce",
}
SIGN = "A method with a gap below 0 is better than all-reduce."
STAR = "A star: the learning rate is the highest or the lowest that was tried."
NO_ROWS = "No study of `benchmarks/results` has trained by it beside all-reduce."


def slug_of(name: str) -> str:
    """Return the page of a method by its name in a CSV file; "": it has none.

    >>> slug_of("AD-PSGD"), slug_of("alpha 0.1: D-PSGD"), slug_of("DiLoCo of one worker, H = 30"), slug_of("HALoS")
    ('adpsgd', 'dpsgd', 'diloco', '')
    """
    own = name.rpartition(": ")[2]
    return next((slug for slug, pattern in METHODS.items() if re.match(rf"(?:{pattern})(?!\w)", own)), "")


def _parts(name: str) -> tuple[str, str, str]:
    """Return the split of the data or the graph, the method with its settings, and the optimizer that a name has.

    >>> _parts("alpha 0.1: SGP"), _parts("SGP with GossipAdamW"), _parts("graph 3, budget 0.5")
    (('alpha 0.1', 'SGP', ''), ('', 'SGP', 'GossipAdamW'), ('graph 3', 'MATCHA, budget 0.5', ''))
    """
    split, _, own = name.rpartition(": ")
    if found := re.match(r"(graph \d), (.*)", own):
        split, own = found[1], f"MATCHA, {found[2]}"
    if found := re.search(r"(?: with |, )(GossipAdamW|AdamW|Muon)\b", own):
        own = own[: found.start()] + own[found.end() :]
    return split, own, found[1] if found else ""


def ends(name: str, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the ends of the trainings of a study, a row for each method, split, number of workers and optimizer.

    Returns:
        page, split, setting, optimizer, workers; score, the mean over seeds; gap, lowest and highest, of the seeds that
        the base has too, above 0 where the method is worse; sent and reduced, the megabytes of a worker by the method
        and by the base; is_end, whether the rate is the highest or the lowest that was tried; is_tuned; is_base.
    """
    source = SOURCES[name]
    last = trainings(rows)
    last = last[last["steps"] == source.steps] if source.steps else last
    parts = pd.DataFrame([_parts(name) for name in last["method"]], index=last.index)
    last = last.assign(split=parts[0], setting=parts[1], optimizer=parts[2].replace("", source.optimizer))
    last["score"] = 100 - last["test"] if source.is_error else last["test"]
    tuning = rows[rows["is_tuning"]].groupby(["method", "workers"])["rate"].agg(["min", "max"])
    is_base = (last["setting"] == source.base) & (last["optimizer"] == source.optimizer)
    bases, found = last[is_base].set_index(["split", "workers", "seed"]), []
    for (split, setting, optimizer, workers), own in last.groupby(
        ["split", "setting", "optimizer", "workers"], sort=False
    ):
        places = [(split, max(workers, 8) if workers == 1 else workers, seed) for seed in own["seed"]]
        base = bases.reindex(places)
        worse = (base["score"].to_numpy() - own["score"].to_numpy()) * (1 if source.is_error else -1)
        gaps = pd.Series(worse).dropna()
        tried = tuning.reindex([(own["method"].iloc[0], workers)]).iloc[0]
        is_tuned = tried.notna().all()
        found.append({
            "page": name, "split": split, "setting": setting, "optimizer": optimizer, "workers": workers,
            "score": own["score"].mean(), "gap": gaps.mean(), "lowest": gaps.min(), "highest": gaps.max(),
            "seeds": len(own), "sent": own["megabytes"].mean(), "reduced": base["megabytes"].mean(),
            "is_end": own["rate"].iloc[0] in tried.to_list(), "is_tuned": is_tuned,
            "is_base": setting == source.base and optimizer == source.optimizer,
        })  # fmt: skip
    return pd.DataFrame(found)


_ENDS: dict[tuple[str, int], tuple[pd.DataFrame, pd.DataFrame]] = {}


def ends_once(name: str, rows: pd.DataFrame) -> pd.DataFrame:
    """Return `ends` of a table, computed once; an entry keeps its table, so that no other one has its identity."""
    key = name, id(rows)
    if key not in _ENDS:
        _ENDS[key] = rows, ends(name, rows)
    return _ENDS[key][1]


def shown(own: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a method that its table shows: of many in one study and setting, the best and the worst."""
    parts = []
    for (page, *_), each in own.groupby(["page", "setting", "optimizer"], sort=False):
        each = each[~each["is_base"] | (SOURCES[page].base == "all-reduce")].sort_values(["split", "workers"])
        if len(each) > MOST_ROWS and not each["is_base"].any():
            each = each.loc[[each["gap"].idxmin(), each["gap"].idxmax()]]
        parts.append(each)
    return pd.concat(parts)


def cells(row: Any) -> dict[str, str]:
    """Return the cells of a row of `ends`."""
    source = SOURCES[row.page]
    unit, points = source.unit
    task = f"[{source.task}{', ' * bool(row.split)}{row.split}](../benchmarks/{address(source.page or row.page)})"
    star = "*" if row.is_end else ""
    if row.is_base:
        gap = "(the base)"
    elif pd.isna(row.gap):
        gap = "no all-reduce there"
    else:
        form = "+.2f" if source.form == ".1f" else "+.3f"
        of_seeds = f" ({row.lowest:{form}} to {row.highest:{form}})" if row.lowest < row.highest else " (one seed)"
        beside = "" if source.base == "all-reduce" else ", beside all links"
        gap = f"{row.gap:{form}}{star} {points}{of_seeds}{beside}"
    sent, reduced = ("" if pd.isna(x) else f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in (row.sent, row.reduced))
    return {
        "method": row.setting, "task": task, "workers": f"{row.workers}", "optimizer": row.optimizer,
        "score": f"{row.score:{source.form}} {unit}{'' if row.is_tuned else ', untuned'}", "gap": gap,
        "sent": sent, "reduced": reduced,
    }  # fmt: skip


def record_cells(records: pd.DataFrame, slug: str) -> Iterator[dict[str, str]]:
    """Yield the cells of a method for each track of the records, in bits per byte and seconds to the target."""
    last = records.drop_duplicates(["track", "submission"], keep="last").set_index(["track", "submission"])
    for (track, name), own in last.iterrows():
        base = last.loc[(track, "all_reduce")]
        if slug_of(str(name)) != slug or name == "all_reduce":
            continue
        times = ["missed" if pd.isna(x["seconds"]) else f"{x['seconds']:,.0f} s" for x in (own, base)]
        sent, reduced = ("" if pd.isna(x["megabytes"]) else f"{x['megabytes']:,.0f}" for x in (own, base))
        yield {
            "method": entry(str(name)).title, "task": f"[records, `{track}`](../benchmarks/records.md)",
            "workers": f"{TRACKS[str(track)].workers}", "optimizer": "AdamW",
            "score": f"{own['final_bits']:.2f} bits; target: {times[0]}, all-reduce {times[1]}",
            "gap": f"{own['final_bits'] - base['final_bits']:+.3f} bits", "sent": sent, "reduced": reduced,
        }  # fmt: skip


def measured(slug: str, *frames: pd.DataFrame) -> str:
    """Return the table of a method, and what its marks mean.

    Args:
        slug: the name of the page in docs/methods/.
        frames: the rows of `HAVE_FILES`, and of the records.
    """
    *studies, records = frames
    found = pd.concat(
        [ends_once(name, rows) for name, rows in zip(HAVE_FILES, studies, strict=True)], ignore_index=True
    )
    own = found[[slug_of(name) == slug for name in found["setting"]]]
    lines = [cells(row) for row in shown(own).itertuples()] if len(own) else []
    lines += record_cells(records, slug)
    if not lines:
        return NO_ROWS
    rows = pd.DataFrame(lines)
    names = [name for name in HEADS if name != "method" or rows["method"].nunique() > 1]
    text = table(rows, {name: (HEADS[name], "s") for name in names})
    notes = [SIGN, *([STAR] if rows["gap"].str.contains("*", regex=False).any() else [])]
    if rows["task"].str.startswith("[records").any():
        notes.append("Records have the mean of three seeds, and megabytes until the target.")
    return f"{text}\n\n{textwrap.fill(' '.join(notes), 118)}"


MEASURED: Mapping[str, Claim] = {
    slug: Claim(
        (*(f"{name}.csv" for name in HAVE_FILES), RECORDS),
        "the last step of each training that chose no rate: test, the mean over seeds, and its difference from the "
        "base with equal workers and seed, the mean, the lowest and the highest; "
        "of records final_bits, seconds and megabytes",
        partial(measured, slug),
    )
    for slug in METHODS
}
"""By the name of a method's page."""
