"""The tables of docs/coming_from, from the tables in the code: `python docs/old_names.py` writes them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gossip_modules import GossipDataParallel  # noqa: E402
from gossip_modules.compat.actions import Ignored, NewName, Refused  # noqa: E402
from gossip_modules.compat.tables import (  # noqa: E402
    AD_PSGD_ARGUMENTS,
    ALL_REDUCE_ARGUMENTS,
    ATTRIBUTES,
    DDP_ARGUMENTS,
    DDP_ATTRIBUTES,
    GRAPH_ARGUMENTS,
    MATCHA_ARGUMENTS,
    MISSING,
    MIXING_ARGUMENTS,
    SGP_ARGUMENTS,
    WAGMA_ARGUMENTS,
    WORKING,
)
from train.old_options.actions import Action, Gone, Same  # noqa: E402
from train.old_options.tables import DPWA, MATCHA, POWERGOSSIP, SGP, WAGMA  # noqa: E402

PAGES = sorted((ROOT / "docs" / "coming_from").glob("*.md"))


def table(head: str, rows: Iterable[tuple[str, str, str]]) -> str:
    """A Markdown table: the old name, what to write or do, and what happens if you type the old name."""
    lines = [f"| {head} | here | if you type it |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {here} | {outcome} |" for name, here, outcome in rows)])


def arguments(actions: Mapping[str, Any]) -> str:
    """Of a table of constructor arguments."""
    return table("argument", ((f"{name}=", *_argument(action)) for name, action in actions.items()))


def _argument(action: Any) -> tuple[str, str]:
    if isinstance(action, Ignored):
        return f"leave it out: {action.why}", "a warning"
    if isinstance(action, Refused):
        return action.remedy, "an error"
    if isinstance(action, NewName):
        return f"`{action.new}=`", "works, with a warning"
    text = " ".join(action.__doc__.split()).rstrip(".")
    return text[0].lower() + text[1:], "a warning, or an error by its value"


def attributes() -> str:
    """Of the methods and attributes of the wrappers."""
    rows = [(name, works.remedy, "works, with a warning") for name, works in WORKING.items()]
    return table("method or attribute", [*rows, *missing(MISSING)])


def options(actions: Mapping[str, Action], *, dashes: str = "--") -> str:
    """Of a table of options of a script."""
    return table("option", ((dashes + name, *_option(action)) for name, action in actions.items()))


def _option(action: Action) -> tuple[str, str]:
    if isinstance(action, Gone):
        return action.remedy, "an error"
    if isinstance(action, Same):
        return action.shown + (f"; {action.note}" if action.note else ""), "works, with a warning"
    return f"leave it out: {action.why}", "a warning"


def missing(remedies: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Rows of attributes that are not here, without those that begin with an underscore."""
    return [(name, remedy, "an error") for name, remedy in remedies.items() if not name.startswith("_")]


def of_ddp() -> list[tuple[str, str, str]]:
    """Rows of attributes of DistributedDataParallel that GossipDataParallel does not have, with its answers."""
    answers = {**DDP_ATTRIBUTES, **ATTRIBUTES["GossipDataParallel"]}
    return missing({name: str(answers[name]) for name in DDP_ATTRIBUTES if not hasattr(GossipDataParallel, name)})


TABLES: Mapping[str, str] = {
    "ddp-arguments": arguments(DDP_ARGUMENTS),
    "ddp-attributes": table("method or attribute", of_ddp()),
    "sgp-arguments": arguments(SGP_ARGUMENTS),
    "adpsgd-arguments": arguments(AD_PSGD_ARGUMENTS),
    "allreduce-arguments": arguments(ALL_REDUCE_ARGUMENTS),
    "graph-arguments": arguments({**GRAPH_ARGUMENTS, **MIXING_ARGUMENTS}),
    "attributes": attributes(),
    "sgp-options": options(SGP),
    "matcha-arguments": arguments(MATCHA_ARGUMENTS),
    "matcha-options": options(MATCHA),
    "wagma-arguments": arguments(WAGMA_ARGUMENTS),
    "wagma-options": options(WAGMA, dashes="-"),
    "powergossip-keys": options(POWERGOSSIP, dashes=""),
    "dpwa-options": options(DPWA),
}


def rendered(text: str) -> str:
    """The text of a page, with each table as it is now."""

    def replace(match: re.Match[str]) -> str:
        return f"{match[1]}\n\n{TABLES[match[2]]}\n\n{match[3]}"

    return re.sub(r"(<!-- table: ([\w-]+) -->)\n.*?(<!-- end -->)", replace, text, flags=re.DOTALL)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")
