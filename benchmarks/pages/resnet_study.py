"""The page of the study with ResNet-20."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from benchmarks.claims.images import gaps, with_spread
from benchmarks.pages.base import QUESTIONS, Page
from benchmarks.pages.image_studies import ends_of_all
from benchmarks.pages.markdown import table
from benchmarks.pages.study_tables import study_page, trainings
from benchmarks.studies.resnet import BATCH_SIZE, METHODS, RESNET, STEPS_PER_EPOCH, WORKERS

NEEDED = {"all-reduce", "SGP"}
STUDY = RESNET["resnet"]
PLANNED = len(STUDY.cells) * len(METHODS)


def after_epochs(rows: pd.DataFrame) -> dict[int, pd.DataFrame]:
    """Return `gaps` by method, for each number of epochs after which all methods of NEEDED have ended."""
    last = trainings(rows)
    found = {}
    for steps, own in last.assign(batch=BATCH_SIZE).groupby("steps"):
        if set(own["method"]) >= NEEDED:
            found[int(steps) // STEPS_PER_EPOCH] = gaps(own).set_index("method")
    return found


def epochs_in_words(epochs: int) -> str:
    """Return "1 epoch", or a larger number of them."""
    return f"{epochs} epoch{'s' if epochs > 1 else ''}"


def said(rows: pd.DataFrame) -> str:
    """Return the result of the longest trainings in words, and the measurements that are missing."""
    done = after_epochs(rows)
    epochs, found = max(done.items())
    base, sgp = found.loc["all-reduce"], found.loc["SGP"]
    where = "below" if sgp["gap"] > 0 else "above"
    seeds = f"{found.loc['SGP', 'seeds']} seed{'s' if sgp['seeds'] > 1 else ''}"
    text = (
        f"**After {epochs_in_words(epochs)}, SGP ends {abs(sgp['gap']):.1f} points {where} all-reduce, which reaches "
        f"{base['accuracy']:.1f} % ({seeds}).**"
    )
    missing = []
    for each in sorted({steps // STEPS_PER_EPOCH for _, steps, _ in STUDY.cells}):
        left = [name for name in METHODS if each not in done or name not in done[each].index]
        if left:
            missing.append(f"{'all' if len(left) == len(METHODS) else len(left)} after {epochs_in_words(each)}")
    return f"{text} Methods not measured yet: {', '.join(missing)}." if missing else text


def summary(rows: pd.DataFrame) -> str:
    """Write the table of methods, three columns for each number of epochs."""
    done = after_epochs(rows)
    shown = pd.DataFrame({"method": [name for name in METHODS if any(name in own.index for own in done.values())]})
    columns = {"method": ("method", "s")}
    for epochs, own in done.items():
        own = own.reindex(shown["method"]).reset_index()
        shown[f"accuracy {epochs}"], shown[f"seeds {epochs}"] = own["accuracy"], own["seeds"]
        shown[f"gap {epochs}"] = [with_spread(row) if row["seeds"] > 0 else "" for _, row in own.iterrows()]
        columns[f"accuracy {epochs}"] = (f"{epochs_in_words(epochs)}, %", ".1f")
        columns[f"gap {epochs}"] = ("points below", "s")
        columns[f"seeds {epochs}"] = ("seeds", "d")
    return table(shown, columns)


SETUP = f"""\
This is [a study in the Lab](index.md#studies-in-the-lab) with ResNet-20 (He et al. 2016, arXiv 1512.03385), 269,722
parameters with batch normalisation. It learns 45,000 images of CIFAR-10 from JPEG copies, cropped with a margin of 4
pixels and mirrored at random, by SGD with momentum 0.9 and weight decay 1e-4, with forwards in `torch.autocast` with
bfloat16. The workers, {WORKERS}, have {BATCH_SIZE} images each in a step, and together read each image once in an
epoch. MATCHA and PowerGossip have a ring. No rate was tuned: all methods have the paper's, 0.1 for 128 images.
`--device cuda` trains on a GPU."""


def pages() -> Mapping[str, Page]:
    """Return the page by its name; empty: no trainings of all-reduce and SGP have ended."""
    return study_page(
        "resnet",
        "Images: ResNet-20 on CIFAR-10",
        said,
        lambda rows: bool(after_epochs(rows)),
        planned=PLANNED,
        render=ends_of_all,
        summary=summary,
        setup=SETUP,
        question=QUESTIONS[0],
    )


RESNET_STUDY: Mapping[str, Page] = pages()
