"""Conversion of checkpoints of version 0.1.0 to the states of this version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_SUM = {"average": "reset", "generation": "reset", "in_units_of_rate": True}
_LAST = {"start": "x", "average": "reset"}
_ON_REQUEST = {"average": "on_request"}
_PUBLIC = {"average": "on_request", "of_weights": True}
_POLICIES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "D2": {"c": _SUM},
    "ExactDiffusion": {"c": _SUM},
    "GradientTracking": {"last": {**_LAST, "generation": "reset"}, "z": _SUM},
    "QGDSGDm": {"last": _LAST, "momentum": _ON_REQUEST},
    "Choco": {"public": _PUBLIC, "drift": _PUBLIC},
    "DeepSqueeze": {"error": {**_ON_REQUEST, "join": "zero"}},
    "DecentLaM": {"last": _LAST, "momentum": _ON_REQUEST},
}
"""The arguments of `Memory.vector` for the vectors in checkpoints of 0.1.0."""
_HAVE_MESSAGES = ("Choco", "DeepSqueeze", "Moniqua", "Sparta", "PowerGossip", "RelaySGD")
"""Algorithms whose state was empty before the first round."""


def converted(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the state of a lockstep engine, of this version or of 0.1.0; shares memory."""
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
"""For each method, the state of the outer optimizer in 0.1.0, its vector in this version, and the sign between them."""


def _of_outer_steps(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the state of an engine of outer steps of 0.1.0."""
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
    policies = {"phi": _LAST} if name in ("NoLoCo", "GASLoC") else {}
    optimizers = {"outer": optimizer} if optimizer and is_outer else {}
    return {"num_rounds": 1, "vectors": vectors, "policies": policies, "optimizers": optimizers, "has_buffers": True}


def renewed(state: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
    """Convert the state of the rounds of composed algorithms, of this version or of 0.1.0; shares memory.

    Args:
        state: the state of the outermost algorithm; in 0.1.0 its entry `mixer` is the state of the next one.
        names: the names of the algorithms, the outermost first.
    """
    name, *inner_names = names
    if "mixer" in state:
        own = {key: value for key, value in state.items() if key != "mixer"}
        inner = renewed(state["mixer"], inner_names) if inner_names else {}
        memory = {**own.get("memory", {}), **({"inner": inner["memory"]} if "memory" in inner else {})}
        return {**own, **{key: inner[key] for key in ("messages", "links") if key in inner}, "memory": memory}
    if not state and name in _HAVE_MESSAGES:
        return {"algorithm": name}
    if "factors" in state or "received" in state:
        return _links_renewed(state)
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


def _links_renewed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the state of PowerGossip or RelaySGD of 0.1.0; shares memory."""
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
