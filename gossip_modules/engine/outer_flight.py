"""OuterFlight: an outer step that travels under training."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass


@dataclass
class OuterFlight:
    """An outer step that travels: of which fragment, when it began, and the step of training at which it is applied."""

    fragment: int
    began: int
    due: int
    future: Future[float]  # 1: it was mixed
