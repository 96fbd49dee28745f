"""Arguments of `Membership` for a mailbox: each error says got, expected and remedy, before a run begins."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gossip_modules import Membership

NO_COUNTS: tuple[Any, ...] = (0, -1, 1.5, "3", True)
NO_SECONDS: tuple[Any, ...] = (0, -1.0, "30", None, True, math.nan, math.inf)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *((name, value, "a whole number of at least 1") for name in ("quorum", "save_every") for value in NO_COUNTS),
        *(("min_workers", value, "a whole number of at least 1") for value in (*NO_COUNTS, None)),
        *((name, value, "seconds above 0") for name in ("grace", "poll", "interval") for value in NO_SECONDS),
        *(("audit", value, "a share of rounds between 0 and 1") for value in (-0.1, 1.1, "1", None, True)),
        *(("key", value, "a long secret text, the same for all workers, or no key") for value in ("", b"", 5)),
    ],
)
def test_arguments_out_of_range_are_refused(name: str, value: object, expected: str) -> None:
    options: dict[str, Any] = {"min_workers": 1, name: value}
    with pytest.raises(ValueError, match=rf"got {name}={value!r}, expected {expected}"):
        Membership("memory://arguments", **options)


def test_a_variable_without_a_value_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job script that exports a secret which is not there must not start a run that anyone can change."""
    monkeypatch.setenv("GOSSIP_JOB_KEY", "")
    with pytest.raises(ValueError, match=r"got GOSSIP_JOB_KEY='', expected a long secret .*; .* unset GOSSIP_JOB_KEY"):
        Membership("memory://arguments", min_workers=1)


@pytest.mark.parametrize("store", ["s3:/bucket/run", "./run", "/shared/run", "node0"])
def test_what_looks_like_neither_address_names_both(store: str) -> None:
    with pytest.raises(ValueError, match=r"expected 'host:port'.* for a mailbox, 's3://bucket/run' or 'file:///folder"):
        Membership(store, min_workers=1)
