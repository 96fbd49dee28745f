"""MATCHA: the matchings of a base graph, how often each is used, and how fast the ranks agree.

`MatchaGraph` in `graph.py` shows the algorithm.
Wang, Sahu, Yang, Joshi, Kar, ICC 2019, arXiv 1905.09435. `python -m gossip_modules.matcha` prints a plan.
"""

from typing import TYPE_CHECKING, Any

from ..graph_manager.matchings import (
    Edge,
    Matching,
    as_matchings,
    decompose,
    matchings_of,
    predefined_matchings,
    select_graph,
)
from ..mixing_manager.laplacians import (
    MixingWeight,
    contraction,
    dpsgd_weight,
    laplacian,
    mixing_weight,
    periodic_dpsgd_weight,
)
from ..old_names import module_attribute
from .graph import MatchaGraph
from .planning import ActivationPlan, activation_probabilities, joint_probabilities, matching_costs

__all__ = [
    "ActivationPlan",
    "Edge",
    "MatchaGraph",
    "Matching",
    "MixingWeight",
    "activation_probabilities",
    "as_matchings",
    "contraction",
    "decompose",
    "dpsgd_weight",
    "joint_probabilities",
    "laplacian",
    "matching_costs",
    "matchings_of",
    "mixing_weight",
    "periodic_dpsgd_weight",
    "predefined_matchings",
    "select_graph",
]


if not TYPE_CHECKING:  # a type checker would take any name, with Any as its type

    def __getattr__(name: str) -> Any:
        return module_attribute(__name__, name)
