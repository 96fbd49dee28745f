"""The commands of rows in benchmarks/results/ can be typed: modules exist, and parsers take the arguments."""

from __future__ import annotations

import argparse
import runpy
import shlex
import sys
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import tyro

from benchmarks.record import RESULTS, ROOT
from tests.benchmarks.test_provenance import FILES

UNTYPED = frozenset({"gap.csv"})
"""Files of studies whose scripts are in an earlier commit. With the last one go `Page.script`, `NOT_IN_HISTORY`, the
pages of `FINISHED` and the paragraph about finished studies in benchmarks/README.md."""


class Parsed(BaseException):
    """The arguments of a command were taken; nothing has run."""


def parse(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command until its parser has taken the arguments.

    Raises:
        Parsed: it has.
        AssertionError: there is no such module or script.
        SystemExit: the parser refuses an argument.
    """
    _, *words = shlex.split(command)
    if words[0] == "-W":
        words = words[2:]
    is_module = words[0] == "-m"
    name, *arguments = words[1:] if is_module else words
    path = ROOT / (name.replace(".", "/") if is_module else name)
    found = [each for each in (path, path.with_suffix(".py"), path / "__main__.py") if each.is_file()]
    assert found, f"{command}: got no {name}, expected it in the tree"
    parse_args, cli = argparse.ArgumentParser.parse_args, tyro.cli

    def ended(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(argparse.ArgumentParser, "parse_args", parse_args)
            function(*args, **options)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda *a, **o: ended(parse_args, *a, **o))
    monkeypatch.setattr(tyro, "cli", lambda *a, **o: ended(cli, *a, **o))
    monkeypatch.setattr(sys, "argv", [str(found[0]), *arguments])
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)  # tyro looks up annotations in the main module
    runpy.run_path(str(path), run_name="__main__")


def commands(name: str) -> list[str]:
    """The commands of the rows of a file, each once."""
    return list(pd.read_csv(RESULTS / name, usecols=["command"])["command"].unique())


@pytest.mark.filterwarnings("ignore:.*found in sys.modules after import:RuntimeWarning")  # of modules imported before
@pytest.mark.parametrize("name", [path.name for path in FILES if path.name not in UNTYPED])
def test_the_commands_of_rows_can_be_typed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in commands(name):
        with pytest.raises(Parsed):
            parse(command, monkeypatch)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules after import:RuntimeWarning")
@pytest.mark.parametrize("name", sorted(UNTYPED))
def test_a_file_of_an_earlier_script_has_a_command_that_cannot_be_typed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = []
    for command in commands(name):
        with pytest.raises((Parsed, AssertionError, SystemExit)) as found:
            parse(command, monkeypatch)
        outcomes.append(found.type)
    assert set(outcomes) != {Parsed}, f"{name}: all commands can be typed; remove it from UNTYPED"
