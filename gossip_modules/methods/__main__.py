"""Print the table of methods, in Markdown, the step sizes that are published, and which methods take a membership.

python -m gossip_modules.methods
"""

from __future__ import annotations

from collections.abc import Sequence

from ..registry import METHODS, Method
from .options import MethodOptions
from .usage import why_fixed_ranks


def methods_table() -> str:
    """A row for each method of the registry: recipe, title, how it is made, what it does, paper, file."""
    rows: list[Sequence[str]] = [("recipe", "method", "in Python", "what it does", "paper", "file"), ("---",) * 6]
    rows += [_row(method) for method in METHODS.values()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def step_sizes_table() -> str:
    """A row for each step size of consensus that is published."""
    rows: list[Sequence[str]] = [("recipe", "code", "bits or ratio", "step size"), ("---",) * 4]
    for name, method in METHODS.items():
        for (code, value), step_size in method.step_sizes.items():
            rows.append((name, code, "" if value is None else f"{value:g}", f"{step_size:g}"))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def membership_table() -> str:
    """A row for each wrapper: its methods that take a membership, and the others, with what their wrapper says."""
    taken: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    for method in METHODS.values():
        wrapper = f"`{method.example.partition('(')[0]}`" if method.example else "of your own"
        why = why_fixed_ranks(method, MethodOptions())
        for rows in (taken, refused):
            rows.setdefault(wrapper, [])
        if why:
            refused[wrapper].append(f"{method.title}: {why.rpartition(' with a membership, ')[2]}")
        else:
            taken[wrapper].append(method.title)
    table = [("wrapper", "with a membership", "only without one"), ("---",) * 3]
    table += [(name, ", ".join(taken[name]) or "-", "<br>".join(refused[name]) or "-") for name in taken]
    return "\n".join(f"| {' | '.join(row)} |" for row in table)


def _row(method: Method) -> tuple[str, ...]:
    paper = ""
    if method.paper is not None:
        first, *others = method.paper.authors.split(", ")
        paper = f"{first} et al., {method.paper.venue}" if others else f"{first}, {method.paper.venue}"
        if method.paper.arxiv:
            paper += f", [{method.paper.arxiv}](https://arxiv.org/abs/{method.paper.arxiv})"
    example = f"`{method.example}`" if method.example else ""
    return f"`{method.name}`", method.title, example, method.summary, paper, f"`{method.file}`"


if __name__ == "__main__":
    print(methods_table())
    print()
    print(step_sizes_table())
    print()
    print(membership_table())
