"""Print the table of methods, in Markdown, the published step sizes, and the methods with a membership.

python -m gossip_modules.methods
"""

from __future__ import annotations

from collections.abc import Iterable

from ..registry import METHODS, Method


def methods_table() -> str:
    """A row for each method of the registry: recipe, title, text, line of Python, summary, paper, file."""
    heading = ("recipe", "method", "`--algorithm`", "in Python", "summary", "paper", "file")
    return _table(heading, map(_row, METHODS.values()))


def step_sizes_table() -> str:
    """A row for each published step size of consensus."""
    sizes = ((name, *size) for name, method in METHODS.items() for size in method.step_sizes.items())
    return _table(
        ("recipe", "compressor", "step size"), ((name, f"`{code}`", f"{value:g}") for name, code, value in sizes)
    )


def membership_table() -> str:
    """A row for each wrapper: its methods with a membership, and its other methods, with the reason."""
    wrappers: dict[str, tuple[list[str], list[str]]] = {}
    for method in METHODS.values():
        wrapper = f"`{method.example.partition('(')[0]}`" if method.example else "of your own"
        taken, refused = wrappers.setdefault(wrapper, ([], []))
        if method.needs_fixed_ranks:
            refused.append(f"{method.title}: {method.needs_fixed_ranks}")
        else:
            taken.append(method.title)
    rows = ((name, ", ".join(taken) or "-", "<br>".join(refused) or "-") for name, (taken, refused) in wrappers.items())
    return _table(("wrapper", "with a membership", "only without one"), rows)


def _table(heading: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (heading, ("---",) * len(heading), *rows))


def _row(method: Method) -> tuple[str, ...]:
    paper = ""
    if method.paper is not None:
        first, *others = method.paper.authors.split(", ")
        paper = f"{first}{' et al.' if others else ''}, {method.paper.venue}"
        if method.paper.arxiv:
            paper += f", [{method.paper.arxiv}](https://arxiv.org/abs/{method.paper.arxiv})"
    example = f"`{method.example}`" if method.example else ""
    return f"`{method.name}`", method.title, f"`{method.text}`", example, method.summary, paper, f"`{method.file}`"


if __name__ == "__main__":
    print("\n\n".join([methods_table(), step_sizes_table(), membership_table()]))
