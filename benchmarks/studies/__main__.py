"""Run a study: `python -m benchmarks.studies accuracy_bytes --output benchmarks/results/accuracy_bytes.csv`.

The environment variable GOSSIP_DATA names the folder that has cifar10-jpeg.tar.gz and multi30k. Set OMP_NUM_THREADS=1.
A training that has rows in the file is not run again, so the same command goes on with a study. Several commands may
write one file, if each has `--workers` or, where no rate is tuned, `--seeds` of its own.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.studies.attacks import ATTACK_STUDIES
from benchmarks.studies.compression import COMPRESSION
from benchmarks.studies.computed import Computed
from benchmarks.studies.consensus import CONSENSUS
from benchmarks.studies.crossover import CROSSOVER
from benchmarks.studies.default import DEFAULT
from benchmarks.studies.goodput import GOODPUT
from benchmarks.studies.graphs import GRAPH_STUDIES
from benchmarks.studies.images import IMAGES
from benchmarks.studies.lab import LAB
from benchmarks.studies.language import LANGUAGE
from benchmarks.studies.outer_steps import OUTER
from benchmarks.studies.regions import REGIONS
from benchmarks.studies.resnet import RESNET
from benchmarks.studies.study import Study, Trainings
from benchmarks.studies.translation import TRANSLATION
from benchmarks.studies.uneven import UNEVEN
from benchmarks.studies.utilisation import UTILISATION
from benchmarks.studies.wagma_ablations import ABLATIONS

STUDIES: Mapping[str, Study] = {
    **DEFAULT,
    **IMAGES,
    **RESNET,
    **ABLATIONS,
    **LANGUAGE,
    **OUTER,
    **TRANSLATION,
    **REGIONS,
    **UNEVEN,
    **CROSSOVER,
    **ATTACK_STUDIES,
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
    parser.add_argument("--workers", type=int, nargs="*", help="train these numbers of workers only")
    parser.add_argument("--seeds", type=int, nargs="*", help="train with these seeds only")
    parser.add_argument("--methods", nargs="*", help="train by these methods only, by their names in the rows")
    parser.add_argument("--quick", action="store_true", help="train each method for a few steps, to see that it runs")
    parser.add_argument("--device", default="cpu", help="the device of the models, such as cuda; resnet only")
    options = parser.parse_args(argv)
    if options.device != "cpu" and not (options.name in STUDIES and STUDIES[options.name].has_device):
        parser.error(f"got --device {options.device} for {options.name}, expected none: it trains on the CPU")
    torch.set_num_threads(1)
    if options.name in COMPUTED:
        return 0 if COMPUTED[options.name].run(options.output, options.minutes) else 3
    study = STUDIES[options.name]
    if options.workers:
        study = study.of(options.workers)
    if not study.cells:
        numbers = sorted({workers for workers, _, _ in STUDIES[options.name].cells})
        parser.error(f"got --workers {options.workers}, expected some of {numbers}")
    if options.seeds:
        seeds = sorted({seed for *_, seed in study.cells})
        study = study.seeded(options.seeds)
        if not study.cells:
            parser.error(f"got --seeds {options.seeds}, expected some of {seeds}")
    if options.methods:
        try:
            study = study.only(options.methods)
        except ValueError as error:
            parser.error(str(error))
    study = study.quick() if options.quick else study
    return 0 if Trainings(study, options.output, options.minutes, options.device).run() else 3


if __name__ == "__main__":
    sys.exit(main())
