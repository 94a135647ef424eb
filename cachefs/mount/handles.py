"""Open files: each open has its own descriptor in the daemon, and the descriptor's number is the FUSE file handle.

With the kernel data path a handle also carries the backing id of its file, which all handles of a node share. Where
that cannot be (the node got a fresh inode while handles with the old one are open; a file with set-id bits, which
writes must clear), the handle is served by the daemon without the page cache: the kernel allows that beside the others.
"""

from __future__ import annotations

import os

from cachefs.mount.inodes import Node
from cachefs.mount.kernel import DataPath, Passthrough
from cachefs.mount.threads import frees_slowly

_ACCESS = os.O_RDONLY | os.O_WRONLY | os.O_RDWR
_SYNCHRONOUS = os.O_SYNC | os.O_DSYNC


class Handle:
    """One open file."""

    __slots__ = ("backing", "counts", "direct", "flags", "left", "node")

    def __init__(self, node: Node, flags: int) -> None:
        self.node = node
        self.flags = flags
        self.backing = 0
        """The backing id it was opened with, 0 for none."""
        self.direct = False
        """Whether the page cache must not be used."""
        self.counts = self.writable
        """Whether it is one of its node's writers."""
        self.left = -1
        """After its end: a descriptor that is to be closed in a thread, -1 for none."""

    @property
    def writable(self) -> bool:
        """Return whether the handle may write."""
        return self.flags & _ACCESS != os.O_RDONLY

    @property
    def synchronous(self) -> bool:
        """Return whether every write must reach the disk before it returns (O_SYNC, O_DSYNC)."""
        return bool(self.flags & _SYNCHRONOUS)


def staging_flags(flags: int) -> int:
    """Return the flags to open the staging file with, for the caller's open flags.

    The kernel gives every write its offset, so O_APPEND must not move it; O_DIRECT would ask for aligned buffers; the
    caller's O_SYNC is honoured by `Handles`, in a thread; O_CREAT, O_EXCL and O_TRUNC are separate steps.
    """
    return flags & _ACCESS | os.O_CLOEXEC | os.O_NOFOLLOW


class Handles:
    """All open handles. Only used from the FUSE loop."""

    def __init__(self, passthrough: Passthrough) -> None:
        self._open: dict[int, Handle] = {}
        self._passthrough = passthrough

    def __len__(self) -> int:
        return len(self._open)

    def __getitem__(self, fh: int) -> Handle:
        return self._open[fh]

    def add(self, fd: int, node: Node, flags: int) -> int:
        """Register a descriptor; it belongs to the table from now on. Raises OSError; nothing is registered then."""
        handle = Handle(node, flags)
        node.set_id = bool(os.fstat(fd).st_mode & 0o6000)
        if self._passthrough.mode is DataPath.KERNEL or node.backing:
            self._back(fd, handle)
        self._open[fd] = handle
        node.handles.add(fd)
        if handle.writable:
            node.writers += 1
        return fd

    def _back(self, fd: int, handle: Handle) -> None:
        node = handle.node
        if node.set_id and not node.backing:
            handle.direct = True
            return
        if node.backing:
            handle.backing = self._passthrough.open(fd, fd, node.backing)
        else:
            # The kernel keeps the file that it is given for as long as anything of the mount is in use, even when the
            # daemon is gone: it must not count as a writer (staging.survivors).
            try:
                read_only = os.open(b"/proc/self/fd/%d" % fd, os.O_RDONLY | os.O_CLOEXEC)
            except PermissionError:  # the file's mode lets its owner write but not read
                read_only = os.dup(fd)
            try:
                handle.backing = self._passthrough.open(fd, read_only, 0)
            finally:
                os.close(read_only)
        if handle.backing:
            node.backing = handle.backing
            node.backed += 1

    def hold(self, fd: int, node: Node) -> None:
        """Register a read-only descriptor that stands for writers without a handle; it belongs to the table."""
        handle = self._open[fd] = Handle(node, os.O_RDONLY)
        handle.counts = True
        node.handles.add(fd)
        node.writers += 1

    def remove(self, fh: int) -> Handle:
        """End a handle and close its descriptor; that of a large file without a name is `left` to the caller."""
        handle = self._open.pop(fh)
        node = handle.node
        node.handles.discard(fh)
        if handle.counts:
            node.writers -= 1
        if not node.names and _frees_slowly(fh):
            handle.left = fh  # so that the kernel's own reference is not the last one either
        else:
            os.close(fh)
        if handle.backing:
            node.backed -= 1
            self._passthrough.close(fh, handle.backing, last=node.backed == 0)
            if node.backed == 0:
                node.backing = 0
        return handle

    def writable(self, node: Node) -> int | None:
        """Return a handle of a node that may write, or None."""
        return next((fh for fh in node.handles if self._open[fh].writable), None)

    def repoint(self, node: Node, name: bytes, dir_fd: int) -> None:
        """Let every open handle of a node use the file that now stands at `name`, under the same handle numbers."""
        for fh in node.handles:
            fd = os.open(name, staging_flags(self._open[fh].flags), dir_fd=dir_fd)
            os.dup2(fd, fh, inheritable=False)
            os.close(fd)


def _frees_slowly(fd: int) -> bool:
    stat = os.fstat(fd)
    return stat.st_nlink == 0 and frees_slowly(stat)
