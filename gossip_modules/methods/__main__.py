"""Print the table of methods, in Markdown, the step sizes that are published, and which methods take a membership.

python -m gossip_modules.methods
"""

from __future__ import annotations

from collections.abc import Sequence

from ..registry import METHODS, Method


def methods_table() -> str:
    """A row for each method of the registry: recipe, title, text, how it is made, what it does, paper, file."""
    heading = ("recipe", "method", "`--algorithm`", "in Python", "summary", "paper", "file")
    rows: list[Sequence[str]] = [heading, ("---",) * 7]
    rows += [_row(method) for method in METHODS.values()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def step_sizes_table() -> str:
    """A row for each step size of consensus that is published."""
    rows: list[Sequence[str]] = [("recipe", "compressor", "step size"), ("---",) * 3]
    for name, method in METHODS.items():
        rows += [(name, f"`{code}`", f"{step_size:g}") for code, step_size in method.step_sizes.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def membership_table() -> str:
    """A row for each wrapper: its methods that take a membership, and the others, with the reason."""
    taken: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    for method in METHODS.values():
        wrapper = f"`{method.example.partition('(')[0]}`" if method.example else "of your own"
        why = method.needs_fixed_ranks
        for rows in (taken, refused):
            rows.setdefault(wrapper, [])
        if why:
            refused[wrapper].append(f"{method.title}: {why}")
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
    return f"`{method.name}`", method.title, f"`{method.text}`", example, method.summary, paper, f"`{method.file}`"


if __name__ == "__main__":
    print(methods_table())
    print()
    print(step_sizes_table())
    print()
    print(membership_table())
