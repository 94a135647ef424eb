"""The visible tree in staging, read through its directory descriptor: what the detector's decisions are based on."""

from __future__ import annotations

import errno
import os
import stat as stat_module
from collections.abc import Sequence

from cachefs.errors import DAMAGE, CorruptError, UnreadableError
from cachefs.formats.names import to_text
from cachefs.formats.records import Baseline
from cachefs.generations.completeness import Source
from cachefs.staging.walking import open_file
from cachefs.staging.writers import written

_ASKED = 1000
"""Files that are asked for their writers at a close: on the event loop, at some 10 us each. The others are asked when
they are pinned, in a thread: one that is written is refused then, and the pinning repeated for a while (effects.py).
"""


class FileSource:
    """A staged file as a Source: opened for each read, so that nothing has to be closed."""

    def __init__(self, path: bytes, dir_fd: int | None, size: int) -> None:
        self._path = path
        self._dir_fd = dir_fd
        self._size = size

    @property
    def size(self) -> int:
        """Return the file's size in bytes, as it was when the source was made."""
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        """Read bytes; fewer at the end of the file, none when it is gone.

        Raises CorruptError when the disk has lost them, UnreadableError when they cannot be read just now.
        """
        try:
            fd = open_file(self._path, self._dir_fd)
            try:
                return os.pread(fd, length, offset)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return b""
            known = CorruptError if error.errno in DAMAGE else UnreadableError
            raise known(f"{to_text(self._path)} cannot be read: {error.strerror}") from error


class TreeView:
    """Implements `View` on the staging tree. Paths are relative to the mount root."""

    def __init__(self, tree_fd: int) -> None:
        self._fd = tree_fd

    def source(self, path: bytes) -> Source | None:
        """Return the bytes of a regular file, or None."""
        stat = self._stat(path)
        if stat is None or not stat_module.S_ISREG(stat.st_mode):
            return None
        return FileSource(path, self._fd, stat.st_size)

    def names(self, path: bytes) -> Sequence[bytes]:
        """Return every file and link below a directory, recursively, relative to it; empty when it is not there."""
        found: list[bytes] = []
        try:
            for root, directories, files, fd in os.fwalk(path or b".", dir_fd=self._fd, follow_symlinks=False):
                above = root[len(path or b".") + 1 :]
                links = [name for name in directories if _is_link(name, fd)]
                found.extend(above + b"/" + name if above else name for name in (*files, *links))
        except OSError:
            pass  # gone, no directory any more, or not ours to read: what was found is what can be said
        return found

    def readlink(self, path: bytes) -> bytes | None:
        """Return the target of a symbolic link, or None."""
        try:
            return os.readlink(path, dir_fd=self._fd)
        except OSError:
            return None

    def written(self, path: bytes) -> Sequence[bytes]:
        """Return the files at or below a path that are open for writing, of the first `_ASKED`. One that cannot be
        asked counts.
        """
        below = [path + b"/" + name for name in self.names(path)[:_ASKED]]
        return [one for one in below or [path] if self._is_written(one)]

    def _is_written(self, path: bytes) -> bool:
        stat = self._stat(path)
        try:
            return stat is not None and stat_module.S_ISREG(stat.st_mode) and written(path, self._fd)
        except OSError:
            return True

    def identity(self, path: bytes) -> Baseline | None:
        """Return what stands under a path, links not followed, or None."""
        stat = self._stat(path)
        return None if stat is None else Baseline(ino=stat.st_ino, mtime_ns=stat.st_mtime_ns, size=stat.st_size)

    def _stat(self, path: bytes) -> os.stat_result | None:
        try:
            return os.stat(path or b".", dir_fd=self._fd, follow_symlinks=False)
        except OSError:
            return None


def _is_link(name: bytes, fd: int) -> bool:
    return stat_module.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
