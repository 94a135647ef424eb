"""A store in memory with the semantics of a versioned S3 bucket, for tests and dry runs.

Synchronous, thread-safe and deterministic: version and upload ids come from a counter, times from the `now` given.
Where S3's documentation leaves an order open, the one that hurts most is taken:
- completing an upload with If-None-Match after a delete of the key since its initiation is a 409 (user guide,
  "Conditional write behavior");
- without a condition, a completed upload takes its place in the history by its *initiation* (user guide, "Multipart
  upload overview"), so the version just completed may not be the current one.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from cachefs import clock
from cachefs.errors import (
    BadPart,
    ConditionConflict,
    ConditionFailed,
    CorruptError,
    InvalidError,
    NoSuchUpload,
    NotFoundError,
)
from cachefs.store.base import (
    STREAM_CHUNK,
    Buffer,
    Condition,
    ExpiryRule,
    Listing,
    ObjectInfo,
    PartInfo,
    UploadInfo,
    VersionInfo,
)
from cachefs.store.digests import body_etag, composite, multipart_etag, verify
from cachefs.store.listing import fold, is_probe_key


class _Version(msgspec.Struct, frozen=True):
    """One version of a key; a delete marker has no `info`. `order` is its place in the history."""

    order: int
    version_id: str
    modified: float
    info: ObjectInfo | None = None
    body: bytes = b""


class _Part(msgspec.Struct, frozen=True):
    info: PartInfo
    body: bytes


class _Upload(msgspec.Struct):
    key: str
    order: int
    initiated: float
    metadata: Mapping[str, str]
    parts: dict[int, _Part]


class MemoryStore:
    """See the module's head. `min_part_size` in bytes: S3 has 5 MiB; 0 lets tests use small parts."""

    def __init__(
        self, prefix: str = "", *, min_part_size: int = 0, now: Callable[[], float] = clock.now, name: str = "memory"
    ) -> None:
        self._prefix = prefix.strip("/")
        self._name = name
        self._min_part_size = min_part_size
        self._now = now
        self._lock = threading.RLock()
        self._serial = 0
        self._versions: dict[str, list[_Version]] = {}
        self._uploads: dict[str, _Upload] = {}

    @property
    def url(self) -> str:
        return f"memory://{self._name}/{self._prefix}".rstrip("/")

    @property
    def prefix(self) -> str:
        return self._prefix

    def check(self) -> None:
        return

    def prepare(self) -> None:
        return

    def versioning(self) -> bool:
        return True

    def expiry_rules(self) -> tuple[ExpiryRule, ...]:
        return ()

    def put(
        self,
        key: str,
        body: Buffer,
        *,
        condition: Condition | None,
        sha256: bytes | None = None,
        metadata: Mapping[str, str] = {},
    ) -> ObjectInfo:
        data = bytes(body)
        verify(data, sha256, key)
        checksum = sha256.hex() if sha256 is not None else None
        with self._lock:
            self._require(key, condition)
            return self._add(key, self._next(), data, body_etag(data), metadata, checksum)

    def create_multipart(self, key: str, *, metadata: Mapping[str, str] = {}) -> str:
        with self._lock:
            order = self._next()
            upload_id = f"u{order:06d}"
            self._uploads[upload_id] = _Upload(key, order, self._now(), dict(metadata), {})
            return upload_id

    def upload_part(self, key: str, upload_id: str, number: int, body: Buffer, *, sha256: bytes) -> str:
        data = bytes(body)
        with self._lock:
            upload = self._upload(key, upload_id)
            verify(data, sha256, f"part {number} of {key}")
            etag = body_etag(data)
            upload.parts[number] = _Part(PartInfo(number, etag, len(data), sha256), data)
            return etag

    def list_parts(self, key: str, upload_id: str) -> list[PartInfo]:
        with self._lock:
            parts = self._upload(key, upload_id).parts
            return [parts[number].info for number in sorted(parts)]

    def complete_multipart(
        self, key: str, upload_id: str, parts: Sequence[PartInfo], *, condition: Condition | None
    ) -> ObjectInfo:
        with self._lock:
            upload = self._upload(key, upload_id)
            chosen = self._chosen(upload, parts)
            self._require(key, condition)
            if condition is not None and condition.if_none_match and self._deleted_since(key, upload.order):
                raise ConditionConflict(f"{key} was deleted while the upload was in progress: start a new upload")
            etag = multipart_etag(part.info.etag for part in chosen)
            checksum = composite(part.info.sha256 or b"" for part in chosen)
            body = b"".join(part.body for part in chosen)
            order = upload.order if condition is None else self._next()
            info = self._add(key, order, body, etag, upload.metadata, checksum)
            del self._uploads[upload_id]
            return info

    def abort_multipart(self, key: str, upload_id: str) -> None:
        with self._lock:
            self._uploads.pop(upload_id, None)

    def list_multiparts(self, prefix: str) -> list[UploadInfo]:
        with self._lock:
            found = [UploadInfo(u.key, upload_id, u.initiated) for upload_id, u in self._uploads.items()]
        return sorted((u for u in found if u.key.startswith(prefix)), key=lambda u: (u.key, u.upload_id))

    def head(self, key: str, version_id: str | None = None) -> ObjectInfo | None:
        found = self._find(key, version_id)
        return found.info if found else None

    def get(self, key: str, version_id: str | None = None) -> tuple[ObjectInfo, bytes] | None:
        found = self._find(key, version_id)
        return (found.info, found.body) if found and found.info else None

    def get_stream(self, key: str, version_id: str) -> Iterator[bytes]:
        body = self._pinned(key, version_id)
        return (body[start : start + STREAM_CHUNK] for start in range(0, len(body), STREAM_CHUNK))

    def get_range(self, key: str, version_id: str, offset: int, length: int) -> bytes:
        body = self._pinned(key, version_id)
        if offset + length > len(body):
            raise CorruptError(f"range {offset}+{length} is outside {key} ({len(body)} bytes)")
        return body[offset : offset + length]

    def list(self, prefix: str, *, delimiter: str = "") -> Listing:
        with self._lock:
            keys = [key for key, versions in self._versions.items() if versions[-1].info is not None]
        return fold(keys, prefix, delimiter)

    def list_versions(self, prefix: str) -> Iterator[VersionInfo]:
        with self._lock:
            found = [
                VersionInfo(
                    key=key,
                    version_id=version.version_id,
                    is_latest=version is versions[-1],
                    is_marker=version.info is None,
                    size=len(version.body),
                    modified=version.modified,
                )
                for key, versions in sorted(self._versions.items())
                if key.startswith(prefix)
                for version in reversed(versions)
            ]
        return iter(found)

    def delete_version(self, key: str, version_id: str) -> None:
        with self._lock:
            left = [version for version in self._versions.get(key, []) if version.version_id != version_id]
            if left:
                self._versions[key] = left
            else:
                self._versions.pop(key, None)

    def probe_delete(self, key: str) -> None:
        if not is_probe_key(self._prefix, key):
            raise InvalidError(f"plain delete outside the probe: {key}")
        with self._lock:
            order = self._next()
            self._insert(key, _Version(order, f"v{order:06d}", self._now()))

    # everything below expects the lock to be held, except _find and _pinned, which take it

    def _next(self) -> int:
        self._serial += 1
        return self._serial

    def _current(self, key: str) -> ObjectInfo | None:
        versions = self._versions.get(key)
        return versions[-1].info if versions else None

    def _require(self, key: str, condition: Condition | None) -> None:
        current = self._current(key)
        if condition is not None and not condition.holds(current.etag if current else None):
            raise ConditionFailed(f"precondition failed on {key}")

    def _deleted_since(self, key: str, order: int) -> bool:
        return any(version.info is None and version.order > order for version in self._versions.get(key, []))

    def _add(
        self, key: str, order: int, body: bytes, etag: str, metadata: Mapping[str, str], checksum: str | None
    ) -> ObjectInfo:
        version_id = f"v{self._next():06d}"
        meta = {name.lower(): value for name, value in metadata.items()}
        info = ObjectInfo(key, version_id, etag, len(body), meta, checksum)
        self._insert(key, _Version(order, version_id, self._now(), info, body))
        return info

    def _insert(self, key: str, version: _Version) -> None:
        insort(self._versions.setdefault(key, []), version, key=lambda v: v.order)

    def _upload(self, key: str, upload_id: str) -> _Upload:
        upload = self._uploads.get(upload_id)
        if upload is None or upload.key != key:
            raise NoSuchUpload(f"no upload {upload_id} of {key}")
        return upload

    def _chosen(self, upload: _Upload, parts: Sequence[PartInfo]) -> Sequence[_Part]:
        if [part.number for part in parts] != list(range(1, len(parts) + 1)) or not parts:
            raise BadPart(f"{upload.key}: part numbers must be consecutive from 1")
        chosen = []
        for asked in parts:
            held = upload.parts.get(asked.number)
            if held is None or held.info.etag != asked.etag or asked.sha256 not in (None, held.info.sha256):
                raise BadPart(f"{upload.key}: part {asked.number} is not the one uploaded")
            chosen.append(held)
        if any(part.info.size < self._min_part_size for part in chosen[:-1]):
            raise BadPart(f"{upload.key}: a part other than the last is smaller than {self._min_part_size} bytes")
        if sum(part.size for part in parts) != sum(part.info.size for part in chosen):
            raise BadPart(f"{upload.key}: the parts do not have the size announced")
        return chosen

    def _find(self, key: str, version_id: str | None) -> _Version | None:
        with self._lock:
            versions = self._versions.get(key, [])
            if version_id is None:
                return versions[-1] if versions else None
            return next((version for version in versions if version.version_id == version_id), None)

    def _pinned(self, key: str, version_id: str) -> bytes:
        found = self._find(key, version_id)
        if found is None or found.info is None:
            raise NotFoundError(f"version {version_id} of {key} is gone")
        return found.body
