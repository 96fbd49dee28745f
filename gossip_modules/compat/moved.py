"""Names of modules that have moved, or that other libraries have in them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from ..extras import PACKAGE, load
from ..warn import levels_to_user

_PROCESSORS = dict.fromkeys(("FixedProcessor", "MatchaProcessor"), "compat.processors")
MOVED: Mapping[str, Mapping[str, str]] = {
    PACKAGE: {
        "Algorithm": "extend",
        "BaseGraph": "graph_manager",
        "ButterflyGroups": "graph_manager",
        "Cast": "compression",
        "ChainGraph": "graph_manager",
        "ChunkTopK": "compression",
        "ClockInterpolation": "dpwa",
        "CompleteGraph": "graph_manager",
        "Compressor": "compression",
        "ConstantInterpolation": "dpwa",
        "DoubleBinaryTreeGraph": "graph_manager",
        "DynamicBipartiteCompleteGraph": "graph_manager",
        "DynamicBipartiteExponentialGraph": "graph_manager",
        "DynamicBipartiteLinearGraph": "graph_manager",
        "DynamicDirectedExponentialGraph": "graph_manager",
        "DynamicDirectedLinearGraph": "graph_manager",
        "Engine": "extend",
        "EquiDynGraph": "graph_manager",
        "EquiStaticGraph": "graph_manager",
        "FlatBuffer": "extend",
        "FlatVector": "extend",
        "GlobalAverage": "extend",
        "GossipModule": "extend",
        "GossipWrapper": "extend",
        "GraphManager": "graph_manager",
        "GraphMixing": "mixing_manager",
        "HypercubeGraph": "graph_manager",
        "Interpolation": "dpwa",
        "LaplacianMixing": "mixing_manager",
        "LockstepEngine": "extend",
        "LossInterpolation": "dpwa",
        "MatrixMixing": "mixing_manager",
        "Memory": "extend",
        "MetropolisHastingsMixing": "mixing_manager",
        "Mix": "extend",
        "Mixer": "extend",
        "MixingManager": "mixing_manager",
        "MixingWeights": "mixing_manager",
        "NPeerDynamicDirectedExponentialGraph": "graph_manager",
        "NetworkXGraph": "graph_manager",
        "OuterMethod": "extend",
        "OverlapEngine": "extend",
        "PairwiseAverager": "dpwa",
        "PairwiseConfig": "dpwa",
        "ProcessGroupTransport": "extend",
        "PushPull": "extend",
        "PushSum": "extend",
        "RandomGraph": "graph_manager",
        "RandomMatchingGraph": "graph_manager",
        "RandomPushGraph": "graph_manager",
        "SGDStep": "extend",
        "Selection": "extend",
        "SimpleGossipDataParallel": "simple_distributed",
        "StaticExponentialGraph": "graph_manager",
        "SyncEngine": "extend",
        "TorusGraph": "graph_manager",
        "Transport": "extend",
        "TwoBit": "compression",
        "UniformMixing": "mixing_manager",
        "Vectors": "extend",
        "WeightedGraph": "graph_manager",
        "init_mpi_process_group": "mpi",
        "measure_link_times": "matcha.link_times",
        "mpi_store": "mpi",
        "register_mpi_backend": "mpi",
        "select_graph": "graph_manager",
        "simple_distributed": "simple_distributed",
    },
    f"{PACKAGE}.graph_manager": _PROCESSORS,
    f"{PACKAGE}.matcha": _PROCESSORS,
}
"""The names, each with its module now, by the module that had them."""


REMOVED: Mapping[str, str] = {
    "AccumAdam": "take GossipAdamW(parameters, lr=1e-3, num_ranks=n), which has the second moments of all-reduce",
    "ConsensusControl": "take algorithm=SlowMo(4, momentum=0.4), whose models end nearer to all-reduce, or "
    "schedule=Schedule(average_every=8), which has exact averages at fixed steps",
}
"""The names of `gossip_modules` that are gone; each with its replacement, as a clause."""


def remedy_of_removed(name: str) -> str:
    """Return the replacement of a name that is gone; "": no such name."""
    return REMOVED.get(name, "")


def module_attribute(module: str, name: str, error: AttributeError) -> Any:
    """Return a name that a module does not have; with a warning, if it was in the package itself.

    Args:
        module: the name of the module.
        name: the name in it.
        error: that it has none.

    Raises:
        AttributeError: it never had one.
        ImportError: the name is gone.
    """
    if module == PACKAGE and name in REMOVED:
        raise ImportError(f"got {module}.{name}, which is gone: {REMOVED[name]}", name=module)
    place = MOVED[module].get(name)
    if place is None:
        raise error
    if place == name:  # a module
        return load(place)
    if module == PACKAGE:
        now = f"{PACKAGE}.{place}.{name}"
        text = f"{module}.{name} is now {now}; the old name will go"
        warnings.warn(text, DeprecationWarning, stacklevel=levels_to_user())
    return load(f"{place}:{name}")
