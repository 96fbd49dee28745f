"""How large the library is: statements of each package, and the moves between files in a training step.

    python -m benchmarks.size                # statements of each package, first those that gossip in lockstep needs
    python -m benchmarks.size --moves        # calls and moves between files in a step, too
    python -m benchmarks.size --root tests   # of another folder

A statement is a node of Python's syntax tree, so comments, docstrings and line breaks do not count. A move is a call of
a function of the library in another file than the call before it, on the training thread of rank 0, in a steady step
with one peer.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch import nn

import gossip_modules as gm
from benchmarks.record import ROOT
from gossip_modules.extras import EXTRAS
from gossip_modules.testing import run_ranks

NUM_STEPS = 6
METHODS: Mapping[str, dict[str, Any]] = {
    "SGP": {},
    "DiLoCo, an outer step": {"algorithm": gm.DiLoCo(sync_every=1)},
    "CHOCO-SGD": {"algorithm": gm.Choco(gm.TopK(0.1), step_size=0.04)},
}
"""The measured steps, each with the arguments of `GossipDataParallel`."""


@dataclass
class SizeOptions:
    """Count statements of packages, and moves between files in a step."""

    root: Path = ROOT / "gossip_modules"
    """the folder to count"""
    moves: bool = False
    """whether to count calls and moves, too"""


def num_statements(text: str) -> int:
    """The number of statements of a file, without docstrings.

    >>> num_statements("'''A module.'''\\nif x:\\n    y = 1\\n")
    2
    """
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    return sum(not (isinstance(x, ast.Expr) and _is_text(x.value)) for x in statements)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def statements(root: Path) -> Counter[str]:
    """The statements of each package below a folder; "top level": of the files beside the packages."""
    count: Counter[str] = Counter()
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        count[parts[0] if len(parts) > 1 else "top level"] += num_statements(path.read_text(encoding="utf-8"))
    return count


def table(count: Counter[str]) -> str:
    """A line for each package, the extras last, and the sums."""
    lines = []
    for title, names in (("core", count.keys() - EXTRAS.keys()), ("extras", count.keys() & EXTRAS.keys())):
        lines += [f"{count[name]:7,}  {name}" for name in sorted(names, key=lambda name: -count[name])]
        lines += [f"{sum(count[name] for name in names):7,}  {title}\n"]
    return "\n".join([*lines, f"{count.total():7,}  together"])


def moves(options: Mapping[str, Any]) -> tuple[int, int]:
    """The calls in a steady step of a wrapper with these arguments, and those in another file than the call before."""
    library, files = str(Path(gm.__file__).parent), list[str]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(library):
            files.append(frame.f_code.co_filename)

    def body(group: dist.ProcessGroup) -> None:
        model = gm.GossipDataParallel(nn.Linear(3, 3), process_group=group, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(NUM_STEPS):
            if step == NUM_STEPS - 1 and group.rank() == 0:
                sys.setprofile(note)
            try:
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            finally:
                sys.setprofile(None)
        model.close()

    run_ranks(2, body)
    return len(files), sum(one != other for one, other in pairwise(files))


def main(options: SizeOptions) -> None:
    """Print the tables."""
    print(table(statements(options.root)))
    if options.moves:
        print("\n  calls  moves")
        for name, arguments in METHODS.items():
            num_calls, num_moves = moves(arguments)
            print(f"{num_calls:7,}{num_moves:7,}  {name}")


if __name__ == "__main__":
    main(tyro.cli(SizeOptions))
