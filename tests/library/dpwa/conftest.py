"""Fixtures of the tests in this folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.harness.ranks import assert_no_gossip_threads


@pytest.fixture
def workers() -> Iterator[contextlib.ExitStack]:
    """Closes what is entered, and checks that no thread is left."""
    with contextlib.ExitStack() as stack:
        yield stack
    assert_no_gossip_threads()
