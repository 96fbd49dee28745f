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
@pytest.mark.parametrize("name", [path.name for path in FILES])
def test_the_commands_of_rows_can_be_typed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in commands(name):
        with pytest.raises(Parsed):
            parse(command, monkeypatch)
