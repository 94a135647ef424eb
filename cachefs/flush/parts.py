"""Reads and hashes one part of a pinned file. Synchronous: runs in a thread, and lets go of the GIL while it works."""

from __future__ import annotations

import errno
import hashlib
import os

import xxhash

from cachefs.errors import DAMAGE, CorruptError
from cachefs.flush.plan import Range
from cachefs.formats.records import ShardRecord
from cachefs.staging.pins import PinReader

_DAMAGE = {*DAMAGE, errno.ENOENT, errno.ELOOP}


def read_part(
    pins: PinReader, record: ShardRecord, part: Range, buffer: memoryview, whole: xxhash.xxh3_128 | None = None
) -> bytes:
    """Fill `buffer` with one part and return its SHA-256, binary; feed `whole`, the hash of the file, if given.

    The file must still be what was pinned. Raises CorruptError, which names it, when the pin is gone, has another size
    or cannot be read from the disk. The modification time is no witness: anyone may set it on a file that is still
    visible; the hash of the file is one, as soon as it is known. Other OSErrors pass (out of descriptors).
    """
    try:
        while not _read_once(pins, record, part, buffer):
            pass
    except OSError as error:
        if error.errno in _DAMAGE:
            raise damaged(record, f"cannot be read from staging: {os.strerror(error.errno or 0)}") from error
        raise
    if whole is not None:
        whole.update(buffer)
    return hashlib.sha256(buffer).digest()


def _read_once(pins: PinReader, record: ShardRecord, part: Range, buffer: memoryview) -> bool:
    """Read the part; False when the pin moved to a copy meanwhile: the inode that was read may have changed."""
    fd = pins.open(record.attempt, record.shard)
    try:
        stat, then = os.fstat(fd), record.identity
        whole = stat.st_size == then.size and _fill(fd, part, buffer)
        if not pins.is_current(record.attempt, record.shard, fd):
            return False
    finally:
        os.close(fd)
    if not whole:
        raise damaged(
            record,
            f"changed in staging after its save closed: {stat.st_size} bytes, it was {then.size}",
        )
    return True


def _fill(fd: int, part: Range, buffer: memoryview) -> bool:
    done = 0
    while done < part.length:
        count = os.preadv(fd, [buffer[done:]], part.offset + done)
        if count == 0:
            return False
        done += count
    return True


def damaged(record: ShardRecord, what: str) -> CorruptError:
    """Return the error for a file whose bytes must not be published."""
    return CorruptError(f"{record.paths[0]} {what}", hint="the save was not published; keep the previous one")
