"""The inode table against a model: whatever the kernel looks up and forgets, however inode numbers are used again."""

from __future__ import annotations

import os
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cachefs.mount.inodes import ROOT_ID, InodeTable, Node

NAMES = st.sampled_from([b"a", b"b", b"c"])
INDEX = st.integers(0, 1 << 16)


class File:
    """A file or directory of the model. `ino` is given to another one as soon as nothing holds it."""

    def __init__(self, ino: int, *, is_dir: bool) -> None:
        self.ino, self.is_dir = ino, is_dir
        self.entries: dict[bytes, File] = {}


class Kernel(RuleBasedStateMachine):
    """A file tree, and a kernel that holds references to some of it, drops them in any order, and keeps files open."""

    def __init__(self) -> None:
        super().__init__()
        self.fds = len(os.listdir("/proc/self/fd"))
        self.tree_fd = os.open("/", os.O_PATH | os.O_DIRECTORY)
        self.table = InodeTable(self.tree_fd)
        self.root = File(self.table.root.ino, is_dir=True)
        self.known: dict[int, tuple[File, Node, int]] = {ROOT_ID: (self.root, self.table.root, 1)}
        self.numbers = count(1000)
        self.free: list[int] = []
        self.handles = count(-1000, -1)  # no real descriptors: the table never uses them

    # ---- the model

    def directories(self) -> list[tuple[int, File]]:
        return [(ident, file) for ident, (file, _, lookups) in self.known.items() if file.is_dir and lookups > 0]

    def pick(self, index: int) -> tuple[int, File]:
        found = self.directories()
        return found[index % len(found)]

    def paths(self, wanted: File) -> set[bytes]:
        found = set()
        todo = [(b"", self.root)]
        while todo:
            path, directory = todo.pop()
            for name, file in directory.entries.items():
                below = path + b"/" + name if path else name
                if file is wanted:
                    found.add(below)
                if file.is_dir:
                    todo.append((below, file))
        return found

    def alive(self, file: File) -> bool:
        return bool(self.paths(file)) or any(held is file and node.handles for held, node, _ in self.known.values())

    def lost(self, file: File) -> bool:
        """A name of the file is gone; return whether it was its last one."""
        last = not self.paths(file)
        if last and not self.alive(file):
            self.free.append(file.ino)
        return last

    # ---- what happens

    @rule(where=INDEX, name=NAMES, is_dir=st.booleans())
    def make(self, where, name, is_dir):
        _, directory = self.pick(where)
        if name not in directory.entries and (directory is self.root or self.paths(directory)):
            ino = self.free.pop() if self.free else next(self.numbers)
            directory.entries[name] = File(ino, is_dir=is_dir)

    @rule(where=INDEX, name=NAMES)
    def look_up(self, where, name):
        parent, directory = self.pick(where)
        file = directory.entries.get(name)
        if file is None:
            return
        node = self.table.remember(parent, name, file.ino, is_dir=file.is_dir)
        if node.id in self.known:
            held, same, lookups = self.known[node.id]
            assert held is file, "another file's node"
            assert same is node
            self.known[node.id] = (file, node, lookups + 1)
        else:
            assert all(held is not file for held, _, _ in self.known.values()), "two nodes for one file"
            self.known[node.id] = (file, node, 1)

    @rule(which=INDEX, times=st.integers(1, 3))
    def forget(self, which, times):
        ids = [ident for ident in self.known if ident != ROOT_ID]
        if not ids:
            return
        ident = ids[which % len(ids)]
        file, node, lookups = self.known[ident]
        times = min(times, lookups)
        self.table.forget(ident, times)
        self.settle(ident, file, node, lookups - times)

    def settle(self, ident, file, node, lookups):
        if lookups == 0 and not node.handles:
            del self.known[ident]
        else:
            self.known[ident] = (file, node, lookups)

    @rule(which=INDEX)
    def open(self, which):
        ident = list(self.known)[which % len(self.known)]
        file, node, lookups = self.known[ident]
        if lookups > 0 and not file.is_dir and self.alive(file):
            node.handles.add(next(self.handles))

    @rule(which=INDEX)
    def release(self, which):
        opened = [ident for ident, (_, node, _) in self.known.items() if node.handles]
        if not opened:
            return
        ident = opened[which % len(opened)]
        file, node, lookups = self.known[ident]
        node.handles.pop()
        if not self.alive(file):
            self.free.append(file.ino)
        self.table.released(node)
        self.settle(ident, file, node, lookups)

    @rule(where=INDEX, name=NAMES)
    def unlink(self, where, name):
        parent, directory = self.pick(where)
        file = directory.entries.get(name)
        if file is not None and not file.entries:
            del directory.entries[name]
            self.table.removed(parent, name, last=self.lost(file))

    @rule(where=INDEX, name=NAMES, whither=INDEX, new=NAMES)
    def rename(self, where, name, whither, new):
        parent, source = self.pick(where)
        target_id, target = self.pick(whither)
        file, replaced = source.entries.get(name), target.entries.get(new)
        if file is None or file is replaced or not (target is self.root or self.paths(target)):
            return
        if replaced is not None and (replaced.is_dir != file.is_dir or replaced.entries):
            return
        if file is target or any(
            path.startswith(own + b"/") for path in self.paths(target) for own in self.paths(file)
        ):
            return
        del source.entries[name]
        target.entries[new] = file
        last = replaced is not None and self.lost(replaced)
        self.table.renamed((parent, name), (target_id, new), last=last)

    @rule(where=INDEX, name=NAMES, whither=INDEX, new=NAMES)
    def exchange(self, where, name, whither, new):
        parent, source = self.pick(where)
        target_id, target = self.pick(whither)
        one, two = source.entries.get(name), target.entries.get(new)
        if one is None or two is None or one is two or one.is_dir or two.is_dir:
            return
        source.entries[name], target.entries[new] = two, one
        self.table.exchanged((parent, name), (target_id, new))

    @rule(which=INDEX, where=INDEX, name=NAMES)
    def link(self, which, where, name):
        ident = list(self.known)[which % len(self.known)]
        file = self.known[ident][0]
        parent, directory = self.pick(where)
        reachable = directory is self.root or self.paths(directory)
        if file.is_dir or not self.paths(file) or name in directory.entries or not reachable:
            return
        directory.entries[name] = file
        self.look_up_again(parent, name, file)

    def look_up_again(self, parent, name, file):
        node = self.table.remember(parent, name, file.ino, is_dir=False)
        held, _, lookups = self.known.get(node.id, (file, node, 0))
        assert held is file
        self.known[node.id] = (file, node, lookups + 1)

    @rule(which=INDEX)
    def rewrite(self, which):
        """A pinned file is opened with O_TRUNC: the node gets another inode."""
        ident = list(self.known)[which % len(self.known)]
        file, node, _ = self.known[ident]
        if not file.is_dir and len(self.paths(file)) == 1 and node.names:
            self.free.append(file.ino)
            file.ino = next(self.numbers)
            self.table.rebind(node, file.ino)

    @precondition(lambda self: len(self.directories()) > 1)
    @rule(which=INDEX)
    def work_in_a_directory(self, which):
        ident, _ = self.pick(which)
        node = self.known[ident][1]
        if node.dir_fd < 0:
            node.dir_fd = os.dup(self.tree_fd)

    # ---- what must be true

    @invariant()
    def every_known_node_is_found_under_a_path_of_its_file(self):
        for ident, (file, node, _) in self.known.items():
            assert self.table.node(ident) is node
            path = self.table.path_of(node)
            assert path in self.paths(file) or (not node.names and path == b"")
            if node.names:
                assert self.table.by_ino(file.ino) is node

    def teardown(self):
        for ident, (_, node, lookups) in list(self.known.items()):
            node.handles.clear()
            if ident != ROOT_ID:
                self.table.forget(ident, lookups)
                self.table.released(node)
        assert len(self.table) == 1, "a node is left that nobody knows"
        os.close(self.tree_fd)
        assert len(os.listdir("/proc/self/fd")) == self.fds, "a descriptor is left open"


TestKernel = Kernel.TestCase
TestKernel.settings = settings(stateful_step_count=60)


def test_a_directory_that_the_kernel_forgot_stays_as_long_as_a_file_in_it_is_known():
    """The kernel may drop a directory before a file that has another name elsewhere: that file is still reached."""
    tree_fd = os.open("/", os.O_PATH | os.O_DIRECTORY)
    try:
        table = InodeTable(tree_fd)
        directory = table.remember(ROOT_ID, b"d", 100, is_dir=True)
        file = table.remember(ROOT_ID, b"x", 101, is_dir=False)
        table.remember(directory.id, b"link", 101, is_dir=False)
        table.forget(directory.id, 1)
        assert table.path_of(file) == b"d/link"
        assert table.remember(ROOT_ID, b"d", 100, is_dir=True) is directory
        table.forget(directory.id, 1)
        table.forget(file.id, 2)
        assert len(table) == 1
    finally:
        os.close(tree_fd)


def test_an_unknown_node_is_stale():
    tree_fd = os.open("/", os.O_PATH | os.O_DIRECTORY)
    try:
        with pytest.raises(OSError, match="unknown node"):
            InodeTable(tree_fd).node(12345)
    finally:
        os.close(tree_fd)
