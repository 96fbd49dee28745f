"""Run a study: `python -m benchmarks.studies accuracy_bytes --output benchmarks/results/accuracy_bytes.csv`.

The environment variable GOSSIP_DATA names the folder that has cifar10-jpeg.tar.gz and multi30k. Set OMP_NUM_THREADS=1.
A training that has rows in the file is not run again, so the same command goes on with a study.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.studies.compression import COMPRESSION
from benchmarks.studies.computed import Computed
from benchmarks.studies.consensus import CONSENSUS
from benchmarks.studies.crossover import CROSSOVER
from benchmarks.studies.goodput import GOODPUT
from benchmarks.studies.graphs import GRAPH_STUDIES
from benchmarks.studies.images import IMAGES
from benchmarks.studies.lab import LAB
from benchmarks.studies.language import LANGUAGE
from benchmarks.studies.regions import REGIONS
from benchmarks.studies.resnet import RESNET
from benchmarks.studies.study import Study, Trainings
from benchmarks.studies.translation import TRANSLATION
from benchmarks.studies.uneven import UNEVEN
from benchmarks.studies.utilisation import UTILISATION
from benchmarks.studies.wagma_ablations import ABLATIONS

STUDIES: Mapping[str, Study] = {
    **IMAGES,
    **RESNET,
    **ABLATIONS,
    **LANGUAGE,
    **TRANSLATION,
    **REGIONS,
    **UNEVEN,
    **CROSSOVER,
}
"""The studies by name."""
COMPUTED: Mapping[str, Computed] = {**CONSENSUS, **UTILISATION, **GOODPUT, **LAB, **GRAPH_STUDIES, **COMPRESSION}
"""The studies without training by name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a study; returns the exit code, 3 if the time was over before the end."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.studies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=[*STUDIES, *COMPUTED], metavar="name", help="the study: %(choices)s")
    parser.add_argument("--output", type=Path, required=True, help="the CSV file of the rows; required")
    parser.add_argument("--minutes", type=float, default=math.inf, help="the time after which no training begins")
    parser.add_argument("--device", default="cpu", help="the device of the models, such as cuda; resnet only")
    options = parser.parse_args(argv)
    study = STUDIES.get(options.name)
    if options.device != "cpu" and not (study and study.has_device):
        parser.error(f"got --device {options.device} for {options.name}, expected none: it trains on the CPU")
    torch.set_num_threads(1)
    if options.name in COMPUTED:
        return 0 if COMPUTED[options.name].run(options.output, options.minutes) else 3
    return 0 if Trainings(STUDIES[options.name], options.output, options.minutes, options.device).run() else 3


if __name__ == "__main__":
    sys.exit(main())
