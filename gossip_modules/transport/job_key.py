"""The key of a job: codes by HMAC-SHA256, with which a worker tells its job's messages and values from a stranger's."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets

VARIABLE = "GOSSIP_JOB_KEY"
MIN_BYTES = 16
CODE_BYTES = hashlib.sha256().digest_size
NONCE_BYTES = 16
_SHORT_BYTES = 1 << 16
WITHOUT_KEY = (
    f"a program that reaches their ports can change the model; set {VARIABLE} to the same secret on all of them, as by "
    f"`export {VARIABLE}=$(openssl rand -hex 16)`, and let a firewall admit only the machines of the job"
)


def key_of(key: str | bytes | None = None) -> bytes | None:
    """The key of a job as bytes; None: the variable GOSSIP_JOB_KEY, if it is set.

    Raises:
        ValueError: the key has fewer than 16 bytes, such as the empty one of a variable without a value. The error has
            its length, and not the key.
    """
    source = VARIABLE if key is None else "key"
    if key is None:
        key = os.environ.get(VARIABLE)
    found = key.encode() if isinstance(key, str) else key
    if found is not None and not (isinstance(found, bytes) and len(found) >= MIN_BYTES):
        size = f"of {len(found)} bytes" if isinstance(found, bytes) else f"of type {type(found).__name__}"
        raise ValueError(
            f"got {source} {size}, expected a secret text of at least {MIN_BYTES} bytes, the same for all workers; "
            f"make one with `openssl rand -hex 16`; for a job without a key unset {VARIABLE}"
        )
    return found


def code_of(key: bytes | None, *names: object, content: bytes | memoryview = b"") -> bytes:
    """The code of a content under names, 32 bytes: HMAC-SHA256 under the key, or without one the SHA-256 digest.

    [Note: one law for codes] All codes of the library are made here: of objects in a mailbox, of values in a key-value
    store, and of messages to a port. The names tell these kinds apart, so a code of one is of no use for another. A
    message to a port has two nonces in its content, one of each end, so a recorded message fits no other connection.

    Args:
        key: the key of the job.
        names: texts and numbers without a zero byte: the kind of the message, its place, its sender.
        content: any bytes.
    """
    place = "".join(f"{name}\0" for name in names).encode()
    if key is not None and len(content) <= _SHORT_BYTES:  # one call for a datagram; a copy of its content
        return hmac.digest(key, place + content, "sha256")
    code = hashlib.sha256() if key is None else hmac.new(key, digestmod=hashlib.sha256)
    code.update(place)
    code.update(content)
    return code.digest()


def is_code(code: bytes | memoryview, key: bytes | None, *names: object, content: bytes | memoryview = b"") -> bool:
    """Whether a code is equal to the result of `code_of`; the comparison takes constant time."""
    return hmac.compare_digest(bytes(code), code_of(key, *names, content=content))


class Handshake:
    """How two ends of one connection show each other that they have the key, and do not show the key.

    [Note: three messages] The listener sends a nonce; the other end answers with a nonce of its own and a code of both;
    the listener sends another code of both. So each end knows that the other one has the key, and has sent this now, on
    this connection. A program between the two can pass the messages on, and then change all later bytes: only
    encryption prevents this.

    Args:
        key: the key.
        names: see `code_of`; the same at both ends.
    """

    ANSWER_BYTES = NONCE_BYTES + CODE_BYTES

    def __init__(self, key: bytes, *names: object) -> None:
        self._key, self._names = key, names

    def __repr__(self) -> str:
        return f"Handshake(..., {self._names})"

    @staticmethod
    def hello() -> bytes:
        """The first message, of the listener: a nonce, 16 bytes."""
        return secrets.token_bytes(NONCE_BYTES)

    def answer(self, hello: bytes) -> tuple[bytes, bytes]:
        """The second message, 48 bytes, and the code that must come back, 32 bytes; at the end that connects."""
        own = secrets.token_bytes(NONCE_BYTES)
        return own + self._code("connects", hello + own), self._code("listens", hello + own)

    def reply(self, hello: bytes, answer: bytes) -> bytes | None:
        """The third message, 32 bytes, of the listener; None: the other end has not the key, or another connection."""
        both = hello + answer[:NONCE_BYTES]
        is_answer = is_code(answer[NONCE_BYTES:], self._key, *self._names, "connects", content=both)
        return self._code("listens", both) if is_answer else None

    def _code(self, end: str, both: bytes) -> bytes:
        return code_of(self._key, *self._names, end, content=both)
