"""Without what only Linux has the package imports and a process trains; what needs it names the system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gossip_modules
from gossip_modules.testing import Chaos
from train.job.addresses import interface_address

PACKAGE = Path(gossip_modules.__file__).parent
PROGRAM = """
import importlib, os, pathlib, signal, socket, sys
import torch, torch.distributed as dist

for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for module, names in (
    (os, ("fork", "register_at_fork", "getuid", "killpg", "setsid", "sched_getaffinity", "O_NONBLOCK")),
    (socket, ("AF_UNIX", "SO_REUSEPORT", "TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")),
    (signal, ("SIGKILL", "SIGSTOP", "SIGCONT", "SIGUSR1", "SIGUSR2", "SIGHUP", "pthread_kill")),
):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

import gossip_modules as gm

root = pathlib.Path(gm.__file__).parent
for path in root.rglob("*.py"):
    # The hosts of integrations are other packages, and the adapter of dpwa is an error that names the new class.
    if path.name not in ("__main__.py", "adapters.py") and path.parent.name != "integrations":
        importlib.import_module(".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"))

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for wrap in (gm.GossipDataParallel, gm.AllReduceDataParallel, gm.BilatGossipDataParallel, gm.GroupAverageDataParallel):
    model = wrap(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.clone() for p in model.parameters()]
    for _ in range(2):
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all((p != q).any() for p, q in zip(model.parameters(), before))
    model.averaged_state_dict()
    model.close()
print("trained")
"""


@pytest.mark.timeout(180)  # it imports every module, which takes a minute on a busy machine
def test_the_package_imports_and_a_process_trains_without_features_of_linux() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "trained"


@pytest.mark.parametrize(("system", "backend"), [("darwin", "network"), ("win32", "network"), ("win32", "processes")])
def test_workers_that_a_system_cannot_have_are_refused(
    system: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(ValueError, match=rf"got backend='{backend}' on {system}.*expected backend='threads'"):
        Chaos([], backend=backend)  # type: ignore[arg-type]


def test_the_address_of_an_interface_is_only_told_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match=r"got GLOO_SOCKET_IFNAME=en0 on darwin, expected Linux.*MASTER_ADDR"):
        interface_address("en0")
