"""The parts of a release: wheel and sdist, tried in a new environment, and the files that name its version."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from gossip_modules import __version__
from tests.harness.pages import ROOT

URL = re.findall(r'^REPOSITORY = "(.+)"$', (ROOT / "setup.py").read_text(encoding="utf-8"), re.M)[0]
TRIAL = """
import importlib.util, sys, torch
import gossip_modules, gossip_modules.watch
from gossip_modules import GossipDataParallel
import torch.distributed as dist
assert gossip_modules.__file__.startswith(sys.prefix), gossip_modules.__file__
assert importlib.util.find_spec("train") is None
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = GossipDataParallel(torch.nn.Linear(2, 1))
model(torch.ones(1, 2)).sum().backward()
print(gossip_modules.__version__, int(model.comm_stats()["num_rounds"]))
model.close()
dist.destroy_process_group()
gossip_modules.watch.main([sys.prefix, "--once"])
"""


def run(*command: str | Path, cwd: Path) -> str:
    """What it prints; it must end well, and sees nothing of this process but the path."""
    env = {"PATH": os.environ["PATH"], "HOME": str(cwd), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source: Path, kind: str, to: Path) -> Path:
    """A wheel or an sdist, by the same hook that pip calls."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(to)!r}))"
    return to / run(sys.executable, "-W", "ignore", "-c", code, cwd=source).splitlines()[-1]


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_sdist_and_wheel_are_whole_and_work_where_they_are_installed(tmp_path: Path) -> None:
    """The wheel is built from the unpacked sdist, as pip does; torch is that of this environment."""
    clone, dist = tmp_path / "clone", tmp_path / "dist"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    for name in (os.fsdecode(name) for name in tracked if name and not name.startswith((b"tests/", b"benchmarks/"))):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, clone / name)
    dist.mkdir()
    sdist = build(clone, "sdist", dist)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / f"gossip_modules-{__version__}"
    for name in (
        "CITATION.cff",
        "LICENSE",
        "SECURITY.md",
        "train/gossip_sgd.py",
        "visualization/curves.py",
        "docs/index.md",
    ):
        assert (source / name).is_file()
    wheel = build(source, "wheel", dist)

    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = email.message_from_bytes(archive.read(f"gossip_modules-{__version__}.dist-info/METADATA"))
    tops = {name.split("/")[0] for name in names}
    assert tops == {"gossip_modules", f"gossip_modules-{__version__}.dist-info"}
    own = {path.relative_to(ROOT).as_posix() for path in (ROOT / "gossip_modules").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == own
    assert "gossip_modules/py.typed" in names
    assert metadata["Version"] == __version__
    assert {re.split(r"[>=]", name)[0] for name in metadata.get_all("Requires-Dist", []) if ";" not in name} == {
        *("networkx", "numpy", "torch")
    }
    assert "train" not in metadata.get_all("Provides-Extra", [])
    text = str(metadata.get_payload())
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert f"{URL}/raw/v{__version__}/docs/assets/gossip.svg" in links
    assert f"{URL}/blob/v{__version__}/docs/choosing.md" in links

    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    paths = {"base": str(environment), "platbase": str(environment)}
    packages = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    (packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check")
    run(*pip, "install", "--no-deps", "--no-index", "--ignore-installed", wheel, cwd=tmp_path)
    printed = run(python, "-W", "error::DeprecationWarning:gossip_modules", "-c", TRIAL, cwd=tmp_path)
    assert printed.splitlines() == [f"{__version__} 1", f"{environment}: no rows yet"]


def test_all_files_name_one_version_and_one_repository() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert citation["repository-code"] == URL
    heading = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)[0]
    assert heading in ("Unreleased", f"{__version__} ({citation['date-released']})")


def test_templates_and_the_hosted_run_are_valid() -> None:
    folder = ROOT / ".github"
    run_steps = yaml.safe_load((folder / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]["run"]["steps"]
    assert ".ci/run" in [step.get("run") for step in run_steps]
    for name in ("bug", "idea"):
        form = yaml.safe_load((folder / "ISSUE_TEMPLATE" / f"{name}.yml").read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= form.keys()
        for field in form["body"]:
            assert field["type"] in ("textarea", "input")
            assert field["id"]
            assert field["attributes"]["label"]
