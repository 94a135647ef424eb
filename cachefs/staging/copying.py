"""Copies of staged files: by reflink where the file system can, otherwise inside the kernel."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

_FICLONE = 0x40049409  # _IOW(0x94, 9, int), linux/fs.h
_CHUNK = 64 << 20
_NO_REFLINK = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS}


def clone(source_fd: int, target: Path) -> None:
    """Create `target` with the bytes, permission bits and modification time of an open file, synced. Blocks.

    Raises OSError and leaves nothing behind (ENOSPC among others).
    """
    stat = os.fstat(source_fd)
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.ioctl(fd, _FICLONE, source_fd)
        except OSError as error:
            if error.errno not in _NO_REFLINK:
                raise
            _copy(source_fd, fd, stat.st_size)
        os.fchmod(fd, stat.st_mode & 0o7777)
        os.utime(fd, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        os.fsync(fd)  # it may take the place of bytes that were promised to survive a power cut
    except BaseException:
        target.unlink()
        raise
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """Make the entries of a directory durable. Blocks."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _copy(source_fd: int, target_fd: int, size: int) -> None:
    offset = 0
    while offset < size:
        done = os.copy_file_range(source_fd, target_fd, min(_CHUNK, size - offset), offset, offset)
        if done == 0:
            raise OSError(errno.EIO, "file became shorter while it was copied")
        offset += done
