"""Bytes of files: create, open, read, write, sync, release."""

from __future__ import annotations

import errno
import os
import stat as stat_module
from collections.abc import Callable

import trio

from cachefs.errors import CachefsError
from cachefs.mount.handles import staging_flags
from cachefs.mount.inodes import Node
from cachefs.mount.kernel import drops_privileges
from cachefs.mount.namespace import Entry, Namespace
from cachefs.mount.threads import frees_slowly
from cachefs.mount.tree import Caller, Tree
from cachefs.staging.changes import Change, Kind
from cachefs.threads import Arguments, Result, in_thread

_WRITING = os.O_WRONLY | os.O_RDWR


class Content:
    """The file operations of the mount. All raise OSError; handles are descriptors (handles.py)."""

    def __init__(self, tree: Tree, namespace: Namespace) -> None:
        self._tree = tree
        self._table = tree.table
        self._namespace = namespace
        self._syncing: dict[int, trio.Event] = {}
        """The nodes whose name is being synced."""
        tree.mapped.release = self._finish

    async def create(self, parent: int, name: bytes, mode: int, flags: int, caller: Caller) -> tuple[int, Entry]:
        """Create and open a file; open it when somebody else was faster and O_EXCL is not asked for."""
        above = self._table.node(parent)
        await self._tree.observer.wait_for_room()
        path = await self._tree.settle(Kind.CREATED, above, name)
        dir_fd = self._table.descriptor(above)
        try:
            fd = os.open(name, staging_flags(flags) | os.O_CREAT | os.O_EXCL, mode, dir_fd=dir_fd)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
            entry = self._namespace.entry(parent, name)
            try:
                return await self.open(entry[0].id, flags), entry
            except BaseException:
                self._table.forget(entry[0].id, 1)
                raise
        node = None
        try:
            self._tree.give_to(caller, above, fd, mode)
            entry = self._namespace.entry(parent, name)
            node = entry[0]
            self._tree.handles.add(fd, node, flags)
        except BaseException:
            os.close(fd)
            os.unlink(name, dir_fd=dir_fd)
            if node is not None:
                self._table.removed(parent, name, last=True)
                self._table.forget(node.id, 1)
            raise
        node.fresh = True
        try:
            await self._report(Kind.CREATED, [path], node)
        except Exception:
            await self._take_back(fd)
            self._table.forget(node.id, 1)
            self._tree.name_changed((parent, name))
            raise
        return fd, entry

    async def open(self, ident: int, flags: int) -> int:
        """Open a file; return the handle. Opening for writing frees the bytes from their pins first."""
        node = self._table.node(ident)
        emptied = bool(flags & os.O_TRUNC)
        unprivileged = emptied and drops_privileges()
        writing = emptied or bool(flags & _WRITING)
        kind = Kind.TRUNCATED if emptied else Kind.OPENED
        if writing:
            await self._tree.ready_to_write(kind, node, emptied=emptied)
        cut = emptied and bool(flags & _WRITING)  # the file keeps its bytes until the open cannot fail any more
        fd = self._open_staged(node, staging_flags(flags) | (os.O_TRUNC if emptied and not cut else 0))
        try:
            if unprivileged:
                self._drop_privileges(fd, node)
            self._tree.handles.add(fd, node, flags)
        except BaseException:
            os.close(fd)
            raise
        if writing:
            try:
                await self._report(kind, self._table.paths_of(node), node)
                if cut:
                    await self._resize(fd, 0)
            except Exception:
                await self._take_back(fd)
                raise
        return fd

    async def _take_back(self, fd: int) -> None:
        """Close a handle whose open is refused after all: the kernel will not release what it never got."""
        try:
            await self.release(fd)
        except CachefsError:
            pass  # the caller is told of the first one

    async def _report(self, kind: Kind, paths: list[bytes], node: Node) -> None:
        """Report a change of a file's bytes, and that it is finished when no writable handle will say so."""
        changes = [Change(kind, path, writers=node.writers) for path in paths]
        if node.writers == 0:
            changes += self._closed(node)
        await self._tree.after(*changes)

    def _closed(self, node: Node) -> list[Change]:
        return [Change(Kind.CLOSED, path) for path in self._table.paths_of(node)]

    def _open_staged(self, node: Node, flags: int) -> int:
        if node.names:
            dir_fd, name = self._table.at(node)
            return os.open(name, flags, dir_fd=dir_fd)
        return os.open(self._tree.reference(node), flags & ~os.O_NOFOLLOW)

    def read(self, handle: int, offset: int, size: int) -> bytes:
        """Read bytes; fewer at the end of the file."""
        return os.pread(handle, size, offset)

    def write_now(self, handle: int, offset: int, data: bytes) -> int | None:
        """Write bytes and return how many fit; None when the write has to wait for something (`write`)."""
        opened = self._tree.handles[handle]
        if opened.node.set_id and drops_privileges():
            self._drop_privileges(handle, opened.node)
        return None if opened.synchronous else os.pwrite(handle, data, offset)

    async def write(self, handle: int, offset: int, data: bytes) -> int:
        """Write bytes and return how many fit, when they are on the disk (O_SYNC, O_DSYNC)."""
        return await self._in_thread(_write_through, handle, data, offset)

    async def truncate(self, node: Node, size: int) -> None:
        """Set a file's size."""
        unprivileged = drops_privileges()
        writer = self._tree.handles.writable(node)
        if writer is None:
            await self._tree.ready_to_write(Kind.TRUNCATED, node, emptied=size == 0)
            fd = self._open_staged(node, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        else:
            fd = os.dup(writer)
        self._tree.handles.hold(fd, node)  # until it is done, the file is open for writing
        try:
            if writer is None:
                paths = self._table.paths_of(node)
                await self._tree.after(*(Change(Kind.TRUNCATED, path, writers=node.writers) for path in paths))
            await self._resize(fd, size)
            if unprivileged:
                self._drop_privileges(fd, node)
        finally:
            await self._finish(fd)

    async def _resize(self, fd: int, size: int) -> None:
        """Set the size of a file that a writer holds open."""
        if frees_slowly(os.fstat(fd), size):
            await in_thread(os.ftruncate, fd, size, limiter=self._tree.threads.frees)
        else:
            os.ftruncate(fd, size)

    def _drop_privileges(self, fd: int, node: Node) -> None:
        """Clear the set-user-id bit, and the set-group-id bit of an executable, as a write by another user does."""
        mode = stat_module.S_IMODE(os.fstat(fd).st_mode)
        kept = mode & ~(0o6000 if mode & 0o010 else 0o4000)
        if kept != mode:
            os.fchmod(fd, kept)
            self._tree.attributes_changed(node)

    async def release(self, handle: int) -> None:
        """Close a handle; the last writable one finishes the file, unless maps of it are still written."""
        await self._finish(handle, ask=self._tree.passthrough.served)

    async def _finish(self, handle: int, *, ask: bool = False) -> None:
        closed = self._tree.handles.remove(handle)
        node = closed.node
        finished = closed.counts and node.writers == 0
        if finished and ask and self._tree.mapped.hold(node):
            return
        changes = self._closed(node) if finished else []
        self._table.released(node)
        try:
            if finished:
                await self._tree.after(*changes)
        finally:
            await self._tree.threads.let_go(closed.left)

    async def fsync(self, handle: int, *, data_only: bool) -> None:
        """Return when the file's bytes, its name, and all that the journal knows of it are on the disk."""
        node = self._tree.handles[handle].node
        fd = os.dup(handle)  # the handle may be released while the thread works
        try:
            await self._in_thread(os.fdatasync if data_only else os.fsync, fd)
        finally:
            os.close(fd)
        await self._sync_names(node)
        await self._tree.observer.durable()

    async def fsync_directory(self, node: Node) -> None:
        """Return when the entries of a directory, and its own name, are on the disk."""
        await self._sync_directory(node)
        await self._sync_names(node)
        await self._tree.observer.durable()

    async def _in_thread(self, call: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Wait for a call that waits for the disk, behind no other kind of call."""
        return await in_thread(call, *arguments, limiter=self._tree.threads.syncs)

    async def _sync_directory(self, node: Node) -> None:
        fd = os.dup(self._table.descriptor(node))  # the node may be forgotten while the thread works
        try:
            await self._in_thread(_sync_directory, fd)
        finally:
            os.close(fd)

    async def _sync_names(self, node: Node) -> None:
        """Return when a node's name, and those of the directories above it, are on the disk."""
        while node.names:
            await self._sync_name(node)
            if not node.names:
                return
            node = self._table.node(node.names[-1][0])

    async def _sync_name(self, node: Node) -> None:
        while True:
            if (syncing := self._syncing.get(node.id)) is not None:
                await syncing.wait()  # it may fail, and the node may be renamed meanwhile
                continue
            if not node.fresh or not node.names:
                return
            event = self._syncing[node.id] = trio.Event()
            node.fresh = False
            try:
                await self._sync_directory(self._table.node(node.names[-1][0]))
            except BaseException:
                node.fresh = True
                raise
            finally:
                del self._syncing[node.id]
                event.set()


def _sync_directory(path_fd: int) -> None:
    try:
        fd = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=path_fd)
    except FileNotFoundError:
        return  # removed meanwhile: nothing is left to be durable
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_through(handle: int, data: bytes, offset: int) -> int:
    written = os.pwrite(handle, data, offset)
    if written == 0 and data:
        raise OSError(errno.EIO, "nothing was written")
    os.fdatasync(handle)
    return written
