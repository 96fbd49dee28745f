"""What the commands say of themselves."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from train.compare import Comparison
from visualization.command import read_arguments

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    *(f"train.{name}" for name in ("gossip_sgd", "translate", "translate_text", "language_model", "compare")),
    "train.consensus",
    *(f"visualization.{name}" for name in ("plot", "report", "spectra", "topology", "curves", "cluster")),
    *(f"visualization.{name}" for name in ("compare", "consensus", "matcha")),
    "gossip_modules.lab.__main__",
)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_terminal_of_100_columns_and_names_commands_one_way(name: str) -> None:
    text = importlib.import_module(name).__doc__ or ""
    assert [line for line in text.splitlines() if len(line) > 100] == []
    command = f"-m {name.removesuffix('.__main__')}"
    assert command in text
    assert "python train/" not in text


def test_the_documentation_starts_scripts_as_modules() -> None:
    # Those of docs/benchmarks are as they were when the figures were measured.
    pages = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "benchmarks"]
    pages += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "benchmarks/README.md")]
    started = r"(?:python3?|torchrun|--[\w=,-]+(?: \d+)?)"
    by_path = re.compile(rf"{started}\s+(?:\\\n\s*)?(?:train|visualization|benchmarks)/\w+\.py")
    assert by_path.search("python train/compare.py")
    assert by_path.search("--signals-to-handle=SIGTERM,SIGINT \\\n    train/gossip_sgd.py")
    said = {str(page.relative_to(ROOT)): by_path.findall(page.read_text(encoding="utf-8")) for page in pages}
    assert said.pop("docs/guides/scripts.md") == ["python train/gossip_sgd.py"]  # which says that it is the same
    assert [name for name, commands in said.items() if commands] == []


def test_arguments_after_two_dashes_are_not_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    comparison = read_arguments(Comparison, description="Compare", arguments=["--recipes", "ar", "--", "--help"])
    assert (comparison.recipes, comparison.options) == (("ar",), ("--help",))
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit):
        read_arguments(Comparison, description="Compare\ntwo", arguments=["--help"])
    assert capsys.readouterr().out.startswith("Compare\ntwo\n")
