"""Objects that no holder of the key has written for their paths are never opened, and each is counted."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from gossip_modules.mailbox.medium import Medium, open_medium
from gossip_modules.mailbox.sealed import Seal

KEY, NUM_TRIES, MAX_BYTES = b"the key of the job", 500, 4096


def forged(medium: Medium, draw: random.Random, path: str) -> None:
    """An object of a stranger: bytes of any kind, or a seal under another key or none."""
    content = draw.randbytes(draw.randrange(200))
    key = draw.choice([None, draw.randbytes(32), KEY[:-1], b""])
    medium._put(path, draw.choice([content, Seal(key).seal(path, content)]))


def altered(medium: Medium, draw: random.Random, path: str) -> None:
    """One bit is another one."""
    data = bytearray(medium.seal.seal(path, draw.randbytes(1 + draw.randrange(200))))
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    medium._put(path, bytes(data))


def replayed(medium: Medium, draw: random.Random, path: str) -> None:
    """The bytes of an object stand at another path, too."""
    medium.create(f"of/{path}", draw.randbytes(draw.randrange(200)))
    data = medium._get(f"of/{path}", MAX_BYTES)
    assert data is not None
    medium._put(path, bytes(data))


def moved(medium: Medium, draw: random.Random, path: str) -> None:
    """An object of another worker has got this path."""
    replayed(medium, draw, path)
    medium.delete([f"of/{path}"])


def truncated(medium: Medium, draw: random.Random, path: str) -> None:
    """The end is missing."""
    data = medium.seal.seal(path, draw.randbytes(1 + draw.randrange(200)))
    medium._put(path, data[: draw.randrange(len(data))])


def oversized(medium: Medium, draw: random.Random, path: str) -> None:
    """The seal is right, and the content larger than allowed."""
    medium.put(path, draw.randbytes(MAX_BYTES + 1 + draw.randrange(200)))


ATTACKS: Mapping[str, Callable[[Medium, random.Random, str], None]] = {
    attack.__name__: attack for attack in (forged, altered, replayed, moved, truncated, oversized)
}


@pytest.mark.parametrize("key", [KEY, None], ids=["key", "no-key"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_opens(attack: str, key: bytes | None) -> None:
    if attack == "forged" and key is None:
        pytest.skip("without a key anyone can write an object that opens; the warning says so")
    medium, draw = open_medium(f"memory://{uuid.uuid4().hex}", timeout=5.0, key=key), random.Random(attack)
    opened = []
    for i in range(NUM_TRIES):
        ATTACKS[attack](medium, draw, f"round/{i}/a")
        opened.append(medium.get(f"round/{i}/a", max_bytes=MAX_BYTES))
    assert opened == [None] * NUM_TRIES
    assert medium.counts.refused == NUM_TRIES


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_opens_in_any_store(address: str, attack: str) -> None:
    medium, draw = open_medium(address, timeout=5.0, key=KEY), random.Random(attack)
    for i in range(3):
        ATTACKS[attack](medium, draw, f"round/{i}/a")
        assert medium.get(f"round/{i}/a", max_bytes=MAX_BYTES) is None
    assert medium.counts.refused == 3


def test_a_file_that_is_oversized_is_not_read(tmp_path: Path) -> None:
    medium = open_medium(f"file://{tmp_path}/run", timeout=5.0, key=KEY)
    with (tmp_path / "run" / "huge").open("wb") as file:
        file.truncate(1 << 40)  # a hole, without blocks
    assert medium.get("huge", max_bytes=MAX_BYTES) is None
    assert medium.counts.refused == 1
    assert medium.counts.bytes_read == 0
