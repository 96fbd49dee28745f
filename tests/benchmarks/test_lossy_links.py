"""Links that lose packets: medians of ratios within a repeat, and the words of the page."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from benchmarks.lossy_links import CUT_OFF
from benchmarks.pages.lossy_links import medians, summary


def row(method: str, line: str, repeat: int, ms: float, **others: Any) -> dict[str, Any]:
    errors = {"mean_error": 4e-5, "spread": 1e-4, "later_error": 3e-6}
    counts = {"datagrams_sent": 100, "datagrams_received": 80, "num_steps": 60, "loss": 0.2, "load": 2.0}
    times = {"median_ms": ms, "mean_ms": ms, "slowest_ms": ms}
    return {"method": method, "line": line, "repeat": repeat, **times, **errors, **counts, **others}


ROWS = pd.DataFrame(
    [
        *(row("running sums", "lossless", k, ms) for k, ms in enumerate((100, 200, 100))),
        *(row("running sums", "lossy", k, ms) for k, ms in enumerate((110, 200, 120))),
        *(row("running sums", CUT_OFF, k, ms) for k, ms in enumerate((110, 210, 100))),
        *(row("SGP", "lossless", k, 100, datagrams_sent=0, datagrams_received=0) for k in range(3)),
        *(row("SGP", "lossy", k, 1250, datagrams_sent=0, datagrams_received=0) for k in range(3)),
    ]
)


def test_ratios_are_within_a_repeat() -> None:
    found = medians(ROWS).set_index(["method", "line"])
    assert found.loc[("running sums", "lossy"), "ratio"] == pytest.approx(1.1)
    assert found.loc[("running sums", CUT_OFF), "ratio"] == pytest.approx(1.05)
    assert found.loc[("running sums", "lossy"), "lost"] == pytest.approx(0.2)
    assert pd.isna(found.loc[("running sums", CUT_OFF), "mean_error"])


def test_the_page_says_the_ratios_and_errors() -> None:
    text = summary(ROWS)
    assert "**With 20% of packets lost, a step with running sums takes 1.10 times as long as without losses" in text
    assert "a step of SGP over TCP 12.5 times.** After 60 steps the mean of the models was off by 4e-05" in text
    assert "With one host cut off a step of the others takes 1.05 times as long" in text
