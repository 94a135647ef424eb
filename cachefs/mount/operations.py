"""The pyfuse3 adapter: translates a request, calls the file system, and maps its errors. No semantics here."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import pyfuse3
import structlog
from pyfuse3 import EntryAttributes, FileHandleT, FileInfo, FileNameT, FlagT, FUSEError, InodeT, ModeT, RequestContext

from cachefs.errors import CachefsError
from cachefs.mount.attributes import Attributes, Update
from cachefs.mount.content import Content
from cachefs.mount.inodes import Name, Node
from cachefs.mount.namespace import Entry, Namespace
from cachefs.mount.tree import Caller, Tree

TIMEOUT = 300.0
"""Seconds that the kernel may use a name or attributes without asking: the daemon is the only one who changes them, but
for files that are written past it.
"""
_log = structlog.get_logger(__name__)


def _attributes_changed(node: Node) -> None:
    try:
        pyfuse3.invalidate_inode(InodeT(node.id), attr_only=True)
    except OSError:
        pass  # the kernel has forgotten the file already, or the mount is gone


def _name_changed(name: Name) -> None:
    parent, own = name
    try:
        # In a thread of its own: the kernel waits until the request that is being handled is answered.
        pyfuse3.invalidate_entry_async(InodeT(parent), FileNameT(own), ignore_enoent=True)
    except RuntimeError:
        pass  # there is no thread just now: the kernel asks when its time is over


def _failed(error: Exception) -> FUSEError:
    if isinstance(error, (OSError, CachefsError)):
        return FUSEError(error.errno or errno.EIO)
    _log.exception("a request failed", exc_info=error)  # one caller's error must not end the mount
    return FUSEError(errno.EIO)


class Operations(pyfuse3.Operations):
    """Serves one mount."""

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self._tree = tree
        self._table = tree.table
        self._namespace = Namespace(tree)
        self._content = Content(tree, self._namespace)
        self._attributes = Attributes(tree, self._content)
        tree.attributes_changed = tree.mapped.ended = _attributes_changed
        tree.name_changed = _name_changed

    def init(self) -> None:
        """Called when the kernel has said what it offers."""
        self._tree.passthrough.negotiated()

    def _info(self, handle: int) -> FileInfo:
        direct = self._tree.handles[handle].direct
        return FileInfo(fh=handle, direct_io=direct, keep_cache=not direct)

    def _attr(self, node: Node, stat: os.stat_result) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino = node.id
        entry.entry_timeout = TIMEOUT
        entry.attr_timeout = 0 if node.past else TIMEOUT
        entry.st_mode = stat.st_mode
        entry.st_nlink = stat.st_nlink - node.pins
        entry.st_uid = stat.st_uid
        entry.st_gid = stat.st_gid
        entry.st_rdev = stat.st_rdev
        entry.st_size = stat.st_size
        entry.st_blksize = stat.st_blksize
        entry.st_blocks = stat.st_blocks
        entry.st_atime_ns = stat.st_atime_ns
        entry.st_mtime_ns = stat.st_mtime_ns
        entry.st_ctime_ns = stat.st_ctime_ns
        return entry

    def _reply(self, entry: Entry) -> EntryAttributes:
        return self._attr(*entry)

    async def lookup(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> EntryAttributes:
        try:
            entry = self._namespace.lookup(parent_inode, name)
            if entry is not None:
                return self._reply(entry)
        except Exception as error:
            raise _failed(error) from None
        absent = EntryAttributes()
        absent.st_ino = 0  # the kernel remembers that there is nothing
        absent.entry_timeout = TIMEOUT
        return absent

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        for inode, lookups in inode_list:
            try:
                self._table.forget(inode, lookups)
            except Exception as error:
                _failed(error)  # nobody waits for an answer

    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        try:
            node = self._table.node(inode)
            return self._attr(node, self._tree.stat(node))
        except Exception as error:
            raise _failed(error) from None

    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        update = Update(
            mode=attr.st_mode if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size=attr.st_size if fields.update_size else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
        )
        try:
            node = self._table.node(inode)
            return self._attr(node, await self._attributes.update(node, update))
        except Exception as error:
            raise _failed(error) from None

    async def readlink(self, inode: InodeT, ctx: RequestContext) -> FileNameT:
        try:
            return self._namespace.readlink(inode)
        except Exception as error:
            raise _failed(error) from None

    async def mknod(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        try:
            caller = Caller(ctx.uid, ctx.gid)
            return self._reply(await self._namespace.mknod(parent_inode, name, mode, rdev, caller))
        except Exception as error:
            raise _failed(error) from None

    async def mkdir(self, parent_inode: InodeT, name: FileNameT, mode: ModeT, ctx: RequestContext) -> EntryAttributes:
        try:
            return self._reply(await self._namespace.mkdir(parent_inode, name, mode, Caller(ctx.uid, ctx.gid)))
        except Exception as error:
            raise _failed(error) from None

    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        try:
            await self._namespace.unlink(parent_inode, name)
        except Exception as error:
            raise _failed(error) from None

    async def rmdir(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        try:
            await self._namespace.rmdir(parent_inode, name)
        except Exception as error:
            raise _failed(error) from None

    async def symlink(
        self, parent_inode: InodeT, name: FileNameT, target: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        try:
            return self._reply(await self._namespace.symlink(parent_inode, name, target, Caller(ctx.uid, ctx.gid)))
        except Exception as error:
            raise _failed(error) from None

    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: FileNameT,
        parent_inode_new: InodeT,
        name_new: FileNameT,
        flags: FlagT,
        ctx: RequestContext,
    ) -> None:
        try:
            await self._namespace.rename(parent_inode_old, name_old, parent_inode_new, name_new, flags)
        except Exception as error:
            raise _failed(error) from None

    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        try:
            return self._reply(await self._namespace.link(inode, new_parent_inode, new_name))
        except Exception as error:
            raise _failed(error) from None

    async def create(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, flags: FlagT, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        try:
            caller = Caller(ctx.uid, ctx.gid)
            handle, entry = await self._content.create(parent_inode, name, mode, flags, caller)
            return self._info(handle), self._reply(entry)
        except Exception as error:
            raise _failed(error) from None

    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> FileInfo:
        try:
            return self._info(await self._content.open(inode, flags))
        except Exception as error:
            raise _failed(error) from None

    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        try:
            return self._content.read(fh, off, size)
        except Exception as error:
            raise _failed(error) from None

    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        try:
            written = self._content.write_now(fh, off, buf)
            return await self._content.write(fh, off, buf) if written is None else written
        except Exception as error:
            raise _failed(error) from None

    async def flush(self, fh: FileHandleT) -> None:
        raise FUSEError(errno.ENOSYS)  # the kernel stops asking: writes report their errors themselves

    async def release(self, fh: FileHandleT) -> None:
        try:
            await self._content.release(fh)
        except Exception as error:
            raise _failed(error) from None

    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        try:
            await self._content.fsync(fh, data_only=datasync)
        except Exception as error:
            raise _failed(error) from None

    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        try:
            return self._namespace.opendir(inode)
        except Exception as error:
            raise _failed(error) from None

    async def readdir(self, fh: FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        try:
            for name, following in self._namespace.names(fh, start_id):
                entry = self._namespace.listed(fh, name)
                if entry is None:
                    continue
                if not pyfuse3.readdir_reply(token, name, self._reply(entry), following):
                    self._namespace.unlisted(entry[0])
                    return
        except Exception as error:
            raise _failed(error) from None

    async def releasedir(self, fh: FileHandleT) -> None:
        try:
            self._namespace.releasedir(fh)
        except Exception as error:
            raise _failed(error) from None

    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        try:
            await self._content.fsync_directory(self._namespace.listing_node(fh))
        except Exception as error:
            raise _failed(error) from None

    async def statfs(self, ctx: RequestContext) -> pyfuse3.StatvfsData:
        try:
            stat = os.fstatvfs(self._tree.fd)
        except Exception as error:
            raise _failed(error) from None
        data = pyfuse3.StatvfsData()
        data.f_bsize = stat.f_bsize
        data.f_frsize = stat.f_frsize
        data.f_blocks = stat.f_blocks
        data.f_bfree = stat.f_bfree
        data.f_bavail = stat.f_bavail
        data.f_files = stat.f_files
        data.f_ffree = stat.f_ffree
        data.f_favail = stat.f_favail
        data.f_namemax = stat.f_namemax
        return data

    async def getxattr(self, inode: InodeT, name: bytes, ctx: RequestContext) -> bytes:
        try:
            return self._attributes.getxattr(self._table.node(inode), os.fsdecode(name))
        except Exception as error:
            raise _failed(error) from None

    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[bytes]:
        try:
            return [os.fsencode(name) for name in self._attributes.listxattr(self._table.node(inode))]
        except Exception as error:
            raise _failed(error) from None

    async def setxattr(self, inode: InodeT, name: bytes, value: bytes, ctx: RequestContext) -> None:
        try:
            await self._attributes.setxattr(self._table.node(inode), os.fsdecode(name), value)
        except Exception as error:
            raise _failed(error) from None

    async def removexattr(self, inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        try:
            self._attributes.removexattr(self._table.node(inode), os.fsdecode(name))
        except Exception as error:
            raise _failed(error) from None
