"""Contact: where a worker is reached, and the number by which others know that it is this worker."""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass, field
from enum import Enum

Address = tuple[str, int]
SECRET_BYTES = 16
PACKET = struct.Struct("!8sQ16s")  # the job, the worker that it is about, and a code that only the job can compute
_NUM_PUBLIC = 16  # bytes of a packet that are no secret


class Packet(Enum):
    """The messages of liveness; the code of one kind is of no use for another."""

    HEARTBEAT = b"heartbeat"  # a datagram: this worker runs
    GREETING = b"greeting"  # of a listener: it is this worker's
    WATCH = b"watch"  # the answer: the connection is one of a worker of this job


@dataclass(frozen=True)
class Contact:
    """Where a worker is reached, and how others know it.

    [Note: secrets of workers] Each worker draws a random number, which the others read in the roster. A packet has a
    code of it (HMAC-SHA256) and not the number, so that a stranger who connects to a worker learns nothing with which
    he could speak in its name. Whoever reads the store, or the traffic between workers, can.

    Attributes:
        worker: its id.
        address: of its heartbeats and its listener.
        secret: its random number.
    """

    worker: int
    address: Address
    secret: bytes = field(repr=False)

    def packet(self, kind: Packet, job: bytes) -> bytes:
        """The packet of this kind about this worker; `job`: see `digest`."""
        code = hmac.digest(self.secret, kind.value + struct.pack("!8sQ", job, self.worker), "sha256")
        return PACKET.pack(job, self.worker, code)


def is_packet(heard: bytes, expected: bytes) -> bool | None:
    """Whether `heard` begins with the packet that is expected; None: it may, once more of it has come."""
    if not expected[:_NUM_PUBLIC].startswith(heard[:_NUM_PUBLIC]):
        return False
    return hmac.compare_digest(heard[: PACKET.size], expected) if len(heard) >= PACKET.size else None


def digest(job: str) -> bytes:
    """Eight bytes that stand for a job in packets."""
    return hashlib.sha256(job.encode()).digest()[:8]
