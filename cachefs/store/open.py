"""From a store URL to a store."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

from cachefs.errors import InvalidError
from cachefs.store.base import ObjectStore

_HINT = "use file:///absolute/directory or s3://bucket/prefix"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


def open_store(
    url: str, *, endpoint_url: str | None = None, region: str | None = None, connections: int = 16
) -> ObjectStore:
    """Return the store at `url`: `file:///absolute/directory` or `s3://bucket/prefix`. Nothing is sent yet.

    `endpoint_url` and `region` are for S3 and None means boto3's defaults; `connections` is the most requests at once.
    Raises InvalidError for any other URL.
    """
    parts = urlsplit(url)
    if parts.query or parts.fragment or parts.username is not None:
        raise InvalidError(f"store URL holds more than a place: {parts.scheme}://...", hint=_HINT)
    match parts.scheme:
        case "file":
            if parts.netloc or not parts.path.startswith("/"):
                raise InvalidError(f"not an absolute file URL: {url}", hint=_HINT)
            if endpoint_url is not None:
                raise InvalidError(f"an endpoint means nothing for {url}", hint="remove endpoint_url")
            from cachefs.store.directory import DirectoryStore

            return DirectoryStore(unquote(parts.path))
        case "s3":
            if not _BUCKET.fullmatch(parts.netloc):
                raise InvalidError(f"not a bucket name: {parts.netloc!r} in {url}", hint=_HINT)
            from cachefs.store.s3 import S3Store  # boto3 takes a while to import

            return S3Store(parts.netloc, parts.path, endpoint_url=endpoint_url, region=region, connections=connections)
    raise InvalidError(f"unknown kind of store: {url}", hint=_HINT)
