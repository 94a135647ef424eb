"""Open files: each open has its own descriptor in the daemon, and the descriptor's number is the FUSE file handle."""

from __future__ import annotations

import os

from cachefs.mount.inodes import Node

_ACCESS = os.O_RDONLY | os.O_WRONLY | os.O_RDWR
_SYNCHRONOUS = os.O_SYNC | os.O_DSYNC


class Handle:
    """One open file."""

    __slots__ = ("flags", "node")

    def __init__(self, node: Node, flags: int) -> None:
        self.node = node
        self.flags = flags

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

    def __init__(self) -> None:
        self._open: dict[int, Handle] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __getitem__(self, fh: int) -> Handle:
        return self._open[fh]

    def add(self, fd: int, node: Node, flags: int) -> int:
        """Register a descriptor; it belongs to the table from now on."""
        handle = Handle(node, flags)
        self._open[fd] = handle
        node.handles.add(fd)
        if handle.writable:
            node.writers += 1
        return fd

    def remove(self, fh: int) -> Handle:
        """Close a handle's descriptor."""
        handle = self._open.pop(fh)
        handle.node.handles.discard(fh)
        if handle.writable:
            handle.node.writers -= 1
        os.close(fh)
        return handle

    def repoint(self, node: Node, name: bytes, dir_fd: int) -> None:
        """Let every open handle of a node use the file that now stands at `name`, under the same handle numbers."""
        for fh in node.handles:
            fd = os.open(name, staging_flags(self._open[fh].flags), dir_fd=dir_fd)
            os.dup2(fd, fh, inheritable=False)
            os.close(fd)
