"""Print the table of methods, in Markdown, and the step sizes that are published.

python -m gossip_modules.methods
"""

from __future__ import annotations

from collections.abc import Sequence

from ..registry import METHODS, Method


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
