"""The mixing matrices W(t): the weight that each rank gives to its own value and to each received one."""

from .base import MetropolisHastingsMixing, MixingManager, MixingWeights, SymmetricMixing, UniformMixing
from .graph_weights import GraphMixing, LaplacianMixing, default_mixing
from .matrix import MatrixMixing
from .spectra import best_step_size

__all__ = [
    "GraphMixing",
    "LaplacianMixing",
    "MatrixMixing",
    "MetropolisHastingsMixing",
    "MixingManager",
    "MixingWeights",
    "SymmetricMixing",
    "UniformMixing",
    "best_step_size",
    "default_mixing",
]
