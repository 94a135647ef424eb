"""Whether somebody has a file open for writing, whoever it is and under whatever name.

The kernel grants a read lease only on a file that nobody has open for writing (fcntl(2), F_SETLEASE), so asking for one
tells. A shared writable map counts after its descriptor was closed: it holds the open file. So do descriptors of this
process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal


def open_to_ask(path: bytes, dir_fd: int) -> int:
    """Return a descriptor of a file to ask with; links are not followed. Raises OSError."""
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=dir_fd)


def is_written(fd: int) -> bool | None:
    """Return whether a file is open for writing; None when nobody can tell.

    `fd` is open for reading only. Nobody can tell on a file system without leases (EINVAL, as on some network disks),
    and for the file of another user without CAP_LEASE.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # ignored, should somebody open it just now
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return True if error.errno == errno.EAGAIN else None
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def written(path: bytes, dir_fd: int) -> bool:
    """Return whether a regular file is open for writing; False when it is gone, or when nobody can tell.

    Raises OSError when the file is there and cannot be opened.
    """
    try:
        fd = open_to_ask(path, dir_fd)
    except FileNotFoundError:
        return False
    try:
        return bool(is_written(fd))
    finally:
        os.close(fd)
