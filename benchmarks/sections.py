"""Studies that are sections of the page of another study, and the addresses of all studies in docs/benchmarks/."""

from __future__ import annotations

from collections.abc import Mapping

SECTIONS: Mapping[str, str] = {
    "crossover": "stragglers",
    "resnet": "worker_numbers",
    "consensus_codes": "compression",
    "power_iterations": "compression",
    "deltas": "compression",
    "matcha_rho": "default_graphs",
    "pairwise": "default_graphs",
    "elastic_cost": "elastic",
    "strangers": "chaos",
    "straggler_accuracy": "stragglers",
    "uneven_data": "worker_numbers",
    "uneven_workers": "worker_numbers",
    "outer_short": "outer_language",
    "outer_long": "outer_language",
    "two_regions": "regions",
    "wire": "step_time",
    "lossy_links": "step_time",
    "hosts": "step_time",
    "attacks": "faults",
}
"""The name of a study, and of the page that it is a section of."""


def address(name: str) -> str:
    """Return the address of a study, relative to docs/benchmarks/.

    >>> address("elastic"), address("elastic_cost")
    ('elastic.md', 'elastic.md#elastic_cost')
    """
    return f"{SECTIONS[name]}.md#{name}" if name in SECTIONS else f"{name}.md"
