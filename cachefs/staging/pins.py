"""Pins: hard links that keep the bytes of a save while its names are overwritten, renamed or removed.

`pins/<attempt>/<shard>` is one link to the staged inode. As long as it exists the inode's bytes do not change: the
mount gives a file that is opened for writing a fresh inode, or the pin a copy (tree.py). Dropping a pin frees the bytes
when the visible name is gone too. Pins are made before they are journaled and dropped after; `sweep` removes those that
a crash left without a record.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Container
from pathlib import Path

from cachefs.staging.layout import Staging


class Pins:
    """The pins of one staging directory. Methods are synchronous and thread-safe; OSError passes through."""

    def __init__(self, staging: Staging) -> None:
        self._root = staging.pins

    def path(self, attempt: str, shard: str) -> Path:
        """Return where a pin is."""
        return self._root / attempt / shard

    def add(self, attempt: str, shard: str, dir_fd: int, name: bytes) -> os.stat_result:
        """Pin the file `name` of a directory and return its stat, taken through the pin."""
        target = self.path(attempt, shard)
        target.parent.mkdir(mode=0o700, exist_ok=True)
        os.link(name, target, src_dir_fd=dir_fd, follow_symlinks=False)
        return os.lstat(target)

    def open(self, attempt: str, shard: str) -> int:
        """Open a pinned file for reading, without touching its access time where that is allowed; return the fd."""
        path = self.path(attempt, shard)
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOATIME)
        except PermissionError:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def replace(self, attempt: str, shard: str, copy: Path) -> None:
        """Put a copy with the same bytes in the place of a pin, atomically; the old inode is free to change."""
        copy.rename(self.path(attempt, shard))

    def drop(self, attempt: str, shard: str) -> None:
        """Drop one pin; already gone is fine."""
        self.path(attempt, shard).unlink(missing_ok=True)

    def drop_attempt(self, attempt: str) -> None:
        """Drop all pins of an attempt; already gone is fine."""
        shutil.rmtree(self._root / attempt, ignore_errors=False) if (self._root / attempt).exists() else None

    def shards(self, attempt: str) -> set[str]:
        """Return the shard ids that have a pin."""
        try:
            return set(os.listdir(self._root / attempt))
        except FileNotFoundError:
            return set()

    def sweep(self, known: Container[str]) -> list[str]:
        """Drop the pins of attempts that are not in `known`; return their attempt ids."""
        swept = [name for name in os.listdir(self._root) if name not in known]
        for attempt in swept:
            shutil.rmtree(self._root / attempt)
        return swept
