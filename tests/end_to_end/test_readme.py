"""The README is short, its tables are right, and its examples run as they stand; test_learn.py runs its script."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from gossip_modules.methods import METHODS
from gossip_modules.methods.__main__ import methods_table
from tests.harness.pages import RANKS, ROOT, blocks
from tests.harness.scripts import script_outputs

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
TABLE = TEXT.partition("<!-- methods: begin -->")[2].partition("<!-- methods: end -->")[0].strip().splitlines()[2:]
WRAPPERS = {line.strip("| ").split(" | ")[2].strip("`") for line in TABLE}


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    assert len(TEXT.encode()) <= 10000
    links = re.findall(r"\]\(([^)#]+)", TEXT)
    assert [link for link in links if not link.startswith("https://") and not (ROOT / link).exists()] == []


def test_the_readme_and_the_first_page_have_a_measured_result() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert "](assets/default.svg)" in index
    assert "](guides/default.md#get)" in index
    for text in (TEXT, index):
        assert "<!--claim elastic.sentence-->\nIn " in text


def test_the_main_result_is_a_table_in_two_places() -> None:
    """The README, and the guide to which the first page and the questions lead."""
    places = {"README.md", "docs/guides/default.md"}
    for claim in ("default.result", "default.fastest"):
        pages = (
            path
            for path in (README, *(ROOT / "docs").rglob("*.md"))
            if f"<!--claim {claim}-->" in path.read_text("utf-8")
        )
        assert {path.relative_to(ROOT).as_posix() for path in pages} == places


def test_the_table_has_five_rows_and_each_names_a_method_of_the_registry() -> None:
    assert len(TABLE) == len(WRAPPERS) == 5
    plain = {wrapper.replace(', overlap="auto"', "") for wrapper in WRAPPERS}
    assert plain <= {method.example for method in METHODS.values()}
    assert "the same" not in "\n".join(TABLE)


def test_the_table_of_all_methods_is_that_of_the_registry() -> None:
    """Make it with `python -m gossip_modules.methods`."""
    index = (ROOT / "docs" / "methods" / "index.md").read_text(encoding="utf-8")
    found = index.partition("<!-- methods: begin -->\n")[2].partition("\n<!-- methods: end -->")[0]
    assert found == methods_table()


def test_the_files_of_the_algorithms_have_the_functions_that_are_named() -> None:
    """Each function is in one of the files of its row, at the least."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = text.partition("<!-- updates: begin -->")[2].partition("<!-- updates: end -->")[0].strip().splitlines()[2:]
    assert rows
    for row in rows:
        _, files, functions = row.strip("| ").split(" | ")
        code = "".join((ROOT / "gossip_modules" / file).read_text() for file in re.findall(r"`([\w/]+\.py)`", files))
        for function in re.findall(r"`(?:\w+\.)?(\w+)`", functions):
            assert f"    def {function}(" in code, row


def test_the_academic_version_finds_the_optimum() -> None:
    (code,) = [block for block in blocks(README, "python") if "def sgp" in block]
    assert len(code.splitlines()) <= 40
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "README.md", "exec"), {})
    errors = [float(line.split()[-1]) for line in output.getvalue().splitlines()]
    assert len(errors) == 2
    assert max(errors) < 1e-4


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_the_diff_and_the_table_run(tmp_path: Path) -> None:
    (diff,) = blocks(README, "diff")
    loop = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    examples = dict.fromkeys([*sorted(WRAPPERS), *(method.example for method in METHODS.values())])
    wrappers = "\n".join(f"try_out({example})" for example in examples)
    script = tmp_path / "both.py"
    script.write_text(SETUP + loop + "\nmodel.close()\n" + TRY_OUT + wrappers + END, encoding="utf-8")
    norms = script_outputs(script, RANKS)
    assert len(norms) == RANKS
    assert norms[0]
    assert len(set(norms)) == 1


SETUP = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
model = nn.Linear(4, 3)
loader = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)]
def evaluate(model):
    print(sum(p.abs().sum().item() for p in model.parameters()))
"""
TRY_OUT = """
import networkx as nx
from gossip_modules import *
model, base = nn.Linear(4, 3), nx.cycle_graph(4)
addresses = {"w0": "tcp://127.0.0.1:*"}  # in every process a worker without peers
def try_out(wrapper):
    x, y = loader[0]
    cross_entropy(wrapper(x), y).backward()
    wrapper.close()
"""
END = "\ntorch.distributed.destroy_process_group()\n"
