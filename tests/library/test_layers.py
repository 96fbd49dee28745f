"""The rooms of the library and of train/: each package imports those below it only, and no file more than it may."""

import ast
import functools
import graphlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from gossip_modules.extras import EXTRAS, NAMES

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "setup.py").exists())
PACKAGE = "gossip_modules"

_LOCKSTEP = {
    *(
        "state",
        "devices",
        "profiling",
        "flat",
        "graph_manager",
        "mixing_manager",
        "compression",
        "transport",
        "schedule",
        "worlds",
    ),
}
_WRAPPERS = {
    *_LOCKSTEP,
    "version",
    "old_names",
    "warn",
    "regions",
    "engine",
    "loop",
    "membership",
    "wrappers",
    "rounds",
    "registry",
}
# What a package, or a module beside the packages, may import besides itself.
MAY_IMPORT: Mapping[str, Mapping[str, set[str]]] = {
    PACKAGE: {
        "state": set(),
        "schedule": set(),
        "checks": set(),
        "regions": set(),
        "partitions": {"checks"},
        "devices": set(),
        "extras": set(),
        "profiling": set(),
        "flat": {"checks", "devices", "state"},
        "old_names": {"extras"},
        "warn": set(),
        "graph_manager": {"checks", "old_names"},
        "compression": {"checks", "devices"},
        "transport": {"devices"},
        "worlds": {"devices", "flat", "transport"},
        "matcha": {"graph_manager", "mixing_manager", "transport", "old_names", "devices"},
        "mixing_manager": {"graph_manager", "old_names"},
        "mpi": {"transport", "devices"},
        "gossiper": {"compat"},
        "optim": {"flat", "rounds", "schedule", "warn"},
        "sparta": {"graph_manager", "compression"},
        "loop": {"state", "flat", "transport", "warn"},
        "rounds": {*_LOCKSTEP, "loop", "registry", "old_names", "checks"},
        "algorithms": {
            *("devices", "flat", "graph_manager", "mixing_manager", "compression", "rounds", "registry", "schedule"),
            *("checks", "state", "transport", "warn", "worlds"),
        },
        "engine": {
            *("devices", "profiling", "rounds", "flat", "schedule", "mixing_manager", "transport"),
            *("state", "worlds", "old_names"),
        },
        "version": set(),
        "compat": {
            *(
                "extras",
                "warn",
                "graph_manager",
                "matcha",
                "schedule",
                "compression",
                "rounds",
                "algorithms",
                "wrappers",
            ),
        },
        "extend": {*_WRAPPERS, "algorithms"} - {"membership"},
        "membership": {*_LOCKSTEP, "version", "extras", "checks"},
        "wrappers": {*_WRAPPERS, "algorithms"} - {"wrappers"},
        "ad_psgd": _WRAPPERS,
        "wagma": _WRAPPERS,
        "dpwa": _WRAPPERS,
        "mailbox": {*_WRAPPERS, "algorithms", "extras", "checks"},
        "checkpoints": {"wrappers"},
        "metrics": {"wrappers"},
        "watch": set(),
        "registry": {"extras"},
        "doctor": {"devices", "graph_manager", "lab", "matcha", "regions", "registry", "transport"},
        "lab": {
            *("state", "flat", "graph_manager", "mixing_manager", "compression", "schedule"),
            *("algorithms", "extras", "mailbox", "rounds", "optim", "regions", "registry", "methods", "warn"),
            "wrappers",
        },
        "methods": {*_WRAPPERS, "algorithms", "extras", "registry"},
        "testing": {"mailbox", "membership", "transport"},
        "integrations": {"flat", "loop", "registry", "transport", "wrappers"},
        # Modules with the names that other systems gave to them.
        "distributed": {"compat"},
        "ar_distributed": {"compat"},
        "simple_distributed": {"compat"},
        "communicator": {"compat"},
    },
    "train": {
        "job": set(),
        "methods": {"job"},
        "run_config": {"methods", "job"},
        "tasks": {"run_config", "job"},
        "training": {"tasks", "run_config", "methods", "job", "old_options"},
        "option_groups": {"run_config"},
        "old_options": {"job"},
        "call": {"old_options", "training", "tasks", "run_config", "job"},
        "command_line": {"option_groups", "old_options", "training", "tasks", "run_config", "job"},
        "consensus_experiment": set(),
        "consensus": {"consensus_experiment", "training", "job"},
        "gossip_sgd": {"command_line", "tasks"},
        "translate": {"command_line", "tasks"},
        "translate_text": {"tasks", "job"},
        "language_model": {"command_line", "tasks"},
        "compare": {"training", "job"},
    },
}
# typing_extensions comes with torch; annotations may use it.
DEPENDENCIES = {"torch", "numpy", "networkx", "typing_extensions"}
# Modules beside the packages that nothing imports: a command, and names of other libraries.
ABOVE = {"ar_distributed", "communicator", "distributed", "doctor", "gossiper", "simple_distributed"}
# The extras that an extra may import: all others it reaches by name.
EXTRAS_OF_EXTRAS = {"lab": {"mailbox", "methods"}, "compat": {"matcha"}, "testing": {"mailbox"}}
# The only files that may import a module by its name; `metrics` and `doctor` import packages of others.
BY_NAME = {"extras", "metrics", "doctor", "lab"}
# Who may import what is not installed with the library; nothing that `import gossip_modules` runs imports these.
FOREIGN = {
    "yaml": {"dpwa"},
    "mpi4py": {"mpi"},
    "obstore": {"mailbox"},
    **{host: {"integrations"} for host in ("accelerate", "lightning", "transformers")},
}
# A laptop tests these in a second, without any process group.
WITHOUT_PROCESSES = {
    "schedule",
    "flat",
    "graph_manager",
    "compression",
    "mixing_manager",
    "matcha",
    "outer",
    "optim",
    "lab",
    "registry",
}
SHARDED_TENSORS = "torch.distributed.tensor."
UNPICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve"}


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """The parsed file."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))))


def imported_names(path: Path, root: Path) -> Iterator[str]:
    """Every dotted name that a file imports, wherever the import stands: `from a import b` gives `a.b`."""
    package = (root.name, *path.relative_to(root).parent.parts)
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join(filter(None, (*above, node.module)))
            yield from (f"{base}.{alias.name}" for alias in node.names)


def module_of(name: str, root: Path) -> str | None:
    """The module of `root` that this name is or stands in; None: of another package."""
    parts = name.split(".")
    if parts[0] != root.name:
        return None
    for length in range(len(parts), 1, -1):
        path = root.joinpath(*parts[1:length])
        if path.is_dir() or path.with_suffix(".py").exists():
            return ".".join(parts[:length])
    return root.name


def room_of(module: str) -> str:
    """The package, or module beside the packages, that a module is or belongs to; "__init__" of the root itself."""
    return module.split(".")[1] if "." in module else "__init__"


def violations(root: Path) -> list[str]:
    """What is wrong with the imports of the package in this folder, one sentence each."""
    may_import, found = MAY_IMPORT[root.name], []
    graph: dict[str, set[str]] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        room, names = room_of(module), set(imported_names(path, root))
        foreign = _foreign(room, names) if root.name == PACKAGE else []  # train/ may use what the extras name
        found += [f"{module} imports {name}: it is not installed with {root.name}" for name in foreign]
        others = {other for name in names if (other := module_of(name, root)) is not None}
        graph[module] = {other for other in others - {module} if not module.startswith(f"{other}.")}
        if room == "__init__":
            continue
        if room not in may_import:
            found.append(f"{module} is in no room that is known: add {room} to MAY_IMPORT in {Path(__file__).name}")
            continue
        rooms = {room_of(other) for other in others} - {room}
        found += [f"{module} imports {other}: {room} may not" for other in sorted(rooms - may_import[room])]
        of_processes = {name for name in names if f"{name}.".startswith("torch.distributed.")}
        if room in WITHOUT_PROCESSES and any(not name.startswith(SHARDED_TENSORS) for name in of_processes):
            found.append(f"{module} imports torch.distributed: {room} works without")
    del graph[root.name]
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found.append(f"imports run in a circle: {' -> '.join(error.args[1])}")
    return found


def _foreign(room: str, names: set[str]) -> list[str]:
    known = {PACKAGE, *DEPENDENCIES, *sys.stdlib_module_names}
    roots = sorted({name.split(".")[0] for name in names} - known)
    return [root for root in roots if room not in FOREIGN.get(root, ())]


def forbidden_imports(folder: Path, forbidden: set[str]) -> list[str]:
    """Which files below the folder import one of these top-level names."""
    return [
        f"{path.relative_to(folder.parent)} imports {name}"
        for path in sorted(folder.rglob("*.py"))
        for name in imported_names(path, folder)
        if name.split(".")[0] in forbidden
    ]


def classes_of_one_name(root: Path, folders: Iterable[str]) -> dict[str, list[str]]:
    """Where the classes are that share their name with another one, at any depth of a file; by name."""
    found: dict[str, list[str]] = {}
    for path in (path for folder in folders for path in sorted((root / folder).rglob("*.py"))):
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(f"{path.relative_to(root)}:{node.lineno}")
    return {name: places for name, places in found.items() if len(places) > 1}


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_point_down(package: str) -> None:
    assert (ROOT / package / "__init__.py").exists()
    assert violations(ROOT / package) == []
    graphlib.TopologicalSorter(MAY_IMPORT[package]).prepare()


def test_wrappers_know_no_algorithm_but_their_default() -> None:
    paths = (ROOT / PACKAGE / "wrappers").glob("*.py")
    found = {module_of(name, ROOT / PACKAGE) for path in paths for name in imported_names(path, ROOT / PACKAGE)}
    assert {name for name in found if name and ".algorithms" in name} == {f"{PACKAGE}.algorithms.sgp"}


@pytest.mark.parametrize("room", sorted(MAY_IMPORT[PACKAGE].keys() - ABOVE))
def test_no_package_imports_an_extra(room: str) -> None:
    """Only `load` of `extras` leads to one, by its name."""
    assert MAY_IMPORT[PACKAGE][room] & EXTRAS.keys() <= EXTRAS_OF_EXTRAS.get(room, set())
    assert MAY_IMPORT[PACKAGE][room] & ABOVE == set()


def test_extras_are_packages() -> None:
    assert [extra for extra in EXTRAS if not (ROOT / PACKAGE / extra / "__init__.py").exists()] == []
    assert {place.partition(".")[0] for place in NAMES.values()} <= EXTRAS.keys()


def test_one_module_imports_by_name() -> None:
    paths = [path for path in (ROOT / PACKAGE).rglob("*.py") if "importlib" in path.read_text(encoding="utf-8")]
    rooms = {path.relative_to(ROOT / PACKAGE).with_suffix("").parts[0] for path in paths}
    assert rooms == BY_NAME


def test_no_two_classes_have_one_name() -> None:
    assert classes_of_one_name(ROOT, ["gossip_modules", "train", "visualization", "benchmarks"]) == {}


def test_classes_of_one_name_are_found(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.py").write_text("class Run:\n    class Part: ...\n", encoding="utf-8")
    (tmp_path / "train" / "b.py").write_text("def f():\n    class Part: ...\n", encoding="utf-8")
    assert classes_of_one_name(tmp_path, ["train"]) == {"Part": ["train/a.py:2", "train/b.py:2"]}


def test_visualization_reads_files_only() -> None:
    assert forbidden_imports(ROOT / "visualization", {"train"}) == []


@pytest.mark.parametrize("folder", [PACKAGE, "train"])
def test_nothing_unpickles(folder: str) -> None:
    assert forbidden_imports(ROOT / folder, UNPICKLERS) == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"rounds/choco": "from gossip_modules.transport.connect import f\nimport torch, numpy, math"}, None),
        (
            {"rounds/choco": "from ..transport.connect import f\nfrom . import push_sum", "rounds/push_sum": ""},
            None,
        ),
        (
            {"transport/connect": "from gossip_modules.rounds.choco import Choco"},
            r"connect imports rounds: transport may",
        ),
        ({"transport/connect": "def f() -> None:\n    from ..rounds import choco"}, "connect imports rounds"),
        ({"transport/connect": "from .. import rounds"}, "connect imports rounds"),
        ({"rounds/choco": "from gossip_modules import PushSum"}, "choco imports __init__"),
        ({"rounds/choco": "import gossip_modules"}, "choco imports __init__"),
        ({"wagma/engine": "from ..ad_psgd import engine", "ad_psgd/engine": ""}, "wagma may not"),
        ({"schedule": "from torch import distributed"}, "schedule imports torch.distributed"),
        ({"flat/vector": "import torch.distributed as dist"}, "flat.vector imports torch.distributed"),
        ({"matcha/graph": "from torch.distributed.nn import functional"}, "matcha.graph imports torch.distributed"),
        ({"engine/overlap": "import pandas.api"}, "overlap imports pandas: it is not installed"),
        ({"engine/overlap": "import yaml"}, "overlap imports yaml: it is not installed"),
        ({"dpwa/config": "import yaml"}, None),
        ({"__init__": "import tqdm"}, "gossip_modules imports tqdm: it is not installed"),
        ({"helpers": ""}, "helpers is in no room that is known"),
        ({"rounds/choco": "from . import a", "rounds/a": "from .choco import Choco"}, "in a circle: .*choco"),
    ],
)
def test_checker_sees(tmp_path: Path, files: dict[str, str], expected: str | None) -> None:
    library = tmp_path / PACKAGE
    for module in {"__init__", "transport/connect", "rounds/choco", *files}:
        path = library / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files.get(module, ""), encoding="utf-8")
    found = violations(library)
    if expected is None:
        assert found == []
    else:
        assert len(found) == 1
        assert re.search(expected, found[0])


def test_checker_sees_forbidden_imports(tmp_path: Path) -> None:
    folder = tmp_path / "visualization"
    folder.mkdir()
    (folder / "curves.py").write_text("from train import log\nfrom pickle import loads\n", encoding="utf-8")
    assert forbidden_imports(folder, {"train"}) == ["visualization/curves.py imports train.log"]
    assert forbidden_imports(folder, UNPICKLERS) == ["visualization/curves.py imports pickle.loads"]
