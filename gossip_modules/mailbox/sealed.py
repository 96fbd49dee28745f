"""Objects as bytes: their seals."""

from __future__ import annotations

import hashlib
import hmac

_MAGIC = b"GMMB\x01"  # the format and its version


class Seal:
    """The seal of objects: HMAC-SHA256 under the key over path and content, in front of the content.

    Without a key it is a SHA-256 digest: a truncated, altered or moved object is noticed, a forged one is not.

    Args:
        key: the key of the job, shared by all workers; None: no key.
    """

    num_bytes = len(_MAGIC) + hashlib.sha256().digest_size

    def __init__(self, key: bytes | None) -> None:
        self._key = key

    def seal(self, path: str, content: bytes) -> bytes:
        """The sealed object for this path, relative to the run."""
        return b"".join([_MAGIC, self._code(path, content), content])

    def open(self, path: str, data: bytes | memoryview) -> bytes | None:
        """The content; None: it is not what `seal` has made with this key for this path."""
        view = memoryview(data)
        content = view[self.num_bytes :]
        expected = _MAGIC + self._code(path, content)
        return bytes(content) if hmac.compare_digest(bytes(view[: self.num_bytes]), expected) else None

    def _code(self, path: str, content: bytes | memoryview) -> bytes:
        code = hashlib.sha256() if self._key is None else hmac.new(self._key, digestmod=hashlib.sha256)
        code.update(path.encode() + b"\0")  # paths have no zero byte
        code.update(content)
        return code.digest()
