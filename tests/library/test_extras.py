"""The extras: the library imports and trains without any one of them, and says which one is missing."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import gossip_modules as gm
from gossip_modules.extras import EXTRAS, NAMES, MissingExtra, load
from tests.harness.pages import ROOT
from tests.harness.scripts import module_output

LIBRARY = Path(gm.__file__).parent
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")


@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_the_library_trains_without_any_one_extra(tmp_path: Path) -> None:
    folders = [tmp_path / extra for extra in EXTRAS]
    for folder in folders:
        copy = folder / LIBRARY.name
        copy.mkdir(parents=True)
        for path in LIBRARY.iterdir():
            if path.name not in (folder.name, "__pycache__"):
                (copy / path.name).symlink_to(path)
    found = dict(
        line.split(" ", 1) for line in module_output("tests.library.missing_extra", *map(str, folders)).splitlines()
    )
    assert found == dict.fromkeys(EXTRAS, "ok")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gossip_modules.dpwa", None)
    got = r"^got gossip_modules.dpwa.PairwiseDataParallel, which is in gossip_modules.dpwa \(dpwa\)"
    with pytest.raises(
        MissingExtra, match=rf"{got}, expected .*; install all packages, in a clone: pip .* \.$"
    ) as caught:
        load("dpwa:PairwiseDataParallel")
    assert caught.value.extra == "dpwa"


def test_another_missing_module_is_not_taken_for_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gossip_modules.engine.nothing", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        load("engine.nothing")
    assert not isinstance(caught.value, MissingExtra)


def test_names_of_extras_are_names_of_the_library() -> None:
    assert {*NAMES, *EXTRAS} <= {*dir(gm)}
    assert {*NAMES} <= {*gm.__all__}
    assert gm.PairwiseDataParallel is gm.dpwa.PairwiseDataParallel
    with pytest.raises(AttributeError, match=r"module 'gossip_modules' has no attribute 'Nothing'"):
        _ = gm.Nothing  # type: ignore[attr-defined]


def test_commands_install_from_a_clone_as_the_package_is_on_no_index() -> None:
    assert "The package is on no index" in (ROOT / "README.md").read_text(encoding="utf-8")
    for folder in ("gossip_modules", "examples", "docs", "job_scripts"):
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix in (".py", ".md", ".txt", ".sh", ".yaml"):
                found = re.search(
                    r"pip install .*gossip-modules(\[|$|`)", path.read_text(encoding="utf-8"), re.MULTILINE
                )
                assert not found, path


def test_each_extra_that_a_command_installs_is_in_setup() -> None:
    extras = set(re.findall(r'^ {8}"(\w+)": ', SETUP.partition("extras_require")[2], re.MULTILINE))
    extras |= {"accelerate", "lightning", "transformers"}  # the keys of HOSTS
    found: set[str] = set()
    for folder in ("gossip_modules", "examples", "docs", "job_scripts"):
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix in (".py", ".md", ".yaml"):
                found |= set(re.findall(r"'\.\[(\w+)\]'", path.read_text(encoding="utf-8")))
    assert {"mailbox", "mpi", "pairwise"} <= found
    assert found <= extras
