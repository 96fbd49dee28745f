"""Whether the period of weights is theirs, or one that a user's class has inherited."""

from __future__ import annotations

from .base import MixingManager

_PACKAGE = __name__.partition(".")[0]


def knows_period(mixing: MixingManager) -> bool:
    """Whether `mixing.period` holds for its weights and its graph's peers.

    A user's class may make them depend on t without saying how often they repeat: then it inherits a `period` that is
    none of theirs.
    """
    return _says_period(mixing, "weights", "buffer_weights") and _says_period(mixing.graph, "out_peers", "in_peers")


def _says_period(schedule: object, *names: str) -> bool:
    """Whether no class outside this library overrides one of the methods, or one overrides `period` as well."""
    own = [vars(cls) for cls in type(schedule).__mro__ if cls.__module__.partition(".")[0] != _PACKAGE]
    is_overridden = any(name in attributes for attributes in own for name in names)
    return not is_overridden or any("period" in attributes for attributes in own)
