"""Checkpoints of 0.1.0: what its gossipers kept, as the memory of algorithms has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def renewed(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of an algorithm; `state` itself where it is of today's form, or of no algorithm that is known."""
    name = state.get("algorithm")
    if "memory" in state or not isinstance(name, str) or name not in _CONVERTERS:
        return state
    return {"algorithm": name, **_CONVERTERS[name](state)}


def _broadcast(state: Mapping[str, Any]) -> dict[str, Any]:
    """Of a gossiper with one message for all peers: its tensors by name for each section, one number of messages."""
    sections = state["sections"]
    vectors = {name: [section[name] for section in sections] for name in (sections[0] if sections else ())}
    digests = {"peers": state["peers"], "digests": state["digests"]}
    return {
        "memory": {"num_rounds": state["num_messages"], "vectors": vectors, "weights": state.get("mixing", "")},
        "messages": {"numbers": dict.fromkeys(state["peers"], state["num_messages"]), **digests},
    }


_CONVERTERS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "Choco": _broadcast,
    "DeepSqueeze": _broadcast,
    "Moniqua": _broadcast,
    "Sparta": _broadcast,
}
