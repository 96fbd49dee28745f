"""docs/llms.txt, the library in one file for an assistant: `python docs/llms.py` writes it.

It has the twelve idioms of docs/idioms.md, and each name of the API reference in a line: signature and first sentence.
Names of the modules in LEFT_OUT have no line. A dataclass has only the arguments that its base does not have alike.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import gossip_modules  # noqa: E402

FILE = ROOT / "docs" / "llms.txt"
API = ROOT / "docs" / "api"
HOSTS = tuple(f"gossip_modules.integrations.{host}" for host in ("accelerate", "lightning", "transformers"))
LEFT_OUT = ("gossip_modules.dpwa", "gossip_modules.matcha", "gossip_modules.methods")
"""Modules without lines: the parts of dpwa, the plans of MATCHA, and the registry of the scripts."""
WITH_METHODS = ("wrappers", "asynchronous", "checkpoints", "membership")  # whose methods a script calls, but for
WITHOUT_METHODS = ("MailMembership",)

HEAD = """# gossip_modules

> Decentralised (gossip) data-parallel training in PyTorch. Wrap a model in GossipDataParallel in place of
> DistributedDataParallel: each rank has its own model and gradients, and averages parameters
> with a few peers in every step, or with all every few steps. Install: `pip install .` in a clone.

Rules that are easy to break:

- One optimizer step is one round. The round runs at the first training forward after optimizer.step(); call nothing.
- Where a rank leaves out a batch, call model.gossip_step() there.
- averaged(), averaged_state_dict(), average_(), consensus_distance(), settle() and the constructor are collective: call
  them on every rank, at the same point. Write `if rank == 0:` around the saving alone.
- With several forwards in a step, put all but the last in `with model.no_sync():`.
- Ranks have different models: save model.checkpoint(optimizer) by torch.distributed.checkpoint to resume, and
  averaged_state_dict() to use the model.
- With a Membership do not call init_process_group, unless one worker is a whole node.

Pages: docs/choosing.md (which method); docs/guides/ training_loop.md, checkpoints.md, elasticity.md, mailbox.md,
sharding.md, hosts.md; docs/extend/algorithm.md; docs/faq.md; docs/troubleshooting.md; docs/coming_from/.
"""


def first_sentence(value: object) -> str:
    """The first sentence of a docstring, on one line."""
    return _first(inspect.getdoc(value) or "")


def _first(docstring: str) -> str:
    text = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", text)[0].rstrip(".")


def signature(value: Any) -> str:
    """The arguments of a function or of a constructor, without self; empty for what cannot be called."""
    try:
        own = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    shown, is_keyword, inherited = [], False, _inherited(value)
    for parameter in own.parameters.values():
        if parameter.name in ("self", "cls") or (parameter.name, parameter.default) in inherited:
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            shown.append("*")
        is_keyword = is_keyword or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        stars = "*" * (parameter.kind is parameter.VAR_POSITIONAL) + "**" * (parameter.kind is parameter.VAR_KEYWORD)
        kind = "" if parameter.annotation is parameter.empty else f": {inspect.formatannotation(parameter.annotation)}"
        shown.append(f"{stars}{parameter.name}{kind.replace(chr(39), '')}{_default(parameter)}")
    if inherited:
        shown.append(f"others as {_base(value).__name__}")
    return f"({', '.join(shown)})"


def _base(value: Any) -> Any:
    """The nearest dataclass that a class derives from and that has a line of its own, or None."""
    named = (*gossip_modules.__all__, *gossip_modules.extend.__all__)
    bases = value.__mro__[1:] if isinstance(value, type) else ()
    return next((base for base in bases if dataclasses.is_dataclass(base) and base.__name__ in named), None)


def _inherited(value: Any) -> list[tuple[str, Any]]:
    """The arguments, with their defaults, that a dataclass has from a base that has a line of its own."""
    if (base := _base(value)) is None:
        return []
    parameters = inspect.signature(base).parameters
    if not parameters.keys() <= inspect.signature(value).parameters.keys():  # it refuses some of them
        return []
    return [(parameter.name, parameter.default) for parameter in parameters.values()]


def _default(parameter: inspect.Parameter) -> str:
    """The default of a parameter; dots for one that is a function or is made anew for each call."""
    if parameter.default is parameter.empty:
        return ""
    text = repr(parameter.default).removeprefix("datetime.")
    return " = ..." if text.startswith("<") else f" = {text}"


def methods(cls: type) -> Iterator[str]:
    """A line for each public method and property of the library that a class has."""
    for name in sorted(dir(cls)):
        owner = next((base for base in cls.__mro__ if name in vars(base)), object)
        if name.startswith("_") or not owner.__module__.startswith("gossip_modules"):
            continue
        bases = [base for base in cls.__mro__ if base.__module__.startswith("gossip_modules")]
        versions = [vars(base)[name] for base in bases if name in vars(base)]
        value = getattr(versions[0], "__func__", versions[0])
        told = next((found for found in versions if not first_sentence(found).startswith("See `")), value)
        if inspect.getdoc(value) and (callable(value) or isinstance(value, property)):
            arguments = "" if isinstance(value, property) else signature(value)
            yield f".{name}{arguments}: {first_sentence(told)}"


def entries(page: Path, listed: set[str]) -> Iterator[str]:
    """A line for each name of a page of the API reference; of methods those that are not listed before."""
    for dotted in re.findall(r"^::: (gossip_modules[\w.]*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        module, _, name = dotted.rpartition(".")
        if module in LEFT_OUT:
            continue
        if module.startswith(HOSTS):  # importing the package of the host takes seconds
            yield f"- {dotted}: {_read(module, name)}"
            continue
        value = getattr(importlib.import_module(module), name)
        call = signature(value) if isinstance(value, type) or inspect.isroutine(value) else ""
        yield f"- {dotted}{call}: {first_sentence(value)}"
        if page.stem in WITH_METHODS and isinstance(value, type) and name not in WITHOUT_METHODS:
            for line in methods(value):
                if line not in listed:
                    yield f"  - {line}"
                listed.add(line)


def _read(module: str, name: str) -> str:
    """The first sentence of the docstring of a class, from the file of its module."""
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    return _first(ast.get_docstring(found) or "")


def surface() -> str:
    """All names, page by page."""
    parts, listed = [], set[str]()
    order = {stem: place for place, stem in enumerate(WITH_METHODS)}
    for page in sorted(API.glob("*.md"), key=lambda page: (order.get(page.stem, len(order)), page.stem)):
        title = page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        if lines := list(entries(page, listed)):
            parts.append(f"### {title}\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def rendered() -> str:
    """The text of the file, as it is now."""
    idioms = (ROOT / "docs" / "idioms.md").read_text(encoding="utf-8")
    idioms = "## " + idioms.partition("\n## ")[2]
    idioms = re.sub(r"^## ", "### ", re.sub(r"\[([^]]*)\]\([\w/.#-]*\)", r"\1", idioms), flags=re.MULTILINE)
    return f"{HEAD}\n## Twelve idioms\n\n{idioms.strip()}\n\n## Public names\n\n{surface()}\n"


if __name__ == "__main__":
    FILE.write_text(rendered(), encoding="utf-8")
