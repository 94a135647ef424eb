"""Attributes: stat, chmod, chown, times, size, extended attributes."""

from __future__ import annotations

import errno
import os
import stat as stat_module

import msgspec

from cachefs.mount.content import Content
from cachefs.mount.inodes import Node
from cachefs.mount.tree import Tree

PRIVATE = "user.cachefs."


class Update(msgspec.Struct, frozen=True):
    """The fields that a setattr request changes; None leaves a field alone. Times in nanoseconds."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


class Attributes:
    """The attribute operations of the mount. All raise OSError."""

    def __init__(self, tree: Tree, content: Content) -> None:
        self._tree = tree
        self._content = content

    async def update(self, node: Node, update: Update) -> os.stat_result:
        """Apply a setattr request and return the new attributes."""
        if update.size is not None:
            await self._content.truncate(node, update.size)
        reference = self._tree.reference(node)
        follow = self._nameless(node)
        if update.uid is not None or update.gid is not None:
            os.chown(
                reference,
                -1 if update.uid is None else update.uid,
                -1 if update.gid is None else update.gid,
                follow_symlinks=follow,
            )
        if update.mode is not None:
            if stat_module.S_ISLNK(self._tree.stat(node).st_mode):
                raise OSError(errno.EOPNOTSUPP, "a symbolic link has no mode")
            os.chmod(reference, stat_module.S_IMODE(update.mode))
            node.set_id = bool(update.mode & 0o6000)
        if update.atime_ns is not None or update.mtime_ns is not None:
            stat = self._tree.stat(node)
            times = (
                stat.st_atime_ns if update.atime_ns is None else update.atime_ns,
                stat.st_mtime_ns if update.mtime_ns is None else update.mtime_ns,
            )
            os.utime(reference, ns=times, follow_symlinks=follow)
        return self._tree.stat(node)

    def getxattr(self, node: Node, name: str) -> bytes:
        """Return an extended attribute; `user.cachefs.*` is answered by the daemon."""
        if name.startswith(PRIVATE):
            answer = None
            if not self._nameless(node):
                answer = self._tree.observer.answer(self._tree.table.path_of(node), name.removeprefix(PRIVATE))
            if answer is None:
                raise OSError(errno.ENODATA, "no such attribute")
            return answer
        if not name.startswith("user."):
            raise OSError(errno.EOPNOTSUPP, "only user attributes are kept")
        return os.getxattr(self._tree.reference(node), name, follow_symlinks=self._nameless(node))

    def listxattr(self, node: Node) -> list[str]:
        """Return the names of the user's own extended attributes."""
        names = os.listxattr(self._tree.reference(node), follow_symlinks=self._nameless(node))
        return [name for name in names if name.startswith("user.")]

    async def setxattr(self, node: Node, name: str, value: bytes) -> None:
        """Set an extended attribute; `user.cachefs.close` closes the generation by hand."""
        if name.startswith(PRIVATE):
            if self._nameless(node):
                raise OSError(errno.EINVAL, "the file has no name any more")
            await self._tree.mapped.look()
            await self._tree.observer.request(self._tree.table.path_of(node), name.removeprefix(PRIVATE))
            return
        if not name.startswith("user."):
            raise OSError(errno.EOPNOTSUPP, "only user attributes are kept")
        os.setxattr(self._tree.reference(node), name, value, follow_symlinks=self._nameless(node))

    def removexattr(self, node: Node, name: str) -> None:
        """Remove an extended attribute."""
        if not name.startswith("user.") or name.startswith(PRIVATE):
            raise OSError(errno.EOPNOTSUPP, "only user attributes are kept")
        os.removexattr(self._tree.reference(node), name, follow_symlinks=self._nameless(node))

    def _nameless(self, node: Node) -> bool:
        """Return whether a node is an open file without a name: its reference is a link in /proc, to be followed."""
        return not node.names and node is not self._tree.table.root
