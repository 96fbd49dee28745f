"""Objects in S3: the errors of the server, over the wire."""

from __future__ import annotations

import socket
import uuid

import pytest

from gossip_modules.mailbox.errors import MailboxError, Unavailable
from gossip_modules.mailbox.medium import Medium, open_medium
from tests.library.mailbox.clock import InstantClock
from tests.library.mailbox.conftest import FaultyServer

KEY = b"the key of the job"


def bucket(name: str = "bucket", *, timeout: float = 5.0) -> Medium:
    return open_medium(f"s3://{name}/{uuid.uuid4().hex}", timeout=timeout, key=KEY, clock=InstantClock())


@pytest.mark.parametrize(
    ("answer", "remedy"),
    [
        (("400 Bad Request", "ExpiredToken"), "renew the credentials and start this worker again"),
        (("403 Forbidden", "AccessDenied"), "let these credentials read, write, list and delete"),
        (("403 Forbidden", "SignatureDoesNotMatch"), "set the credentials: AWS_ACCESS_KEY_ID"),
        (("403 Forbidden", "RequestTimeTooSkewed"), "set the clock of this machine"),
        (("404 Not Found", "NoSuchBucket"), "make the bucket"),
        (("400 Bad Request", "AuthorizationHeaderMalformed"), "set AWS_REGION"),
        (("400 Bad Request", "EntityTooLarge"), "send smaller objects"),
        (("400 Bad Request", "NobodyKnows"), "see whether address, endpoint"),
        (("501 Not Implemented", "NotImplemented"), "conditional writes"),
    ],
)
@pytest.mark.parametrize("call", ["create", "put", "get", "list", "delete"])
def test_refusals_of_the_server_have_remedies(
    s3: FaultyServer, call: str, answer: tuple[str, str], remedy: str
) -> None:
    medium = bucket()
    calls = {
        "create": lambda: medium.create("a", b"x"),
        "put": lambda: medium.put("a", b"x"),
        "get": lambda: medium.get("a", max_bytes=9),
        "list": lambda: medium.list("a"),
        "delete": lambda: medium.delete(["a"]),
    }
    s3.answers = [answer]
    with pytest.raises(MailboxError, match=rf"{call} 'a' in s3://bucket/\w+ failed after 0.0 s, 1 try: .*") as caught:
        calls[call]()
    assert remedy in str(caught.value)
    assert "Debug source" not in str(caught.value)
    assert s3.answers == []


@pytest.mark.parametrize(
    "answer",
    [
        ("503 Slow Down", "SlowDown"),
        ("500 Internal Server Error", "InternalError"),
        ("429 Too Many Requests", "TooManyRequests"),
        ("400 Bad Request", "RequestTimeout"),
        ("409 Conflict", "ConditionalRequestConflict"),
        "cut",
        "lost",
    ],
)
def test_passing_errors_are_tried_again(s3: FaultyServer, answer: tuple[str, str] | str) -> None:
    medium = bucket()
    s3.answers = [answer]
    assert medium.create("a", b"mine")
    s3.answers = [answer]
    medium.put("b", b"beat")
    s3.answers = [answer]
    assert medium.get("a", max_bytes=9) == b"mine"
    s3.answers = [answer]
    assert set(medium.list()) == {"a", "b"}
    s3.answers = [answer]
    medium.delete(["a", "b"])
    assert medium.list() == {}
    assert medium.counts.retries == 5


def test_a_lost_answer_and_the_object_of_another(s3: FaultyServer) -> None:
    medium = bucket()
    medium.create("a", b"theirs")
    s3.answers = ["cut"]
    assert not medium.create("a", b"mine")


def test_a_missing_bucket_is_an_error(s3: FaultyServer) -> None:
    medium = bucket("nobucket")
    with pytest.raises(MailboxError, match=r"(?s)create 'a' .*NoSuchBucket.*; make the bucket"):
        medium.create("a", b"x")


def test_a_large_object_arrives(s3: FaultyServer) -> None:
    medium, data = bucket(), bytes(range(256)) * (6 << 12)  # 6 MiB: more than one part of an upload in parts
    assert medium.create("a", data)
    medium.put("b", data)
    assert medium.get("a", max_bytes=len(data)) == data
    assert medium.get("b", max_bytes=len(data)) == data
    assert medium.get("b", max_bytes=len(data) - 1) is None


def test_a_server_that_is_away_is_unavailable(s3: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody listens there
    medium = bucket()
    with pytest.raises(Unavailable, match=r"failed after 5.0 s, \d+ tries: .*HTTP error.*; see whether"):
        medium.create("a", b"x")


def test_a_hanging_server_ends_at_the_timeout(s3: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        medium = bucket(timeout=0.3)
        with pytest.raises(Unavailable, match="create 'a' in s3://bucket/"):
            medium.create("a", b"x")


def test_unset_credentials_of_azure_are_an_error(s3: FaultyServer) -> None:
    with pytest.raises(
        MailboxError, match=r"open '' in az://c/run .*: .*Account must be specified; see whether .*options"
    ):
        open_medium("az://c/run", timeout=5.0, key=KEY)
