"""Loose files: what lies outside every generation (logs, event files, trackers) is mirrored to overwritable objects.

A mirror is a convenience, not a promise: the newest version of the object is some state that the file really had, of
one moment. A file that changes while it is read is read again later, and later each time. Nothing is ever deleted in
the bucket.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat as stat_module
from collections.abc import Callable
from functools import partial

import trio

from cachefs import clock
from cachefs.errors import CachefsError, InvalidError, StoreError
from cachefs.flush.plan import Backoff, Range, fit_part_size, parts
from cachefs.flush.throttle import Throttle
from cachefs.formats.keys import Keys
from cachefs.formats.names import to_text
from cachefs.formats.records import Identity, LooseRecord
from cachefs.journal import Journal, Txn
from cachefs.staging.walking import open_directory, open_file
from cachefs.store.base import ObjectInfo, ObjectStore, PartInfo
from cachefs.store.createonly import SHA256
from cachefs.store.hop import Hop

SETTLE = 0.1
"""Seconds a file must be left alone: a change within one tick of the file system's clock does not show in its time."""
PATIENCE = 16
"""Intervals that a file which changes whenever it is read is left alone, at most."""
BACKOFF_BASE = 1.0
BACKOFF_CAP = 60.0
"""Seconds between two tries of a file that cannot be read or sent, at first and at most."""

_NOT_A_FILE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV}


class Fresh(Exception):
    """The file was written a moment ago; nothing was read."""


class Changing(Exception):
    """The file changed while it was read: what was sent of it was sent for nothing."""


class LooseMirror:
    """Mirrors the files it is told about, one at a time, each at most every `interval` seconds.

    What was mirrored is journaled; being told about a file that did not change costs one stat. A file of a directory
    belongs to the run of that path, a file at the root to `default_run`.
    """

    def __init__(
        self,
        journal: Journal,
        store: ObjectStore,
        keys: Keys,
        hop: Hop,
        tree_fd: int,
        default_run: str,
        *,
        interval: float,
        part_size: int,
        throttle: Throttle | None = None,
        is_loose: Callable[[bytes], bool] = lambda path: False,
    ) -> None:
        """`part_size` in bytes is also what one file takes in memory; `throttle` says when it may be sent.

        `is_loose` is asked about the files below a directory that was noted (moved, say); by default they are left to
        notes of their own.
        """
        self._journal = journal
        self._store = store
        self._keys = keys
        self._hop = hop
        self._tree_fd = tree_fd
        self._default_run = default_run
        self._interval = interval
        self._part_size = part_size
        self._throttle = throttle or Throttle(0)
        self._is_loose = is_loose
        self._due: dict[bytes, float] = {}
        self._rests: dict[bytes, float] = {}
        self._backoffs: dict[bytes, Backoff] = {}
        self._leftovers: list[tuple[str, str]] = []
        self._looking = 0
        self._changed = trio.Event()
        self.errors: dict[bytes, str] = {}
        """Why files are not mirrored, by path; all but those with impossible names are tried again."""

    def note(self, path: bytes) -> None:
        """Hint that something changed at `path` (relative to the mount root): a file, or nothing any more."""
        self._due.setdefault(path, max(trio.current_time(), self._rests.get(path, 0.0)))
        self._changed.set()

    def forget(self, path: bytes) -> None:
        """Hint that what was at `path` is gone. Its mirror stays in the bucket; only the record goes."""
        self._due[path] = trio.current_time()
        self._changed.set()

    def pending(self) -> int:
        """Return how many files wait to be mirrored or looked at."""
        return len(self._due) + self._looking

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Mirror for ever."""
        task_status.started()
        while True:
            self._changed = trio.Event()
            now = trio.current_time()
            self._rests = {path: until for path, until in self._rests.items() if until > now}
            for path in [path for path, due in self._due.items() if due <= now]:
                await self._look(path)
            with trio.move_on_at(min(self._due.values(), default=float("inf"))):
                await self._changed.wait()

    async def _look(self, path: bytes) -> None:
        del self._due[path]  # so that a note of a change that this look does not see makes another
        self._looking = 1
        again: float | None = None
        try:
            await self._abort_leftovers()
            await self._mirror(path)
        except Fresh:
            again = self._later(path, SETTLE, self._interval)
        except Changing:
            again = self._later(path, self._interval, PATIENCE * self._interval)
        except InvalidError as error:
            self.errors[path] = str(error)
        except (CachefsError, OSError) as error:
            self.errors[path] = str(error)
            again = self._later(path, BACKOFF_BASE, BACKOFF_CAP, clock.jitter)
        else:
            self.errors.pop(path, None)
            self._backoffs.pop(path, None)
        if again is not None or path in self._due:
            self._due[path] = max(again or 0.0, self._rests.get(path, 0.0))
        self._looking = 0

    def _later(self, path: bytes, base: float, cap: float, jitter: Callable[[float], float] = float) -> float:
        """Return when to look at a file again: later with every look in a row that was for nothing."""
        before = self._backoffs.get(path, Backoff())
        backoff = self._backoffs[path] = before.failed(trio.current_time(), base=base, cap=cap, jitter=jitter)
        return backoff.until

    async def _mirror(self, path: bytes) -> None:
        fd = await self._hop(_open, self._tree_fd, path)
        if fd is None:
            return await self._forget(path)
        try:
            mode = os.fstat(fd).st_mode
            if stat_module.S_ISDIR(mode):
                return self._note_below(path, await self._hop(os.listdir, fd))
            if not stat_module.S_ISREG(mode):
                return await self._forget(path)
            await self._mirror_file(path, fd)
        finally:
            os.close(fd)

    def _note_below(self, path: bytes, names: list[str]) -> None:
        for name in names:
            inside = path + b"/" + os.fsencode(name)
            if self._is_loose(inside):
                self.note(inside)

    async def _mirror_file(self, path: bytes, fd: int) -> None:
        text, identity = to_text(path), _identity(fd)
        with self._journal.read() as txn:
            known = txn.loose.get(text)
        if known is not None and known.identity == identity:
            return
        if clock.now() - identity.mtime_ns / 1e9 < SETTLE:
            raise Fresh
        above, _, name = path.rpartition(b"/")
        key = self._keys.loose(to_text(above) if above else self._default_run, to_text(name))
        info = await self._send(fd, identity, key)
        record = LooseRecord(path=text, identity=identity, key=key, version_id=info.version_id)
        await self._journal.write(lambda txn: txn.loose.put(text, record))
        self._rests[path] = trio.current_time() + self._interval

    async def _send(self, fd: int, identity: Identity, key: str) -> ObjectInfo:
        ranges = parts(identity.size, fit_part_size(identity.size, self._part_size))
        with memoryview(bytearray(ranges[0].length)) as buffer:
            if len(ranges) > 1:
                return await self._send_parts(fd, identity, key, ranges, buffer)
            digest = await self._hop(_read, fd, identity, ranges[0], buffer)
            await self._throttle.take(identity.size)
            return await self._hop(
                self._store.put, key, buffer, condition=None, sha256=digest, metadata={SHA256: digest.hex()}
            )

    async def _send_parts(
        self, fd: int, identity: Identity, key: str, ranges: list[Range], buffer: memoryview
    ) -> ObjectInfo:
        upload_id = await self._hop(self._store.create_multipart, key)
        try:
            sent: list[PartInfo] = []
            for part in ranges:
                body = buffer[: part.length]
                digest = await self._hop(_read, fd, identity, part, body)
                await self._throttle.take(part.length)
                etag = await self._hop(self._store.upload_part, key, upload_id, part.number, body, sha256=digest)
                sent.append(PartInfo(part.number, etag, part.length, digest))
            return await self._hop(self._store.complete_multipart, key, upload_id, sent, condition=None)
        except BaseException:
            self._leftovers.append((key, upload_id))
            raise

    async def _abort_leftovers(self) -> None:
        """Abort what a changed file or a failed request left behind. What a kill leaves is the bucket's to expire."""
        while self._leftovers:
            try:
                await self._hop(self._store.abort_multipart, *self._leftovers[-1])
            except StoreError:
                return
            self._leftovers.pop()

    async def _forget(self, path: bytes) -> None:
        await self._journal.write(partial(_forget, to_text(path)))
        self._rests.pop(path, None)


def _forget(text: str, txn: Txn) -> None:
    txn.loose.delete(text)
    for record in list(txn.loose.scan(f"{text}/")):
        txn.loose.delete(record.path)


def _open(tree_fd: int, path: bytes) -> int | None:
    """Open a file below the tree for reading, never through a symbolic link; None when there is no file."""
    directory, _, name = path.rpartition(b"/")
    try:
        above = open_directory(tree_fd, directory)
        try:
            return open_file(name, above)
        finally:
            os.close(above)
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            return None
        raise


def _identity(fd: int) -> Identity:
    stat = os.fstat(fd)
    return Identity(stat.st_ino, stat.st_size, stat.st_mtime_ns)


def _read(fd: int, identity: Identity, part: Range, buffer: memoryview) -> bytes:
    """Fill `buffer` and return its SHA-256. Raises Changing unless the file is what it was, after the read too."""
    done = 0
    while done < part.length:
        count = os.preadv(fd, [buffer[done:]], part.offset + done)
        if count == 0:
            raise Changing
        done += count
    if _identity(fd) != identity:
        raise Changing
    return hashlib.sha256(buffer).digest()
