"""A directory as a store: `file:///dir`, on a local disk or on a file system shared by all nodes (NFS, Lustre, GPFS).

On disk:

    <dir>/a/b.bin@/00000002-5f1e0c9ab3d4     the bytes of a version of key `a/b.bin`; its name is the version id
    <dir>/a/b.bin@/00000002.json             its record: key, version id, size, SHA-256, metadata; or a delete marker
    <dir>/.cachefs/locks/<00..ff>             one lock file per hash of the key
    <dir>/.cachefs/new/<id>/                  one change in the making: `body` and `record`
    <dir>/.cachefs/uploads/<id>/              a multipart upload: `upload` and `<number>-<sha256>` for each part

A version exists when its record does; the record with the highest number is the current version. See filekeys.py for
the names of keys. The stored files are ordinary and read-only: `sha256sum`, `cp` and `jq` are enough to read a store.

Writes: bytes and record are written and synced in `.cachefs/new`, then, under the key's lock, the condition is checked
and both are linked into place, the record last. Taking the next number with link(2) is exclusive by itself, so that
even on a file system whose locks are not shared no two writers both win. A process killed anywhere leaves nothing or a
whole version, and perhaps an entry in `.cachefs/new`; its `record` says which bytes it may have put in place, and
`sweep` removes both. ETags are the version id, so they never repeat. Times are those of the file system.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256 as hash_of
from itertools import islice

from cachefs import clock
from cachefs.errors import (
    ConditionConflict,
    ConditionFailed,
    CorruptError,
    InvalidError,
    NotFoundError,
    UnavailableError,
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
from cachefs.store.digests import composite, verify
from cachefs.store.filekeys import extend, is_versions, key_bytes, versions_path
from cachefs.store.filerecords import Record, current, find, link_version, load, numbers, record_path
from cachefs.store.files import (
    concatenate,
    locked,
    make_directories,
    prune_directories,
    sync_directory,
    translated,
    unlink,
    write_file,
)
from cachefs.store.fileuploads import Uploads
from cachefs.store.listing import fold, is_probe_key

SWEEP_AGE = 86400.0
"""Age, seconds, after which an entry in `.cachefs/new` is taken to be left over by a dead process."""

_OWN = ".cachefs"
_TRIES = 16


class DirectoryStore:
    """See the module's head. `root` must exist, and so must `.cachefs` in it once it was there: an unmounted file
    system must not be mistaken for an empty store, nor be written to. Then every call raises NoStoreError.
    """

    def __init__(self, root: str) -> None:
        self._root = os.path.abspath(root)
        self._own = os.path.join(self._root, _OWN)
        self._uploads = Uploads(self._own, self._work)
        self._there = self._own if os.path.isdir(self._own) else self._root

    @property
    def url(self) -> str:
        return f"file://{self._root}"

    @property
    def prefix(self) -> str:
        return ""

    def check(self) -> None:
        with translated(self.url):
            os.listdir(self._there)

    def prepare(self) -> None:
        with translated(self.url):
            for name in ("locks", "new", "uploads"):
                make_directories(self._root, f"{_OWN}/{name}")
            with self._lock(""):
                pass
        self._there = self._own
        self.sweep()

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
        verify(body, sha256, key)
        checksum = sha256.hex() if sha256 is not None else None
        return self._commit(key, lambda path: write_file(path, body), len(body), checksum, metadata, condition)

    def create_multipart(self, key: str, *, metadata: Mapping[str, str] = {}) -> str:
        versions_path(key)
        with translated(self.url):
            return self._uploads.create(key, metadata)

    def upload_part(self, key: str, upload_id: str, number: int, body: Buffer, *, sha256: bytes) -> str:
        with translated(self.url):
            return self._uploads.add(key, upload_id, number, body, sha256)

    def list_parts(self, key: str, upload_id: str) -> list[PartInfo]:
        with translated(self.url):
            return self._uploads.parts(key, upload_id)

    def complete_multipart(
        self, key: str, upload_id: str, parts: Sequence[PartInfo], *, condition: Condition | None
    ) -> ObjectInfo:
        with translated(self.url):
            upload = self._uploads.require(key, upload_id)
            files, digests, size = self._uploads.chosen(key, upload_id, parts)
        info = self._commit(
            key, lambda path: concatenate(path, files), size, composite(digests), upload.metadata, condition
        )
        self.abort_multipart(key, upload_id)
        return info

    def abort_multipart(self, key: str, upload_id: str) -> None:
        with translated(self.url):
            self._uploads.remove(upload_id)

    def list_multiparts(self, prefix: str) -> list[UploadInfo]:
        with translated(self.url):
            found = self._uploads.list(prefix)
            os.stat(self._there)
            return found

    def head(self, key: str, version_id: str | None = None) -> ObjectInfo | None:
        directory = self._directory(key)
        with translated(self.url):
            record = current(directory)[1] if version_id is None else find(directory, version_id)
        if record is not None and record.marker:
            return None
        if record is not None:
            with translated(f"version {record.version_id} of {key}"):
                if self._holds(directory, record):
                    return record.info()
        with translated(self.url):
            os.stat(self._there)  # last: a store that went away during the look has lost no version
        return None

    def get(self, key: str, version_id: str | None = None) -> tuple[ObjectInfo, bytes] | None:
        info = self.head(key, version_id)
        return (info, b"".join(self.get_stream(key, info.version_id))) if info else None

    def get_stream(self, key: str, version_id: str) -> Iterator[bytes]:
        with self._pinned(key, version_id) as (fd, size):
            for offset in range(0, size, STREAM_CHUNK):
                yield _read(fd, offset, min(STREAM_CHUNK, size - offset), key)

    def get_range(self, key: str, version_id: str, offset: int, length: int) -> bytes:
        with self._pinned(key, version_id) as (fd, size):
            if offset + length > size:
                raise CorruptError(f"range {offset}+{length} is outside {key} ({size} bytes)")
            return _read(fd, offset, length, key)

    def list(self, prefix: str, *, delimiter: str = "") -> Listing:
        with translated(self.url):
            found = [key for key, directory in _walk(self._root, prefix, delimiter) if _is_live(directory)]
            os.stat(self._there)
        return fold(found, prefix, delimiter)

    def list_versions(self, prefix: str) -> Iterator[VersionInfo]:
        with translated(self.url):
            for key, directory in _walk(self._root, prefix):
                latest = True
                for number in sorted(numbers(directory), reverse=True):
                    path = record_path(directory, number)
                    record = load(path)
                    if record is None:
                        continue  # deleted since the directory was read
                    modified = os.stat(path).st_mtime
                    yield VersionInfo(key, record.version_id, latest, record.marker, record.size, modified)
                    latest = False
            os.stat(self._there)

    def delete_version(self, key: str, version_id: str) -> None:
        directory = self._directory(key)
        with translated(self.url), self._work() as work, self._lock(key):
            record = find(directory, version_id)
            if record is None:
                return
            # the record first, and into `.cachefs/new`: if we die here, the sweep knows which bytes are left
            os.rename(record_path(directory, record.number), os.path.join(work, "record"))
            sync_directory(directory)
            self._drop(record)

    def probe_delete(self, key: str) -> None:
        if not is_probe_key(self.prefix, key):
            raise InvalidError(f"plain delete outside the probe: {key}")
        self._commit(key, None, 0, None, {}, None)

    def sweep(self, age: float = SWEEP_AGE) -> int:
        """Remove what processes that died left in `.cachefs/new` at least `age` seconds ago; return how many."""
        swept = 0
        with translated(self.url), self._work() as own:
            now = os.stat(own).st_mtime
            for name in os.listdir(os.path.dirname(own)):
                path = os.path.join(os.path.dirname(own), name)
                try:
                    if path == own or now - os.stat(path).st_mtime < age:
                        continue
                except FileNotFoundError:
                    continue  # its owner has just finished
                self._undo(os.path.join(path, "record"))
                shutil.rmtree(path, ignore_errors=True)
                swept += 1
        return swept

    def _undo(self, draft: str) -> None:
        """Remove the bytes that a dead process put in place for a record it did not commit, or had withdrawn."""
        try:
            record = load(draft)
        except CorruptError:
            return  # it died while writing the draft: nothing was put in place yet
        if record is not None:
            with self._lock(record.key):
                if find(self._directory(record.key), record.version_id) is None:
                    self._drop(record)

    def _drop(self, record: Record) -> None:
        """Remove the bytes of a version that has no record."""
        unlink(os.path.join(self._directory(record.key), record.version_id))
        prune_directories(self._root, versions_path(record.key))

    def _commit(
        self,
        key: str,
        write_body: Callable[[str], None] | None,
        size: int,
        checksum: str | None,
        metadata: Mapping[str, str],
        condition: Condition | None,
    ) -> ObjectInfo:
        """Write a new version, or a delete marker when there is no body to write."""
        relative = versions_path(key)
        meta = {name.lower(): value for name, value in metadata.items()}
        with translated(self.url), self._work() as work:
            body, draft = os.path.join(work, "body"), os.path.join(work, "record")
            if write_body is not None:
                write_body(body)
                if (held := os.stat(body).st_size) != size:
                    raise UnavailableError(f"{key}: {held} bytes were written, not {size}", reason="io")
            for _ in range(_TRIES):
                with self._lock(key):
                    number, before = current(self._directory(key))
                    etag = before.etag if before and not before.marker else None
                    if condition is not None and not condition.holds(etag):
                        raise ConditionFailed(f"precondition failed on {key}")
                    version_id = f"{number + 1:08d}-{clock.new_id()[:12]}"
                    record = Record(key, version_id, size, checksum, meta, write_body is None)
                    unlink(draft)
                    write_file(draft, record.encode())
                    try:
                        directory = make_directories(self._root, relative)
                        if link_version(directory, record, body if write_body else None, draft):
                            return record.info()
                    except FileNotFoundError:
                        continue  # a delete of another key pruned the directory under us
        raise ConditionConflict(f"{key}: other writers took every number that was tried")

    def _holds(self, directory: str, record: Record) -> bool:
        """Return whether the bytes of a version are there, as many as its record says; False when its record is gone
        too: it was deleted since, or the whole store is away. Raises CorruptError.
        """
        try:
            held = os.stat(os.path.join(directory, record.version_id)).st_size
        except FileNotFoundError as error:
            if find(directory, record.version_id) is None:
                return False
            # a delete takes the record first, and a commit puts it in place last
            raise CorruptError(f"version {record.version_id} of {record.key} has lost its bytes") from error
        if held != record.size:
            raise CorruptError(f"version {record.version_id} of {record.key} has {held} bytes, not {record.size}")
        return True

    def _directory(self, key: str) -> str:
        return os.path.join(self._root, versions_path(key))

    @contextmanager
    def _work(self) -> Iterator[str]:
        """Give a private directory for one change; removed when the change is over, either way."""
        os.stat(self._there)
        path = make_directories(self._root, f"{_OWN}/new/{clock.new_id()}")
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        directory = make_directories(self._root, f"{_OWN}/locks")
        with locked(os.path.join(directory, hash_of(key.encode()).hexdigest()[:2])):
            yield

    @contextmanager
    def _pinned(self, key: str, version_id: str) -> Iterator[tuple[int, int]]:
        """Give an open file of a version's bytes and its size."""
        fd, size = self._open(key, version_id)
        try:
            with translated(f"version {version_id} of {key}"):
                yield fd, size
        finally:
            os.close(fd)

    def _open(self, key: str, version_id: str) -> tuple[int, int]:
        with translated(f"version {version_id} of {key}"):
            for _ in range(_TRIES):
                info = self.head(key, version_id)
                if info is None:
                    raise NotFoundError(f"version {version_id} of {key} is gone")
                try:
                    path = os.path.join(self._directory(key), version_id)
                    return os.open(path, os.O_RDONLY | os.O_CLOEXEC), info.size
                except FileNotFoundError:
                    continue  # deleted, lost or unmounted since: the next look says which
        raise UnavailableError(f"version {version_id} of {key} does not settle", reason="stale")


def _read(fd: int, offset: int, length: int, key: str) -> bytes:
    pieces: list[bytes] = []
    while length:
        piece = os.pread(fd, length, offset)
        if not piece:
            raise CorruptError(f"{key} ended early, at byte {offset}")
        pieces.append(piece)
        offset, length = offset + len(piece), length - len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _is_live(directory: str) -> bool:
    record = current(directory)[1]
    return record is not None and not record.marker


def _walk(path: str, prefix: str, delimiter: str = "", raw: bytes = b"") -> Iterator[tuple[str, str]]:
    """Iterate over (key, directory of its versions) for the keys under a prefix.

    With the delimiter "/", a directory that will be rolled up into a common prefix stops at its first live key.
    """
    wanted = prefix.encode()
    try:
        names = sorted(os.listdir(path))
    except FileNotFoundError:
        if not raw:
            raise
        return  # pruned since its parent was read
    for name in names:
        if name.startswith("."):
            continue
        below, inner = extend(raw, name), os.path.join(path, name)
        text = key_bytes(below)
        if is_versions(name):
            if text.startswith(wanted):
                yield text.decode(), inner
        elif below.endswith(b"/") and not (text.startswith(wanted) or wanted.startswith(text)):
            continue
        elif delimiter == "/" and below.endswith(b"/") and text.startswith(wanted) and text != wanted:
            yield from islice((found for found in _walk(inner, prefix, "", below) if _is_live(found[1])), 1)
        else:
            yield from _walk(inner, prefix, delimiter, below)
