"""What the commands say of themselves."""

from __future__ import annotations

import importlib

import pytest

COMMANDS = (
    *(f"train.{name}" for name in ("gossip_sgd", "translate", "translate_text", "compare", "consensus")),
    "gossip_modules.simulate.__main__",
)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_terminal_of_100_columns_and_names_commands_one_way(name: str) -> None:
    text = importlib.import_module(name).__doc__ or ""
    assert [line for line in text.splitlines() if len(line) > 100] == []
    command = f"-m {name.removesuffix('.__main__')}"
    assert command in text
    assert "python train/" not in text
