"""The few file operations that the directory store is built from: durable, exclusive, and correct on NFS."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cachefs.errors import DeniedError, NoStoreError, StoreError, UnavailableError, Unsupported
from cachefs.store.base import Buffer

_COPY = 1 << 30
_NO_KERNEL_COPY = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
_REASONS = {errno.ENOSPC: "full", errno.EDQUOT: "full", errno.ETIMEDOUT: "timeout", errno.ESTALE: "stale"}


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Turn an OSError of the block into the store's errors; `where` is named in the message."""
    try:
        yield
    except OSError as error:
        raise store_error(error, where) from error


def store_error(error: OSError, where: str) -> StoreError | DeniedError | NoStoreError:
    """Return the store's error for a failed system call. Pure."""
    message = f"{where}: {os.strerror(error.errno) if error.errno else error}"
    if error.errno in _DENIED:
        message += f": {error.filename}" if error.filename else ""
        return DeniedError(message, hint="check the directory's owner and permissions")
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return NoStoreError(message, hint="is the directory there, and its file system mounted?")
    if error.errno in _NO_LOCKS:
        return Unsupported(message, hint="mount the file system with locks (NFS: lockd; Lustre: -o flock)")
    return UnavailableError(message, reason=_REASONS.get(error.errno or 0, "io"))


def write_file(path: str, data: Buffer) -> None:
    """Create a file that does not exist and write it to disk. Read-only, since stored bytes never change."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
    try:
        left = memoryview(data).cast("B") if len(data) else memoryview(b"")
        while left:
            left = left[os.write(fd, left) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def concatenate(path: str, parts: Sequence[str]) -> None:
    """Create a file from whole files in order, copied by the kernel (a reflink where it can), and write it to disk."""
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
    try:
        for part in parts:
            source = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _append(out, source)
            finally:
                os.close(source)
        os.fsync(out)
    finally:
        os.close(out)


def _append(out: int, source: int) -> None:
    """Copy to the end. Some file systems end copy_file_range early, so that sendfile always gets the last word."""
    try:
        while os.copy_file_range(source, out, _COPY):
            pass
    except OSError as error:
        if error.errno not in _NO_KERNEL_COPY:
            raise
    while os.sendfile(out, source, None, _COPY):
        pass


def unlink(path: str) -> None:
    """Remove a file; already gone is fine."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def sync_directory(path: str) -> None:
    """Make the entries of a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directories(root: str, relative: str) -> str:
    """Create the directories of `relative` below `root`, durably; return the full path. `root` must exist."""
    path = root
    for name in relative.split("/"):
        parent, path = path, os.path.join(path, name)
        try:
            os.mkdir(path)
        except FileExistsError:
            continue
        sync_directory(parent)
    return path


def prune_directories(root: str, relative: str) -> None:
    """Remove the directories of `relative` below `root` that are empty, innermost first."""
    while relative:
        try:
            os.rmdir(os.path.join(root, relative))
        except OSError:
            return
        relative = os.path.dirname(relative)


def link_exclusive(source: str, target: str) -> bool:
    """Give `source` the name `target` unless the name is taken; return whether it is ours.

    Over NFS the answer to a link may be lost and the retry then says "exists" (open(2), O_EXCL): the inode decides.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        try:
            return os.path.samefile(source, target)
        except FileNotFoundError:
            return False
    return True


@contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold an exclusive lock on a lock file, which is created and then stays.

    An "open file description" lock (fcntl(2)): it excludes threads and processes alike, works across NFS clients, and
    the kernel drops it when its holder dies.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        yield
    finally:
        os.close(fd)
