"""Files that outlive the mount they were opened in: with the kernel data path a process goes on writing to its open
files after the daemon was killed, and nobody tells the next daemon when it closes them.

The kernel grants a read lease only on a file that nobody has open for writing, so asking for one tells. The descriptors
kept here follow the files through renames.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Iterable


class Survivors:
    """The files that processes of an earlier mount still have open for writing. Only used from the event loop."""

    def __init__(self, tree_fd: int) -> None:
        self._tree_fd = tree_fd
        self._open: list[int] = []

    def __len__(self) -> int:
        return len(self._open)

    def find(self, paths: Iterable[bytes]) -> list[bytes]:
        """Return those files that are open for writing, and watch them. Before the new mount serves any."""
        found = []
        for path in paths:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self._tree_fd)
            except OSError:
                continue
            if _is_written(fd):
                self._open.append(fd)
                found.append(path)
            else:
                os.close(fd)
        return found

    def ended(self) -> list[bytes]:
        """Return the files that are not open for writing any more, under their present names; stop watching them."""
        ended = [fd for fd in self._open if not _is_written(fd)]
        self._open = [fd for fd in self._open if fd not in ended]
        above = os.readlink(b"/proc/self/fd/%d" % self._tree_fd) + b"/"
        paths = []
        for fd in ended:
            if os.fstat(fd).st_nlink:
                path = os.readlink(b"/proc/self/fd/%d" % fd)
                if path.startswith(above):
                    paths.append(path.removeprefix(above))
            os.close(fd)
        return paths

    def close(self) -> None:
        """Watch nothing any more."""
        for fd in self._open:
            os.close(fd)
        self._open.clear()


def _is_written(fd: int) -> bool:
    """Return whether a file is open for writing; False where the file system knows no leases."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # ignored, should somebody open it just now
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False
