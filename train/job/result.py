"""RunResult: the results of a run, for the code that called it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.job.outputs import EXPORT


@dataclass(frozen=True)
class RunResult:
    """The results of a run, as one rank knows them."""

    exit_code: int
    """0: the run is complete; 75: it was told to stop, and has a checkpoint."""
    folder: Path
    """Of everything that the run has written."""
    rank: int
    world_size: int
    score: str
    """The metric that tells good from bad."""
    averaged_test: Mapping[str, float]
    """Metrics of the average of all models, the same on every rank; empty where the run was told to stop."""
    own_test: Mapping[str, float]
    """Metrics of the model of this rank; empty as above."""
    consensus_distance: float
    """sqrt(mean_i ||x_i - mean_j x_j||^2); NaN where the run was told to stop."""
    epochs: Sequence[Mapping[str, Any]]
    """The rows of the table of this rank, one for each epoch, also of an earlier process of the run."""

    @property
    def is_complete(self) -> bool:
        """Whether all epochs were trained."""
        return self.exit_code == 0

    @property
    def model_path(self) -> Path:
        """The averaged model, a file of safetensors that rank 0 writes."""
        return self.folder / EXPORT
