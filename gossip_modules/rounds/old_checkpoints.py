"""States of 0.1.0 as this version has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SUM = {"average": "reset", "generation": "reset", "join": "copy"}
_LAST = {"average": "reset", "generation": "keep", "join": "copy"}
_MOMENTUM = {"average": "on_request", "generation": "keep", "join": "copy"}
_POLICIES: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "D2": {"c": _SUM},
    "ExactDiffusion": {"c": _SUM},
    "GradientTracking": {"last": _SUM, "z": _SUM},
    "QGDSGDm": {"last": _LAST, "momentum": _MOMENTUM},
    "DecentLaM": {"last": _LAST, "momentum": _MOMENTUM},
}
"""When the vectors of update rules start anew."""


def converted(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a lockstep engine, of this version or of 0.1.0; shares memory."""
    if "carried" not in state:
        return dict(state)
    name = str(state["engine"]).removesuffix(" engine")
    memory = {**state["carried"], "policies": _POLICIES.get(name, {})}
    optimizer = {"sgd_step": state["sgd_step"], "step_rates": state.get("step_rates")}
    gossiper = {"algorithm": name, "memory": memory, "mixer": state["gossiper"], "optimizer": optimizer}
    return {"engine": "LockstepEngine", "t": state["t"], "step": state["step"], "gossiper": gossiper}
