"""Create-only writes: the one place that decides what an unclear answer to one means.

The rules are those of S3 ("Conditional write behavior" in the user guide) and of a lost answer: a 412, 409, timeout,
5xx or a missing upload id proves nothing, so the key is read back and the object found there is classified. Every
write carries a write id in its metadata that is used for this one object and its bytes only.

Both functions send one request and resolve it. They do not wait and do not repeat: a caller in a back-off must not hold
its buffer. Calling again with the same arguments is always safe and is the only retry allowed (invariant I11): at most
one copy of the write can win, and every later call finds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

import msgspec

from cachefs.errors import ConditionConflict, ConditionFailed, CorruptError, NoSuchUpload, UnavailableError
from cachefs.store.base import CREATE_ONLY, Buffer, ObjectInfo, ObjectStore, PartInfo
from cachefs.store.hop import Hop

WRITE_ID = "write-id"
SHA256 = "sha256"
"""User metadata keys. An upload in parts carries only the first: its digest is not known when it starts."""


class Wanted(msgspec.Struct, frozen=True):
    """What we meant to write. `size` in bytes, `sha256` hex as in manifest.Shard (parts: over the part digests)."""

    write_id: str
    size: int
    sha256: str


class Found(Enum):
    """What stands under a key, seen from one write."""

    OURS = "ours"
    SAME_BYTES = "same bytes"
    OTHER = "other bytes"
    ABSENT = "absent"


def classify(info: ObjectInfo | None, wanted: Wanted) -> Found:
    """Compare what was read back with what was to be written.

    Ours is: our write id, our size, and no digest that says otherwise (a store may report none for an upload in parts).
    The same bytes under another write id need a digest to say so.
    """
    if info is None:
        return Found.ABSENT
    digests = {digest for digest in (info.checksum, info.metadata.get(SHA256)) if digest}
    if info.size != wanted.size or not digests <= {wanted.sha256}:
        return Found.OTHER
    if info.metadata.get(WRITE_ID) == wanted.write_id:
        return Found.OURS
    return Found.SAME_BYTES if digests else Found.OTHER


async def read_back(store: ObjectStore, hop: Hop, key: str, wanted: Wanted) -> tuple[Found, ObjectInfo | None]:
    """Return what stands under a key, and the version to pin when it is ours or has the same bytes.

    The current version decides if it is ours. Otherwise all versions are looked at: ours may lie below a delete marker
    or below a later write that ignored the condition, and its version id still pins it. Raises what the store raises.
    """
    info = await hop(store.head, key)
    found = classify(info, wanted)
    if found is Found.OURS:
        return found, info
    others = await hop(_versions, store, key)
    for version_id in others:
        older = await hop(store.head, key, version_id)
        if classify(older, wanted) is Found.OURS:
            return Found.OURS, older
        if found is Found.ABSENT:
            found, info = classify(older, wanted), older
    return found, info


def _versions(store: ObjectStore, key: str) -> list[str]:
    return [entry.version_id for entry in store.list_versions(key) if entry.key == key and not entry.is_marker]


async def create_only(
    store: ObjectStore,
    hop: Hop,
    key: str,
    body: Buffer,
    *,
    write_id: str,
    sha256: bytes,
    metadata: Mapping[str, str] = {},
) -> ObjectInfo:
    """Create an object in one request and return its version: the one just written, or one that holds these bytes.

    `sha256` is the binary digest of `body`. Raises
    - UnavailableError: nothing is known, or nothing landed yet: call again with the same arguments,
    - CorruptError: the key holds other bytes, for good,
    - BadPart: the body did not have the digest: it changed on the way, read it again,
    - DeniedError and the other errors of the store.
    """
    wanted = Wanted(write_id, memoryview(body).nbytes, sha256.hex())
    tags = {**metadata, WRITE_ID: write_id, SHA256: wanted.sha256}
    try:
        return await hop(store.put, key, body, condition=CREATE_ONLY, sha256=sha256, metadata=tags)
    except (ConditionFailed, ConditionConflict, UnavailableError) as error:
        found, info = await read_back(store, hop, key, wanted)
        if info is not None:
            return _accept(found, info, wanted)
        raise _undecided(key, error) from error


async def complete_create_only(
    store: ObjectStore,
    hop: Hop,
    key: str,
    upload_id: str,
    parts: Sequence[PartInfo],
    *,
    write_id: str,
    sha256: str,
) -> ObjectInfo:
    """Complete an upload that was started with `{WRITE_ID: write_id}` and return the version, as `create_only` does.

    `sha256` is the digest over the part digests, hex. Raises
    - UnavailableError: nothing is known: call again with the same arguments,
    - NoSuchUpload: this upload did not create the object and cannot any more (aborted, expired, or a 409 over a delete:
      S3 then asks for a new upload and all its parts); abort it and start over,
    - CorruptError: the key holds other bytes, for good,
    - BadPart: the store does not hold these parts: list them and send what differs,
    - DeniedError and the other errors of the store.
    """
    wanted = Wanted(write_id, sum(part.size for part in parts), sha256)
    try:
        return await hop(store.complete_multipart, key, upload_id, parts, condition=CREATE_ONLY)
    except (ConditionFailed, ConditionConflict, NoSuchUpload, UnavailableError) as error:
        found, info = await read_back(store, hop, key, wanted)
        if info is not None:
            if isinstance(error, (ConditionFailed, ConditionConflict)):
                # The object is there without this upload, which is still alive and would be billed.
                await hop(store.abort_multipart, key, upload_id)
            return _accept(found, info, wanted)
        if isinstance(error, (ConditionConflict, NoSuchUpload)):
            raise NoSuchUpload(f"{key}: the upload is gone or refused and created nothing: {error}") from error
        raise _undecided(key, error) from error


def _accept(found: Found, info: ObjectInfo, wanted: Wanted) -> ObjectInfo:
    if found is Found.OTHER:
        raise CorruptError(
            f"{info.key} holds other bytes than the ones to be written "
            f"(version {info.version_id}, {info.size} bytes, wanted {wanted.size} with SHA-256 {wanted.sha256})",
            hint="another writer used this key; nothing was overwritten",
        )
    return info


def _undecided(key: str, error: Exception) -> UnavailableError:
    reason = error.reason if isinstance(error, UnavailableError) else "conflict"
    return UnavailableError(f"{key}: not created yet: {error}", reason=reason)
