"""The bytes of one shard: read by pinned version, hashed part by part (see formats/manifest.py for the digests).

Every function raises CorruptError that names the shard's path, key and version when the version is gone or not what the
manifest says, and the store's own errors when nothing is known (UnavailableError: try again; NoStoreError).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import Protocol

from cachefs.errors import CorruptError, NotFoundError
from cachefs.formats.manifest import Shard, tree_digest
from cachefs.store.base import StoreReads

Sink = Callable[[int, bytes], None]
"""Takes bytes at an offset."""


class Source(Protocol):
    """The bytes of one file, wherever they are; what format checks read from."""

    @property
    def size(self) -> int:
        """Return the length in bytes."""

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes at `offset`, fewer at the end of the file."""


def ignore(offset: int, data: bytes) -> None:
    """Take bytes and do nothing with them."""


def read_shard(store: StoreReads, shard: Shard, sink: Sink = ignore, *, ranges: bool = True) -> None:
    """Read and verify a whole shard. `sink` gets the bytes in order; at most one part is in memory.

    With `ranges` each part is one request and reaches the sink only after its digest was right. Without (the probe says
    what a store can do) the version is streamed, and the sink has bytes before the error that condemns them: it must
    write to a place that nobody uses yet.
    """
    check_arithmetic(shard)
    try:
        if ranges:
            _read_parts(store, shard, sink)
        else:
            _read_stream(store, shard, sink)
    except NotFoundError as error:
        raise corrupt(shard, "the version is gone") from error


def check_arithmetic(shard: Shard) -> None:
    """Check that size, part size, part digests and digest of a shard agree, without reading a byte of it."""
    size, part_size = shard.pin.size, shard.part_size
    if size < 0 or part_size <= 0 or len(shard.parts) != max(1, -(-size // part_size)):
        raise corrupt(shard, f"{len(shard.parts)} parts of {part_size} bytes do not make {size} bytes")
    try:
        digest = tree_digest([bytes.fromhex(part) for part in shard.parts])
    except ValueError as error:
        raise corrupt(shard, "a part digest is not hexadecimal") from error
    if digest != shard.pin.sha256:
        raise corrupt(shard, "the part digests do not add up to the digest of the shard")


def check_object(store: StoreReads, shard: Shard) -> bool:
    """Check size and checksum of the pinned version as the store reports them, without reading its bytes.

    Returns False when the store keeps no SHA-256 of it: then nothing is proved about the bytes.
    """
    check_arithmetic(shard)
    with _naming(shard):
        info = store.head(shard.pin.key, shard.pin.version_id)
    if info is None:
        store.list(shard.pin.key)  # a HEAD does not tell a bucket that is gone from an object that is: this raises
        raise corrupt(shard, "the version is gone")
    if info.size != shard.pin.size:
        raise corrupt(shard, f"the object has {info.size} bytes, {shard.pin.size} were pinned")
    if info.checksum not in (None, shard.pin.sha256):
        raise corrupt(shard, f"the store's SHA-256 is {info.checksum}, {shard.pin.sha256} was pinned")
    return info.checksum is not None


def corrupt(shard: Shard, what: str) -> CorruptError:
    """Return the error that names the shard."""
    where = f"{shard.pin.key} version {shard.pin.version_id}"
    return CorruptError(f"shard {shard.paths[0] if shard.paths else '?'} ({where}): {what}")


@contextmanager
def _naming(shard: Shard) -> Iterator[None]:
    """Name the shard in what the store says of a damaged version."""
    try:
        yield
    except CorruptError as error:
        raise corrupt(shard, str(error)) from error


def _read_parts(store: StoreReads, shard: Shard, sink: Sink) -> None:
    pin = shard.pin
    if pin.size == 0:
        # There is no range to ask for; an empty version still has to be there.
        with _naming(shard):
            found = store.get(pin.key, pin.version_id)
        if found is None:
            raise NotFoundError(f"version {pin.version_id} of {pin.key} is gone")
        return _check_part(shard, 0, found[1])
    for number, expected_at in enumerate(range(0, pin.size, shard.part_size)):
        length = min(shard.part_size, pin.size - expected_at)
        with _naming(shard):
            data = store.get_range(pin.key, pin.version_id, expected_at, length)
        _check_part(shard, number, data)
        sink(expected_at, data)
    return None


def _check_part(shard: Shard, number: int, data: bytes) -> None:
    expected = min(shard.part_size, shard.pin.size - number * shard.part_size)
    if len(data) != expected:
        raise corrupt(shard, f"part {number + 1} has {len(data)} bytes, {expected} were pinned")
    if hashlib.sha256(data).hexdigest() != shard.parts[number]:
        raise corrupt(shard, f"part {number + 1} has other bytes than were pinned")


def _read_stream(store: StoreReads, shard: Shard, sink: Sink) -> None:
    offset, number, digest = 0, 0, hashlib.sha256()
    with closing(_chunks(store, shard)) as chunks:
        for chunk in chunks:
            if offset + len(chunk) > shard.pin.size:
                raise corrupt(shard, f"the object is longer than the {shard.pin.size} bytes that were pinned")
            view = memoryview(chunk)
            while view:
                room = (number + 1) * shard.part_size - offset
                digest.update(view[:room])
                sink(offset, bytes(view[:room]))
                offset += len(view[:room])
                view = view[room:]
                if offset == (number + 1) * shard.part_size or offset == shard.pin.size:
                    _check_digest(shard, number, digest.hexdigest())
                    number, digest = number + 1, hashlib.sha256()
    if offset != shard.pin.size:
        raise corrupt(shard, f"the object ended after {offset} of {shard.pin.size} bytes")
    if shard.pin.size == 0:
        _check_digest(shard, 0, digest.hexdigest())


def _check_digest(shard: Shard, number: int, digest: str) -> None:
    if digest != shard.parts[number]:
        raise corrupt(shard, f"part {number + 1} has other bytes than were pinned")


def _chunks(store: StoreReads, shard: Shard) -> Generator[bytes]:
    with _naming(shard):
        yield from store.get_stream(shard.pin.key, shard.pin.version_id)


class StoreSource:
    """A shard's object as a Source. Reads are not verified: check the bytes with `read_shard` first."""

    def __init__(self, store: StoreReads, shard: Shard, *, ranges: bool = True) -> None:
        self._store = store
        self._shard = shard
        self._ranges = ranges

    @property
    def size(self) -> int:
        return self._shard.pin.size

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes of the pinned version. Without ranges the version is streamed up to the end of what is asked."""
        pin = self._shard.pin
        length = max(0, min(length, pin.size - offset))
        if length == 0:
            return b""
        try:
            if self._ranges:
                return self._store.get_range(pin.key, pin.version_id, offset, length)
            return self._skip(offset, length)
        except NotFoundError as error:
            raise corrupt(self._shard, "the version is gone") from error

    def _skip(self, offset: int, length: int) -> bytes:
        found, at = bytearray(), 0
        with closing(_chunks(self._store, self._shard)) as chunks:
            for chunk in chunks:
                found += chunk[max(0, offset - at) : max(0, offset + length - at)]
                at += len(chunk)
                if at >= offset + length:
                    break
        return bytes(found)
