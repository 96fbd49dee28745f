"""The table of ports in docs/guides/security.md is true: no file opens another one, and a job listens at these only."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.strangers import at_liveness, at_store_port, at_store_values
from gossip_modules.membership.serve import serve
from gossip_modules.transport.job_key import VARIABLE
from tests.harness.pages import ROOT
from tests.library.dpwa.workers import num_descriptors, wait_for
from tests.library.membership.conftest import _no_thread_stays
from tests.library.membership.test_membership import Job, close, model_of

__all__ = ["_no_thread_stays"]
PAGE = (ROOT / "docs" / "guides" / "security.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r'^\| <a id="port-(\w+)"></a>[^|]*\| `([\w/]+\.py)`', PAGE, flags=re.MULTILINE))
OPENS = re.compile(
    r"create_server\(|is_master=True|create_device\(|create_default_device\(|SOCK_DGRAM\)\)|\bHTTPServer\b|\.listen\(\d*\)"
)
LISTENS = "0A"  # the state of a socket in /proc/net/tcp


def ports() -> set[int]:
    """At which this process listens, by the kernel's word."""
    own = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:  # the folder's own one
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in own:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found


def test_the_table_names_every_file_that_opens_a_port() -> None:
    package = ROOT / "gossip_modules"
    files = {str(file.relative_to(package)) for file in package.rglob("*.py") if OPENS.search(file.read_text("utf-8"))}
    assert len(ROWS) == len(set(ROWS.values()))
    assert files == set(ROWS.values())


def test_a_job_listens_at_the_ports_of_the_table_only() -> None:
    """One store, one port for liveness and one of Gloo for each worker, all at the address of the job."""
    before = ports()
    store = serve(0)
    job = Job(f"127.0.0.1:{store.port}", min_workers=2)
    workers = job.start(2)
    job.until_live(workers)
    found = ports() - before
    liveness = {worker.membership.worker.liveness.contact.address[1] for worker in workers}  # type: ignore[union-attr]
    gloo = found - liveness - {store.port}
    close(job.end())
    assert {store.port} | liveness <= found
    assert [len(liveness), len(gloo)] == [2, 2]
    assert {"store", "liveness", "gloo"} <= ROWS.keys()


@pytest.mark.parametrize("key", [None, "sixteen bytes and more"], ids=["no-key", "key"])
def test_recorded_and_altered_messages_change_nothing(key: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m benchmarks.strangers` sends more of them, to processes, and compares the bits of models."""
    monkeypatch.setenv(VARIABLE, key) if key else monkeypatch.delenv(VARIABLE, raising=False)
    store = serve(0)
    job = Job(f"127.0.0.1:{store.port}", min_workers=2)
    workers = job.start(2, learning_rate=0.0)
    job.until_live(workers)
    monitors: list[Any] = [worker.membership.worker.liveness for worker in workers]  # type: ignore[union-attr]
    wait_for(lambda: all(len(monitor._watchers) == 1 for monitor in monitors))
    members, before = workers[0].members, num_descriptors()
    contacts = [monitor.contact for monitor in monitors]
    reports = [{"contact": (contact.worker, contact.address, contact.secret)} for contact in contacts]
    attacked: Any = SimpleNamespace(key=key.encode() if key else None, port=store.port)
    draw = random.Random(0)
    assert not any(at_liveness(attacked, reports, 100, draw))
    for _ in at_store_port(attacked, reports, 10, draw):
        pass  # the effect is on the models and the members, below
    if key:
        for _ in at_store_values(attacked, reports, 200, draw):
            pass
    job.until_live(workers)
    job.until(lambda: num_descriptors() <= before, "the connections of strangers are closed")
    close(job.end())  # else its threads would open descriptors in later tests, which count all of the process
    assert [worker.members for worker in workers] == [members] * 2
    assert [worker.error for worker in workers] == [None] * 2
    for worker in workers:  # the learning rate is 0, and the mean of two equal models has their bits
        for own, first in zip(worker.model.parameters(), model_of().parameters(), strict=True):
            assert torch.equal(own, first)


def test_the_gloo_of_torch_has_no_tls() -> None:
    """As the page says. If this fails, Gloo's device for TLS is the remedy in place of a tunnel."""
    code = "import torch.distributed as dist; dist.ProcessGroupGloo.create_device(hostname='127.0.0.1')"
    environment = {**os.environ, "GLOO_DEVICE_TRANSPORT": "TCP_TLS"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "unsupported gloo device" in done.stderr
    assert "unsupported gloo device" in PAGE
