"""What the three parts of the file system share: the nodes, the open handles, the pins, the observer."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import trio

from cachefs.mount.handles import Handles
from cachefs.mount.inodes import InodeTable, Node
from cachefs.mount.observer import Observer
from cachefs.staging.changes import Change, Kind
from cachefs.staging.layout import Staging
from cachefs.staging.pins import Pins


class Caller:
    """Who asks: the user and group that new files belong to."""

    __slots__ = ("gid", "uid")

    def __init__(self, uid: int, gid: int) -> None:
        self.uid = uid
        self.gid = gid


class Tree:
    """The visible tree in staging, as the mount works on it. Only used from the FUSE loop."""

    def __init__(self, staging: Staging, pins: Pins, observer: Observer) -> None:
        self.fd = staging.tree_fd
        self.table = InodeTable(staging.tree_fd)
        self.handles = Handles()
        self.pins = pins
        self.observer = observer
        self._scratch = staging.scratch
        self._releasing: dict[int, trio.Event] = {}
        self._privileged = os.geteuid() == 0

    def stat(self, node: Node) -> os.stat_result:
        """Return a node's attributes; works for an open file without a name, too."""
        if node.names or node is self.table.root:
            dir_fd, name = self.table.at(node)
            return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        if node.handles:
            return os.fstat(next(iter(node.handles)))
        raise OSError(errno.ESTALE, "no name and no handle left")

    def links(self, stat: os.stat_result) -> int:
        """Return how many names a file has in the visible tree: its links without the pins."""
        return stat.st_nlink - len(self.pins.holders(stat.st_ino))

    def reference(self, node: Node) -> bytes:
        """Return a path that reaches a node for calls that take no directory descriptor; never resolved by a name."""
        if node is self.table.root:
            return b"/proc/self/fd/%d/." % node.dir_fd
        if node.names:
            return b"/proc/self/fd/%d/%s" % self.table.at(node)
        if node.handles:
            return b"/proc/self/fd/%d" % next(iter(node.handles))
        raise OSError(errno.ESTALE, "no name and no handle left")

    def give_to(self, caller: Caller, parent: Node, path: bytes | int, *, dir_fd: int | None = None) -> None:
        """Give a new entry to its creator, as the kernel does on a local disk: a set-group-id directory hands its
        group on.

        The daemon creates as itself, so that a caller whose right to the directory comes from a supplementary group is
        not refused; the kernel has checked the permission already (`default_permissions`).
        """
        if not self._privileged or (caller.uid == 0 and caller.gid == 0):
            return
        above = self.stat(parent)
        gid = above.st_gid if above.st_mode & 0o2000 else caller.gid
        os.chown(path, caller.uid, gid, dir_fd=dir_fd, follow_symlinks=isinstance(path, int))

    async def before(self, kind: Kind, path: bytes, *, old: bytes = b"", is_dir: bool = False) -> None:
        """Let the observer hold an operation back."""
        waiting = self.observer.before(Change(kind, path, old=old, is_dir=is_dir))
        if waiting is not None:
            await waiting

    async def after(self, change: Change) -> None:
        """Tell the observer, and wait for what must happen before the caller gets its answer."""
        waiting = self.observer.after(change)
        if waiting is not None:
            await waiting

    async def make_writable(self, node: Node, *, emptied: bool) -> None:
        """Free a node's inode from its pins before its bytes change.

        A file that is about to be emptied gets a fresh inode at once, and the pins keep the old one. Otherwise, or when
        the file has several names, the pins move to a copy, in a thread.
        """
        while (event := self._releasing.get(node.id)) is not None:
            await event.wait()
        if not self.pins.holders(node.ino):
            return
        stat = self.stat(node)
        if emptied and node.names and self.links(stat) == 1:
            self._renew(node, stat)
            return
        event = self._releasing[node.id] = trio.Event()
        try:
            await trio.to_thread.run_sync(self.pins.release_inode, node.ino)
        finally:
            del self._releasing[node.id]
            event.set()

    def _renew(self, node: Node, stat: os.stat_result) -> None:
        dir_fd, name = self.table.at(node)
        scratch = self._scratch / f"fresh-{node.id}"
        fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if self._privileged:
                os.fchown(fd, stat.st_uid, stat.st_gid)
            os.fchmod(fd, stat.st_mode & 0o7777)
            reference = self.reference(node)
            for attribute in os.listxattr(reference, follow_symlinks=False):
                if attribute.startswith("user."):
                    os.setxattr(fd, attribute, os.getxattr(reference, attribute, follow_symlinks=False))
            ino = os.fstat(fd).st_ino
            os.rename(scratch, name, dst_dir_fd=dir_fd)
        except BaseException:
            Path(scratch).unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        self.table.rebind(node, ino)
        node.fresh = True
        self.handles.repoint(node, name, dir_fd)
