"""Limits for loaded machines, and the check that no thread of the library outlives its test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gossip_modules.membership import limits
from tests.harness.ranks import assert_no_gossip_threads


@pytest.fixture(autouse=True)
def _no_thread_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(limits, "FORMING", 25.0)  # a loaded machine may take long
    monkeypatch.setattr(limits, "CONNECT", 25.0)  # a thread that connects with a worker that has gone ends then
    yield
    assert_no_gossip_threads()
