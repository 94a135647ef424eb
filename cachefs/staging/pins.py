"""Pins: hard links that keep the bytes of a save while its names are overwritten, renamed or removed.

`pins/<attempt>/<shard>` is one link to the staged inode. As long as it exists the inode's bytes do not change: the
mount gives a file that is opened for writing a fresh inode, or the pin a copy (tree.py). Dropping a pin frees the bytes
when the visible name is gone too. Pins are made before they are journaled and dropped after; `sweep` removes those that
a crash left without a record.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Container
from pathlib import Path

from cachefs.staging.copying import clone, sync_directory
from cachefs.staging.layout import Staging
from cachefs.staging.walking import open_file

PinName = tuple[str, str]
"""Attempt id and shard id."""


class PinReader:
    """Reads pins that another process makes, moves and drops. Synchronous and thread-safe; OSError passes through."""

    def __init__(self, root: Path) -> None:
        """`root` is the directory `pins` of a staging directory."""
        self._root = root

    def path(self, attempt: str, shard: str) -> Path:
        """Return where a pin is."""
        return self._root / attempt / shard

    def open(self, attempt: str, shard: str) -> int:
        """Open a pinned file for reading, without touching its access time where that is allowed; return the fd."""
        return open_file(self.path(attempt, shard))

    def is_current(self, attempt: str, shard: str, fd: int) -> bool:
        """Return whether the pin still is the inode behind `fd`: what was read from it then is the pinned bytes."""
        try:
            return os.lstat(self.path(attempt, shard)).st_ino == os.fstat(fd).st_ino
        except FileNotFoundError:
            return False

    def shards(self, attempt: str) -> set[str]:
        """Return the shard ids that have a pin."""
        try:
            return set(os.listdir(self._root / attempt))
        except FileNotFoundError:
            return set()

    def drop_attempt(self, attempt: str) -> None:
        """Do nothing: the owner of the pins drops those of attempts that are over and have no records any more."""


class Pins(PinReader):
    """The pins of one staging directory, in the process that owns them. Synchronous and thread-safe; OSError passes
    through.
    """

    def __init__(self, staging: Staging) -> None:
        """Find the pins that an earlier daemon left."""
        super().__init__(staging.pins)
        self._staging = staging
        self._scratch = staging.scratch
        self._lock = threading.Lock()
        self._holders: dict[int, set[PinName]] = {}
        self._inos: dict[PinName, int] = {}
        for attempt in os.listdir(self._root):
            for shard in os.listdir(self._root / attempt):
                self._note((attempt, shard), os.lstat(self._root / attempt / shard).st_ino)

    def _note(self, pin: PinName, ino: int) -> None:
        self._unlist(pin)
        self._inos[pin] = ino
        self._holders.setdefault(ino, set()).add(pin)

    def _unlist(self, pin: PinName) -> None:
        ino = self._inos.pop(pin, None)
        if ino is not None:
            self._holders[ino].discard(pin)
            if not self._holders[ino]:
                del self._holders[ino]

    def holders(self, ino: int) -> frozenset[PinName]:
        """Return the pins on an inode."""
        with self._lock:
            return frozenset(self._holders.get(ino, ()))

    def counted(self, look: Callable[[], os.stat_result]) -> tuple[os.stat_result, int]:
        """Return what `look` finds, and how many of its links are pins at that instant: the others are the user's."""
        with self._lock:
            stat = look()
            return stat, len(self._holders.get(stat.st_ino, ()))

    def has_names(self, attempt: str) -> bool:
        """Return whether a pinned file of an attempt still has a name in the tree, under whatever path."""
        for shard in self.shards(attempt):
            path = self.path(attempt, shard)
            try:
                stat, pins = self.counted(path.lstat)
            except FileNotFoundError:
                continue  # dropped meanwhile
            if stat.st_nlink > pins:
                return True
        return False

    def add(self, attempt: str, shard: str, dir_fd: int, name: bytes) -> os.stat_result:
        """Pin the file `name` of a directory and return its stat, taken through the pin.

        A pin takes no room but for its name: on a full disk the reserve is given back for it.
        """
        try:
            return self._link(attempt, shard, dir_fd, name)
        except OSError as error:
            if error.errno != errno.ENOSPC or not self._staging.give_reserve_back():
                raise
        return self._link(attempt, shard, dir_fd, name)

    def _link(self, attempt: str, shard: str, dir_fd: int, name: bytes) -> os.stat_result:
        target = self.path(attempt, shard)
        target.parent.mkdir(mode=0o700, exist_ok=True)
        with self._lock:  # a link and its note are one step for `counted`
            os.link(name, target, src_dir_fd=dir_fd, follow_symlinks=False)
            stat = os.lstat(target)
            self._note((attempt, shard), stat.st_ino)
        return stat

    def release_inode(self, ino: int) -> None:
        """Move every pin on an inode to a copy of its bytes, atomically each; the inode is free to change then. Blocks.

        Raises OSError when the copy does not fit; the pins then stay on the inode.
        """
        for attempt, shard in self.holders(ino):
            try:
                source = self.open(attempt, shard)
            except FileNotFoundError:
                continue  # dropped meanwhile
            copy = self._scratch / f"{attempt}-{shard}"
            try:
                clone(source, copy)
                with self._lock:
                    if self._inos.get((attempt, shard)) == ino:
                        copy_ino = os.lstat(copy).st_ino
                        copy.rename(self.path(attempt, shard))
                        self._note((attempt, shard), copy_ino)
                    else:
                        copy.unlink()  # dropped while it was copied
                        continue
                sync_directory(self._root / attempt)
            finally:
                os.close(source)

    def drop(self, attempt: str, shard: str) -> None:
        """Drop one pin; already gone is fine."""
        path = self.path(attempt, shard)
        try:
            held = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            held = -1  # gone, or no descriptor left: then the blocks are freed under the lock
        with self._lock:
            path.unlink(missing_ok=True)
            self._unlist((attempt, shard))
        if held >= 0:
            os.close(held)  # frees the blocks, which may take a while, when nobody waits for the lock

    def drop_attempt(self, attempt: str) -> None:
        """Drop all pins of an attempt; already gone is fine."""
        for shard in self.shards(attempt):
            self.drop(attempt, shard)
        try:
            (self._root / attempt).rmdir()
        except FileNotFoundError:
            pass
        self._staging.fill_reserve()

    def attempts(self) -> set[str]:
        """Return the attempts that have pins."""
        with self._lock:
            return {attempt for attempt, _ in self._inos}

    def sweep(self, known: Container[str]) -> list[str]:
        """Drop the pins of attempts that are not in `known`, and directories without pins; return their ids."""
        swept = [name for name in os.listdir(self._root) if name not in known or not self.shards(name)]
        for attempt in swept:
            self.drop_attempt(attempt)
        return swept
