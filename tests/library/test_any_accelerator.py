"""Every wrapper trains on a device that is neither the CPU nor CUDA, and waits for what it has queued there."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils import backend_registration

import gossip_modules
from gossip_modules import GossipDataParallel, connect
from gossip_modules.devices import host_zeros, wide_dtype
from gossip_modules.flat import vector
from tests.harness.problems import mlp
from tests.harness.ranks import TIMEOUT, run_ranks
from tests.harness.scripts import module_output

PACKAGE = Path(gossip_modules.__file__).parent


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this version of torch needs C++ for a device",
)
@pytest.mark.timeout(120)  # with the start of the server of forks
def test_all_wrappers_train_on_a_registered_device_as_on_the_cpu() -> None:
    """In a process of its own: a device cannot be taken back."""
    found = json.loads(module_output("tests.harness.late_device").splitlines()[-1])
    assert found.pop("no waits") > 0.01  # so the device is late, and the figures below mean something
    assert found.pop("dpwa") == pytest.approx(0.5**4, rel=1e-3)
    # The device has no float64, in which CHOCO's signs have their scale on the CPU.
    assert max(found.pop("CHOCO"), found.pop("Lab, Choco")) < 1e-6
    assert re.search(r"got a model on late, which has no float64.*choose Choco", found.pop("PowerGossip"))
    assert found == {
        "blocking": 0.0,
        "overlap": 0.0,
        "deltas": 0.0,
        "DiLoCo with a delay": 0.0,
        "running sums": None,
        "AD-PSGD": None,
        "WAGMA": None,
        "Lab, sgp": 0.0,
        "Lab, d2": 0.0,
    }


def test_no_name_of_cuda_is_left() -> None:
    """TF32, which is a setting of CUDA, and MPI libraries that read GPU memory are all that is of one maker."""
    found = {
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"torch\.cuda|is_cuda\b|torch\.xpu|torch\.mps", line)
    }
    assert found == set()


@pytest.mark.parametrize("device", ["xpu", "mps", "cuda"])
def test_without_a_backend_for_the_device_messages_go_through_host_memory(device: str) -> None:
    def body(group: dist.ProcessGroup) -> str:
        transport = connect(group, module_device=torch.device(device), timeout=TIMEOUT)
        return transport.device.type

    assert run_ranks(1, body) == ["cpu"]


@pytest.mark.parametrize("device", ["xpu", "mps", "cuda"])
def test_gloo_from_the_memory_of_a_device_is_refused(device: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match=rf"got comm_device='{device}' over Gloo|without a backend for {device}"):
            connect(group, module_device=torch.device(device), comm_device=device, timeout=TIMEOUT)

    run_ranks(1, body)


def test_the_cpu_has_float64_and_needs_no_pinned_memory() -> None:
    cpu = torch.device("cpu")
    assert wide_dtype(cpu) is torch.float64
    assert not host_zeros([3], torch.uint8, beside=cpu).any()


def test_ranks_with_and_without_float64_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their messages have other lengths, so each would wait for the other in vain."""
    own = threading.local()
    monkeypatch.setattr(vector, "wide_dtype", lambda device: getattr(own, "dtype", torch.float64))

    def body(group: dist.ProcessGroup) -> None:
        own.dtype = torch.float32 if group.rank() else torch.float64
        with pytest.raises(ValueError, match=r"rank 1: push-sum weight.*torch\.float32.*torch\.float64"):
            GossipDataParallel(mlp(), process_group=group)

    run_ranks(2, body)
