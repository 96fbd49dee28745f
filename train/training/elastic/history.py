"""History: what an elastic run was before a worker has come to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class History:
    """What a worker that joins has to know of the run before: given to `Membership.track`."""

    def __init__(self) -> None:
        self.first_turn = 0
        """Where the run has gone on from a checkpoint."""
        self.changes: list[dict[str, Any]] = []
        """Generations that have begun, for the report."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"first_turn": self.first_turn, "changes": self.changes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what another worker knows."""
        self.first_turn, self.changes = int(state["first_turn"]), list(state["changes"])
