"""The mixing matrices W(t): the weights of each rank for its own value and for each received one."""

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
