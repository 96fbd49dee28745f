"""Contact: the address of a worker, its secret for identification, and the query for a reply."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import hmac
import selectors
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...transport.job_key import CODE_BYTES, NONCE_BYTES, Handshake, code_of

Address = tuple[str, int]
SECRET_BYTES = 16
HELLO = struct.Struct(f"!8sQ{NONCE_BYTES}s")  # the job, the worker whose listener it is, and a nonce of the connection
_NUM_PUBLIC = HELLO.size - NONCE_BYTES
GREETING_BYTES = HELLO.size + CODE_BYTES


@dataclass(frozen=True)
class Contact:
    """The address of a worker, and its secret for identification.

    [Note: secrets of workers] Each worker draws a random number. The others read it in the roster. Both ends of a
    connection to the worker show that they know it, by a `Handshake`, which does not contain it and fits no other
    connection. So a stranger cannot send messages as this worker. A program that reads the store, or the traffic
    between workers, can, unless the job has a key: then the secret is a code of the number under the key.

    Attributes:
        worker: its id.
        address: the address of its listener.
        secret: its random number.
    """

    worker: int
    address: Address
    secret: bytes = field(repr=False)

    def handshake(self, job: bytes, key: bytes | None) -> Handshake:
        """The handshake of a connection to this worker; `job`: see `digest`; `key`: of the job."""
        secret = self.secret if key is None else code_of(key, "liveness", content=self.secret)
        return Handshake(secret, "liveness", job.hex(), self.worker)

    def hello(self, job: bytes, nonce: bytes) -> bytes:
        """The first message of the listener of this worker."""
        return HELLO.pack(job, self.worker, nonce)


class Greeting:
    """The messages of one connection to a worker, at the end that connects; none of them is kept but the greeting.

    Args:
        contact: the contact of the worker.
        job, key: see `Contact.handshake`.

    Attributes:
        answer: to send, once the hello of the worker has come; empty: it has not, or this was sent.
        is_whole: whether the worker has shown its secret; None: not yet; False: another program has the port.
        has_hello: whether the hello of the worker has come; a stranger may have sent it.
    """

    def __init__(self, contact: Contact, job: bytes, key: bytes | None) -> None:
        self._public, self._handshake = contact.hello(job, b"")[:_NUM_PUBLIC], contact.handshake(job, key)
        self._received, self._expected, self.answer = b"", b"", b""
        self.is_whole: bool | None = None
        self.has_hello = False

    def take(self, data: bytes) -> bytes:
        """Take in bytes as they come; returns those after the greeting."""
        self._received, rest = self._received + data[: (left := GREETING_BYTES - len(self._received))], data[left:]
        if self.is_whole is not None:
            return rest
        heard = self._received[: HELLO.size]
        if not self._public.startswith(heard[:_NUM_PUBLIC]):
            self.is_whole = False
        elif len(heard) == HELLO.size and not self.has_hello:
            self.has_hello = True
            self.answer, self._expected = self._handshake.answer(heard[_NUM_PUBLIC:])
        if len(self._received) == GREETING_BYTES:
            self.is_whole = hmac.compare_digest(self._received[HELLO.size :], self._expected)
        return rest

    def taken(self) -> bytes:
        """The answer, once."""
        answer, self.answer = self.answer, b""
        return answer


def digest(job: str) -> bytes:
    """Eight bytes for a job in packets."""
    return hashlib.sha256(job.encode()).digest()[:8]


class LifeSign(enum.Enum):
    """The result of a probe."""

    LIVES = "lives"
    ENDED = "has ended"  # its machine refuses the connection, or another program has its port
    SILENT = "is silent"  # it is stopped, its machine is out of reach, or the connection was closed


def probe(
    contacts: Mapping[int, Contact], *, job: bytes, seconds: float, key: bytes | None = None
) -> dict[int, LifeSign]:
    """Connect to the listeners of workers of a job; returns when one has answered, or all are known to have ended.

    Args:
        contacts: the contacts of the workers, by id.
        job, key: see `Contact.handshake`.
        seconds: the longest wait.

    Returns:
        The signs of life, by id.
    """
    signs = dict.fromkeys(contacts, LifeSign.SILENT)
    greetings = {worker: Greeting(contact, job, key) for worker, contact in contacts.items()}
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as connections:
        for worker, contact in contacts.items():
            if (connection := connect(contact.address)) is not None:
                selector.register(connections.enter_context(connection), selectors.EVENT_READ, worker)
        while selector.get_map() and LifeSign.LIVES not in signs.values() and time.monotonic() < deadline:
            for event, _ in selector.select(max(deadline - time.monotonic(), 0.0)):
                worker, other = event.data, event.fileobj
                assert isinstance(other, socket.socket)
                is_refused, data = False, b""
                try:
                    data = other.recv(64)
                except OSError as error:  # no route, or no answer: nothing shows that the process has ended
                    is_refused = isinstance(error, ConnectionRefusedError)
                greeting = greetings[worker]
                greeting.take(data)
                if answer := greeting.taken():
                    send(other, answer)
                if greeting.is_whole:
                    signs[worker] = LifeSign.LIVES
                elif is_refused or greeting.is_whole is False:
                    signs[worker] = LifeSign.ENDED
                if not data or greeting.is_whole is False:  # closed: perhaps to make room for another connection
                    selector.unregister(other)
    return signs


def connect(address: Address) -> socket.socket | None:
    """A connection in the making; None: there is no route to that address.

    Raises:
        OSError: this process has no descriptor left.
    """
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        connection.connect(address)
    except BlockingIOError:
        pass
    except OSError:
        connection.close()
        return None
    return connection


def send(other: socket.socket, data: bytes) -> None:
    """Send a few bytes, unless the other end has gone, as the next read shows, or reads nothing."""
    with contextlib.suppress(OSError):
        other.send(data)
