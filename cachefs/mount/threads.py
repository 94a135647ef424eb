"""The threads of the mount. Each kind of slow call has a limit of its own, so that it waits behind none of another
kind; the journal and the pins use trio's own limit, and wait behind none of the mount's.
"""

from __future__ import annotations

import os
import stat as stat_module

import trio

from cachefs.threads import NoThread, in_thread

LARGE = 16 << 20
"""Bytes of blocks from which they are freed in a thread: ext4 takes milliseconds for them, and seconds for the hundreds
of GB of a checkpoint; a thread takes a tenth of a millisecond, which small files are spared.
"""
REQUESTS = 1000
"""Requests served at a time: more than can wait in threads, so that others are still read from the kernel. Less than
PENDING in _passthrough.c.
"""


class Threads:
    """The limits of one mount."""

    def __init__(self) -> None:
        self.syncs = trio.CapacityLimiter(64)
        """fsync and O_SYNC writes: they wait for the disk, which serves many at once."""
        self.copies = trio.CapacityLimiter(4)
        """Copies of pinned files: a few use the disk's whole bandwidth."""
        self.frees = trio.CapacityLimiter(8)
        """Removals and truncations of large files: the disk gives their blocks back."""

    async def let_go(self, fd: int) -> None:
        """Close a descriptor that may be the last of a large file; -1 for none."""
        if fd >= 0:
            with trio.CancelScope(shield=True):
                try:
                    await in_thread(os.close, fd, limiter=self.frees)
                except NoThread:  # late for others is better than never
                    os.close(fd)


def frees_slowly(stat: os.stat_result, kept: int = 0) -> bool:
    """Return whether giving back the blocks of a file is worth a thread: all with its last name and descriptor, or
    those beyond `kept` bytes.
    """
    return stat_module.S_ISREG(stat.st_mode) and stat.st_blocks * 512 - kept >= LARGE


def hold(name: bytes, dir_fd: int, stat: os.stat_result | None) -> int:
    """Return a descriptor for `Threads.let_go` when a name's removal would free a large file, else -1."""
    if stat is None or stat.st_nlink > 1 or not frees_slowly(stat):
        return -1
    try:
        return os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    except OSError:
        return -1  # gone, or no descriptor is left: then it is freed at once
