"""States of 0.1.0 as this version has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _policy(
    *,
    start: str = "zero",
    average: str = "reset",
    generation: str = "keep",
    join: str = "copy",
    in_units: bool = False,
    of_weights: bool = False,
) -> Any:
    others = {"in_units_of_rate": in_units, "of_weights": of_weights}
    return {"start": start, "average": average, "generation": generation, "join": join, **others}


_SUM = _policy(generation="reset", in_units=True)
_LAST = _policy(start="x")
_PUBLIC = _policy(average="on_request", of_weights=True)
_POLICIES: Mapping[str, Mapping[str, Any]] = {
    "D2": {"c": _SUM},
    "ExactDiffusion": {"c": _SUM},
    "GradientTracking": {"last": _policy(start="x", generation="reset"), "z": _SUM},
    "QGDSGDm": {"last": _LAST, "momentum": _policy(average="on_request")},
    "Choco": {"public": _PUBLIC, "drift": _PUBLIC},
    "DeepSqueeze": {"error": _policy(average="on_request", join="zero")},
    "DecentLaM": {"last": _LAST, "momentum": _policy(average="on_request")},
}
"""The arguments of `Memory.vector` for the vectors that 0.1.0 had."""
_HAVE_MESSAGES = ("Choco", "DeepSqueeze", "Moniqua", "Sparta", "PowerGossip", "RelaySGD")
"""Algorithms whose state was empty before the first round."""


def converted(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a lockstep engine, of this version or of 0.1.0; shares memory."""
    if "carried" not in state:
        return dict(state)
    name, carried = str(state["engine"]).removesuffix(" engine"), state["carried"]
    memory = {**carried, "policies": dict(_POLICIES.get(name, {}))} if carried else {}
    optimizer = {"sgd_step": state["sgd_step"], "step_rates": state.get("step_rates")}
    gossiper = {"algorithm": name, "memory": memory, "mixer": state["gossiper"], "optimizer": optimizer}
    return {"engine": "LockstepEngine", "t": state["t"], "step": state["step"], "gossiper": gossiper}


def renewed(state: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The state of the rounds of an algorithm, of this version or of 0.1.0; shares memory. name: of the algorithm."""
    if not state and name in _HAVE_MESSAGES:
        return {"algorithm": name}
    if "sections" not in state:
        return state
    sections, number, policies = state["sections"], state["num_messages"], _POLICIES.get(state["algorithm"], {})
    vectors = {vector: [section[vector] for section in sections] for vector in (sections[0] if sections else ())}
    weights = {"weights": state["mixing"]} if "mixing" in state else {}
    numbers = dict.fromkeys(state["peers"], number)
    return {
        "algorithm": state["algorithm"],
        "memory": {"num_rounds": number, "vectors": vectors, "policies": dict(policies), **weights},
        "messages": {"numbers": numbers, "peers": state["peers"], "digests": state["digests"]},
    }
