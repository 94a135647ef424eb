"""Opening directories of the visible tree: whoever writes to the mount may put a symbolic link in place of any."""

from __future__ import annotations

import os

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
