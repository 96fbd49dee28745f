"""Former pages of the documentation: a browser that opens one is sent to the page in its place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

MOVED: Mapping[str, str] = {
    "api/communicators": "api/matcha#matchas-communicators",
    "api/dpwa": "api/asynchronous#dpwa",
    "api/mailbox": "api/membership#mailbox",
    "api/metrics": "api/checkpoints#metrics",
    "api/mixing": "api/graphs#mixing-weights",
    "api/schedules": "api/algorithms#schedules",
    "api/wrapper_base": "api/rounds#the-base-class-of-wrappers",
    "benchmarks/before_after_bits": "benchmarks/index",
    "benchmarks/consensus": "benchmarks/compression#consensus_codes",
    "benchmarks/consensus_codes": "benchmarks/compression#consensus_codes",
    "benchmarks/consensus_control": "benchmarks/worker_numbers",
    "benchmarks/elastic_cost": "benchmarks/elastic#elastic_cost",
    "benchmarks/gap": "benchmarks/language",
    "benchmarks/graph_scaling": "benchmarks/default_graphs",
    "benchmarks/hosts": "benchmarks/step_time#hosts",
    "benchmarks/language_model": "benchmarks/language",
    "benchmarks/many_workers": "benchmarks/lab",
    "benchmarks/matcha_planning": "benchmarks/default_graphs",
    "benchmarks/matcha_rho": "benchmarks/default_graphs#matcha_rho",
    "benchmarks/outer_short": "benchmarks/outer_language#outer_short",
    "benchmarks/pairwise": "benchmarks/default_graphs#pairwise",
    "benchmarks/setup": "benchmarks/index#setup",
    "benchmarks/simulator": "benchmarks/lab",
    "benchmarks/slowmo": "benchmarks/worker_numbers",
    "benchmarks/straggler_accuracy": "benchmarks/stragglers#straggler_accuracy",
    "benchmarks/time_to_loss": "benchmarks/default",
    "benchmarks/uneven_data": "benchmarks/worker_numbers#uneven_data",
    "benchmarks/wire": "benchmarks/step_time#wire",
    "decisions/compression": "decisions/vectors_and_rounds#compression",
    "decisions/optimizers": "decisions/vectors_and_rounds#optimizers",
    "decisions/size": "decisions/tools#size",
    "extend/mixing": "extend/graph#mixing-weights",
    "getting_started": "learn/quickstart#install",
    "guides/averaging": "api/rounds#average-tensors",
    "guides/clouds": "guides/launchers#clouds",
    "guides/dpwa": "methods/dpwa",
    "guides/elasticity_failures": "guides/failures#with-a-membership",
    "guides/elasticity_loop": "guides/elasticity#your-training-loop",
    "guides/kubernetes": "guides/launchers#kubernetes",
    "guides/learning_rates": "guides/optimizers",
    "guides/matcha": "methods/matcha",
    "guides/mpi": "guides/launchers#mpi",
    "guides/optimizer_state": "guides/optimizers#optimizer-state",
    "guides/seeds": "guides/training_loop#seeds",
    "guides/slurm": "guides/launchers#slurm",
}
"""Former pages, and the pages in their place, without their suffix; the part after # is a section."""


def write_moved(site: Path) -> None:
    """Write a page for each key of MOVED.

    Args:
        site: the folder of the built pages.
    """
    for former, page in MOVED.items():
        path, _, section = page.partition("#")
        address = f"{os.path.relpath(path, Path(former).parent)}.html" + (f"#{section}" if section else "")
        lines = (
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<meta charset="utf-8">',
            "<title>Moved</title>",
            f'<link rel="canonical" href="{address}">',
            f'<meta http-equiv="refresh" content="0; url={address}">',
            f'<p>This page has moved: <a href="{address}">open it</a>.</p>',
            "</html>",
        )
        written = site / f"{former}.html"
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text("\n".join([*lines, ""]), encoding="utf-8")
