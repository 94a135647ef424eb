"""The inode table: which nodes the kernel holds, and under which names they stand in the visible tree.

A node id is the staging inode number at the time the node was first seen. It stays when the node gets a fresh inode (a
pinned file that is opened for writing), so that the kernel and the user see one stable file. Work on a node goes
through the descriptor of its directory and its name there; names follow every rename, and a directory's own descriptor
is opened when first needed and stays right when the directory moves. Files cost no descriptor until they are opened,
and of directories only those in use: the kernel remembers all that it ever visited.
"""

from __future__ import annotations

import errno
import os
import resource
from collections import OrderedDict
from itertools import count

from cachefs.mount.kernel import directory_closing, directory_opened

ROOT_ID = 1
"""The kernel's node id of the mount root (FUSE_ROOT_ID, fuse_kernel.h)."""

LEAST_OPEN = 16
"""Descriptors of directories that may always be open: more than one operation works with."""

Name = tuple[int, bytes]
"""A directory entry: the parent's node id, and the name in it."""


class Node:
    """A file or directory that the kernel holds a reference to."""

    __slots__ = (
        "backed",
        "backing",
        "children",
        "dir_fd",
        "fresh",
        "handles",
        "id",
        "ino",
        "is_dir",
        "lookups",
        "names",
        "past",
        "path",
        "path_stamp",
        "pins",
        "set_id",
        "writers",
    )

    def __init__(self, ident: int, ino: int, *, is_dir: bool) -> None:
        self.id = ident
        self.ino = ino
        self.is_dir = is_dir
        self.lookups = 0
        """References the kernel holds; it gives them back with FORGET."""
        self.names: list[Name] = []
        self.children = 0
        """Names of other nodes in this directory: it stays as long as they need it, even when the kernel forgot it."""
        self.handles: set[int] = set()
        """Descriptors of the open handles."""
        self.writers = 0
        self.past = False
        """Whether it is written past its handles (mapped.py): its attributes change without a request."""
        self.set_id = False
        """Whether the file had set-user-id or set-group-id bits when it was opened or its mode was set last."""
        self.backing = 0
        """The kernel's backing id of the file, 0 for none; `backed` handles use it."""
        self.backed = 0
        self.pins = 0
        """How many of its links were pins when it was last looked at."""
        self.fresh = True
        """Whether the node may have been created or renamed since its directory was last synced: what was found may
        have been made by an earlier daemon.
        """
        self.dir_fd = -1
        self.path = b""
        self.path_stamp = -1


def descriptors() -> int:
    """Return how many descriptors directories may take: half of what the process may have, files get the others."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if limit == resource.RLIM_INFINITY else max(limit // 2, LEAST_OPEN)


class InodeTable:
    """All nodes. Only used from the FUSE loop; no method waits."""

    def __init__(self, tree_fd: int) -> None:
        stat = os.fstat(tree_fd)
        self.root = Node(ROOT_ID, stat.st_ino, is_dir=True)
        self.root.dir_fd = tree_fd
        directory_opened(ROOT_ID, tree_fd)
        self._nodes: dict[int, Node] = {ROOT_ID: self.root}
        self._by_ino: dict[int, Node] = {stat.st_ino: self.root}
        self._entries: dict[Name, Node] = {}
        self.most_open = descriptors()
        """Beyond so many, the descriptors of directories are closed that were not used for longest."""
        self._opened: OrderedDict[int, Node] = OrderedDict()
        """The directories with a descriptor, the one used last at the end."""
        self._spare = count(1 << 62)
        self._moves = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def node(self, ident: int) -> Node:
        """Return the node. Raises ESTALE for an id that is not known."""
        try:
            return self._nodes[ident]
        except KeyError:
            raise OSError(errno.ESTALE, "unknown node") from None

    def entry(self, parent: int, name: bytes) -> Node | None:
        """Return the node known under a name, or None when the kernel holds none."""
        return self._entries.get((parent, name))

    def by_ino(self, ino: int) -> Node | None:
        """Return the node that a staging inode backs, or None."""
        return self._by_ino.get(ino)

    def remember(self, parent: int, name: bytes, ino: int, *, is_dir: bool) -> Node:
        """Return the node for a directory entry that is about to be reported, and count the reference."""
        node = self._by_ino.get(ino)
        if node is None:
            ident = ino if ino not in self._nodes and ino > ROOT_ID else next(self._spare)
            node = Node(ident, ino, is_dir=is_dir)
            self._nodes[ident] = node
            self._by_ino[ino] = node
        node.lookups += 1
        key = (parent, name)
        if self._entries.get(key) is not node:
            self._unname(key)
            self._name(node, key)
        return node

    def _name(self, node: Node, key: Name) -> None:
        self._entries[key] = node
        node.names.append(key)
        node.path_stamp = -1
        self._nodes[key[0]].children += 1

    def _unname(self, key: Name) -> Node | None:
        node = self._entries.pop(key, None)
        if node is not None:
            node.names.remove(key)
            node.path_stamp = -1
            self._nodes[key[0]].children -= 1
        return node

    def forget(self, ident: int, lookups: int) -> None:
        """Give back references; the last one ends the node."""
        node = self._nodes.get(ident)
        if node is None or node is self.root:
            return
        node.lookups -= lookups
        self._retire(node)

    def released(self, node: Node) -> None:
        """End a node whose last handle is gone and that the kernel has forgotten before."""
        self._retire(node)

    def _retire(self, node: Node) -> None:
        """End a node that nobody needs any more, and the directories above that were only kept for it."""
        unsure = [node]
        while unsure:
            node = unsure.pop()
            if node.lookups > 0 or node.handles or node.children or node is self.root or node.id not in self._nodes:
                continue
            del self._nodes[node.id]
            if self._by_ino.get(node.ino) is node:
                del self._by_ino[node.ino]
            for key in list(node.names):
                self._unname(key)
                unsure.append(self._nodes[key[0]])
            self._opened.pop(node.id, None)
            self._close(node)

    def removed(self, parent: int, name: bytes, *, last: bool = False) -> None:
        """Take a name away from the node it stood for.

        With `last` the inode has no name left in the tree: it may be freed and its number used again, for another file,
        while the kernel still holds this node.
        """
        node = self._unname((parent, name))
        if node is not None and last and self._by_ino.get(node.ino) is node:
            del self._by_ino[node.ino]

    def renamed(self, old: Name, new: Name, *, last: bool = False) -> None:
        """Move a name; whatever stood under the new one has lost it (`last` as in `removed`)."""
        self.removed(*new, last=last)
        node = self._unname(old)
        if node is not None:
            self._name(node, new)
            self._moves += node.is_dir

    def exchanged(self, one: Name, two: Name) -> None:
        """Swap two names."""
        first, second = self._unname(one), self._unname(two)
        if first is not None:
            self._name(first, two)
        if second is not None:
            self._name(second, one)
        self._moves += 1

    def rebind(self, node: Node, ino: int) -> None:
        """Back a node by another staging inode from now on."""
        if self._by_ino.get(node.ino) is node:
            del self._by_ino[node.ino]
        node.ino = ino
        self._by_ino[ino] = node

    def descriptor(self, node: Node) -> int:
        """Return the descriptor of a directory node, for `*at` calls; until the next wait, and at most LEAST_OPEN of
        them. Raises ENOTDIR, ENOENT for a removed directory.
        """
        if not node.is_dir:
            raise OSError(errno.ENOTDIR, "not a directory")
        if node.dir_fd < 0:
            self._open(node)
        if node.id in self._opened:
            self._opened.move_to_end(node.id)
        return node.dir_fd

    def _open(self, node: Node) -> None:
        closed = []
        above = node
        while above.dir_fd < 0:
            closed.append(above)
            above = self._nodes[self._any_name(above)[0]]
        for one in reversed(closed):
            parent, name = self._any_name(one)
            flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            one.dir_fd = os.open(name, flags, dir_fd=self._nodes[parent].dir_fd)
            directory_opened(one.id, one.dir_fd)
            self._opened[one.id] = one
            self._opened.move_to_end(one.id, last=False)  # nobody works in those on the way: they go first
        self._opened.move_to_end(node.id)
        while len(self._opened) > self.most_open:
            _, unused = self._opened.popitem(last=False)
            if unused.names:  # else it is never found again
                self._close(unused)

    @staticmethod
    def _close(node: Node) -> None:
        if node.dir_fd >= 0:
            directory_closing(node.id)
            os.close(node.dir_fd)
            node.dir_fd = -1

    def at(self, node: Node) -> tuple[int, bytes]:
        """Return the directory descriptor and the name to reach a node by. Raises ENOENT when it has no name left."""
        if node is self.root:
            return node.dir_fd, b"."
        parent, name = self._any_name(node)
        return self.descriptor(self._nodes[parent]), name

    @staticmethod
    def _any_name(node: Node) -> Name:
        if not node.names:
            raise OSError(errno.ENOENT, "no name left")
        return node.names[-1]

    def path_of(self, node: Node) -> bytes:
        """Return the path of a node relative to the mount root; empty for the root and for a node without a name."""
        stale = []
        while node.names and node.path_stamp != self._moves:
            stale.append(node)
            node = self._nodes[node.names[-1][0]]
        path = node.path if node.names else b""
        for one in reversed(stale):
            name = one.names[-1][1]
            path = one.path = path + b"/" + name if path else name
            one.path_stamp = self._moves
        return path

    def paths_of(self, node: Node) -> list[bytes]:
        """Return the paths of all names of a node that were seen, relative to the mount root. Which of them a caller
        opened the kernel does not say.
        """
        if len(node.names) == 1:
            return [self.path_of(node)]
        return [self.path_at(self._nodes[parent], name) for parent, name in node.names]

    def path_at(self, parent: Node, name: bytes) -> bytes:
        """Return the path of a directory entry relative to the mount root."""
        above = self.path_of(parent)
        return above + b"/" + name if above else name
