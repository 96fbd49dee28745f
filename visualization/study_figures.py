"""Figures of benchmark pages, from the rows of their studies: `visualization.papers` writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from visualization.charts import LETTER, Curve, Look, Plane, Scale, ticks
from visualization.diagrams import Drawing
from visualization.logs.tables import read_columns
from visualization.study_rows import SOURCE, last, mean_curves, points, trainings

LATE: Mapping[str, Look] = {
    "WAGMA-SGD": Look("purple"),
    "SGP, 2 peers": Look("blue"),
    "all-reduce": Look("ink"),
    "AD-PSGD": Look("green"),
    "dpwa": Look("muted"),
    "D-PSGD": Look("orange"),
}
UNEVEN: Mapping[str, Look] = {
    "all-reduce": Look("ink"),
    "RelaySGD": Look("purple"),
    "DecentLaM": Look("green"),
    "SGP": Look("blue"),
    "local SGD, 8": Look("muted"),
    "QG-DSGDm": Look("green", dashed=True),
    "D2": Look("blue", dashed=True),
    "exact diffusion": Look("purple", dashed=True),
    "D-PSGD": Look("orange"),
    "gradient tracking": Look("orange", dashed=True),
}
OUTER: Sequence[tuple[str, Look, Sequence[str]]] = (
    ("all-reduce", Look("ink"), ("all-reduce",)),
    ("DiLoCo", Look("blue"), tuple(f"DiLoCo, H = {period}" for period in (500, 100, 30))),
    ("local SGD", Look("orange"), tuple(f"local SGD, H = {period}" for period in (500, 30))),
    ("IsoLoCo", Look("purple"), ("IsoLoCo, H = 30",)),
    ("MuLoCo", Look("green"), ("MuLoCo, H = 30",)),
    ("GASLoC", Look("muted"), ("GASLoC, H = 30",)),
    ("NoLoCo", Look("muted"), ("NoLoCo, H = 50",)),
    ("Streaming", Look("blue"), ("Streaming DiLoCo, H = 100, 4 bits",)),
    ("SparseLoCo", Look("green"), ("SparseLoCo, H = 30",)),
)
"""Label, look, and rows from the fewest bytes to the most."""
LONG: Sequence[tuple[str, str, Look]] = (
    ("one worker alone", "one alone", Look("muted")),
    ("DiLoCo", "DiLoCo", Look("blue")),
    ("local SGD", "local SGD", Look("orange")),
    ("all-reduce", "all-reduce", Look("ink")),
)
TRANSLATED: Sequence[tuple[str, str, Look]] = (
    ("all-reduce", "all-reduce", Look("ink")),
    ("SGP", "SGP", Look("blue")),
    ("Overlap SGP", "Overlap", Look("orange")),
    ("SGP with GossipAdamW", "SGP, G", Look("blue", dashed=True)),
    ("Overlap SGP with GossipAdamW", "Overlap, G", Look("orange", dashed=True)),
)
REGIONS: Sequence[tuple[str, str, Look]] = (
    ("HALoS", "HALoS", Look("blue")),
    ("HALoS, K = 4", "HALoS, K = 4", Look("blue", dashed=True)),
    ("async local SGD", "async SGD", Look("green")),
    ("DiLoCo, DyLU", "DiLoCo, DyLU", Look("orange", dashed=True)),
    ("DiLoCo", "DiLoCo", Look("orange")),
)
SYSTEMS: Mapping[str, tuple[str, Look]] = {
    "SGP with a membership": ("SGP", Look("blue")),
    "torchft, all-reduce": ("torchft", Look("orange")),
    "DDP, a checkpoint every 30 s": ("DDP, 30 s", Look("ink", dashed=True)),
    "DDP, a checkpoint every 600 s": ("DDP, 600 s", Look("ink")),
}
GRAPHS: Mapping[str, tuple[str, Look]] = {
    "ring, both neighbours": ("ring", Look("orange")),
    "default, undirected": ("undirected", Look("blue", dashed=True)),
    "default, push-sum": ("push-sum", Look("blue")),
    "random matching": ("matching", Look("green")),
    "base, 1 peer": ("BaseGraph", Look("purple")),
}
PERIODS: Mapping[int, str] = {128: "purple", 32: "green", 8: "blue", 1: "orange"}
"""The colour of each period of DiLoCo."""
PAIRWISE: Mapping[str, Look] = {"AD-PSGD": Look("green"), "A2CiD2": Look("purple")}
LINKS: Mapping[str, tuple[str, Look]] = {
    "DDP": ("DDP", Look("ink")),
    "SGP, one-peer exponential": ("SGP", Look("blue")),
    "WAGMA": ("WAGMA", Look("purple")),
    "OSGP": ("Overlap SGP", Look("blue", dashed=True)),
    "Decent-DP, one-peer exponential": ("Decent-DP", Look("orange")),
    "torchft LocalSGD, period 4": ("torchft, H = 4", Look("orange", dashed=True)),
    "local SGD, period 4": ("local, H = 4", Look("muted")),
    "AD-PSGD": ("AD-PSGD", Look("green")),
    "no communication": ("none", Look("muted", dashed=True)),
}


def late_workers(path: Path, title: str) -> Drawing:
    """The test error against seconds, while two workers of 64 are late in each step."""
    rows = trainings(path)
    curves = mean_curves(rows, "seconds", "test", [(name, name, look) for name, look in LATE.items()])
    drawing = Drawing(title, 340)
    x = Scale(ticks((0, rows["seconds"].max()), 5), "seconds (64 workers, two of them late in each step)")
    Plane(drawing, (36, 30), (282, 260), x, Scale((6, 8, 10, 15, 20, 40), "test error, %", is_log=True)).curves(curves)
    return drawing


def uneven_data(path: Path, title: str) -> Drawing:
    """The accuracy with three splits of the data, from nearly even to one or two classes on each worker."""
    ends, splits = last(trainings(path)), ("alpha 1", "alpha 0.1", "1-2 classes")
    means = ends.groupby("method")["accuracy"].mean()
    names = {name: [f"{split}: {name}" for split in splits] for name in UNEVEN}
    curves = [
        Curve(name, look, [(float(place), float(means[row])) for place, row in enumerate(names[name])])
        for name, look in UNEVEN.items()
    ]
    drawing = Drawing(title, 330)
    x = Scale((0, 1, 2), "classes of the 16 workers' images", names=("alpha 1", "alpha 0.1", "1-2 classes"))
    shown = [mean for own in names.values() for mean in means[own]]
    Plane(drawing, (36, 30), (250, 250), x, Scale(ticks(shown), "accuracy, %")).curves(curves)
    return drawing


def outer_bytes(path: Path, title: str) -> Drawing:
    """The loss of outer methods against the bytes that a worker has sent, with 8 workers."""
    ends = last(trainings(path))
    means = ends[ends["workers"] == 8].groupby("method")[["megabytes", "test"]].mean()
    curves = [Curve(label, look, points(means.loc[list(rows)])) for label, look, rows in OUTER]
    drawing = Drawing(title, 330)
    x = Scale((0.2, 1, 5, 20, 100, 500), "MB sent by a worker (8 workers)", is_log=True)
    y = Scale(ticks([height for curve in curves for _, height in curve.points]), "nats per byte")
    Plane(drawing, (42, 30), (272, 250), x, y).curves(curves)
    return drawing


def outer_steps(path: Path, title: str) -> Drawing:
    """The loss against steps with an outer step in each 500, with four workers, and of one worker alone."""
    rows = trainings(path)
    rows = rows[rows["workers"].isin((1, 4))]
    trained = set(rows["method"])
    curves = mean_curves(rows, "step", "test", [each for each in LONG if each[0] in trained])
    drawing = Drawing(title, 330)
    x = Scale((0, 22_000, 44_000, 66_000, 88_000), "steps (4 workers, 500 from one outer step to the next)")
    y = Scale(ticks([height for curve in curves for _, height in curve.points]), "nats per byte")
    Plane(drawing, (42, 30), (272, 250), x, y).curves(curves)
    return drawing


def translation(path: Path, title: str) -> Drawing:
    """The BLEU of a translation against steps."""
    rows = trainings(path)
    drawing = Drawing(title, 320)
    curves = mean_curves(rows[rows["step"] != rows["steps"] - 2], "step", "accuracy", TRANSLATED)
    x = Scale((0, 1000, 2000, 3000), "steps (Multi30k, 8 workers; G: GossipAdamW)")
    y = Scale(ticks([height for curve in curves for _, height in curve.points]), "BLEU")
    Plane(drawing, (36, 30), (286, 240), x, y).curves(curves)
    return drawing


def regions(path: Path, title: str) -> Drawing:
    """The loss of asynchronous methods against seconds, in four regions."""
    curves = mean_curves(trainings(path), "seconds", "test", REGIONS)
    drawing = Drawing(title, 330)
    x = Scale((10, 30, 100, 300, 1000, 3200), "seconds (16 workers in four regions)", is_log=True)
    Plane(drawing, (36, 30), (276, 250), x, Scale((2, 2.25, 2.5, 3, 4, 5), "nats per byte", is_log=True)).curves(curves)
    return drawing


def goodput(path: Path, title: str) -> Drawing:
    """The share of time that trains against the number of workers, for two rates of failures."""
    rows = read_columns(path, ("failures", "system", "workers", "worker_hours", "goodput"), source=SOURCE)
    drawing = Drawing(title, 516)
    drawing.text((8, 510), "DDP: with a checkpoint every 30 or 600 s", color="muted", size=LETTER, anchor="start")
    for number, failures in enumerate(("100 times as often", "one an hour")):
        own = rows[rows["failures"] == failures]
        hours = f"{own['worker_hours'].iloc[0]:.0f} h"
        x = Scale((8, 32, 128, 1024), f"workers, each of which fails once in {hours}", is_log=True)
        plane = Plane(drawing, (42, 30 + 250 * number), (276, 170), x, Scale((0, 25, 50, 75, 100), "goodput, %"))
        shares = own.assign(percent=100 * own["goodput"]).set_index("system")[["workers", "percent"]]
        plane.curves([Curve(label, look, points(shares.loc[name])) for name, (label, look) in SYSTEMS.items()])
    return drawing


def agreement_of_graphs(path: Path, title: str) -> Drawing:
    """The messages of a rank until the error is 1e-6, against the number of ranks."""
    rows = read_columns(path, ("ranks", "role", "messages"), source=SOURCE).sort_values("ranks")
    means = rows.groupby(["role", "ranks"])["messages"].mean()
    drawing = Drawing(title, 330)
    x = Scale((3, 6, 12, 25, 50), "ranks (blue: the default graphs)", is_log=True)
    y = Scale((1, 10, 100, 1000, 10000), "messages of a rank to an error of 1e-6", is_log=True)
    curves = [Curve(label, look, list(means[name].items())) for name, (label, look) in GRAPHS.items()]
    Plane(drawing, (50, 30), (274, 250), x, y).curves(curves)
    return drawing


def exchanges(path: Path, title: str) -> Drawing:
    """The exchanges of a worker until the error is 0.001, against the number of workers of a cycle."""
    rows = read_columns(path, ("method", "workers", "exchanges_to_0.001"), source=SOURCE)
    means = rows.groupby(["method", "workers"])["exchanges_to_0.001"].mean()
    drawing = Drawing(title, 280)
    x = Scale((8, 16, 32), "workers of a cycle", is_log=True)
    y = Scale((10, 20, 50, 100, 200, 300), "exchanges of a worker to an error of 0.001", is_log=True)
    curves = [Curve(name, look, list(means[name].items())) for name, look in PAIRWISE.items()]
    Plane(drawing, (36, 30), (290, 200), x, y).curves(curves)
    return drawing


def utilisation(path: Path, title: str) -> Drawing:
    """The share of a step that computes against the speed of the links: ours as lines, and the published dots."""
    columns = ("method", "period", "mbit", "utilisation_percent", "published_percent")
    rows = read_columns(path, columns, source=SOURCE)
    rows = rows[rows["method"] == "DiLoCo"].sort_values("mbit").set_index("period")
    drawing = Drawing(title, 340)
    x = Scale((50, 200, 1000, 5000), "Mbit/s (lines: the Lab; circles: published)", is_log=True)
    plane = Plane(drawing, (42, 30), (286, 250), x, Scale((0, 25, 50, 75, 100), "compute utilisation, %"))
    curves = []
    for period, color in PERIODS.items():
        own = rows.loc[period]
        curves.append(Curve(f"H = {period}", Look(color), points(own[["mbit", "utilisation_percent"]])))
        for point in points(own[["mbit", "published_percent"]]):
            drawing.ring(plane.place(*point), color=color)
    plane.curves(curves)
    return drawing


def steps_by_link(path: Path, title: str) -> Drawing:
    """The time of a step against the speed of the links, with stragglers."""
    rows = read_columns(path, ("title", "rate_gbit", "fleet_step_ms"), source="benchmarks.cluster")
    medians = rows.groupby(["title", "rate_gbit"])["fleet_step_ms"].median()
    drawing = Drawing(title, 330)
    x = Scale((0.1, 1, 10), "Gbit/s (4 hosts; one step in 20 is slow)", is_log=True)
    y = Scale((40, 100, 200, 600), "ms per step", is_log=True)
    curves = [Curve(label, look, list(medians[name].items())) for name, (label, look) in LINKS.items()]
    Plane(drawing, (36, 30), (276, 250), x, y).curves(curves)
    return drawing


def rates_of_matcha(path: Path, title: str) -> Drawing:
    """The contraction rho of MATCHA against its budget, for six graphs."""
    rows = read_columns(path, ("graph", "workers", "budget", "rho"), source=SOURCE).sort_values("budget")
    drawing = Drawing(title, 330)
    x = Scale((0.1, 0.25, 0.5, 0.75, 1), "budget: the share of the messages")
    plane = Plane(drawing, (36, 30), (286, 250), x, Scale(ticks(rows["rho"]), "rho, less is faster"))
    looks = (*map(Look, ("ink", "blue", "green", "orange", "purple", "muted")),)
    plane.curves(
        [
            Curve(f"graph {graph}", look, points(own[["budget", "rho"]]))
            for look, (graph, own) in zip(looks, rows.groupby("graph"), strict=True)
        ]
    )
    return drawing
