"""The tasks that methods are compared by."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.cluster.workload.image_task import ClusterImages
from benchmarks.cluster.workload.language_task import ClusterText
from benchmarks.cluster.workload.task import LearningTask

TASKS: Mapping[str, type[LearningTask]] = {"images": ClusterImages, "language": ClusterText}
"""Each is made of the folder of its arrays."""
