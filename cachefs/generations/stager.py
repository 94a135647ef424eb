"""From closed to `staged`: the daemon syncs every file and directory of a closed save itself, since most frameworks
never call fsync, and takes the identity of each file, by which later damage is told from the bytes that were closed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec
import structlog
import trio
import xxhash

from cachefs import clock
from cachefs.errors import DAMAGE, CorruptError, StagingError
from cachefs.formats.names import to_bytes
from cachefs.formats.records import AttemptRecord, Identity, ShardRecord, State
from cachefs.generations import retrying
from cachefs.journal import Journal, Txn
from cachefs.staging.pins import PinReader
from cachefs.threads import in_thread

THREADS = 4
"""Files that are synced and hashed at the same time: the disk commits several small ones in one go."""
_READ = 1 << 20
PATIENCE = 60.0
"""Seconds that a closed save may wait for its upload to begin before a later save of the same path replaces it."""
_log = structlog.get_logger(__name__)


class Stager:
    """Stages closed saves, the oldest first. The journal is the queue."""

    def __init__(self, journal: Journal, pins: PinReader, tree_fd: int, *, staged: Callable[[], None]) -> None:
        """`staged` is called after an attempt moved on."""
        self._journal = journal
        self._pins = pins
        self._tree_fd = tree_fd
        self._staged = staged
        self._hint = trio.Event()

    def wake(self) -> None:
        """Hint that an attempt was closed."""
        self._hint.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Stage whatever is closed, for ever. What may succeed later is shown in the record and tried again."""
        task_status.started()
        pause = retrying.FIRST
        while True:
            self._hint = trio.Event()
            with self._journal.read() as txn:
                waiting = [a for a in txn.attempts.scan() if a.closed_at is not None and a.state is State.OPEN]
            failed = False
            for attempt in sorted(waiting, key=lambda record: record.serial):
                try:
                    failed |= not await self._stage(attempt)
                except StagingError as error:
                    _log.error("staging: the journal failed", path=attempt.path, reason=str(error), again_in=pause)
                    failed = True
            if failed:
                with trio.move_on_after(pause):
                    await self._hint.wait()
                pause = min(2 * pause, retrying.LAST)
            else:
                pause = retrying.FIRST
                if not waiting:
                    await self._hint.wait()

    async def _stage(self, attempt: AttemptRecord) -> bool:
        """Stage or abandon one save; return False when it has to wait. Raises StagingError."""
        with self._journal.read() as txn:
            shards = txn.shards_of(attempt.attempt)
        try:
            identities = await in_thread(self._sync, attempt, shards)
        except (CorruptError, OSError) as error:
            reason = str(error)
            if isinstance(error, OSError) and error.errno not in DAMAGE:
                if attempt.error != reason:
                    _log.warning("staging waits", path=attempt.path, reason=reason)
                    await self._journal.write(lambda txn: _waits(txn, attempt.attempt, reason))
                return False
            _log.error("save abandoned", path=attempt.path, reason=reason)
            await self._journal.write(lambda txn: _abandon(txn, attempt.attempt, reason))
        else:
            for superseded in await self._journal.write(lambda txn: _staged(txn, attempt, identities)):
                with suppress(OSError):  # then the mount process drops them
                    await in_thread(self._pins.drop_attempt, superseded)
        self._staged()
        return True

    def _sync(self, attempt: AttemptRecord, shards: list[ShardRecord]) -> dict[str, Identity]:
        """Sync and identify every pinned file; in a worker thread. Raises CorruptError for bytes that are lost, and
        OSError.
        """
        with ThreadPoolExecutor(THREADS, "staging") as pool:
            found = zip(shards, pool.map(self._sync_file, shards), strict=True)
            identities = {shard.shard: identity for shard, identity in found if identity is not None}
        if shards:
            pins = self._pins.path(attempt.attempt, "")
            _sync_directory(pins, None)
            _sync_directory(pins.parent, None)
        self._sync_tree(to_bytes(attempt.path))
        return identities

    def _sync_file(self, shard: ShardRecord) -> Identity | None:
        """Sync one file; return its identity if it was not known."""
        while True:
            try:
                fd = self._pins.open(shard.attempt, shard.shard)
            except FileNotFoundError:
                raise CorruptError(f"the bytes of {shard.paths[0]} are gone from staging") from None
            try:
                _sync_bytes(fd, shard.paths[0])
                known = shard.pin is not None or shard.identity.xxh3 is not None
                xxh3 = shard.identity.xxh3 if known else _xxh3(fd)
                # Not the time: it may be set after the close (Lightning does), which changes no byte.
                same = os.fstat(fd).st_size == shard.identity.size
                if not self._pins.is_current(shard.attempt, shard.shard, fd):
                    continue  # the pin moved to a copy: what was read may be bytes that were written since
            finally:
                os.close(fd)
            if not same:
                raise CorruptError(f"{shard.paths[0]} changed in staging after its save was closed")
            return None if known else msgspec.structs.replace(shard.identity, xxh3=xxh3)

    def _sync_tree(self, path: bytes) -> None:
        """Sync the directories of a generation and those above it; they may have been removed by now."""
        try:
            walk = os.fwalk(path, dir_fd=self._tree_fd, follow_symlinks=False, onerror=_raise_unless_gone)
            for _root, _directories, _files, fd in walk:
                os.fsync(fd)
        except (FileNotFoundError, NotADirectoryError):
            pass  # rotated away: the pins are what counts
        while path := path.rpartition(b"/")[0]:
            _sync_directory(path, self._tree_fd)
        os.fsync(self._tree_fd)


def _sync_bytes(fd: int, path: str) -> None:
    """Sync a file. Raises CorruptError when its bytes did not reach the disk: Linux tells each descriptor of a failed
    write-back once, and drops the pages (fsync(2), NOTES), so that the same call would succeed the next time.
    """
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (*DAMAGE, errno.ENOSPC, errno.EDQUOT):
            raise
        raise CorruptError(f"{path} did not reach the disk: {error.strerror}") from error


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error


def _xxh3(fd: int) -> str:
    digest = xxhash.xxh3_128()
    buffer = bytearray(_READ)
    offset = 0
    while count := os.preadv(fd, [buffer], offset):
        digest.update(memoryview(buffer)[:count])
        offset += count
    return digest.hexdigest()


def _sync_directory(path: os.PathLike[str] | bytes, dir_fd: int | None) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _waits(txn: Txn, attempt: str, reason: str) -> None:
    record = txn.attempts.get(attempt)
    if record is not None and not record.state.final:
        txn.update_attempt(attempt, error=reason)


def _abandon(txn: Txn, attempt: str, reason: str) -> None:
    if txn.attempts.get(attempt) is not None:
        txn.update_attempt(attempt, state=State.ABANDONED, error=reason)


def _staged(txn: Txn, attempt: AttemptRecord, identities: dict[str, Identity]) -> list[str]:
    current = txn.attempts.get(attempt.attempt)
    if current is None or current.state is not State.OPEN:
        return []
    for name, identity in identities.items():
        shard = txn.shard(attempt.attempt, name)
        if shard is not None:
            txn.put_shard(msgspec.structs.replace(shard, identity=identity))
    # What stood there when the staging began is over; what came since is the publisher's, who goes on meanwhile.
    error = "" if current.error == attempt.error else current.error
    txn.update_attempt(attempt.attempt, state=State.STAGED, staged_at=clock.now(), error=error)
    return _supersede(txn, attempt)


def _supersede(txn: Txn, newer: AttemptRecord) -> list[str]:
    """Abandon older saves of the same generation that have waited long and of which nothing was sent yet; return them.

    So a path that is overwritten in a loop does not fill staging while the store is slow or away. One that is being
    sent goes on: a path that is overwritten faster than it can be sent is still published.
    """
    superseded = []
    now = clock.now()
    for older in list(txn.attempts.scan()):
        shards = txn.shards_of(older.attempt)
        if (
            older.path == newer.path
            and older.serial < newer.serial
            and older.closed_at is not None
            and now - older.closed_at > PATIENCE
            and older.state in (State.OPEN, State.STAGED)
            and not any(shard.pin or shard.upload_id for shard in shards)
        ):
            reason = f"superseded by a later save before its upload began (attempt {newer.attempt})"
            txn.update_attempt(older.attempt, state=State.ABANDONED, error=reason)
            for shard in shards:
                txn.drop_shard(shard)
            superseded.append(older.attempt)
    return superseded
