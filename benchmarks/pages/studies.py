"""Pages of the studies of `benchmarks.studies`, and their rows of the page Reproduction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.pages.base import Page
from benchmarks.pages.headline import Headline

STUDIES: Mapping[str, Page] = {}
"""By the name of the page."""

REPRODUCED: Sequence[Headline] = ()
"""The headlines of papers that the studies measure; see `benchmarks.pages.reproduction`."""
