"""The planner's table of rounds over a mailbox has the law of their requests, and the smallest period for a wait."""

from __future__ import annotations

import re

import pytest

from gossip_modules.lab.__main__ import main
from gossip_modules.lab.clock import TCP_SHARE, Compute, Network
from gossip_modules.lab.mailbox_costs import mailbox_costs
from gossip_modules.lab.plan import Setting
from gossip_modules.mailbox.bucket import ENDPOINTS
from gossip_modules.mailbox.costs import PRICES, RoundCosts

SETTING = Setting(8, 25_000_000, Compute(0.5), Network("1 Gbit/s, 20 ms"))


@pytest.fixture(autouse=True)
def no_other_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)


def rows_of(text: str) -> dict[int, list[str]]:
    """The cells of the table by the number of steps."""
    lines = (re.split(r" {2,}", line.strip()) for line in text.splitlines())
    return {int(cells[0]): cells[1:] for cells in lines if len(cells) == 6 and cells[0].isdigit()}


def test_a_row_has_the_seconds_and_the_money_of_a_round() -> None:
    costs = RoundCosts(8, 1e8, 3e8)
    wait = costs.seconds(1e9 / 8 * TCP_SHARE, latency=0.02)
    money = PRICES["s3"].hourly(costs.requests, seconds=50 + wait, stored_bytes=costs.stored_bytes)
    expected = [money.requests, money.storage, money.egress]
    assert rows_of(mailbox_costs(SETTING, "s3"))[100] == [
        f"{50 + wait:.1f}",
        f"{wait / (50 + wait):.0%}",
        *(f"{x:.3g}" for x in expected),
    ]


def test_the_smallest_period_is_a_row_with_so_little_waiting() -> None:
    text = mailbox_costs(SETTING, "gs://bucket/run", max_waiting=0.02)
    found = re.search(r"At most 2% waiting needs (\d+) steps between two rounds", text)
    assert found is not None
    assert rows_of(text)[int(found[1])][1] == "2%"
    assert "8 workers over gs, messages of 100 MB, 0.5 s a step" in text


def test_the_slowest_worker_and_link_count() -> None:
    slow = Setting(8, 25_000_000, Compute(0.5, slow_rank_factor=3.0), Network("1 Gbit/s", slow_share=0.1))
    even = Setting(8, 25_000_000, Compute(1.5), Network("100 Mbit/s"))
    assert rows_of(mailbox_costs(slow, "az"))[100] == rows_of(mailbox_costs(even, "az"))[100]


def test_a_folder_is_free() -> None:
    assert all(row[2:] == ["0"] * 3 for row in rows_of(mailbox_costs(SETTING, "file")).values())


def test_the_command_prints_the_table_without_training(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--world-size 8 --parameters 25e6 --compute 0.5 --mailbox s3 --sync-every 77"
    assert main(arguments.split()) == 0
    said = capsys.readouterr()
    assert 77 in rows_of(said.out)
    assert said.err == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--mailbox ftp", "got mailbox=ftp, expected an address, or one of s3, gs, az, file, store, memory"),
        ("--mailbox s3 --max-waiting 0", "got max_waiting=0.0, expected a share above 0"),
        ("--mailbox s3 --sync-every 1", "got sync_every=1, expected at least 2 steps"),
    ],
)
def test_numbers_out_of_range_are_one_line(arguments: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--world-size", "8", *arguments.split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {expected}")
