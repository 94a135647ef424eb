"""Opening what is staged: whoever writes to the mount may put a symbolic link in place of any file or directory."""

from __future__ import annotations

import os
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_directory(tree_fd: int, path: bytes) -> int:
    """Open a directory below the tree (b"": the tree itself), never through a symbolic link; return the fd.

    Raises OSError: ENOTDIR or ELOOP where a component is a link or a file.
    """
    fd = os.open(b".", _FLAGS, dir_fd=tree_fd)
    try:
        for name in path.split(b"/") if path else ():
            inner = os.open(name, _FLAGS, dir_fd=fd)
            os.close(fd)
            fd = inner
    except OSError:
        os.close(fd)
        raise
    return fd


def open_file(path: str | bytes | Path, dir_fd: int | None = None) -> int:
    """Open a file for reading, never through a symbolic link, and without touching its access time where that is
    allowed; return the fd. A FIFO in its place holds nobody. Raises OSError.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(path, flags | os.O_NOATIME, dir_fd=dir_fd)
    except PermissionError:
        return os.open(path, flags, dir_fd=dir_fd)
