"""The pages of docs/: their examples run as they stand, and every public name has its place."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

import gossip_modules
from gossip_modules.compat import moved
from gossip_modules.extend import Algorithm, Mixer
from tests.harness.pages import RANKS, ROOT, scripts, snippets
from tests.harness.scripts import script_outputs

DOCS = ROOT / "docs"
MOVED = {name: place for name, place in moved.MOVED["gossip_modules"].items() if name != place}
PAGES = sorted(DOCS.rglob("*.md"))
SCRIPTS = {name: text for page in PAGES for name, text in scripts(page).items()}


PUBLIC = [
    gossip_modules,
    *(
        import_module(f"gossip_modules.{name}")
        for name in (
            *("checkpoints", "communicator", "compression", "dpwa", "extend", "graph_manager", "lab", "matcha"),
            *("methods", "mixing_manager", "mpi", "simple_distributed", "testing"),
        )
    ),
]


def entries_of_the_reference() -> list[str]:
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.md")))
    return re.findall(r"^::: (gossip_modules\.[\w.]+)$", text, flags=re.MULTILINE)


def found(dotted: str) -> object:
    module, _, name = dotted.rpartition(".")
    return getattr(import_module(module), name)


def test_every_exported_name_has_one_entry_in_the_reference_and_a_link_in_its_index() -> None:
    """Classes and functions; aliases of types and constants have no docstring that a page could show."""
    entries = entries_of_the_reference()
    assert [name for name, count in Counter(entries).items() if count > 1] == []
    own = [name for name in entries if not name.startswith("gossip_modules.integrations.")]  # these need their hosts
    documented = Counter(id(found(name)) for name in own)
    assert set(documented.values()) == {1}, "an object has two entries, under two names"
    exported = {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in PUBLIC
        for name in module.__all__
        if inspect.isclass(getattr(module, name)) or inspect.isroutine(getattr(module, name))
    }
    exported |= {
        f"gossip_modules.{module}.{name}": found(f"gossip_modules.{module}.{name}") for name, module in MOVED.items()
    }
    assert [name for name, value in exported.items() if id(value) not in documented] == []
    index = (DOCS / "api" / "index.md").read_text(encoding="utf-8")
    linked = {id(found(name)) for name in re.findall(r"\]\[(gossip_modules[\w.]+)\]", index) if name in own}
    assert [name for name, value in exported.items() if id(value) not in linked] == []


def test_each_entry_and_its_methods_have_docstrings() -> None:
    """A method that overrides one of the library may leave the docstring to it."""
    missing = []
    for name in entries_of_the_reference():
        if ".integrations." in name:
            continue
        value = found(name)
        members = vars(value) if inspect.isclass(value) else {}
        shown = {
            key: getattr(value, key)
            for key, member in members.items()
            if not (key.startswith("_") or key in getattr(value, "__dataclass_fields__", ()))
            and (inspect.isroutine(member) or isinstance(member, property))
        }
        missing += [f"{name}.{key}" for key, member in shown.items() if not inspect.getdoc(member)]
        missing += [] if inspect.getdoc(value) else [name]
    assert missing == []


def test_the_top_level_has_the_names_of_daily_use_and_says_where_the_others_are() -> None:
    values = {name: getattr(gossip_modules, name) for name in gossip_modules.__all__}
    methods = [
        name for name, value in values.items() if isinstance(value, type) and issubclass(value, Algorithm | Mixer)
    ]
    assert len(values) - len(methods) <= 24, "beside one name for each algorithm"
    for name, module in MOVED.items():
        with pytest.warns(
            DeprecationWarning, match=rf"^gossip_modules.{name} is now gossip_modules.{module}.{name}; the"
        ):
            assert getattr(gossip_modules, name) is getattr(import_module(f"gossip_modules.{module}"), name)
    with pytest.raises(AttributeError, match=r"^module 'gossip_modules' has no attribute 'Nonesuch'$"):
        _ = gossip_modules.Nonesuch  # type: ignore[attr-defined]


def test_every_public_name_has_a_docstring() -> None:
    assert [name for name in gossip_modules.__all__ if not getattr(gossip_modules, name).__doc__] == []


def test_pages_name_files_that_exist() -> None:
    """Links between pages are checked by `make docs`."""
    named = {
        (page.relative_to(ROOT).as_posix(), path)
        for page in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
        for path in re.findall(
            r"(?<![/\w.(:])(?:gossip_modules|train|tests|docs|benchmarks|visualization|job_scripts|examples)/[\w/.]*\w",
            page.read_text(encoding="utf-8"),
        )
    }
    assert sorted((page, path) for page, path in named if not (ROOT / path).exists()) == []


def run_script(name: str, folder: Path) -> list[str]:
    """What each rank of a script of the pages prints."""
    (folder / name).write_text(SCRIPTS[name], encoding="utf-8")
    return script_outputs(folder / name, RANKS)


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_the_examples_of_the_pages_run(tmp_path: Path) -> None:
    """Those of docs/extend have a test of their own: test_extend.py."""
    pages = [str(page) for page in PAGES if snippets(page) and page.parent.name != "extend"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [sys.executable, *launcher, "-m", "tests.harness.pages", str(tmp_path), *pages]
    result = subprocess.run(command, capture_output=True, text=True, timeout=290, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.findall(r"^ran (.*)$", result.stdout, flags=re.MULTILINE) == pages


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_averaging_is_exact_after_two_rounds(tmp_path: Path) -> None:
    assert run_script("average.py", tmp_path) == [f"rank {rank}: [1.5, 1.5, 1.5]\n" for rank in range(RANKS)]


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_ad_psgd_finds_the_weights(tmp_path: Path) -> None:
    output = "".join(run_script("adpsgd.py", tmp_path))
    errors = [float(value) for value in re.findall(r"averaged weights ([-+.e0-9]+)", output)]
    assert len(errors) == RANKS
    assert len(set(errors)) == 1
    assert errors[0] < 0.1


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_the_script_of_a_fork_learns_all_classes(tmp_path: Path) -> None:
    (line,) = set(run_script("fork.py", tmp_path))  # the averaged model is one for all ranks
    accuracy = float(re.fullmatch(r"averaged model: accuracy (\d+\.\d) %\n", line)[1])  # type: ignore[index]
    assert accuracy > 80  # one worker has one or two large classes of ten


def test_every_script_of_the_pages_is_run_here() -> None:
    tested = re.findall(r'run_script\("(\w+\.py)"', Path(__file__).read_text(encoding="utf-8"))
    assert sorted(tested) == sorted(SCRIPTS)


WIDEST_INLINE = 36
"""Letters of a formula in a line: more of them are wider than a phone of 390 pixels, and no line break divides them."""


def letters(formula: str) -> int:
    """The letters of a formula of TeX that a reader sees, about."""
    seen = re.sub(r"\\(tfrac|frac|mathrm|text|operatorname|bar|hat|tilde|mathbf|left|right|[,;!])", "", formula)
    return len(re.sub(r"[{}_^\s&]", "", re.sub(r"\\[a-zA-Z]+", "x", seen)))


def test_a_formula_in_a_line_fits_on_a_phone() -> None:
    assert letters(r"x(t+1) = (I + W)\, x(t) - \tfrac{I + W}{2}\, x(t-1) - u(t) + u(t-1)") > WIDEST_INLINE
    assert letters(r"\varphi = \mathrm{clock}_j") == 8
    for page in DOCS.rglob("*.md"):
        text = re.sub(r"```.*?```|\$\$.*?\$\$|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for formula in re.findall(r"\$([^$\s](?:[^$\n]|\n(?!\n))*)\$", text):
            assert letters(formula) <= WIDEST_INLINE, f"{page.name}: write ${formula}$ as a block, which scrolls"
