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
    if "anchor" in state:
        return _of_outer_steps(state)
    if "carried" not in state:
        return dict(state)
    name, carried = str(state["engine"]).removesuffix(" engine"), state["carried"]
    memory = {**carried, "policies": dict(_POLICIES.get(name, {}))} if carried else {}
    optimizer = {"sgd_step": state["sgd_step"], "step_rates": state.get("step_rates")}
    gossiper = {"algorithm": name, "memory": memory, "mixer": state["gossiper"], "optimizer": optimizer}
    return {"engine": "LockstepEngine", "t": state["t"], "step": state["step"], "gossiper": gossiper}


_STEPPED = {"SlowMo": ("u", "u", 1), "NoLoCo": ("momentum_buffer", "momentum", -1), "GASLoC": ("y", "y", 1)}
"""The state of the outer optimizers of 0.1.0 that is a vector by now, and its sign, by the methods."""


def _of_outer_steps(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an engine of outer steps."""
    name, anchor = str(state["engine"]).removesuffix(" engine"), state["anchor"]
    anchors = anchor.get("fragments", [anchor] if anchor else [])
    taken = state.get("stamps", [0] * len(anchors))
    pieces = [
        {
            "algorithm": name,
            "memory": _memory_of(name, each),
            "mixer": state["gossiper"],
            "optimizer": {"inner_rate": state.get("inner_rate")},
            "stamps": [stamp, 0],
        }
        for each, stamp in zip(anchors, taken, strict=True)
    ]
    several = {"algorithm": name, "fragments": pieces}
    gossiper = several if len(pieces) > 1 else pieces[0] if pieces else {"algorithm": name, "mixer": state["gossiper"]}
    return {"engine": "LockstepEngine", "t": state["t"], "step": state["step"], "gossiper": gossiper}


def _memory_of(name: str, anchor: Mapping[str, Any]) -> dict[str, Any]:
    optimizer, vectors = anchor["optimizer"], {"phi": anchor["phi"], **anchor.get("memory", {})}
    states = optimizer.get("state", {})
    old, new, sign = _STEPPED.get(name, ("", "", 1))
    if found := [sign * states[k][old] for k in sorted(states) if old in states[k]]:
        vectors[new] = found
    elif name == "GASLoC" and not states:  # no outer step yet
        vectors[new] = anchor["phi"]
    is_outer = name not in ("SlowMo", "NoLoCo", "SparseLoCo") and not found
    policies = {"phi": _policy(start="x")} if name in ("NoLoCo", "GASLoC") else {}
    optimizers = {"outer": optimizer} if optimizer and is_outer else {}
    return {"num_rounds": 1, "vectors": vectors, "policies": policies, "optimizers": optimizers, "has_buffers": True}
