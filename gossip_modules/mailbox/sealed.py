"""Objects as bytes: headers and tensors without pickle, and seals."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..transport.job_key import CODE_BYTES, code_of, is_code
from ..transport.state_tree import bytes_of, empty_tensors, num_bytes_of, specs_of

_MAX_HEADER = 4 << 20  # bytes of JSON; Python's objects take some 20 times as much
_LENGTH = 4  # bytes of the size of the JSON
JOB = "job"  # the path of the object with the identity of a run
_MAGIC = b"GMMB\x01"  # the format and its version


def pack(header: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> bytes:
    """A header and tensors as bytes: the JSON of both, and the little-endian numbers of the tensors.

    Args:
        header: values for JSON, with texts as keys at all levels.
        tensors: of any device, dtype and shape.

    Raises:
        TypeError: the header has a value of another type.
        ValueError: the JSON is larger than 4 MiB.
    """
    assert sys.byteorder == "little", "the mailbox knows no other order of bytes"
    text = json.dumps([dict(header), specs_of(tensors)], separators=(",", ":")).encode()
    if len(text) > _MAX_HEADER:
        raise ValueError(f"got a header of {len(text)} bytes of JSON, expected at most {_MAX_HEADER}; give tensors")
    numbers = [bytes_of(x.detach().cpu()).numpy().data for x in tensors]
    return b"".join([len(text).to_bytes(_LENGTH, "little"), text, *numbers])


def unpack(data: bytes | memoryview, *, max_bytes: int) -> tuple[dict[str, Any], list[Tensor]]:
    """The header and the tensors of `pack`. The tensors have memory of their own.

    Args:
        data: the bytes; all sizes are checked before memory is allocated.
        max_bytes: the limit of their number.

    Raises:
        ValueError: `pack` has not made them, or they are more than `max_bytes`.
    """
    view = memoryview(data)
    end = _LENGTH + int.from_bytes(view[:_LENGTH], "little")
    if len(view) > max_bytes or not _LENGTH < end <= min(len(view), _LENGTH + _MAX_HEADER):
        raise ValueError(f"got {len(view)} bytes, expected at most {max_bytes} bytes of a header and its tensors")
    try:
        header, specs = json.loads(bytes(view[_LENGTH:end]))
    except (RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"got a header that is no JSON of a header and tensors: {error}") from error
    if not isinstance(header, dict) or num_bytes_of(specs) != len(view) - end:
        raise ValueError(f"got {len(view) - end} bytes of tensors, expected a header and its {num_bytes_of(specs)}")
    tensors = empty_tensors(specs)
    for x in tensors:
        numbers = bytes_of(x).numpy().data
        numbers[:] = view[end : end + numbers.nbytes]
        end += numbers.nbytes
    return header, tensors


class Seal:
    """The seal of objects: HMAC-SHA256 under the key over run, path and content, in front of the content.

    Without a key it is a SHA-256 digest: a truncated, altered or moved object is noticed, a forged one is not.

    [Note: One run] The first worker of a run draws its identity and writes it into the object `job`, the only one whose
    seal has no identity. An object of another run with the same key does not open, at whatever place it is put.

    Args:
        key: the key of the job, shared by all workers; None: no key.
        run: the identity of the run; "": not known yet.
    """

    num_bytes = len(_MAGIC) + CODE_BYTES

    def __init__(self, key: bytes | None, *, run: str = "") -> None:
        self._key, self._run = key, run

    def of_run(self, run: str) -> Seal:
        """The seal of the objects of a run with this identity."""
        return Seal(self._key, run=run)

    def seal(self, path: str, content: bytes) -> bytes:
        """The sealed object of a content.

        Args:
            path: its path, relative to the run.
            content: its content.
        """
        return b"".join([_MAGIC, code_of(self._key, *self._names(path), content=content), content])

    def open(self, path: str, data: bytes | memoryview) -> bytes | None:
        """The content; None: `seal` has not made these bytes with this key for this path."""
        view = memoryview(data)
        content, code = view[self.num_bytes :], view[len(_MAGIC) : self.num_bytes]
        is_sealed = is_code(code, self._key, *self._names(path), content=content)
        return bytes(content) if is_sealed and view[: len(_MAGIC)] == _MAGIC else None

    def _names(self, path: str) -> tuple[str, str]:
        """See `code_of`; neither has a zero byte."""
        return "" if path == JOB else self._run, path
