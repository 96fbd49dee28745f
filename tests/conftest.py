"""Fixtures of several test files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.harness.ranks import forget_threads

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with end-to-end tests come first: they take longest, and one that came last would run alone."""
    long = {item.path for item in items if item.get_closest_marker("e2e")}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(autouse=True)
def _only_its_own_threads() -> None:
    """A test answers for the threads that it starts."""
    forget_threads()


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are written, in their order."""
    from matplotlib.figure import Figure  # here: most tests draw nothing, and it takes a second

    written: list[Figure] = []
    write = Figure.savefig

    def savefig(figure: Figure, path: Path, **options: Any) -> None:
        written.append(figure)
        write(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return written
