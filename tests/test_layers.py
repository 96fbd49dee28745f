"""The layers of the library: imports point down only, and each package stays in its own house."""

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "gossip_modules"

PAIRWISE_WIRE = ("curve_server", "model_client", "model_fetcher", "peer_connection")
# A module may import modules of its own layer and of the layers below it.
LAYERS: tuple[tuple[str, ...], ...] = (
    (
        *("flat_layout", "flat_vector", "flat_buffer", "schedule", "nonfinite"),
        *("compressor", "sparsifier", "quantizer", "bit_packing"),
        *("edge_coloring", "base_graphs", "barrier", "contraction", "activation", "joint_activation", "matching"),
        *("graph_manager", "shift_graph", "dynamic_graphs", "static_graphs", "matcha_graph", "named_graphs"),
        *("mixing_manager", "matrix_mixing", "laplacian_mixing"),
        *("simulated_mixing", "simulated_delays", "simulated_clocks", "simulated_codes", "simulated_problems"),
        *("simulated_gossip", "simulated_asynchronous", "simulated_groups", "simulated_setting"),
        *("butterfly_groups", "interpolation", "peer_scores", "curve_keys", "pairwise_config"),
        *("model_message", "snapshot_pool", "host_copy", "zmtp", "distance_bound"),
    ),
    (
        *(
            "transport",
            "exchange",
            "staging",
            "listener",
            "connect",
            "progress",
            *PAIRWISE_WIRE,
            "model_server",
            "plain_server",
            "watched_transport",
            "backend",
            "bounded_store",
            "failure_notes",
            "named_barrier",
            "shared_group",
            "gradient_group",
        ),
        *("mpi", "mpi_group", "mpi_library", "mpi_work"),
    ),
    (
        *("gossiper", "push_sum", "agreement", "node", "link_times", "envelope", "matrix_batches", "orthonormal"),
        *("compressed_gossiper", "broadcast_gossiper", "choco", "deep_squeeze", "moniqua", "power_gossip"),
        *("mailbox", "bilateral", "presence", "group_average", "average_on_demand"),
        *("simulated_power_gossip", "simulated_methods", "simulated_options", "simulated_advice"),
    ),
    (
        *(
            "engine",
            "overlap_engine",
            "gossip_thread",
            "averaging",
            "defaults",
            "debias",
            "metadata_state",
            "uneven_inputs",
        ),
        *("background", "bilateral_engine", "pairwise_engine"),
        *(
            "wait_avoiding_engine",
            "wait_avoiding_worker",
            "wait_avoiding_words",
            "wait_avoiding_watch",
            "wait_avoiding_pace",
        ),
    ),
    ("wrapper", "lockstep_wrapper", "composition", "unsynced_steps"),
    (
        *("simple_distributed", "distributed", "ad_psgd", "wagma", "pairwise", "pairwise_averager", "ar_distributed"),
        "simulate",
    ),
)
LAYER_OF = {module: layer for layer, modules in enumerate(LAYERS) for module in modules}
# typing_extensions comes with torch; annotations may use it.
DEPENDENCIES = {"torch", "numpy", "networkx", "typing_extensions"}
# Who may import what is not installed with the library; nothing that `import gossip_modules` runs imports these.
EXTRAS = {
    "zmq": {*PAIRWISE_WIRE, "pairwise_engine"},
    "yaml": {"pairwise_config"},
    "mpi4py": {"mpi_library", "mpi_group", "mpi_work"},
}
UNPICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve"}


def imported_names(path: Path, package: str) -> Iterator[str]:
    """Every dotted name that a file imports, wherever the import stands: `from a import b` gives `a.b`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, (package if node.level else "", node.module)))
            yield from (f"{base}.{alias.name}" for alias in node.names)


def inner_imports(path: Path) -> set[str]:
    """The modules of the library that one of its files imports; `__init__` where it imports the package itself."""
    names = [name.split(".") for name in imported_names(path, PACKAGE)]
    # `from . import x` and `from .x import f` both name x second; what is no module is a public name of __init__.
    seconds = [name[1] if len(name) > 1 else "__init__" for name in names if name[0] == PACKAGE]
    return {second if (path.parent / f"{second}.py").exists() else "__init__" for second in seconds}


def layer_violations(library: Path) -> list[str]:
    """What is wrong with the imports of the library in this folder, one sentence each."""
    violations = []
    graph: dict[str, set[str]] = {}
    for path in sorted(library.rglob("*.py")):
        module = ".".join(path.relative_to(library).with_suffix("").parts)
        names = set(imported_names(path, PACKAGE))
        for root in sorted({name.split(".")[0] for name in names}):
            is_known = root == PACKAGE or root in DEPENDENCIES or module in EXTRAS.get(root, ())
            if not is_known and root not in sys.stdlib_module_names:
                violations.append(
                    f"{module} imports {root}: expected only {sorted(DEPENDENCIES)} and the standard library"
                )
        if module == "__init__":
            continue
        if module not in LAYER_OF:
            violations.append(f"{module} has no layer: add it to LAYERS in tests/test_layers.py")
            continue
        graph[module] = inner_imports(path)
        for other in sorted(graph[module]):
            if LAYER_OF.get(other, len(LAYERS)) > LAYER_OF[module]:
                violations.append(f"{module} (layer {LAYER_OF[module]}) imports {other}: imports point down only")
        if LAYER_OF[module] == 0 and any(f"{name}.".startswith("torch.distributed.") for name in names):
            violations.append(f"{module} (layer 0) imports torch.distributed: a laptop tests it in a second without")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        violations.append(f"imports run in a circle: {' -> '.join(error.args[1])}")
    return violations


def forbidden_imports(folder: Path, forbidden: set[str]) -> list[str]:
    """Which files below the folder import one of these top-level names."""
    return [
        f"{path.relative_to(folder.parent)} imports {name}"
        for path in sorted(folder.rglob("*.py"))
        for name in imported_names(path, folder.name)
        if name.split(".")[0] in forbidden
    ]


def test_imports_of_the_library_point_down() -> None:
    assert (ROOT / PACKAGE / "__init__.py").exists()
    assert layer_violations(ROOT / PACKAGE) == []


def test_the_library_imports_without_extras() -> None:
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in EXTRAS)
    code = f"import sys; {blocked}import {PACKAGE}"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_visualization_reads_files_only() -> None:
    assert forbidden_imports(ROOT / "visualization", {"train"}) == []


@pytest.mark.parametrize("folder", [PACKAGE, "train"])
def test_nothing_unpickles(folder: str) -> None:
    assert forbidden_imports(ROOT / folder, UNPICKLERS) == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"gossiper": "from gossip_modules.transport import Transport\nimport torch, numpy, math"}, None),
        ({"gossiper": "from .transport import Transport\nfrom . import transport"}, None),
        (
            {"transport": "from gossip_modules.gossiper import PushSum"},
            r"transport \(layer 1\) imports gossiper: .* down",
        ),
        ({"transport": "def f() -> None:\n    from .gossiper import PushSum"}, "transport .* imports gossiper"),
        ({"transport": "from . import gossiper"}, "transport .* imports gossiper"),
        ({"engine": "from gossip_modules import PushSum"}, "engine .* imports __init__"),
        ({"engine": "import gossip_modules"}, "engine .* imports __init__"),
        ({"schedule": "from torch import distributed"}, "schedule .* imports torch.distributed"),
        ({"schedule": "import torch.distributed as dist"}, "schedule .* imports torch.distributed"),
        ({"schedule": "from torch.distributed.nn import functional"}, "schedule .* imports torch.distributed"),
        ({"wrapper": "import pandas.api"}, "wrapper imports pandas: expected only"),
        ({"__init__": "import tqdm"}, "__init__ imports tqdm: expected only"),
        ({"helpers": ""}, "helpers has no layer: add it"),
        (
            {"engine": "import gossip_modules.bilateral_engine", "bilateral_engine": "from . import engine"},
            "in a circle: .*engine",
        ),
    ],
)
def test_checker_sees(tmp_path: Path, files: dict[str, str], expected: str | None) -> None:
    library = tmp_path / PACKAGE
    library.mkdir()
    for module in {"__init__", "transport", "gossiper", *files}:
        (library / f"{module}.py").write_text(files.get(module, ""), encoding="utf-8")
    violations = layer_violations(library)
    if expected is None:
        assert violations == []
    else:
        assert len(violations) == 1
        assert re.search(expected, violations[0])


def test_checker_sees_forbidden_imports(tmp_path: Path) -> None:
    folder = tmp_path / "visualization"
    folder.mkdir()
    (folder / "curves.py").write_text("from train import log\nfrom pickle import loads\n", encoding="utf-8")
    assert forbidden_imports(folder, {"train"}) == ["visualization/curves.py imports train.log"]
    assert forbidden_imports(folder, UNPICKLERS) == ["visualization/curves.py imports pickle.loads"]
