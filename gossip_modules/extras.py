"""The extras: packages without which the others run, and the one way in which the others reach them, by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

PACKAGE = __name__.rpartition(".")[0]

EXTRAS: Mapping[str, str] = {
    "ad_psgd": "AD-PSGD",
    "compat": "the names and arguments of other libraries and of older versions",
    "dpwa": "dpwa",
    "integrations": "Accelerate, Lightning and transformers",
    "lab": "the Lab",
    "mailbox": "training over an object store",
    "matcha": "MATCHA",
    "methods": "the table of methods by name",
    "mpi": "the MPI backend",
    "testing": "ranks for tests",
    "wagma": "WAGMA-SGD",
}
"""The packages, each with its subject."""

NAMES: Mapping[str, str] = {
    "BilatGossipDataParallel": "ad_psgd.wrapper",
    "GroupAverageDataParallel": "wagma.wrapper",
    "MatchaGraph": "matcha.graph",
    "PairwiseDataParallel": "dpwa.wrapper",
}
"""Names of `gossip_modules` itself that are in extras, with their modules."""


class MissingExtra(ImportError):
    """An extra is not in this installation.

    Args:
        extra: the package, a key of `EXTRAS`.
        asked: the module or name that is in it, for the message.
    """

    def __init__(self, extra: str, asked: str) -> None:
        self.extra = extra
        super().__init__(
            f"got {asked}, which is in {PACKAGE}.{extra} ({EXTRAS[extra]}), expected that package, which this "
            "installation lacks; install all packages, in a clone: pip install --force-reinstall --no-deps ."
        )


def place_of(name: str) -> str:
    """Return the place of a name of `NAMES` or `EXTRAS`, for `load`."""
    return f"{NAMES[name]}:{name}" if name in NAMES else name


def load(place: str) -> Any:
    """Return a module or a name of this library, given as "dpwa.wrapper" or "dpwa.wrapper:PairwiseDataParallel".

    Raises:
        MissingExtra: the package, or another extra that it needs, is not installed.
    """
    module, _, name = place.partition(":")
    try:
        found = importlib.import_module(f"{PACKAGE}.{module}")
    except ModuleNotFoundError as error:
        parent, _, extra = (error.name or "").partition(".")
        if parent != PACKAGE or extra not in EXTRAS:
            raise
        raise MissingExtra(extra, f"{PACKAGE}.{module}{name and f'.{name}'}") from error
    return getattr(found, name) if name else found
