"""What the three parts of the file system share: the nodes, the open handles, the pins, the observer."""

from __future__ import annotations

import errno
import os
import stat as stat_module
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import trio

from cachefs.mount.handles import Handles
from cachefs.mount.inodes import InodeTable, Name, Node
from cachefs.mount.kernel import Passthrough
from cachefs.mount.mapped import Mapped
from cachefs.mount.observer import Observer
from cachefs.mount.threads import Threads
from cachefs.staging.changes import Change, Kind
from cachefs.staging.layout import Staging
from cachefs.staging.pins import Pins
from cachefs.threads import in_thread
from cachefs.waiting import each


class Caller:
    """Who asks: the user and group that new files belong to."""

    __slots__ = ("gid", "uid")

    def __init__(self, uid: int, gid: int) -> None:
        self.uid = uid
        self.gid = gid


class Tree:
    """The visible tree in staging, as the mount works on it. Only used from the FUSE loop."""

    def __init__(
        self, staging: Staging, pins: Pins, observer: Observer, passthrough: Passthrough | None = None
    ) -> None:
        self.fd = staging.tree_fd
        self.table = InodeTable(staging.tree_fd)
        self.passthrough = passthrough or Passthrough("python")
        self.handles = Handles(self.passthrough)
        self.mapped = Mapped(self.table, self.handles)
        self.threads = Threads()
        self.pins = pins
        self.observer = observer
        self._scratch = staging.scratch
        self.attributes_changed: Callable[[Node], None] = lambda node: None
        """Called when the daemon itself changed attributes that the kernel may hold."""
        self.name_changed: Callable[[Name], None] = lambda name: None
        """Called when what a name stands for changed although its caller was told of an error: the kernel believes
        that it did not.
        """
        self._releasing: dict[int, trio.Event] = {}
        self._privileged = os.geteuid() == 0

    def stat(self, node: Node) -> os.stat_result:
        """Return a node's attributes; works for an open file or directory without a name, too."""
        if node.names or node is self.table.root:
            dir_fd, name = self.table.at(node)
            return self.note(node, lambda: os.stat(name, dir_fd=dir_fd, follow_symlinks=False))
        if node.handles:
            return self.note(node, lambda: os.fstat(next(iter(node.handles))))
        if node.dir_fd >= 0:
            return os.fstat(node.dir_fd)
        raise OSError(errno.ESTALE, "no name and no handle left")

    def note(self, node: Node, look: Callable[[], os.stat_result]) -> os.stat_result:
        """Look at a node's attributes, and note how many of its links are pins."""
        stat, node.pins = self.pins.counted(look)
        return stat

    def reference(self, node: Node) -> bytes:
        """Return a path that reaches a node for calls that take no directory descriptor; never resolved by a name."""
        if node is self.table.root:
            return b"/proc/self/fd/%d/." % node.dir_fd
        if node.names:
            return b"/proc/self/fd/%d/%s" % self.table.at(node)
        if node.handles:
            return b"/proc/self/fd/%d" % next(iter(node.handles))
        raise OSError(errno.ESTALE, "no name and no handle left")

    def give_to(
        self, caller: Caller, parent: Node, path: bytes | int, mode: int | None, *, dir_fd: int | None = None
    ) -> None:
        """Give a new entry to its creator, as the kernel does on a local disk: a set-group-id directory hands its
        group on, and to directories the bit itself.

        The daemon creates as itself, so that a caller whose right to the directory comes from a supplementary group is
        not refused; the kernel has checked the permission already (`default_permissions`), and it has applied the
        caller's umask: the daemon's own must not count. `mode` is None for a symbolic link.
        """
        if self._privileged and (caller.uid or caller.gid):
            above = self.stat(parent)
            gid = above.st_gid if above.st_mode & 0o2000 else caller.gid
            os.chown(path, caller.uid, gid, dir_fd=dir_fd, follow_symlinks=isinstance(path, int))
        if mode is not None:
            made = os.stat(path, dir_fd=dir_fd)
            handed_on = made.st_mode & 0o2000 if stat_module.S_ISDIR(made.st_mode) else 0
            os.chmod(path, stat_module.S_IMODE(mode) | handed_on, dir_fd=dir_fd)

    async def before(self, kind: Kind, path: bytes, *, old: bytes = b"", is_dir: bool = False) -> None:
        """Let the observer hold an operation back. When this returns, nothing has run since the observer agreed."""
        if self.mapped:
            await self.mapped.look()  # a close that was waited for is told before what follows it
        change = Change(kind, path, old=old, is_dir=is_dir)
        while (waiting := self.observer.before(change)) is not None:
            await waiting

    async def settle(self, kind: Kind, parent: Node, name: bytes, *, is_dir: bool = False) -> bytes:
        """Let the observer hold back an operation on a directory entry; return the path it has then."""
        await self.before(kind, self.table.path_at(parent, name), is_dir=is_dir)
        return self.table.path_at(parent, name)

    async def ready_to_write(self, kind: Kind, node: Node, *, emptied: bool) -> None:
        """Return when the bytes of a node may change: the observer agrees, and no pin is on its inode any more."""
        if node.past:
            await self.mapped.look(node)  # what it overwrites is a save of its own then
        while True:
            if (waiting := self._held_back(kind, node)) is not None:
                await waiting
            elif not await self._unpin(node, emptied=emptied):
                return  # at once; after a wait its save may have been closed, and pinned, meanwhile

    def _held_back(self, kind: Kind, node: Node) -> Awaitable[None] | None:
        for path in self.table.paths_of(node):
            if (waiting := self.observer.before(Change(kind, path))) is not None:
                return waiting
        return None

    async def after(self, *changes: Change, names: Sequence[Name] = (), made: Node | None = None) -> None:
        """Tell the observer, and wait for what must happen before the caller gets its answer. Nothing runs between what
        is told of one change and of the next; all are told and waited for, also when one fails.

        `names` stand for something else now, `made` is the node that the reply gives to the kernel: when this raises,
        the kernel gets nothing, and asks for the names again.
        """
        try:
            waiting = [one for change in changes if (one := self.observer.after(change)) is not None]
            if waiting:
                await each(waiting)
        except Exception:
            if made is not None:
                self.table.forget(made.id, 1)
            for name in names:
                self.name_changed(name)
            raise

    async def _unpin(self, node: Node, *, emptied: bool) -> bool:
        """Free a node's inode from its pins before its bytes change; return whether that took a wait.

        A file that is about to be emptied gets a fresh inode at once, and the pins keep the old one. Otherwise, or when
        the file has several names, the pins move to a copy, in a thread. A node whose old inode the kernel reads and
        writes for others cannot get another one: its name becomes that of a new node, and the caller is sent back to
        look the name up again (ESTALE, which the kernel does by itself); the others keep the file they opened.
        """
        if (event := self._releasing.get(node.id)) is not None:
            await event.wait()
            return True
        if not self.pins.holders(node.ino):
            return False
        stat = self.stat(node)
        if emptied and node.names and stat.st_nlink - node.pins == 1:
            ino = self._renew(node, stat)
            if node.backed:
                self.table.removed(*node.names[-1], last=True)
                raise OSError(errno.ESTALE, "the name belongs to another file now")
            self._rebind(node, ino)
            return False
        event = self._releasing[node.id] = trio.Event()
        try:
            await in_thread(self.pins.release_inode, node.ino, limiter=self.threads.copies)
        finally:
            del self._releasing[node.id]
            event.set()
        return True

    def _renew(self, node: Node, stat: os.stat_result) -> int:
        """Put an empty file with the same attributes in the place of a node's; return its inode number."""
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
            above = os.stat(b".", dir_fd=dir_fd)
            os.rename(scratch, name, dst_dir_fd=dir_fd)
            # To the user no name changed, so the directory was not modified.
            os.utime(b".", ns=(above.st_atime_ns, above.st_mtime_ns), dir_fd=dir_fd)
        except BaseException:
            Path(scratch).unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        return ino

    def _rebind(self, node: Node, ino: int) -> None:
        self.table.rebind(node, ino)
        node.pins = 0
        node.fresh = True
        dir_fd, name = self.table.at(node)
        self.handles.repoint(node, name, dir_fd)
