"""How much each rank gives to its own and to each received value."""

from .base import MetropolisHastingsMixing, MixingManager, MixingWeights, SymmetricMixing, UniformMixing
from .laplacian import LaplacianMixing
from .matrix import MatrixMixing
from .step_size import best_step_size

__all__ = [
    "LaplacianMixing",
    "MatrixMixing",
    "MetropolisHastingsMixing",
    "MixingManager",
    "MixingWeights",
    "SymmetricMixing",
    "UniformMixing",
    "best_step_size",
]
