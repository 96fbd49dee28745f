"""Fixtures of the tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.ranks import assert_no_gossip_threads


@pytest.fixture(autouse=True)
def all_threads_end() -> Iterator[None]:
    """Every test closes its wrappers, and no thread of theirs is left."""
    yield
    assert_no_gossip_threads()
