"""The object store as the rest of cachefs sees it: a versioned key-value store with conditional writes.

Backends are synchronous and thread-safe; async code calls one method per thread hop. A method makes at most one logical
request and never retries a conditional write by itself: what an unclear outcome means is decided in `publish.writes`.

Errors of StoreError: ConditionFailed and ConditionConflict from conditional writes, UnavailableError when nothing is
known, NoSuchUpload, BadPart, Unsupported. Others: DeniedError, NotFoundError (the version is not there), NoStoreError
(bucket or directory are not there: nothing is known of any version). A method never returns a half result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from cachefs.errors import InvalidError

Buffer = bytes | bytearray | memoryview

HISTORY = 100
"""Old versions of a key that a rule for them must keep: the history of pointers. The most that S3 lets a rule keep."""
STREAM_CHUNK = 4 << 20
"""Longest chunk of a streamed read, bytes."""


class Condition(msgspec.Struct, frozen=True):
    """The condition of a write: exactly one of the two. `if_match` is an ETag exactly as the store returned it."""

    if_none_match: bool = False
    if_match: str | None = None

    def __post_init__(self) -> None:
        if self.if_none_match == (self.if_match is not None):
            raise InvalidError("a condition is either if_none_match or if_match")

    def holds(self, current: str | None) -> bool:
        """Return whether a write may go ahead over the current version's ETag (None: no version, or a delete marker).

        These are S3's rules (user guide, "Conditional write behavior"); If-Match over nothing fails.
        """
        return current is None if self.if_none_match else current == self.if_match


CREATE_ONLY = Condition(if_none_match=True)


class ObjectInfo(msgspec.Struct, frozen=True):
    """One object version. `version_id` is never empty. `metadata` are the user's keys, lower case.

    `checksum` is the SHA-256 the store itself reports, as in manifest.Shard.sha256 (hex, no `-N` suffix), or None when
    the store keeps none.
    """

    key: str
    version_id: str
    etag: str
    size: int
    metadata: Mapping[str, str] = {}
    checksum: str | None = None


class PartInfo(msgspec.Struct, frozen=True):
    """One uploaded part of a multipart upload. `sha256` is binary, None when the store does not report it."""

    number: int
    etag: str
    size: int
    sha256: bytes | None = None


class VersionInfo(msgspec.Struct, frozen=True):
    """One entry of a version listing. `modified` is the store's clock, seconds since the epoch."""

    key: str
    version_id: str
    is_latest: bool
    is_marker: bool
    size: int
    modified: float


class UploadInfo(msgspec.Struct, frozen=True):
    """One multipart upload in progress. `initiated` is the store's clock, seconds since the epoch."""

    key: str
    upload_id: str
    initiated: float


class ExpiryRule(msgspec.Struct, frozen=True):
    """A rule by which the store itself deletes objects of a key prefix by age. `expires`: current ones, behind a delete
    marker when the bucket is versioned. `keeps`: old versions of a key, except the newest so many; None: not those.
    """

    id: str
    prefix: str
    expires: bool
    keeps: int | None


class Listing(msgspec.Struct, frozen=True):
    """Keys and, when a delimiter was given, common prefixes, each sorted; complete (all pages read)."""

    keys: tuple[str, ...]
    prefixes: tuple[str, ...] = ()


class ObjectStore(Protocol):
    """A store that has passed, or is about to be given to, the probe."""

    @property
    def url(self) -> str:
        """Return where the store is, for messages; holds no secret."""
        ...

    @property
    def prefix(self) -> str:
        """Return the key prefix from the store URL, without slashes at its ends."""
        ...

    def check(self) -> None:
        """Check that the bucket or directory exists and can be read; changes nothing. Raises NoStoreError,
        DeniedError, UnavailableError.
        """
        ...

    def prepare(self) -> None:
        """Check as `check` does, and make ready what writes need. Raises what `check` raises, and Unsupported."""
        ...

    def versioning(self) -> bool:
        """Return whether versioning is enabled (not suspended)."""
        ...

    def expiry_rules(self) -> Sequence[ExpiryRule]:
        """Return the rules that are enabled and do not ask for tags: cachefs gives objects none. Raises DeniedError,
        and Unsupported where there are no such rules.
        """
        ...

    def put(
        self,
        key: str,
        body: Buffer,
        *,
        condition: Condition | None,
        sha256: bytes | None = None,
        metadata: Mapping[str, str] = {},
    ) -> ObjectInfo:
        """Write one object in one request. `sha256`, binary, is sent for the store to verify; it is trusted to be
        right.

        With a condition the request is sent exactly once. Returns the new version.
        """
        ...

    def create_multipart(self, key: str, *, metadata: Mapping[str, str] = {}) -> str:
        """Start a multipart upload with SHA-256 part checksums; return its upload id."""
        ...

    def upload_part(self, key: str, upload_id: str, number: int, body: Buffer, *, sha256: bytes) -> str:
        """Upload part `number` (from 1); return its ETag. Raises NoSuchUpload, BadPart."""
        ...

    def list_parts(self, key: str, upload_id: str) -> list[PartInfo]:
        """Return the parts the store holds, by number. Raises NoSuchUpload."""
        ...

    def complete_multipart(
        self, key: str, upload_id: str, parts: Sequence[PartInfo], *, condition: Condition | None
    ) -> ObjectInfo:
        """Complete an upload from consecutive parts, sent exactly once. An error body inside a 200 is UnavailableError.

        The `metadata` returned may be empty, since S3's answer does not carry it: `head` has it.
        Raises NoSuchUpload (completed or aborted: read back), BadPart (InvalidPart: list the parts and send the
        missing).
        """
        ...

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Abort an upload; unknown uploads are fine."""
        ...

    def list_multiparts(self, prefix: str) -> list[UploadInfo]:
        """Return the uploads in progress under a prefix."""
        ...

    def head(self, key: str, version_id: str | None = None) -> ObjectInfo | None:
        """Return the current or the named version, with its checksum; None when there is none (or a delete marker).

        Raises CorruptError where it shows that the version is there and its bytes are not.
        """
        ...

    def get(self, key: str, version_id: str | None = None) -> tuple[ObjectInfo, bytes] | None:
        """Read a small object whole; None when there is none. Checked against its length."""
        ...

    def get_stream(self, key: str, version_id: str) -> Iterator[bytes]:
        """Read a pinned version whole, in order, as chunks of at most STREAM_CHUNK bytes.

        For sequential reads, and the only way to read large objects from a store whose probe said `ranges=False`.
        Checked against the version's length: the iteration raises CorruptError instead of ending short,
        UnavailableError when the connection breaks, and NotFoundError, no later than at the first chunk, when the
        version is gone. Close it if it is not read to the end.
        """
        ...

    def get_range(self, key: str, version_id: str, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes of a pinned version.

        Accepts only a 206 with the matching Content-Range (I20). Raises NotFoundError when the version is gone,
        CorruptError when the store answers with other bytes than were asked for.
        """
        ...

    def list(self, prefix: str, *, delimiter: str = "") -> Listing:
        """List keys (not versions) under a prefix; all pages, or an error."""
        ...

    def list_versions(self, prefix: str) -> Iterator[VersionInfo]:
        """Iterate over all versions and delete markers under a prefix."""
        ...

    def delete_version(self, key: str, version_id: str) -> None:
        """Delete one version for good. The only delete there is outside the probe; already gone is fine."""
        ...

    def probe_delete(self, key: str) -> None:
        """Put a delete marker on a key under `.probe/`: the probe must see how conditions behave over one.

        Raises InvalidError for any other key: there is no plain delete.
        """
        ...


class StoreReads(Protocol):
    """The part of a store that readers need; `restore` asks for no more."""

    def head(self, key: str, version_id: str | None = None) -> ObjectInfo | None:
        """See ObjectStore.head."""
        ...

    def get(self, key: str, version_id: str | None = None) -> tuple[ObjectInfo, bytes] | None:
        """See ObjectStore.get."""
        ...

    def get_stream(self, key: str, version_id: str) -> Iterator[bytes]:
        """See ObjectStore.get_stream."""
        ...

    def get_range(self, key: str, version_id: str, offset: int, length: int) -> bytes:
        """See ObjectStore.get_range."""
        ...

    def list(self, prefix: str, *, delimiter: str = "") -> Listing:
        """See ObjectStore.list."""
        ...
