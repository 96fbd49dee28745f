"""`entry`: the entry of an algorithm in the table of methods, made of the facts that its class declares."""

from __future__ import annotations

from typing import Any

from ..registry import Method
from .facts import FACTS
from .options import WRAPPER_OPTIONS
from .wrapping import wrap_gossip

ROUNDS = frozenset(WRAPPER_OPTIONS) - {"peers_per_itr"}
"""The options of a method that runs in rounds by an algorithm."""


def entry(algorithm: type[Any], *, text: str = "", example: str = "", **others: Any) -> Method:
    """The entry of an algorithm; `register` takes it.

    Args:
        algorithm: a class with the facts of `Algorithm`: `short_name`, `title`, `summary`, `paper`. Without them the
            name of the class and the first line of its docstring serve.
        text: the text of Python that `--recipe` stands for; "": the class without arguments.
        example: the same for the documentation; "": `text`.
        others: more fields of `Method`.
    """
    name = algorithm.__name__
    for fact, value in FACTS.get(name, {}).items():
        if fact not in vars(algorithm):
            setattr(algorithm, fact, value)
    facts = vars(algorithm)  # without those of its base
    return Method(
        **{
            "name": facts.get("short_name") or name.lower(),
            "title": facts.get("title") or name,
            "summary": facts.get("summary") or (algorithm.__doc__ or "").strip().partition("\n")[0],
            "paper": facts.get("paper"),
            "algorithm": algorithm,
            "make": algorithm,
            "text": text or f"{name}()",
            "wrap": wrap_gossip,
            "example": f"GossipDataParallel(model, algorithm={example or text or f'{name}()'})",
            "options": ROUNDS,
            "needs_sgd": getattr(algorithm, "needs_sgd", False),
            "takes_nesterov": getattr(algorithm, "takes_nesterov", True),
            **others,
        }
    )
