"""Whether training gives the bits that it gave with an earlier commit's library: every method, in lockstep.

    python -m benchmarks.bit_equal --before cdfd2e7d                   # trains with both libraries, and compares
    python -m benchmarks.bit_equal --quick --methods sgp diloco        # prints digests
    python -m benchmarks.bit_equal --digest before.json                # writes digests
    python -m benchmarks.bit_equal --against before.json               # compares with these digests

Each case trains a small model on four ranks for 24 steps. Its digest is of the parameters, buffers and momenta of all
ranks. A case with other bits is an error, and so is a case that only one of the libraries refuses. Digests depend on
the machine and on the version of torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.bit_equal_side import LEFT_OUT, METHODS, QUICK, SINGLE, VARIANTS
from benchmarks.record import ROOT
from benchmarks.step_time import extract

SIDE = Path(__file__).with_name("bit_equal_side.py")


@dataclass
class BitOptions:
    """Compare the bits of training with an earlier commit's."""

    before: str = ""
    """an earlier commit, to train with its library too"""
    against: Path | None = None
    """a file of digests, to compare with"""
    digest: Path | None = None
    """a file of digests to write; with `before`, the digests of that commit"""
    methods: tuple[str, ...] = tuple(METHODS)
    """which methods, by their names in the registry"""
    quick: bool = False
    """without the variants that take the same paths through the library"""


def chosen(options: BitOptions) -> list[str]:
    """The names of the cases."""
    variants = QUICK if options.quick else tuple(VARIANTS)
    products = [f"{method}, {variant}".removesuffix(", ") for method in options.methods for variant in variants]
    return products + [case for case in SINGLE if case.partition(" ")[0].rstrip(",") in options.methods]


def digests(tree: Path, cases: Sequence[str]) -> dict[str, str]:
    """The digests of cases that are trained with the library of a tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command, found, start = [sys.executable, str(SIDE), json.dumps(cases)], {}, time.perf_counter()
    with subprocess.Popen(command, env=environment, cwd=tree, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            case, value, seconds = json.loads(line)
            found[case] = value
            print(f"{case:36} {value:24} {seconds:6.2f} s", flush=True)
    if process.returncode:
        raise SystemExit(f"error: the training with {tree} ended with exit code {process.returncode}")
    print(f"{len(found)} cases in {time.perf_counter() - start:.0f} s, with {tree}", flush=True)
    return found


def differences(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """A line for each case that differs; cases of one side only are left out."""
    return [
        f"{case}: got {now[case]}, expected {before[case]}"
        for case in before
        if case in now and now[case] != before[case]
    ]


def main() -> None:
    """Train, print and compare."""
    options = tyro.cli(BitOptions, description=__doc__)
    if unknown := [name for name in options.methods if name not in METHODS]:
        left_out = "; ".join(f"{name}: {why}" for name, why in LEFT_OUT.items())
        raise SystemExit(f"error: got methods {unknown}, expected some of {', '.join(METHODS)}. Left out: {left_out}")
    cases, before = chosen(options), None
    with tempfile.TemporaryDirectory() as temporary:
        if options.before:
            extract(options.before, Path(temporary))
            before = digests(Path(temporary), cases)
        elif options.against is not None:
            before = json.loads(options.against.read_text())
        now = digests(ROOT, cases)
    if options.digest is not None:
        options.digest.write_text(json.dumps(before if options.before else now, indent=1) + "\n")
    print("left out:", *(f"  {name}: {why}" for name, why in LEFT_OUT.items()), sep="\n")
    if before is not None:
        found = differences(before, now)
        print(*found, f"{sum(case in before for case in now)} cases compared, {len(found)} differ", sep="\n")
        raise SystemExit(int(bool(found)))


if __name__ == "__main__":
    main()
