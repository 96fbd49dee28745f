"""Code blocks of Markdown pages, and how they are run: under torchrun, as files of their own or page after page.

    torchrun --standalone --nproc-per-node 4 -m tests.harness.pages /tmp docs/guides/evaluation.md

runs the Python blocks of a page from top to bottom in one namespace, on each rank, with /tmp for the files that they
write. `beginning` has the names that blocks may use without importing them. A block that starts with "# torchrun" is a
file of its own, and is left out.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from gossip_modules import AllReduceDataParallel
from gossip_modules.extend import GossipWrapper
from gossip_modules.membership.serve import serve

ROOT = Path(__file__).resolve().parents[2]
RANKS = 4


def blocks(page: Path, language: str) -> list[str]:
    """The page's code blocks in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def scripts(page: Path) -> dict[str, str]:
    """The page's blocks that are files of their own, by their name: "# torchrun ... name.py" is their first line."""
    found = {}
    for block in blocks(page, "python"):
        if block.startswith("# torchrun "):
            command = block.partition("\n")[0]
            assert re.fullmatch(rf"# torchrun --standalone --nproc-per-node {RANKS} \w+\.py", command), command
            found[command.split()[-1]] = block
    return found


def snippets(page: Path) -> list[str]:
    """The other Python blocks of a page."""
    return [block for block in blocks(page, "python") if not block.startswith("# torchrun ")]


def beginning(folder: Path, shared_folder: Path, store: str) -> dict[str, Any]:
    """The names that blocks may use without importing them.

    Args:
        folder: of this rank.
        shared_folder: of all ranks.
        store: the address of a store for memberships.
    """
    return {
        "torch": torch,
        "nn": nn,
        "dist": dist,
        "cross_entropy": cross_entropy,
        "loader": [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)],
        "model": nn.Linear(4, 3),
        "folder": folder,
        "shared_folder": shared_folder,
        "store": store,
    }


def run_page(page: Path, namespace: dict[str, Any]) -> None:
    """Run the blocks of a page in order, and close the wrappers that they have made, in the same order on all ranks."""
    for number, block in enumerate(snippets(page), 1):
        exec(compile(block, f"{page} block {number}", "exec", dont_inherit=True), namespace)
    for value in namespace.values():
        if isinstance(value, GossipWrapper | AllReduceDataParallel):
            value.close()
    if accelerate := sys.modules.get("accelerate.state"):  # else the next page has the settings of this one
        accelerate.AcceleratorState._reset_state(reset_partial_state=True)


def main(folder: Path, pages: Sequence[str]) -> None:
    """Run pages one after the other, on this rank.

    Args:
        folder: where blocks may write.
        pages: Markdown files.
    """
    warnings.simplefilter("error")
    dist.init_process_group("gloo")
    own = folder / f"rank_{dist.get_rank()}"
    own.mkdir()
    os.chdir(own)  # files that blocks name are written here, and not into the clone
    server = serve(0) if dist.get_rank() == 0 else None
    address: list[str | None] = [None if server is None else f"127.0.0.1:{server.port}"]
    dist.broadcast_object_list(address)
    for page in pages:
        shared_folder = folder / f"{Path(page).parent.name}_{Path(page).stem}_of_all_ranks"
        run_page(Path(page), beginning(own, shared_folder, str(address[0])))
        gc.collect()
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"ran {page}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
