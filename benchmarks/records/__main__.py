r"""Rerun a record, or enter one: seconds of the Lab's clock until the averaged model reaches a fixed loss.

    python -m benchmarks.records slow sgp           # three seeds, and a row of benchmarks/results/records.csv
    python -m benchmarks.records slow sgp --grid    # before: each setting of the grid, with seed 0
    python -m benchmarks.records slow sgp --dry     # print, write nothing

benchmarks/records/README.md has the rules. A setting of the grid that has a row is not tried again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.record import RESULTS, append_row, digest, matching, rows_in
from benchmarks.records import task
from benchmarks.records.submission import Submission, entry, names
from benchmarks.records.tracks import COMPUTE, EVERY, MAX_STEPS, NUM_PARAMETERS, TARGET_BITS, TRACKS, Track
from gossip_modules.lab import Result, compare

LOG, GRID = RESULTS / "records.csv", RESULTS / "records_grid.csv"
FIGURES = ("steps_to_target", "seconds", "seconds_low", "seconds_high", "megabytes", "final_bits", "cpu_seconds")
COLUMNS = ("track", "submission", "setting", "seeds", "steps", "data", *FIGURES)
SEEDS, GRID_SEED = (1, 2, 3), 0


def train(track: Track, submission: Submission, seeds: Sequence[int], split: str, *, steps: int = MAX_STEPS) -> Result:
    """Return the curves of a submission on a track, measured on a split."""
    return compare(
        {submission.title: submission.method()},
        model=task.NextByte,
        loss=task.loss,
        data=task.batches(track.workers, track.alpha),
        optimizer=submission.optimizer,
        scheduler=submission.scheduler,
        evaluate=task.bits_per_byte(split),
        workers=[track.workers],
        steps=steps,
        seeds=seeds,
        network=track.network,
        compute=COMPUTE,
        events=[event for event in track.events if event.step < steps],
        every=EVERY,
        num_parameters=NUM_PARAMETERS,
    )


def figures(result: Result, cpu_seconds: float, *, target: float = TARGET_BITS) -> dict[str, Any]:
    """Return the entries of FIGURES: means over seeds; nan for a target that a seed has not reached."""
    curves = pd.DataFrame(result.rows)
    reached = curves[curves["evaluation"] <= target].groupby("seed").first()
    if len(reached) < curves["seed"].nunique():
        reached = reached.iloc[:0]
    last = curves.groupby("seed")["evaluation"].last()
    values = {
        "steps_to_target": reached["step"].mean(),
        "seconds": reached["seconds"].mean(),
        "seconds_low": reached["seconds"].min(),
        "seconds_high": reached["seconds"].max(),
        "megabytes": reached["megabytes"].mean(),
        "final_bits": last.mean(),
        "cpu_seconds": cpu_seconds,
    }
    return {name: round(float(value), 4) for name, value in values.items()}


def setting_of(track: str, name: str, grid: Path = GRID) -> Mapping[str, Any]:
    """Return the setting of a submission that is best on a track: fewest seconds, then fewest bits per byte.

    Raises:
        ValueError: a setting of its grid was not tried.
    """
    settings = {text_of(name, setting): setting for setting in entry(name).grid}
    if len(settings) == 1:
        return next(iter(settings.values()))
    tried = matching(rows_in(grid, COLUMNS), {"track": track, "submission": name})
    if missing := [text for text in settings if text not in set(tried["setting"])]:
        raise ValueError(f"got {name} on {track} without rows of {missing} in {grid}, expected all; add --grid")
    tried = tried[tried["setting"].isin(settings)]
    return settings[tried.sort_values(["seconds", "final_bits"])["setting"].iloc[0]]


def text_of(name: str, setting: Mapping[str, Any]) -> str:
    """Return the column `setting` of a submission: its setting, and its optimizer where that is not the usual one."""
    return str({**setting, **entry(name)(**setting).recipe})


def row_of(track: str, name: str, setting: Mapping[str, Any], seeds: Sequence[int], split: str) -> dict[str, Any]:
    """Train, and return a row by COLUMNS."""
    begin = time.process_time()
    result = train(TRACKS[track], entry(name)(**setting), seeds, split)
    shared = (track, name, text_of(name, setting), " ".join(map(str, seeds)), MAX_STEPS, digest(task.TEXT))
    return {**dict(zip(COLUMNS, shared)), **figures(result, time.process_time() - begin)}


def main() -> int:
    """Train and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("track", choices=list(TRACKS))
    parser.add_argument("submissions", nargs="+", choices=names())
    parser.add_argument("--grid", action="store_true", help="try the settings of the grid, with a seed of their own")
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.submissions:
        if not (options.grid or options.dry) and has_row(options.track, name):
            print(f"{name} on {options.track} has a row in {LOG}; add --dry to rerun it")
            continue
        for row, path in tried(options.track, name) if options.grid else final(options.track, name):
            print("\n".join(f"{key}: {value}" for key, value in row.items()), flush=True)
            if not options.dry:
                append_row(path, row, seed=int(str(row["seeds"]).split()[0]))
    return 0


def has_row(track: str, name: str) -> bool:
    """Return whether the log has the row of a submission on a track.

    Raises:
        ValueError: it has a row of another setting or optimizer.
    """
    found = matching(rows_in(LOG, COLUMNS), {"track": track, "submission": name})["setting"].tolist()
    own = text_of(name, setting_of(track, name))
    if others := [text for text in found if text != own]:
        raise ValueError(f"got rows of {name} on {track} with {others} in {LOG}, expected {own}; remove these rows")
    return bool(found)


def tried(track: str, name: str) -> Iterator[tuple[dict[str, Any], Path]]:
    """Try the settings of a submission that have no row; yield the rows and the file that they belong to."""
    known = matching(rows_in(GRID, COLUMNS), {"track": track, "submission": name})
    for setting in entry(name).grid:
        if text_of(name, setting) not in set(known["setting"]):
            yield row_of(track, name, setting, [GRID_SEED], "validation"), GRID


def final(track: str, name: str) -> Iterator[tuple[dict[str, Any], Path]]:
    """Train by the best setting; yield the row and the file that it belongs to."""
    yield row_of(track, name, setting_of(track, name), SEEDS, "test"), LOG


if __name__ == "__main__":
    sys.exit(main())
