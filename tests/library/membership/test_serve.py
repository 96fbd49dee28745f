"""The store of a job: it listens at the address that it is told to, and nowhere else."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch.distributed as dist

from gossip_modules.membership import serve as command
from gossip_modules.membership.serve import main, serve

SECONDS = 30.0


def answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=SECONDS).close()
    except (ConnectionRefusedError, TimeoutError):
        # Timeout: another test listens at this port of the other address, and its queue is full.
        return False
    return True


def served(host: str) -> Any:
    """Serve a store at a port where no other test answers at 127.0.0.1 or 127.0.0.2, as far as five tries find one."""
    other = {"127.0.0.2": "127.0.0.1", "localhost": "127.0.0.2"}.get(host)
    for _ in range(5):
        store = serve(0, host=host)
        if other is None or not answers(other, store.port):  # a store that listens everywhere answers in all tries
            break
    return store


@pytest.mark.parametrize("host", ["127.0.0.2", "0.0.0.0", "localhost"])
def test_the_store_listens_at_its_host_only(host: str) -> None:
    store = served(host)
    assert answers("127.0.0.1", store.port) == (host != "127.0.0.2")
    assert answers("127.0.0.2", store.port) == (host != "localhost")
    client = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    client.set("key", "value")
    assert store.get("key") == b"value"


def test_by_default_only_this_machine_reaches_it() -> None:
    store = serve(0)
    assert (store.host, answers("127.0.0.2", store.port)) == ("127.0.0.1", False)


def test_a_store_may_begin_again_at_its_port() -> None:
    store = serve(0)
    port = store.port
    client = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    client.set("key", "value")
    del client, store
    assert serve(port).port == port


def test_a_port_in_use_and_an_unknown_host_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    store = serve(0)
    with pytest.raises(RuntimeError, match=rf"got port {store.port} at 127.0.0.1, expected a free one: .*in use"):
        serve(store.port)
    for host in ("192.0.2.1", "no such host"):
        with pytest.raises(ValueError, match=f"got host '{host}', expected a name or an address of this machine"):
            serve(0, host=host)
    assert main(["--port", str(store.port), "--host", "127.0.0.1"]) == 2
    assert main(["--host", "192.0.2.1"]) == 2
    error = capsys.readouterr().err
    assert f"error: got port {store.port} at 127.0.0.1, expected a free one" in error
    assert "error: got host '192.0.2.1', expected" in error
    assert error.count("see --host and --port") == 2


class Ended:
    """In place of the event for which the command waits: what is to be seen meanwhile."""

    addresses: ClassVar[list[tuple[str, int]]] = []
    host = ""

    def wait(self) -> None:
        store = Path(self.host).read_text(encoding="utf-8").strip()
        name, _, port = store.rpartition(":")
        self.addresses.append((name, int(port)))
        for host in ("127.0.0.1", "127.0.0.2"):
            if answers(host, int(port)):
                self.addresses.append((host, int(port)))

    def set(self) -> None:
        """A signal has come."""


@pytest.mark.parametrize(
    ("options", "name", "reached"),
    [
        pytest.param(["--host", "127.0.0.2"], "127.0.0.2", ["127.0.0.2"], id="an address"),
        pytest.param([], "reply", ["127.0.0.2"], id="the name of this machine"),
        pytest.param(["--host", "0.0.0.0"], "reply", ["127.0.0.1", "127.0.0.2"], id="all"),
    ],
)
def test_the_command_binds_the_address_that_it_prints(
    options: list[str],
    name: str,
    reached: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    look_up = socket.getaddrinfo
    monkeypatch.setattr(socket, "gethostname", lambda: "reply")
    monkeypatch.setattr(socket, "getaddrinfo", lambda h, *a, **o: look_up("127.0.0.2" if h == "reply" else h, *a, **o))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(command.threading, "Event", Ended)
    path = tmp_path / "store"
    Ended.addresses, Ended.host = [], str(path)
    assert main(["--port", "0", "--address-file", str(path), *options]) == 0
    (named, port), *answered = Ended.addresses
    assert named == name
    assert answered == [(host, port) for host in reached]
    out, error = capsys.readouterr()
    host = options[-1] if options else "reply"
    assert out == f"serving the membership of jobs at {host} on port {port}\n"
    assert ("which only this machine reaches; see --host" in error) == (not options)
