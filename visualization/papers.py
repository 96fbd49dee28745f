"""The papers' own figures and those of benchmark pages, from the rows of benchmarks/results/, as files of docs/assets.

python -m visualization.papers                    # writes all of them
python -m visualization.papers --output /tmp
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from visualization.charts import Curve, Look, Plane, Scale, SeedRange, ranges, ticks
from visualization.command import run_command
from visualization.diagrams import FOLDER, Drawing
from visualization.logs.tables import read_columns
from visualization.study_figures import (
    agreement_of_graphs,
    exchanges,
    goodput,
    late_workers,
    outer_bytes,
    outer_steps,
    rates_of_matcha,
    regions,
    steps_by_link,
    translation,
    uneven_data,
    utilisation,
)
from visualization.study_rows import last, points, trainings

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
LOOKS: Mapping[str, Look] = {
    "all-reduce": Look("ink"),
    "SGP": Look("blue"),
    "Overlap SGP": Look("blue", dashed=True),
    "D-PSGD": Look("orange"),
    "AD-PSGD": Look("green"),
    "WAGMA-SGD": Look("purple"),
}
CODES: Mapping[str, tuple[str, Look]] = {
    "D-PSGD": ("D-PSGD", Look("orange")),
    "Moniqua, 8 bits": ("Moniqua, 8 bits", Look("ink")),
    "PowerGossip, rank 1": ("PowerGossip", Look("blue")),
    "CHOCO, signs": ("CHOCO, signs", Look("green")),
    "CHOCO, top 1 %": ("CHOCO, top 1 %", Look("green", dashed=True)),
    "DeepSqueeze, signs": ("DeepSqueeze", Look("purple")),
}
"""Label and look of the methods on a ring."""
BUDGETS: Mapping[float, Look] = {
    1.0: Look("ink"),
    0.5: Look("blue"),
    0.25: Look("green"),
    0.1: Look("orange"),
}
ABLATIONS: Mapping[str, str] = {
    **{f"groups of {size}": "blue" for size in (2, 4, 8, 16, 64)},
    "fixed groups of 8": "orange",
    "no groups": "orange",
}
"""The colour of each ablation of WAGMA-SGD."""


def accuracy_workers(path: Path, title: str) -> Drawing:
    """Accuracy against the number of workers, at equal numbers of images."""
    means = last(trainings(path)).groupby(["method", "workers"])["accuracy"].mean()
    drawing = Drawing(title, 300)
    x = Scale(
        sorted(means.index.get_level_values("workers").unique()), "workers (CIFAR-10, equal numbers of images)", True
    )
    shown = means[list(LOOKS)]
    panel = Plane(drawing, (36, 30), (280, 220), x, Scale(ticks(shown), "accuracy, %"))
    panel.curves([Curve(name, look, list(means[name].items())) for name, look in LOOKS.items()])
    return drawing


def accuracy_bytes(path: Path, title: str) -> Drawing:
    """Accuracy against the bytes that a worker has sent."""
    curves = trainings(path).groupby(["method", "step"])[["megabytes", "accuracy"]].mean()
    drawing = Drawing(title, 300)
    x = Scale((1, 10, 100, 1000, 10000), "MB sent by a worker (CIFAR-10, ring of 8)", is_log=True)
    y = Scale(ticks(curves.loc[list(CODES)]["accuracy"]), "accuracy, %")
    panel = Plane(drawing, (36, 30), (264, 220), x, y)
    panel.curves([Curve(label, look, points(curves.loc[name])) for name, (label, look) in CODES.items()])
    return drawing


def error_bits(path: Path, title: str) -> Drawing:
    """Bits until the consensus error is 1 %, of each code that reaches it with all seeds."""
    rows = read_columns(path, ("method", "step_size", "run_seed", "rounds", "megabits"), source="benchmarks.studies")
    seeds, found = rows["run_seed"].nunique(), []
    for (name, _), own in rows.groupby(["method", "step_size"], sort=False):
        if len(own) == seeds and own["megabits"].notna().all():
            mbit = own["megabits"]
            color = "orange" if name == "plain" else "blue" if str(name).startswith("power") else "green"
            found.append(
                SeedRange(str(name), mbit.mean(), mbit.min(), mbit.max(), color, f"{own['rounds'].mean():.0f}")
            )
    found.sort(key=lambda row: row.mean)
    drawing = Drawing(title, 76 + 20 * len(found))
    drawing.text((372, 20), "rounds", color="muted", size=12, anchor="start")
    x = Scale((0.5, 1, 2, 5, 10, 20), "Mbit of a worker until the error is 1 %", is_log=True)
    ranges(drawing, 32, 128, 240, x, found)
    return drawing


def power_iterations(path: Path, title: str) -> Drawing:
    """Bits until the consensus error is 1 %, by the rank and the power iterations in a round."""
    rows = read_columns(path, ("rank", "iterations", "rounds", "megabits"), source="benchmarks.studies")
    found = []
    for (rank, iterations), own in rows.groupby(["rank", "iterations"]):
        name, mbit = f"rank {rank}, {iterations} iteration{'s' if iterations > 1 else ''}", own["megabits"]
        color = "blue" if rank == 1 else "green"
        found.append(SeedRange(name, mbit.mean(), mbit.min(), mbit.max(), color, f"{own['rounds'].mean():.0f}"))
    drawing = Drawing(title, 76 + 20 * len(found))
    drawing.text((372, 20), "rounds", color="muted", size=12, anchor="start")
    x = Scale(ticks([0.0, *rows["megabits"]], 4), "Mbit of a worker until the error is 1 %")
    ranges(drawing, 32, 144, 224, x, found)
    return drawing


def crossover(path: Path, title: str) -> Drawing:
    """The error of dpwa and of all-reduce against time, with fewer and with more workers."""
    rows = trainings(path)
    curves = rows.groupby(["workers", "method", "step"])[["seconds", "test"]].mean()
    y = Scale((5, 10, 20, 50, 100), "test error, %", is_log=True)
    numbers = sorted(rows["workers"].unique())
    drawing = Drawing(title, 260 * len(numbers))
    for number, workers in enumerate(numbers):
        own = curves.loc[workers]
        x = Scale(ticks((0, float(own.loc["dpwa"]["seconds"].max())), 4), f"seconds, {workers} workers")
        panel = Plane(drawing, (36, 30 + 260 * number), (276, 180), x, y)
        shown = own[(own["seconds"] <= x.ticks[-1]) & (own["test"] <= 100)]
        panel.curves(
            [
                Curve(name, look, points(shown.loc[name]))
                for name, look in (("all-reduce", LOOKS["all-reduce"]), ("dpwa", Look("blue")))
            ]
        )
    return drawing


def matcha_budgets(path: Path, title: str) -> Drawing:
    """The error on graph 0 against steps and against time, for each budget."""
    rows = trainings(path)
    names = {budget: f"graph 0, budget {budget:g}" for budget in BUDGETS}
    curves = rows.groupby(["method", "step"])[["seconds", "test"]].mean()
    drawing = Drawing(title, 520)
    shown = pd.concat([curves.loc[name] for name in names.values()])
    y = Scale((8, 10, 20, 50, 100) if shown["test"].min() >= 8 else (5, 10, 20, 50, 100), "test error, %", is_log=True)
    steps, seconds = int(rows["steps"].max()), float(shown["seconds"].max())
    for number, (column, words, end) in enumerate(
        (("step", "steps (graph 0, 8 workers)", steps), ("seconds", "seconds", seconds))
    ):
        panel = Plane(drawing, (36, 30 + 260 * number), (276, 180), Scale(ticks((0, end), 4), words), y)
        own = []
        for budget, look in BUDGETS.items():
            rows = curves.loc[names[budget]].reset_index()
            own.append(Curve(f"budget {budget:g}", look, points(rows[[column, "test"]])))
        panel.curves(own)
    return drawing


def wagma_ablations(path: Path, title: str) -> Drawing:
    """Accuracy with groups of several sizes, with fixed groups and without groups, for images and digits."""
    drawing, top = Drawing(title, 2 * 222 + 4), 32.0
    for task, file in (("CIFAR-10", path), ("drawn digits", path.with_name("wagma_ablations.csv"))):
        ends = last(trainings(file)).groupby("method")["accuracy"].agg(["mean", "min", "max", "count"])
        found = []
        for name, color in ABLATIONS.items():
            mean, low, high = (float(ends.loc[name, column]) for column in ("mean", "min", "max"))
            found.append(SeedRange(name, mean, low, high, color, f"{mean:.1f}"))
        drawing.text((134, top - 14), f"{task}, 64 workers", size=12, anchor="start", bold=True)
        x = Scale(ticks([*ends["min"], *ends["max"]], 4), "accuracy, % (mean, lowest and highest seed)")
        top = ranges(drawing, top, 134, 234, x, found) + 36
    return drawing


def late_throughput(path: Path, title: str) -> Drawing:
    """Images in a second by 64 workers, of which two are late in each step."""
    ends = last(trainings(path))
    compute = 0.6 + 0.32 * 2 / 64  # seconds of a step, mean over workers
    shares = (1 - ends.groupby("method")["waiting"].mean()).sort_values(ascending=False)
    found = []
    for name, share in shares.items():
        speed = 64 / (compute / share)
        look = LOOKS.get(str(name).partition(", 2")[0], Look("muted"))
        found.append(SeedRange(str(name), speed, 0.0, speed, look.color, f"{speed:.0f}"))
    drawing = Drawing(title, 76 + 20 * len(found))
    drawing.text((12, 18), "64 workers, two of them 320 ms late in each step", size=12, anchor="start", bold=True)
    ranges(drawing, 32, 112, 256, Scale(ticks((0, 64 / compute), 5), "steps of all workers in a second"), found)
    return drawing


@dataclass(frozen=True)
class Picture:
    """A figure of a paper or of a benchmark page: the page of its file shows it.

    Attributes:
        csv: the file in benchmarks/results/; others beside it may be read too.
        title: what the picture shows.
        draw: draws it from that file and the title.
    """

    csv: str
    title: str
    draw: Callable[[Path, str], Drawing]

    def svg(self, folder: Path) -> str:
        """Return the picture as the text of a file.

        Args:
            folder: has the CSV files.
        """
        return self.draw(folder / self.csv, self.title).svg()


PICTURES: Mapping[str, Picture] = {
    "accuracy_workers": Picture(
        "worker_numbers.csv", "Accuracy of six methods with 4, 8, 16 and 32 workers", accuracy_workers
    ),
    "accuracy_bytes": Picture(
        "accuracy_bytes.csv", "Accuracy against megabytes sent, for D-PSGD and five compressed methods", accuracy_bytes
    ),
    "error_bits": Picture(
        "consensus_codes.csv", "Megabits until the workers agree to 1 %, for each compressor", error_bits
    ),
    "power_iterations": Picture(
        "power_iterations.csv", "Megabits until the workers agree to 1 %, by power iterations", power_iterations
    ),
    "crossover": Picture(
        "crossover.csv", "Test error of dpwa and all-reduce against seconds, with 8, 32 and 100 workers", crossover
    ),
    "matcha_budgets": Picture(
        "matcha_time.csv", "Test error of MATCHA against steps and against seconds, for four budgets", matcha_budgets
    ),
    "wagma_ablations": Picture(
        "wagma_ablations_images.csv",
        "Accuracy of WAGMA-SGD with groups of 2 to 64 workers, fixed groups, and no groups",
        wagma_ablations,
    ),
    "late_throughput": Picture(
        "straggler_accuracy.csv", "Steps in a second of six methods with two late workers of 64", late_throughput
    ),
    "late_error": Picture(
        "straggler_accuracy.csv", "Test error of six methods against seconds, with two late workers of 64", late_workers
    ),
    "matcha_rates": Picture("matcha_rho.csv", "The rate rho of MATCHA against its budget, six graphs", rates_of_matcha),
    "uneven_data": Picture("uneven_data.csv", "Accuracy of ten methods on three splits of the data", uneven_data),
    "outer_bytes": Picture(
        "outer_language.csv", "Loss of nine outer methods against the megabytes that a worker sends", outer_bytes
    ),
    "outer_steps": Picture(
        "outer_long.csv", "Loss over 176 outer steps of DiLoCo and local SGD, with four workers", outer_steps
    ),
    "translation": Picture("translation.csv", "BLEU of five methods against steps", translation),
    "regions": Picture("regions.csv", "Loss against seconds of five methods in four regions", regions),
    "goodput": Picture("goodput.csv", "Goodput of four systems with 8 to 1,024 workers", goodput),
    "agreement_of_graphs": Picture(
        "default_graphs.csv", "Messages until ranks agree, for five graphs with 3 to 49 ranks", agreement_of_graphs
    ),
    "exchanges": Picture(
        "pairwise.csv", "Exchanges until workers agree, for AD-PSGD and A2CiD2 on cycles of 8 to 32", exchanges
    ),
    "utilisation": Picture(
        "utilisation.csv", "Compute utilisation of DiLoCo with four periods, ours and the published one", utilisation
    ),
    "steps_by_link": Picture(
        "straggler_cells.csv", "Milliseconds of a step of nine methods at 0.1, 1 and 10 Gbit/s", steps_by_link
    ),
}
"""By the name of the file."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write all pictures whose rows are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder to write to")
    folder = parser.parse_args(arguments).output
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in PICTURES.items():
        if not (RESULTS / picture.csv).exists():
            print(f"not drawn: {name}: got no {picture.csv}, expected the rows of its study")
            continue
        path = folder / f"{name}.svg"
        path.write_text(picture.svg(RESULTS), encoding="utf-8")
        print(f"drew {path}")


if __name__ == "__main__":
    run_command(main)
