"""Train the same model on the same data and budget by several recipes, and print how they compare.

    python -m train.compare  # handwritten digits, 4 ranks
    python -m train.compare --nproc-per-node 2 --recipes ar osgp -- --epochs 5 --seed 3
    python -m train.compare --recipes dpsgd matcha choco powergossip
    python -m train.compare --recipes ar sgp adpsgd wagma dpwa -- --epochs 10
    python -m train.compare --script translate --recipes ar sgp osgp           # number words

What follows `--` goes to every run of the script. Writes comparison.txt and comparison.png next to
the runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Literal

import tyro

# Run by path, Python looks for modules beside this file; they are one level up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gossip_modules.methods import METHODS, name_of
from train.job.errors import UsageError, refuse
from train.job.outputs import outputs_in, tables_in
from train.training.evaluate import title_of
from train.training.report import table
from visualization.command import read_arguments
from visualization.curves import draw


@dataclass(frozen=True)
class Comparison:
    """Which runs to make."""

    options: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Options of every run, after `--`."""
    script: Literal["gossip_sgd", "translate", "language_model"] = "gossip_sgd"
    """Of train/: what is learnt."""
    recipes: tuple[str, ...] = ("ar", "dpsgd", "sgp", "osgp")
    """Methods, as python -m gossip_modules.methods lists them, each once; differences are to the first."""
    nproc_per_node: int = 4
    """Ranks of every run."""
    out_dir: Path = Path("runs/compare")
    """Folder of the runs, one each."""
    overwrite: bool = False
    """Delete the runs of the same recipes that out_dir has; otherwise they are an error."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipes", tuple(map(name_of, self.recipes)))
        unknown = [name for name in self.recipes if name not in METHODS]
        if unknown or not self.recipes or len(set(self.recipes)) < len(self.recipes):
            raise ValueError(
                f"got recipes={', '.join(self.recipes)}, expected some of {', '.join(METHODS)}, each once; see --help"
            )
        if self.nproc_per_node < 1:
            raise ValueError(f"got nproc_per_node={self.nproc_per_node}, expected 1 or more")


def train(recipe: str, comparison: Comparison) -> dict[str, Any]:
    """Run one recipe under torchrun and return its summary.json.

    Raises:
        UsageError: the run failed; it has said why.
    """
    folder = comparison.out_dir / recipe
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [
        "--nproc-per-node",
        str(comparison.nproc_per_node),
        str(Path(__file__).with_name(f"{comparison.script}.py")),
    ]
    command += ["--recipe", recipe, "--out-dir", str(folder), *comparison.options]
    command += ["--overwrite"] if comparison.overwrite else []
    if code := subprocess.run(command, check=False).returncode:
        raise UsageError(f"got exit code {code} from the run of {recipe}, expected 0: see above for what it has said")
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def compare(summaries: dict[str, dict[str, Any]]) -> str:
    """The summaries of runs, by recipe, as a table; differences are to the first."""
    first_recipe, first = next(iter(summaries.items()))
    score = first["score"]
    unit = "points" if score.endswith("_percent") else score
    rows = []
    for recipe, summary in summaries.items():
        ranks = summary["ranks"]
        averaged = summary["averaged_test"]
        rows.append(
            {
                "recipe": recipe,
                **{f"averaged {title_of(metric)}": f"{value:.2f}" for metric, value in averaged.items()},
                f"to {first_recipe} [{unit}]": f"{averaged[score] - first['averaged_test'][score]:+.2f}",
                **{
                    f"own {title_of(name.removeprefix('own_test_'))}, mean": f"{mean(rank[name] for rank in ranks):.2f}"
                    for name in ranks[0]
                    if name.startswith("own_test_")
                },
                "consensus distance": f"{summary['consensus_distance']:.3g}",
                "sent per rank [MB]": f"{mean(rank['bytes_sent'] for rank in ranks) / 1e6:.1f}",
                "training [s]": f"{mean(rank['time_seconds'] for rank in ranks):.1f}",
            }
        )
    return table(rows)


def require_new_folders(comparison: Comparison) -> None:
    """All folders of the comparison are free, before the first run takes its time.

    Raises:
        UsageError: one has an earlier run, and it is neither to be deleted nor to be gone on from.
    """
    if comparison.overwrite or any(option.startswith("--resume") for option in comparison.options):
        return  # each run sees for itself whether there is one to go on from
    folders = [comparison.out_dir / recipe for recipe in comparison.recipes]
    if taken := [str(folder) for folder in folders if tables_in(folder) or outputs_in(folder)]:
        raise UsageError(
            f"got an --out-dir with earlier runs ({', '.join(taken)}), expected new ones; pass another --out-dir, or "
            "--overwrite to delete them"
        )


def main(comparison: Comparison) -> None:
    """Make the runs, then print and draw the comparison.

    Raises:
        UsageError: a folder is not free, or a run failed.
    """
    require_new_folders(comparison)
    summaries = {}
    for recipe in comparison.recipes:
        print(f"== {METHODS[recipe].title}", flush=True)
        summaries[recipe] = train(recipe, comparison)
    text = compare(summaries)
    picture = draw({recipe: comparison.out_dir / recipe for recipe in summaries}, comparison.out_dir / "comparison.png")
    (comparison.out_dir / "comparison.txt").write_text(text + "\n")
    print(f"\n{text}\n\ncurves in {picture}")


if __name__ == "__main__":
    try:
        main(read_arguments(Comparison, description=__doc__))
    except UsageError as error:
        refuse(error, 0)
