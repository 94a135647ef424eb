"""How S3 computes ETags and composite checksums; used by the backends that imitate it. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from cachefs.errors import BadPart
from cachefs.store.base import Buffer


def body_etag(body: Buffer) -> str:
    """Return the ETag of a single put: the quoted MD5 of the body. An identifier here, not protection."""
    return f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'


def multipart_etag(part_etags: Iterable[str]) -> str:
    """Return the ETag of a completed upload: the quoted MD5 over the parts' binary MD5s, with the number of parts."""
    digests = [bytes.fromhex(etag.strip('"')) for etag in part_etags]
    return f'"{hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()}-{len(digests)}"'


def composite(digests: Iterable[bytes]) -> str:
    """Return the composite SHA-256 of a multipart upload, hex: the hash over the parts' binary hashes.

    Of a one-part upload too, as S3 does (user guide, "Checking object integrity"): that is not the part's own hash, so
    an object of one part is better put than uploaded in parts.
    """
    return hashlib.sha256(b"".join(digests)).hexdigest()


def verify(body: Buffer, sha256: bytes | None, what: str) -> None:
    """Check a body against the hash sent with it. Raises BadPart, like S3's BadDigest."""
    if sha256 is not None and hashlib.sha256(body).digest() != sha256:
        raise BadPart(f"{what}: the body does not have the SHA-256 sent with it")
