"""What the commands say of themselves."""

from __future__ import annotations

import importlib

import pytest

from train.compare import Comparison
from visualization.command import read_arguments

COMMANDS = (
    *(f"train.{name}" for name in ("gossip_sgd", "translate", "translate_text", "compare", "consensus")),
    *(f"visualization.{name}" for name in ("plot", "report", "spectra", "topology", "curves", "cluster", "stragglers")),
    *(f"visualization.{name}" for name in ("accuracy_bytes", "consensus", "matcha")),
    "gossip_modules.simulate.__main__",
)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_terminal_of_100_columns_and_names_commands_one_way(name: str) -> None:
    text = importlib.import_module(name).__doc__ or ""
    assert [line for line in text.splitlines() if len(line) > 100] == []
    command = f"-m {name.removesuffix('.__main__')}"
    assert command in text
    assert "python train/" not in text


def test_arguments_after_two_dashes_are_not_those_of_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = read_arguments(Comparison, description="Compare", arguments=["--recipes", "ar", "--", "--help"])
    assert (comparison.recipes, comparison.options) == (("ar",), ("--help",))
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit):
        read_arguments(Comparison, description="Compare\ntwo", arguments=["--help"])
    assert capsys.readouterr().out.startswith("Compare\ntwo\n")
