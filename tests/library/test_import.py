"""What `import gossip_modules` costs: a launcher that starts hundreds of processes waits for each of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gossip_modules
from gossip_modules.extras import EXTRAS
from tests.library.test_layers import FOREIGN

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "setup.py").exists())

LOADED = """
import sys
for name in sys.argv[1:]:
    sys.modules[name] = None
import torch
before = set(sys.modules)
import gossip_modules
print(*sorted(set(sys.modules) - before))
"""


def test_the_import_loads_no_compiler_no_algebra_and_no_extra() -> None:
    """Neither torch._dynamo, which takes seconds, nor packages that only some graphs, wires, files and methods need."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *FOREIGN], capture_output=True, text=True, timeout=50, check=True
    )
    loaded = done.stdout.split()
    assert "gossip_modules.wrappers.base" in loaded
    slow = ("torch._dynamo", "torch._inductor", "torch.fx.experimental", "sympy", "networkx")
    kept_out = (*slow, *(f"gossip_modules.{extra}" for extra in EXTRAS))
    assert [name for name in loaded if f"{name}.".startswith(tuple(f"{package}." for package in kept_out))] == []


def test_the_version_is_that_of_the_package() -> None:
    command = [sys.executable, "-W", "ignore", "setup.py", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.split()[-1] == gossip_modules.__version__
