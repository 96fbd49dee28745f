"""Objects in an object store: S3 and its like, Google Cloud Storage, Azure Blob Storage."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from .base import Listed, Medium
from .errors import Permanent, Transient

_SMALL = 1 << 20  # bytes; a request for no more should end within _PATIENCE
_PATIENCE, _CONNECT = 15.0, 5.0  # seconds
ENDPOINTS = ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
_CREDENTIALS = (
    "set the credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (aws configure export-credentials prints them), "
    "GOOGLE_SERVICE_ACCOUNT, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
)
_EXPIRED = "renew the credentials and start this worker again; the others train on meanwhile"
_NO_BUCKET = "make the bucket, or give the name of another one"
_REGION = "set AWS_REGION to the region of the bucket"
_ADDRESS = "see whether address, endpoint (AWS_ENDPOINT_URL) and options in the environment are those of this store"
_REMEDIES = {  # by code, then by status of the answer
    **dict.fromkeys(("ExpiredToken", "TokenRefreshRequired", "RequestExpired"), _EXPIRED),
    **dict.fromkeys(("NoSuchBucket", "ContainerNotFound"), _NO_BUCKET),
    **dict.fromkeys(
        ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthenticationFailed", "401"), _CREDENTIALS
    ),
    **dict.fromkeys(("AuthorizationHeaderMalformed", "PermanentRedirect", "301"), _REGION),
    "RequestTimeTooSkewed": "set the clock of this machine",
    "EntityTooLarge": "send smaller objects: fragments of the model, or compressed messages",
    "403": "let these credentials read, write, list and delete objects there, or set those of another user",
    "501": "use a store, or a version of it, with conditional writes (If-None-Match)",
}
_LATER = ("RequestTimeout", "408", "409", "425", "429")  # refusals that another try may not meet
_STATUS, _CODE = re.compile(r"non-2xx status code: (\d{3})"), re.compile(r"<Code>(\w+)</Code>")
_METADATA = re.compile(r"Error performing \w+ http://(169\.254\.169\.254|metadata\.google\.internal)/")


class BucketMedium(Medium):
    """Objects in an object store, by `obstore`.

    Args:
        address: "s3://bucket/prefix", "gs://..." or "az://...". All else comes from the environment, as for `obstore`.
        options: see `Medium`.

    Raises:
        ImportError: `obstore` is not installed.
        MailboxError: an option is wrong.
    """

    SCHEMES = ("s3", "gs", "az")

    def __init__(self, address: str, **options: Any) -> None:
        super().__init__(address.rstrip("/"), **options)
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise ImportError(
                f"{address} needs the package obstore; in a clone: pip install '.[mailbox]' (its newest version needs "
                "Python 3.11), or give file:///folder or store://host:port/run"
            ) from error
        self._obstore, self.errors = obstore, (obstore.exceptions.BaseError, OSError)

        def opened(patience: float) -> Any:
            client: Any = {
                "timeout": timedelta(seconds=patience),
                "connect_timeout": timedelta(seconds=min(_CONNECT, patience)),
                "allow_http": any(os.environ.get(name, "").startswith("http://") for name in ENDPOINTS),
            }
            # The tries are those of [Note: retries] of `Medium`.
            retries: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=patience)}
            try:
                return from_url(self.address, client_options=client, retry_config=retries)
            except obstore.exceptions.BaseError as error:
                raise Permanent(_text(error), remedy=_ADDRESS) from error

        # A connection that was cut off shows no error. Small objects need not wait for it as long as large ones.
        self._fast, self._slow = self._repeat(
            "open", "", lambda is_retry: (opened(min(self.timeout, _PATIENCE)), opened(self.timeout)), None
        )

    def _create(self, path: str, data: bytes) -> bool:
        try:
            self._obstore.put(self._store_for(len(data)), path, data, mode="create")
        except self._obstore.exceptions.AlreadyExistsError as error:
            with suppress(FileNotFoundError):
                self._obstore.head(self._fast, path)
                return False
            raise Transient(f"another writer of the object is under way: {_text(error)}") from error
        return True

    def _put(self, path: str, data: bytes) -> None:
        self._obstore.put(self._store_for(len(data)), path, data, use_multipart=False)

    def _get(self, path: str, max_bytes: int) -> bytes | memoryview | None:
        with self._absent_ignored():
            found = self._obstore.get(self._store_for(max_bytes), path)  # the header of the answer; no content yet
            return b"" if found.meta["size"] > max_bytes else memoryview(found.bytes())
        return None

    def _list(self, prefix: str) -> dict[str, Listed]:
        found = [entry for page in self._obstore.list(self._fast, prefix or None) for entry in page]
        tagged = ((entry, entry["e_tag"] or f"{entry['size']}-{entry['last_modified']}") for entry in found)
        return {e["path"]: Listed(tag, e["size"], e["last_modified"].timestamp()) for e, tag in tagged}

    def _delete(self, paths: Iterable[str]) -> None:
        paths = list(paths)
        with self._absent_ignored():
            self._obstore.delete(self._fast, paths)
            return
        for path in paths:  # a store without a request for many has ended at an absent one
            with self._absent_ignored():
                self._obstore.delete(self._fast, path)

    def _store_for(self, num_bytes: int) -> Any:
        return self._fast if num_bytes <= _SMALL else self._slow

    @contextmanager
    def _absent_ignored(self) -> Iterator[None]:
        """Ignore that there is no such object; there must be the bucket."""
        try:
            yield
        except FileNotFoundError as error:
            if _REMEDIES.get(_found(_CODE, str(error))) == _NO_BUCKET:
                raise

    def _failure(self, error: Exception) -> Transient:
        text = _text(error)
        status, code = _found(_STATUS, text), _found(_CODE, text)
        if _METADATA.search(text):  # where obstore looks for credentials that nobody has set
            return (Permanent if status.startswith("4") else Transient)(text, remedy=_CREDENTIALS)
        if status.startswith(("3", "4", "501")) and not {status, code} & {*_LATER}:
            return Permanent(text, remedy=_REMEDIES.get(code) or _REMEDIES.get(status, _ADDRESS))
        return Transient(text)


def _found(pattern: re.Pattern[str], text: str) -> str:
    return "".join(pattern.findall(text)[:1])


def _text(error: Exception) -> str:
    """The error without the dump of the objects of the Rust library."""
    return f"{type(error).__name__}: {str(error).partition('Debug source:')[0].strip()}"
