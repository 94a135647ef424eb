"""What a candidate must pass: the formats of its files as they lie in staging, then every byte as it lies in the store.

Everything raises CorruptError that names the shard when the candidate is bad, and other errors when nothing is known.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import trio

from cachefs.errors import CorruptError, PendingError
from cachefs.formats.manifest import Manifest, Shard
from cachefs.formats.records import ShardRecord
from cachefs.publish.sealing import Completeness
from cachefs.publish.writes import Writes
from cachefs.restore.shards import Source, StoreSource
from cachefs.restore.verify import Level, verify_shard
from cachefs.staging.pins import PinReader
from cachefs.store.base import StoreReads


class FileSource:
    """An open file as a Source."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes of the file."""
        return os.pread(self._fd, length, offset)


def check_pinned(
    completeness: Completeness,
    manifest: Manifest,
    pins: PinReader,
    records: Sequence[ShardRecord],
    store: StoreReads,
    *,
    ranges: bool,
) -> Sequence[str]:
    """Check the formats of a generation on the files pinned here, and in the store for those of other members; blocks.

    `records` are this member's shards.
    """
    pinned = {record.key: record for record in records}

    def once() -> tuple[Sequence[str], CorruptError | None, bool]:
        """Check once; return what was found, and whether every pin still is the file that was read."""
        opened: list[tuple[ShardRecord, int]] = []

        def open_source(shard: Shard) -> Source:
            record = pinned.get(shard.pin.key)
            if record is None:
                return StoreSource(store, shard, ranges=ranges)
            fd = pins.open(record.attempt, record.shard)
            opened.append((record, fd))
            return FileSource(fd)

        checks: Sequence[str] = ()
        error: CorruptError | None = None
        try:
            checks = completeness(manifest, open_source)
        except CorruptError as found:
            error = found
        finally:
            current = all(pins.is_current(record.attempt, record.shard, fd) for record, fd in opened)
            for _, fd in opened:
                os.close(fd)
        return checks, error, current

    checks, error, current = once()
    while not current:  # a pin moved to a copy: what was read may be bytes that were written since
        checks, error, current = once()
    if error is not None:
        raise error
    return checks


async def read_back(writes: Writes, manifest: Manifest, level: Level, *, workers: int, ranges: bool) -> None:
    """Verify every shard of a manifest in the store, `workers` at a time, waiting for a store that does not answer.

    The first bad shard ends it; cancelling ends it after the part being read.
    """
    limit = trio.CapacityLimiter(workers)
    stopped = threading.Event()
    failed: list[Exception] = []

    def progress(_count: int) -> None:
        if stopped.is_set():
            raise PendingError("the restore test was stopped")

    async def one(shard: Shard) -> None:
        try:
            async with limit:
                await writes.read(verify_shard, writes.store, shard, level, progress, ranges=ranges)
        except Exception as error:
            failed.append(error)
            everything.cancel_scope.cancel()

    async def stop_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            stopped.set()

    async with trio.open_nursery() as everything:
        everything.start_soon(stop_when_cancelled)
        async with trio.open_nursery() as readers:
            for shard in manifest.shards:
                readers.start_soon(one, shard)
        everything.cancel_scope.cancel()
    if failed:
        raise failed[0]


async def check_stored(
    writes: Writes, completeness: Completeness, manifest: Manifest, *, ranges: bool
) -> Sequence[str]:
    """Check the formats of a generation on the store's bytes; returns the names of the checks."""

    def open_source(shard: Shard) -> Source:
        return StoreSource(writes.store, shard, ranges=ranges)

    return await writes.read(completeness, manifest, open_source)
