"""The key of a job: strangers at its store and at the ports of Gloo change nothing, and old values are refused."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from operator import methodcaller
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gossip_modules import Membership
from gossip_modules.membership import serve as command
from gossip_modules.membership import shared_roster
from gossip_modules.membership.addresses import connect_groups
from gossip_modules.membership.background_log import NAME, log
from gossip_modules.membership.generations import Generations
from gossip_modules.membership.serve import serve
from gossip_modules.membership.shared_roster import SharedRoster
from gossip_modules.transport.job_key import VARIABLE
from gossip_modules.transport.stores import BoundedStore, ForeignValueError, Records
from tests.harness.ranks import TIMEOUT, run_ranks
from tests.library.membership.stores import exchange_over
from tests.library.membership.test_membership import Job, close, model_of
from tests.library.membership.test_roster import begin, come

KEY = "sixteen bytes and more"
ROSTER = "gossip/job/roster"


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)


def roster_of(store: dist.Store, worker: int = -1) -> SharedRoster:
    shared = SharedRoster(store, name="job", timeout=timedelta(seconds=20))
    shared.worker = worker
    return shared


def member_of(store: dist.Store) -> SharedRoster:
    """Worker 0, in a generation with worker 1."""
    shared = roster_of(store, 0)
    assert shared.update([come(0, min_workers=2), come(1, min_workers=2)])
    assert shared.update([begin((0, 1), 1, step=0)])
    assert shared.roster.is_member(0)
    return shared


def messages(caplog: pytest.LogCaptureFixture) -> str:
    assert log.flush(20.0)
    return caplog.text


# Values in a store.


def bounded(store: dist.Store, **options: Any) -> BoundedStore:
    return BoundedStore(store, **{"key": KEY.encode(), "place": "here", "timeout": TIMEOUT, **options})


def test_a_value_is_read_where_it_was_written_and_nowhere_else() -> None:
    raw = dist.HashStore()
    store = bounded(raw)
    store.set("a", b"value", what="")
    assert store.get("a", what="") == b"value"
    assert store.compare_set("c", "", "new", what="") == b"new"
    assert store.compare_set("c", "new", "newer", what="") == b"newer"
    assert store.compare_set("c", "new", "x", what="") == b"newer"
    raw.set("b", raw.get("a"))  # type: ignore[arg-type]
    for value in (raw.get("a"), b"value", raw.get("a")[:-1], raw.get("a") + b"+", b""):
        raw.set("b", value)  # type: ignore[arg-type]
        with pytest.raises(
            ForeignValueError, match=r"value of 'here/b' .* not signed with this job's key.*set GOSSIP_JO"
        ):
            store.get("b", what="")
        with pytest.raises(ForeignValueError, match="'here/b'"):
            store.get_all(["a", "b"], what="")
    for other in (bounded(raw, key=b"another key of a job"), bounded(raw, place="there"), bounded(raw, key=None)):
        with pytest.raises(
            ForeignValueError, match=r"in the key-value store at HashStore .*: it is not used"
        ) as caught:
            other.get("a", what="")
        assert KEY not in str(caught.value)


def test_a_record_of_a_stranger_is_not_parsed() -> None:
    raw = dist.HashStore()
    records = Records(bounded(raw))
    records.append([1])
    assert records.new() == [[1]]
    raw.add("count", 1)
    raw.set("2", "[2]")
    with pytest.raises(ForeignValueError, match="'here/2'"):
        records.new()


# The roster.


def test_members_restore_a_roster_that_a_stranger_has_written(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    member, other = member_of(store), roster_of(store, 1)
    assert other.update()
    forged = other.roster.dumps()
    for text in (forged, "garbage", f"7 {forged}", store.get(ROSTER).decode().replace("founded", "Founded")):
        with caplog.at_level(logging.ERROR, NAME):
            store.set(ROSTER, text)
            store.add("gossip/job/version", 1)
            assert member.update()
        assert store.get(ROSTER).startswith(b"gossip-signed ")
        assert other.update()
        assert other.roster == member.roster
    assert messages(caplog).count("is not signed with this job's key") == 1, "once a minute"
    assert member.roster.view is not None
    assert member.roster.view.ids == (0, 1)


def test_members_restore_the_roster_where_a_stranger_puts_an_old_one_back(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    member = member_of(store)
    old = store.get(ROSTER)
    assert member.update([methodcaller("ask", 5)])
    with caplog.at_level(logging.ERROR, NAME):
        store.set(ROSTER, old.decode())
        store.add("gossip/job/version", 1)
        assert member.update()
    assert member.roster.query == 5
    assert "a stranger has put an old roster back" in messages(caplog)
    late = roster_of(store, 1)
    assert late.update()
    assert late.roster == member.roster


def test_an_event_that_changes_nothing_writes_nothing() -> None:
    store = dist.HashStore()
    member = member_of(store)
    before = store.get(ROSTER)
    assert member.update([begin((0, 1), 1, step=0)])
    assert store.get(ROSTER) == before


def test_a_newcomer_ends_with_an_error_where_the_roster_is_of_a_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_roster, "_FOREIGN_SECONDS", 0.2)
    store = dist.HashStore()
    newcomer = roster_of(store)
    store.set(ROSTER, "{}")
    with pytest.raises(ValueError, match=rf"job 'job': the value of '{ROSTER}' .* is not signed .* firewall"):
        newcomer.check_format()
    assert store.get(ROSTER) == b"{}"


@pytest.mark.parametrize("key", [None, "another key of a job"])
def test_a_worker_with_another_key_or_none_ends_with_an_error(key: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    member_of(store)
    before = store.get(ROSTER)
    monkeypatch.delenv(VARIABLE) if key is None else monkeypatch.setenv(VARIABLE, key)
    with pytest.raises(
        ForeignValueError, match=r"value of 'gossip/job/epoch' .*; set GOSSIP_JOB_KEY to the same secret"
    ):
        roster_of(store)
    assert store.get(ROSTER) == before


def test_an_address_that_a_stranger_has_put_is_not_used() -> None:
    store = dist.HashStore()
    shared = roster_of(store, 0)
    store.set("gossip/job/1/addresses/0/1", "somewhere else")
    with pytest.raises(ForeignValueError, match="'gossip/job/1/addresses/0/1'"):
        shared.gather("1/addresses/0", 0, "here", (0, 1), is_void=lambda: False)


# A job with `key=`.


def forge(stranger: dist.TCPStore, *, old: dict[str, bytes]) -> None:
    """Write another value under each key of a job: of another key, an old one, or none of the job; not its counts."""
    for number, key in enumerate(sorted(old)):
        if not key.endswith(("/version", "/count", "/nonces")) and key != "gossip/job/epoch":
            values = (old[ROSTER], old[key], b"[0, 1, true, []]", b"")
            stranger.set(key, values[number % len(values)].decode(errors="replace"))


def test_values_of_a_stranger_in_the_store_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job has the argument `key`, and no variable. The stranger writes, then a rank is late: the other looks."""
    monkeypatch.delenv(VARIABLE)
    store = serve(0)
    job = Job(f"127.0.0.1:{store.port}", min_workers=2, key=KEY, min_deadline=30.0)
    workers = job.start(2, learning_rate=0.0)
    job.until_live(workers)
    members = workers[0].members
    stranger = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    old = {key: stranger.get(key) for key in stranger.list_keys() if key.startswith("gossip/")}
    assert all(value.startswith(b"gossip-signed ") for key, value in old.items() if not value.isdigit())
    (changes,) = {key.rpartition("/")[0] for key in old if "/gossip_changes/" in key and key.endswith("/nonces")}
    for number in range(3):
        forge(stranger, old=old)
        count = stranger.add(f"{changes}/count", 1)
        stranger.set(f"{changes}/{count}", f"[{number % 2}, 0, true, []]")
        stranger.add("gossip/job/version", 1)
    workers[1].is_paused.set()  # so that worker 0 waits, and looks for changes
    time.sleep(1.0)
    with torch.no_grad():  # wrong weights would move the mean
        for own in workers[1].model.parameters():
            own.add_(1.0)
    workers[1].may_go_on.set()
    job.until_live(workers)
    close(job.end())
    assert [worker.members for worker in workers] == [members] * 2
    for worker in workers:
        for own, first in zip(worker.model.parameters(), model_of().parameters(), strict=True):
            torch.testing.assert_close(own, first + 0.5)


@pytest.mark.parametrize("key", [None, "another key of a job"])
def test_the_argument_key_keeps_workers_with_another_one_out(key: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    store = dist.HashStore()
    own = Membership(store, min_workers=1, key=KEY, host="127.0.0.1")
    assert own.job.store.key == KEY.encode()
    with pytest.raises(ForeignValueError, match="value of 'gossip/job/epoch'") as caught:
        Membership(store, min_workers=1, key=key, host="127.0.0.1")
    assert KEY not in str(caught.value)
    monkeypatch.setenv(VARIABLE, "another key of a job")
    assert Membership(store, min_workers=1, key=KEY, host="127.0.0.1").job.store.key == KEY.encode()


def test_a_short_key_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"got key of 5 bytes, expected a secret text of at least 16 bytes"):
        Membership(dist.HashStore(), min_workers=1, key="short")


# The ports of Gloo.


@pytest.mark.parametrize("keys", [[KEY, KEY, KEY], [KEY, KEY, "another key of a job"]], ids=["one", "two"])
def test_links_are_used_where_both_ends_have_the_key(keys: list[str]) -> None:
    store = dist.HashStore()

    def connect(group: dist.ProcessGroup) -> float | str:
        rank, size = group.rank(), group.size()
        places, exchange = {"all": (rank, size)}, exchange_over(store, rank, size)
        try:
            (made,) = connect_groups(places, exchange, patience=TIMEOUT, host="127.0.0.1", key=keys[rank].encode())
        except RuntimeError as error:
            return str(error)
        x = torch.ones(1)
        made.allreduce([x]).wait()
        return float(x)

    results = run_ranks(3, connect)
    if keys[2] == KEY:
        assert results == [3.0] * 3
    else:
        assert all("a program without the key of the job has connected in place of rank" in str(x) for x in results)
        assert KEY not in str(results)


# Without a key.


@pytest.mark.parametrize(
    ("host", "key", "expected"),
    [("10.0.0.1", None, 1), ("127.0.0.1", None, 0), ("127.0.0.2", None, 0), ("10.0.0.1", b"k" * 16, 0)],
)
def test_a_job_that_strangers_reach_has_one_warning(
    host: str, key: bytes | None, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    class Stub:
        class job:
            name = "job"

            class store:
                pass

    Stub.job.host, Stub.job.store.key = host, key  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING, NAME):
        Generations._warn_without_key(Stub)  # type: ignore[arg-type]
    assert messages(caplog).count("and no key: a program that reaches their ports can change the model") == expected


@pytest.mark.parametrize(
    ("host", "has_key", "warns"), [("0.0.0.0", False, True), ("0.0.0.0", True, False), ("127.0.0.2", False, False)]
)
def test_the_command_warns_where_strangers_reach_the_store(
    host: str, has_key: bool, warns: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not has_key:
        monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(command.threading.Event, "wait", lambda *_: True)
    assert command.main(["--host", host, "--port", "0"]) == 0
    shown = capsys.readouterr().err
    assert ("warning: got workers at 0.0.0.0 and no key" in shown) == warns
    assert KEY not in shown
