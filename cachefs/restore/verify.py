"""Verify all shards of a manifest in place: nothing is written anywhere.

Level `checksum` compares size and SHA-256 that the store itself reports, and reads the bytes of what the store keeps no
SHA-256 of. Level `bytes` also reads and hashes every byte here, so it finds what a store does not know about its disks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import msgspec

from cachefs.formats.manifest import Manifest, Shard
from cachefs.restore.layout import check_manifest
from cachefs.restore.pool import run_all
from cachefs.restore.shards import check_object, read_shard
from cachefs.store.base import StoreReads

Level = Literal["checksum", "bytes"]
Progress = Callable[[int], None]
"""Called from worker threads with the number of bytes just verified or written; what it raises stops the work."""


class Verified(msgspec.Struct, frozen=True):
    """What was verified, and how many bytes were read for it."""

    level: Level
    shards: int
    bytes: int
    read: int


def silent(count: int) -> None:
    """Show no progress."""


def verify_shard(
    store: StoreReads, shard: Shard, level: Level, progress: Progress = silent, *, ranges: bool = True
) -> int:
    """Verify one shard; return how many bytes were read. Raises CorruptError that names it, and the store's errors."""
    reported = check_object(store, shard)
    if level == "checksum" and reported:
        progress(shard.pin.size)
        return 0
    read_shard(store, shard, lambda _offset, data: progress(len(data)), ranges=ranges)
    return shard.pin.size


def verify(
    store: StoreReads,
    manifest: Manifest,
    level: Level,
    *,
    workers: int = 8,
    ranges: bool = True,
    progress: Progress = silent,
) -> Verified:
    """Verify a manifest's paths and every shard, `workers` at a time; blocks.

    Raises CorruptError that names the first shard found wrong, and the store's errors.
    """
    check_manifest(manifest)
    read: list[int] = []

    def one(shard: Shard) -> None:
        read.append(verify_shard(store, shard, level, progress, ranges=ranges))

    run_all([partial(one, shard) for shard in manifest.shards], workers)
    return Verified(level, len(manifest.shards), manifest.size, sum(read))
