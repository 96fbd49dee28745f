"""The tasks that methods are compared by."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.cluster.workload.image_task import ImageTask
from benchmarks.cluster.workload.language_task import LanguageTask
from benchmarks.cluster.workload.task import LearningTask

TASKS: Mapping[str, type[LearningTask]] = {"images": ImageTask, "language": LanguageTask}
"""Each is made of the folder of its arrays."""
