"""Names: lookup, create, remove, rename, link, list. Work goes through directory descriptors."""

from __future__ import annotations

import ctypes
import errno
import os
import stat as stat_module
from bisect import bisect_left
from collections.abc import Iterator
from itertools import count, islice

import xxhash

from cachefs.mount.inodes import Node
from cachefs.mount.threads import hold
from cachefs.mount.tree import Caller, Tree
from cachefs.staging.changes import Change, Kind

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
_libc = ctypes.CDLL(None, use_errno=True)

Entry = tuple[Node, os.stat_result]
_PLACE_BITS = 40
"""Of a position in a listing; those above it, up to the sign, number the reading of the directory."""
_READINGS = (1 << (63 - _PLACE_BITS)) - 1


class Listing:
    """A directory being listed: its entries by place, as they were read, and the number of the reading."""

    __slots__ = ("entries", "node", "reading")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.entries: list[tuple[int, bytes]] = []
        self.reading = 0


class Namespace:
    """The directory operations of the mount. All raise OSError."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._table = tree.table
        self._listings: dict[int, Listing] = {}
        self._next_listing = count(1)
        self._next_reading = count()

    def lookup(self, parent: int, name: bytes) -> Entry | None:
        """Return the entry, or None when there is none (the kernel may remember that: nobody else creates names)."""
        above = self._table.node(parent)
        if name in (b".", b".."):
            node = above if name == b"." or above is self._table.root else self._table.node(above.names[-1][0])
            node.lookups += 1
            return node, self._tree.stat(node)
        try:
            return self._found(above, name)
        except FileNotFoundError:
            return None

    def _entry(self, parent: Node, name: bytes) -> Entry:
        dir_fd = self._table.descriptor(parent)
        stat, pins = self._tree.pins.counted(lambda: os.stat(name, dir_fd=dir_fd, follow_symlinks=False))
        node = self._table.remember(parent.id, name, stat.st_ino, is_dir=stat_module.S_ISDIR(stat.st_mode))
        node.pins = pins
        return node, stat

    def _found(self, parent: Node, name: bytes) -> Entry:
        """Return an entry that an earlier daemon may have left: who opened it then may write it still."""
        node, stat = self._entry(parent, name)
        if node.lookups == 1 and not node.handles and stat_module.S_ISREG(stat.st_mode):
            self._tree.mapped.hold(node, served=False)
        return node, stat

    def entry(self, parent: int, name: bytes) -> Entry:
        """Return an entry that must be there, and count the kernel's reference."""
        return self._entry(self._table.node(parent), name)

    async def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> Entry:
        """Create a directory."""
        above = self._table.node(parent)
        path = await self._tree.settle(Kind.MADE_DIR, above, name, is_dir=True)
        dir_fd = self._table.descriptor(above)
        os.mkdir(name, mode, dir_fd=dir_fd)
        self._tree.give_to(caller, above, name, mode, dir_fd=dir_fd)
        entry = self._entry(above, name)
        entry[0].fresh = True
        await self._tree.after(Change(Kind.MADE_DIR, path, is_dir=True), names=[(parent, name)], made=entry[0])
        return entry

    async def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Entry:
        """Create a fifo, socket, device or regular file."""
        above = self._table.node(parent)
        path = b""
        regular = stat_module.S_ISREG(mode)
        if regular:
            await self._tree.observer.wait_for_room()
            path = await self._tree.settle(Kind.CREATED, above, name)
        dir_fd = self._table.descriptor(above)
        os.mknod(name, mode, rdev, dir_fd=dir_fd)
        self._tree.give_to(caller, above, name, mode, dir_fd=dir_fd)
        entry = self._entry(above, name)
        entry[0].fresh = True
        if regular:
            changes = [Change(Kind.CREATED, path), Change(Kind.CLOSED, path)]
            await self._tree.after(*changes, names=[(parent, name)], made=entry[0])
        return entry

    async def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Entry:
        """Create a symbolic link."""
        above = self._table.node(parent)
        path = await self._tree.settle(Kind.SYMLINKED, above, name)
        dir_fd = self._table.descriptor(above)
        os.symlink(target, name, dir_fd=dir_fd)
        self._tree.give_to(caller, above, name, None, dir_fd=dir_fd)
        entry = self._entry(above, name)
        change = Change(Kind.SYMLINKED, path, target=target)
        await self._tree.after(change, names=[(parent, name)], made=entry[0])
        return entry

    def readlink(self, ident: int) -> bytes:
        """Return a symbolic link's target."""
        dir_fd, name = self._table.at(self._table.node(ident))
        return os.readlink(name, dir_fd=dir_fd)

    async def link(self, ident: int, parent: int, name: bytes) -> Entry:
        """Create a hard link."""
        node = self._table.node(ident)
        above = self._table.node(parent)
        await self._tree.before(Kind.LINKED, self._table.path_at(above, name), old=self._table.path_of(node))
        path, old = self._table.path_at(above, name), self._table.path_of(node)
        src_fd, src_name = self._table.at(node)
        os.link(src_name, name, src_dir_fd=src_fd, dst_dir_fd=self._table.descriptor(above), follow_symlinks=False)
        entry = self._entry(above, name)
        node.fresh = True
        change = Change(Kind.LINKED, path, old=old, writers=node.writers)
        await self._tree.after(change, names=[(parent, name)], made=entry[0])
        return entry

    async def unlink(self, parent: int, name: bytes) -> None:
        """Remove a name that is not a directory. Pins keep the bytes of closed saves."""
        above = self._table.node(parent)
        path = await self._tree.settle(Kind.REMOVED, above, name)
        dir_fd = self._table.descriptor(above)
        stat, last = self._going(dir_fd, name)
        held = hold(name, dir_fd, stat)
        try:
            os.unlink(name, dir_fd=dir_fd)
            self._table.removed(parent, name, last=last)
            await self._tree.after(Change(Kind.REMOVED, path), names=[(parent, name)])
        finally:
            await self._tree.threads.let_go(held)

    def _going(self, dir_fd: int, name: bytes) -> tuple[os.stat_result | None, bool]:
        """Return what a name stands for, None for nothing, and whether it is the only one of its inode in the visible
        tree.
        """
        try:
            stat, pins = self._tree.pins.counted(lambda: os.stat(name, dir_fd=dir_fd, follow_symlinks=False))
        except FileNotFoundError:
            return None, False
        return stat, stat_module.S_ISDIR(stat.st_mode) or stat.st_nlink - pins <= 1

    async def rmdir(self, parent: int, name: bytes) -> None:
        """Remove an empty directory."""
        above = self._table.node(parent)
        path = await self._tree.settle(Kind.REMOVED, above, name, is_dir=True)
        node = self._table.entry(parent, name)
        if node is not None and node.is_dir:
            self._table.descriptor(node)  # whoever is in it still sees it
        os.rmdir(name, dir_fd=self._table.descriptor(above))
        self._table.removed(parent, name, last=True)
        await self._tree.after(Change(Kind.REMOVED, path, is_dir=True), names=[(parent, name)])

    async def rename(self, old_parent: int, old_name: bytes, parent: int, name: bytes, flags: int) -> None:
        """Rename, with RENAME_NOREPLACE or RENAME_EXCHANGE. The file may be open, for writing too."""
        if flags not in (0, RENAME_NOREPLACE, RENAME_EXCHANGE):
            raise OSError(errno.EINVAL, "unknown rename flags")
        source, target = self._table.node(old_parent), self._table.node(parent)
        await self._tree.before(
            Kind.RENAMED, self._table.path_at(target, name), old=self._table.path_at(source, old_name)
        )
        old, new = self._table.path_at(source, old_name), self._table.path_at(target, name)
        source_fd, target_fd = self._table.descriptor(source), self._table.descriptor(target)
        stat = os.stat(old_name, dir_fd=source_fd, follow_symlinks=False)
        replaced, last = self._going(target_fd, name)
        if replaced is not None and flags == 0 and replaced.st_ino == stat.st_ino:
            return  # two names of one file: POSIX wants nothing done
        one, two = (old_parent, old_name), (parent, name)
        if flags == RENAME_EXCHANGE:
            _renameat2(source_fd, old_name, target_fd, name, flags)
            assert replaced is not None
            self._table.exchanged(one, two)
            there = self._moved(two, replaced_by=stat, old=old, new=new)
            back = self._moved(one, replaced_by=replaced, old=new, new=old)
            await self._tree.after(there, back, names=[one, two])
            return
        held = hold(name, target_fd, replaced)
        try:
            if flags:
                _renameat2(source_fd, old_name, target_fd, name, flags)
            else:
                os.rename(old_name, name, src_dir_fd=source_fd, dst_dir_fd=target_fd)
            self._table.renamed(one, two, last=last)
            await self._tree.after(self._moved(two, replaced_by=stat, old=old, new=new), names=[one, two])
        finally:
            await self._tree.threads.let_go(held)

    def _moved(self, where: tuple[int, bytes], *, replaced_by: os.stat_result, old: bytes, new: bytes) -> Change:
        node = self._table.entry(*where)
        if node is not None:
            node.fresh = True
        is_dir = stat_module.S_ISDIR(replaced_by.st_mode)
        return Change(Kind.RENAMED, new, old=old, is_dir=is_dir, writers=node.writers if node is not None else 0)

    def opendir(self, ident: int) -> int:
        """Start a listing; return its handle."""
        node = self._table.node(ident)
        self._table.descriptor(node)
        handle = next(self._next_listing)
        self._listings[handle] = Listing(node)
        return handle

    def names(self, handle: int, start: int) -> Iterator[tuple[bytes, int]]:
        """Yield the names of a listing from a position on, each with the position after it; position 0 reads the
        directory (again), later ones use what was read.

        A name has the same place in every reading, and they come in that order: so each one that is there all the time
        is reported once, whatever happens to the directory meanwhile, and whoever read it. For when the kernel drops a
        part of a listing that it has cached, it asks a handle to go on that has read nothing, or something else. Above
        the place a position holds the number of the reading: the kernel joins to one cached listing what it asked for
        through several handles, if only the positions fit.
        """
        listing = self._listings[handle]
        reading, place = divmod(start, 1 << _PLACE_BITS)
        if start == 0 or reading != listing.reading:
            listing.entries = self._read(listing.node)
            listing.reading = 1 + next(self._next_reading) % _READINGS
        first = bisect_left(listing.entries, (place + 1, b"")) if start else 0
        for at, name in islice(listing.entries, first, None):
            yield name, (listing.reading << _PLACE_BITS) + at

    def _read(self, node: Node) -> list[tuple[int, bytes]]:
        """Read a directory; return its names with their places, which go by their hashes."""
        fd = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._table.descriptor(node))
        try:
            names = [os.fsencode(name) for name in os.listdir(fd)]
        finally:
            os.close(fd)
        # A bit less than there is room for: of names with one hash, each has the place after the one before it.
        hashed = sorted((xxhash.xxh3_64_intdigest(name) >> (65 - _PLACE_BITS), name) for name in names)
        last, entries = -1, []
        for place, name in hashed:
            last = max(place, last + 1)
            entries.append((last, name))
        return entries

    def listed(self, handle: int, name: bytes) -> Entry | None:
        """Return an entry of a listing and count the kernel's reference; None when it is gone meanwhile."""
        try:
            return self._found(self._listings[handle].node, name)
        except FileNotFoundError:
            return None

    def unlisted(self, node: Node) -> None:
        """Take the reference of `listed` back: the kernel had no room for the entry."""
        self._table.forget(node.id, 1)

    def releasedir(self, handle: int) -> None:
        """End a listing."""
        del self._listings[handle]

    def listing_node(self, handle: int) -> Node:
        """Return the directory of a listing."""
        return self._listings[handle].node


def _renameat2(source_fd: int, old: bytes, target_fd: int, new: bytes, flags: int) -> None:
    if _libc.renameat2(source_fd, old, target_fd, new, flags) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
