"""Fixtures of the tests in this folder."""

from __future__ import annotations

import functools

import pytest

from gossip_modules.engine.background import Background


@pytest.fixture
def impatient_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """`close()` waits for its threads a short while only."""
    monkeypatch.setattr(Background, "close", functools.partialmethod(Background.close, timeout=0.2))
