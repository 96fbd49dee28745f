"""States of 0.1.0 as this version has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _policy(*, start: str = "zero", average: str = "reset", generation: str = "keep", in_units: bool = False) -> Any:
    units = {"in_units_of_rate": in_units}
    return {"start": start, "average": average, "generation": generation, "join": "copy", **units}


_SUM = _policy(generation="reset", in_units=True)
_LAST = _policy(start="x")
_POLICIES: Mapping[str, Mapping[str, Any]] = {
    "D2": {"c": _SUM},
    "ExactDiffusion": {"c": _SUM},
    "GradientTracking": {"last": _policy(start="x", generation="reset"), "z": _SUM},
    "QGDSGDm": {"last": _LAST, "momentum": _policy(average="on_request")},
    "DecentLaM": {"last": _LAST, "momentum": _policy(average="on_request")},
}
"""The arguments of `Memory.vector` for the vectors of update rules."""


def converted(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a lockstep engine, of this version or of 0.1.0; shares memory."""
    if "carried" not in state:
        return dict(state)
    name, carried = str(state["engine"]).removesuffix(" engine"), state["carried"]
    memory = {**carried, "policies": dict(_POLICIES.get(name, {}))} if carried else {}
    optimizer = {"sgd_step": state["sgd_step"], "step_rates": state.get("step_rates")}
    gossiper = {"algorithm": name, "memory": memory, "mixer": state["gossiper"], "optimizer": optimizer}
    return {"engine": "LockstepEngine", "t": state["t"], "step": state["step"], "gossiper": gossiper}


def links_renewed(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of PowerGossip or RelaySGD of 0.1.0, as rounds have it; shares memory."""
    name = state["algorithm"]
    if name == "RelaySGD":
        links: dict[int, Any] = dict(state["received"])  # bytes, which the algorithm unpacks
        return {"algorithm": name, "links": sorted(links), "memory": {"num_rounds": 1, "links": links}}
    numbers = dict(zip(state["links"], state["iterations"], strict=True))
    links = {
        peer: {
            **{side: [factors[side][k] for factors in state["factors"]] for side in ("left", "right")},
            "iterations": number,
        }
        for k, (peer, number) in enumerate(numbers.items())
    }
    return {
        "algorithm": name,
        "links": list(numbers),
        "memory": {"num_rounds": max(numbers.values(), default=0), "links": links},
        "messages": {"numbers": numbers, "peers": state["peers"], "digests": state["digests"]},
    }
