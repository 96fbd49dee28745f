"""CurveKeys: the CurveZMQ keys of a worker and of its peers, which say who may read and write models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

KEY_LENGTH = 40  # characters of Z85, ZeroMQ's text form of 32 bytes
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"  # ZeroMQ RFC 32
_GROUP = 5  # characters of a big-endian number of 32 bits


@dataclass(frozen=True)
class CurveKeys:
    """A worker's own pair of keys and the public keys of its peers, each as 40 characters of Z85.

    With keys all traffic is encrypted and both ends are authenticated: a peer is asked only if it has the secret key
    that belongs to the public key under its name, and only holders of one of these keys are answered.
    `zmq.curve_keypair()` makes a pair. Keep `secret` out of version control; `repr` does not show it.

    Args:
        public: this worker's public key.
        secret: this worker's secret key.
        peers: the public keys of the other workers by name.

    Raises:
        ValueError: a key that is not 40 characters of Z85.
    """

    public: str
    secret: str = field(repr=False)
    peers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for owner, key in (("public", self.public), ("secret", self.secret), *self.peers.items()):
            check_key(key, owner=owner)

    def check_pair(self, public_of_secret: str) -> None:
        """Raise ValueError where `public` is not `zmq.curve_public(secret)`, which needs pyzmq."""
        if public_of_secret != self.public:
            raise ValueError(
                f"got the public key {self.public!r} with the secret key of another pair, expected one pair; "
                "zmq.curve_public(secret) tells the public key"
            )

    def of_peer(self, name: str) -> str:
        """The public key of a peer.

        Raises:
            ValueError: there is no key under this name.
        """
        if name not in self.peers:
            raise ValueError(
                f"got no public key of peer {name!r}, expected one beside those of {sorted(self.peers)}; "
                "add it to CurveKeys.peers"
            )
        return self.peers[name]


def check_key(key: str, *, owner: str) -> None:
    """Raise ValueError unless this is a key in Z85. The error does not contain it, as it may be a secret."""
    if not isinstance(key, str) or len(key) != KEY_LENGTH or not key.isascii():
        length = len(key) if isinstance(key, (str, bytes)) else type(key).__name__
        raise ValueError(
            f"got a key '{owner}' of {length} characters, expected a string of {KEY_LENGTH}; "
            "make a pair with zmq.curve_keypair() and decode() both"
        )
    groups = [key[k : k + _GROUP] for k in range(0, KEY_LENGTH, _GROUP)]
    if not set(key) <= set(_Z85) or any(_number(group) >= 1 << 32 for group in groups):
        raise ValueError(
            f"got a key '{owner}' that is no Z85, expected 32 bytes in that form; "
            "was a character lost or changed? make a pair with zmq.curve_keypair() and decode() both"
        )


def _number(group: str) -> int:
    value = 0
    for character in group:
        value = value * len(_Z85) + _Z85.index(character)
    return value
