"""The staging directory on the local disk.

tree/          the visible tree, a mirror of the mount: plain files that stay readable when the daemon is down
pins/          pins/<attempt>/<shard>: hard links that keep the bytes of a closed save (pins.py)
load/          load/<attempt>/: copies that the restore test loads (publish/loading.py)
journal/       the LMDB environment
control.sock   the daemon's control socket
lock           held (flock) by the one daemon that serves this staging
reserve        preallocated bytes, given back to the file system when it is full so that the daemon can go on
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from cachefs.errors import StagingError

RESERVE = 4 << 20
"""Bytes of the reserve; at most a hundredth of the disk. Room for the directories of pins."""


class Staging:
    """One staging directory, created and locked. All of it is on one local file system."""

    def __init__(self, root: Path) -> None:
        """Create what is missing and take the lock.

        Raises StagingError when the directory cannot be used or another daemon holds it.
        """
        self.root = root
        self.tree = root / "tree"
        self.pins = root / "pins"
        self.scratch = root / "scratch"
        self.journal = root / "journal"
        self.socket = root / "control.sock"
        try:
            root.mkdir(parents=True, exist_ok=True)
            root.chmod(0o711)
            self._lock = self._take_lock(root / "lock")
            self.tree.mkdir(exist_ok=True)
            self.pins.mkdir(mode=0o700, exist_ok=True)
            self.scratch.mkdir(mode=0o700, exist_ok=True)
            for left in self.scratch.iterdir():
                left.unlink()
            if len({path.stat().st_dev for path in (root, self.tree, self.pins)}) != 1:
                raise StagingError(f"{root} spans several file systems", hint="staging must be one local file system")
            self.tree_fd = os.open(self.tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self.fill_reserve()
        except OSError as error:
            raise StagingError(
                f"staging directory {root} cannot be used: {error.strerror}",
                hint="choose a directory on a local disk that this user can write",
            ) from error

    def _take_lock(self, path: Path) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            os.close(fd)
            raise StagingError(
                f"staging directory {self.root} is in use by another cachefs daemon (pid {holder or 'unknown'})",
                hint="one daemon per staging directory: stop the other one, or use another --staging",
            ) from None
        self._write_pid(fd)
        return fd

    @staticmethod
    def _write_pid(fd: int) -> None:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)

    def record_pid(self) -> None:
        """Write this process's id into the lock file again, after a fork into the background."""
        self._write_pid(self._lock)

    def fill_reserve(self) -> None:
        """Preallocate the reserve where there is room for it; cheap when it is whole."""
        size = min(RESERVE, self.total_bytes() // 100)
        fd = os.open(self.root / "reserve", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size < size:
                os.posix_fallocate(fd, 0, size)
        except OSError as error:
            os.ftruncate(fd, 0)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        finally:
            os.close(fd)

    def give_reserve_back(self) -> bool:
        """Give the reserve back to the full file system; return whether there was any."""
        path = self.root / "reserve"
        try:
            if path.stat().st_size == 0:
                return False
            os.truncate(path, 0)
        except FileNotFoundError:
            return False
        return True

    def free_bytes(self) -> int:
        """Return the bytes that an unprivileged writer may still use."""
        stat = os.fstatvfs(self.tree_fd)
        return stat.f_bavail * stat.f_frsize

    def total_bytes(self) -> int:
        """Return the size of the file system in bytes."""
        stat = os.fstatvfs(self.tree_fd)
        return stat.f_blocks * stat.f_frsize

    def close(self) -> None:
        """Give the lock back."""
        os.close(self.tree_fd)
        os.close(self._lock)
